# SPDX-License-Identifier: Apache-2.0
"""State, one behaviour at a time; `test_machine` mixes them. Tier: exact."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from histories import poison_unreachable, same, target, tensors
from plain_run import PROMPTS, PlainRun
from tiny_decoder import SHAPE, VOCAB
from torch import Tensor

from specla.errors import CapacityExceeded, ConfigError
from specla.state import State
from specla.state.log import Log
from specla.state.rounds import DeviceRounds
from specla.topology.tree import DraftTree

NAN = float("nan")
PROMPT = 5  # six tokens


def new_state(**sizes: int) -> State:
    return State(SHAPE, **{"num_slots": 3, "max_nodes": 6, "log_capacity": 8, **sizes})


def admit(state: State, prompt: int = PROMPT) -> int:
    slot = state.acquire()
    target()[0].prefill(PROMPTS[prompt][:-1], slot, state)
    return slot


def play(
    state: State, slots: Sequence[int], trees: Sequence[DraftTree], paths: Sequence[Sequence[int]]
) -> list[Tensor]:
    """One round; each row's logits."""
    plan = state.begin(slots, trees)
    logits = target()[0].verify(plan, state)
    state.commit(slots, paths)
    return list(logits.split([t.num_nodes for t in trees]))


def bushy(root: int) -> DraftTree:
    """Two children, one of which has two."""
    return DraftTree((root, 1, 2, 3, 4), (-1, 0, 0, 2, 2))


def canary(state: State, slot: int, value: float) -> None:
    for tensor in tensors(state):
        tensor[slot] = value


def snapshot(state: State, slot: int) -> list[Tensor]:
    return [t[slot].clone() for t in tensors(state)]


def unchanged(state: State, slot: int, before: list[Tensor]) -> bool:
    return all(torch.equal(t[slot], b) for t, b in zip(tensors(state), before, strict=True))


@pytest.fixture
def plain() -> PlainRun:
    return target()[1]


@pytest.fixture(params=["torch", "kernels"])
def new_either(request: pytest.FixtureRequest) -> Callable[..., State]:
    """`new_state`, slots erased and copied as on a CPU, or by the kernels of a GPU."""

    def new(**sizes: int) -> State:
        state = new_state(**sizes)
        if request.param == "kernels":
            pytest.importorskip("triton")
            from specla.ops.slots import SlotKernels

            state._kernels = SlotKernels(state.layers)
        return state

    return new


@pytest.mark.parametrize("value", [NAN, 7.0])
def test_release_erases_everything(value: float, new_either: Callable[..., State]) -> None:
    """I6: every tensor of the slot, its cursors included, and no other slot's."""
    state = new_either()
    others = [admit(state), admit(state)]
    slot = admit(state)
    play(state, [slot], [bushy(3)], [[0, 2, 3]])
    canary(state, slot, value)
    before = [snapshot(state, other) for other in others]
    state.release(slot)
    for other, kept in zip(others, before, strict=True):
        assert unchanged(state, other, kept)
    for tensor in tensors(state):
        assert torch.equal(tensor[slot], torch.zeros_like(tensor[slot]))
    state.check_integrity()
    assert state.logs[slot].committed_len == 0


def test_a_reused_slot_equals_a_fresh_one(
    plain: PlainRun, new_either: Callable[..., State]
) -> None:
    """I6: a canary in the first request, logits and state of the second."""
    state = new_either(num_slots=1)
    slot = admit(state, 7)
    play(state, [slot], [bushy(3)], [[0, 2, 4]])
    canary(state, slot, 1e6)
    state.release(slot)
    again = admit(state)
    assert again == slot
    (logits,) = play(state, [slot], [bushy(PROMPTS[PROMPT][-1])], [[0]])
    for node, tokens in enumerate([(), (1,), (2,), (2, 3), (2, 4)]):
        want = plain.at(PROMPT, (PROMPTS[PROMPT][-1], *tokens)).logits
        assert torch.equal(logits[node], want)


def test_fork_continues_independently(plain: PlainRun, new_either: Callable[..., State]) -> None:
    state = new_either()
    slot, root = admit(state), PROMPTS[PROMPT][-1]
    play(state, [slot], [bushy(root)], [[0, 2, 3]])
    twin = state.fork(slot)
    assert same(state.committed_state(twin), state.committed_state(slot))
    before = snapshot(state, slot)
    play(state, [twin], [DraftTree.chain(9, [8, 7])], [[0, 1, 2]])
    assert unchanged(state, slot, before), "the twin's rounds are its own"
    canary(state, twin, NAN)
    state.release(twin)
    (logits,) = play(state, [slot], [DraftTree.root(5)], [[0]])
    assert torch.equal(logits[0], plain.at(PROMPT, (root, 2, 3, 5)).logits)


def test_fork_of_every_log_length(plain: PlainRun, new_either: Callable[..., State]) -> None:
    """The ring, both banks and the cursors go along."""
    state, root = new_either(log_capacity=4), PROMPTS[PROMPT][-1]
    slot, tokens = admit(state), list[int]()
    for turn in range(7):
        token = root if turn == 0 else (5 * turn) % VOCAB
        play(state, [slot], [DraftTree.root(token)], [[0]])
        tokens.append(token)
        twin = state.fork(slot)
        play(state, [twin], [DraftTree.root(11)], [[0]])
        want = plain.at(PROMPT, (*tokens, 11)).committed
        assert same(state.committed_state(twin), want)
        state.release(twin)


def test_a_copy_covers_whatever_the_slot_held(
    plain: PlainRun, new_either: Callable[..., State]
) -> None:
    state, root = new_either(log_capacity=4), PROMPTS[PROMPT][-1]
    slot, to = admit(state), admit(state, 7)
    canary(state, to, 1e6)
    play(state, [slot], [bushy(root)], [[0, 2, 3]])
    play(state, [to], [DraftTree.root(9)], [[0]])
    state.copy(slot, to)
    assert state.logs[to] == state.logs[slot]
    assert state.logs[to] is not state.logs[slot]
    assert same(state.committed_state(to), state.committed_state(slot))
    before = snapshot(state, slot)
    (logits,) = play(state, [to], [DraftTree.root(5)], [[0]])
    assert torch.equal(logits[0], plain.at(PROMPT, (root, 2, 3, 5)).logits)
    assert unchanged(state, slot, before)


@pytest.mark.parametrize("rounds", range(7))
def test_materialise_changes_where_not_what(rounds: int, plain: PlainRun) -> None:
    state, root = new_state(log_capacity=5), PROMPTS[PROMPT][-1]
    slot, tokens = admit(state), list[int]()
    for turn in range(rounds):
        play(state, [slot], [bushy(root + turn)], [[0, 2, 4]])
        tokens += [root + turn, 2, 4]
    before = state.committed_state(slot)
    committed = state.logs[slot].committed_len
    state.materialise(slot)
    log = state.logs[slot]
    assert (log.log_len, log.durable_len) == (0, committed), "I1"
    for i, (S, tail) in enumerate(before):
        assert torch.equal(state.layers[i].S[slot], S)
        assert torch.equal(state.tail(i, slot), tail)
    assert same(state.committed_state(slot), before)
    assert same(before, plain.at(PROMPT, tokens).committed)
    state.materialise(slot)
    assert same(state.committed_state(slot), before), "twice is once"


def test_committed_state_reads_only() -> None:
    state = new_state()
    slot = admit(state)
    play(state, [slot], [bushy(3)], [[0, 2, 3]])
    before = snapshot(state, slot)
    for S, tail in state.committed_state(slot):
        S.fill_(NAN)
        tail.fill_(NAN)
    assert unchanged(state, slot, before)


def test_rejecting_is_doing_nothing(plain: PlainRun) -> None:
    """All drafts rejected for many rounds: as if they had never been (vllm 39273)."""
    state, root = new_state(log_capacity=3), PROMPTS[PROMPT][-1]
    slot, tokens = admit(state), list[int]()
    for turn in range(12):
        token = root if turn == 0 else (3 * turn) % VOCAB
        tree = bushy(token) if turn % 3 else DraftTree.root(token)
        (logits,) = play(state, [slot], [tree], [[0]])
        tokens.append(token)
        want = plain.at(PROMPT, tokens)
        assert torch.equal(logits[0], want.logits)
        assert same(state.committed_state(slot), want.committed)


def test_nan_in_what_is_rejected_or_free_never_leaks(plain: PlainRun) -> None:
    """Rejected candidates, unused entries, free slots and the padding slot hold NaN."""
    state, root = new_state(log_capacity=3), PROMPTS[PROMPT][-1]
    slots = [admit(state), admit(state, 7)]
    for free in (0, 3):
        canary(state, free, NAN)
    tokens = [[], []]
    for turn in range(8):
        trees = [bushy((root, PROMPTS[7][-1])[b] if turn == 0 else turn) for b in range(2)]
        paths = [[0, 2, 3][: turn % 3 + 1], [0, 1][: turn % 2 + 1]]
        for slot in slots:
            poison_unreachable(state, slot)
        play(state, slots, trees, paths)
        for b, slot in enumerate(slots):
            tokens[b] += [trees[b].tokens[i] for i in paths[b]]
            want = plain.at((PROMPT, 7)[b], tokens[b]).committed
            assert same(state.committed_state(slot), want)
    for free in (0, 3):
        for tensor in tensors(state):
            assert tensor[free].isnan().all(), "nothing is written there either"


def test_padding_slot_is_never_written() -> None:
    state = new_state()
    slots = [admit(state), admit(state, 7), admit(state, 1)]
    for _ in range(4):
        play(state, slots, [bushy(3)] * 3, [[0, 2], [0], [0, 2, 4]])
        state.materialise(slots[1])
    for tensor in tensors(state):
        assert not tensor[0].any()


def test_a_tree_beyond_the_bank_is_refused_before_anything_moves() -> None:
    state = new_state(max_nodes=4)
    slot = admit(state)
    before, log = snapshot(state, slot), repr(state.logs[slot])
    with pytest.raises(CapacityExceeded, match=rf"4 nodes.*slot {slot}'s has 5"):
        state.begin([slot], [bushy(3)])
    assert unchanged(state, slot, before)
    assert repr(state.logs[slot]) == log


def test_a_path_beyond_what_there_is_room_for_is_refused() -> None:
    """What a log can come to is known beforehand: one path more than a fold is due for."""
    state = new_state(max_path=3)
    assert state.max_log == 8 + 3
    assert new_state().max_log == new_state(max_path=9).max_log == 8 + 6
    slot = admit(state)
    deep, before = DraftTree.chain(7, [1, 2, 3]), snapshot(state, slot)
    with pytest.raises(CapacityExceeded, match=rf"3 nodes \(max_path\), slot {slot}'s .* of 4"):
        state.begin([slot], [deep])
    assert unchanged(state, slot, before)
    play(state, [slot], [bushy(7)], [(0, 2, 4)])
    state.check_integrity()


def test_more_sequences_than_slots_are_refused() -> None:
    state = new_state(num_slots=1)
    state.acquire()
    with pytest.raises(CapacityExceeded, match="max_slots"):
        state.acquire()
    with pytest.raises(CapacityExceeded, match="max_slots"):
        state.fork(1)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"num_slots": 0}, "max_slots"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"log_capacity": -1}, "log_capacity"),
        ({"fold_threshold": -1}, "fold_threshold"),
        ({"fold_threshold": 9}, "fold_threshold"),
        ({"max_path": 0}, "max_path"),
    ],
)
def test_sizes_out_of_range(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        new_state(**sizes)


def test_more_than_there_is_memory_for() -> None:
    """What is checked is what would be allocated."""
    state, sizes = new_state(), {"max_nodes": 6, "log_capacity": 8}
    slots = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // state.bytes().total
    with pytest.raises(ConfigError, match=rf"{slots} sequences \(max_slots\) must fit"):
        new_state(num_slots=slots, **sizes)


@pytest.mark.parametrize("path", [[], [1], [2, 3]])
def test_a_path_starts_at_node_0(path: list[int]) -> None:
    state = new_state()
    slot = admit(state)
    state.begin([slot], [bushy(3)])
    with pytest.raises(AssertionError, match="starts at node 0"):
        state.commit([slot], [path])


def test_prefill_needs_an_empty_log() -> None:
    state = new_state()
    slot = admit(state)
    play(state, [slot], [DraftTree.root(3)], [[0]])
    with pytest.raises(AssertionError, match="empty log"):
        state.advance(slot, 4)


def test_a_round_of_a_free_slot_is_our_bug() -> None:
    state = new_state()
    with pytest.raises(AssertionError, match="slot 2 is free"):
        state.begin([2], [DraftTree.root(3)])


def test_device_rounds_have_sizes_of_buckets() -> None:
    rounds, log, three = (
        DeviceRounds(3, torch.device("cpu")),
        Log(0, 3, 0),
        DraftTree.chain(1, [2, 3]),
    )
    plan = rounds.plan([1, 2, 3], [log] * 3, [three] * 3)
    assert (plan.round.tokens.shape, plan.offsets) == ((4, 4), (0, 4, 8))
    with pytest.raises(AssertionError, match=r"powers of two, got \(1, 3\)"):
        rounds.plan([1], [log], [DraftTree.root(1)], num_nodes=3)
    with pytest.raises(AssertionError, match=r"powers of two, got \(3, 4\)"):
        rounds.round(3, 4)
    with pytest.raises(AssertionError, match="room for 3 nodes, got 4"):
        rounds.plan([1], [log], [DraftTree.chain(1, [2, 3, 4])])


def test_check_integrity_finds_a_dirty_free_slot() -> None:
    state = new_state()
    state.logs[2].commit((0,))
    with pytest.raises(AssertionError, match="free slot 2"):
        state.check_integrity()


def test_equal_bits_for_every_fold_threshold(plain: PlainRun) -> None:
    """From a fold in every round to a ring of 16: when a fold happens changes nothing."""
    root = PROMPTS[PROMPT][-1]
    for capacity in (0, 1, 2, 5, 8, 16):
        for threshold in {0, capacity // 2, capacity}:
            state = new_state(log_capacity=capacity, fold_threshold=threshold)
            slot, tokens = admit(state), list[int]()
            for turn in range(6):
                first = root if turn == 0 else turn
                play(state, [slot], [bushy(first)], [[0, 2, 4][: 1 + turn % 3]])
                tokens += [first, 2, 4][: 1 + turn % 3]
            want = plain.at(PROMPT, tokens).committed
            assert same(state.committed_state(slot), want), (capacity, threshold)
