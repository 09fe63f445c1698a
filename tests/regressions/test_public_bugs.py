# SPDX-License-Identifier: Apache-2.0
"""Bugs other engines had with recurrent state: one small reproduction each.

Every test is run twice: as it is, and with the bug put in, which must be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_harness import (
    States,
    drive,
    load_target,
    make_engine,
    plain,
    request,
    same_state,
    truth_of,
)
from torch import Tensor

from specla.drafters.base import Drafter
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.request import Request
from specla.sampling import accept
from specla.state import State
from specla.state.log import Log
from specla.testing import OracleDrafter, ScriptedDrafter
from specla.topology.tree import DraftTree

PROMPT = (5, 9, 14, 15, 16, 17, 10, 22, 6)


def states_by_length(
    target: TargetModel, one: Request, drafter: Drafter | None, log: int
) -> dict[int, States]:
    """The state after every round, by committed tokens; the tokens under key 0."""
    seen: dict[int, States] = {}

    def keep(engine: Engine) -> None:
        for row in engine.scheduler.running.values():
            if row.acceptance.rounds:
                seen[engine.state.logs[1].committed_len] = engine.state.committed_state(1)

    done = drive(make_engine(target, drafter, slots=1, log=log), [one], keep).completions
    ids = torch.tensor(done[one.request_id].token_ids)
    return {0: [(ids, ids)], **seen}


def test_case_01_a_round_without_drafts_after_one_that_accepted(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#39273: after a step that accepted drafts, a step without any read the state from a
    slot that was no longer the current one, and the text fell into loops."""
    one = request("a", PROMPT, max_tokens=20)
    want = states_by_length(target, one, None, 0)
    truth = truth_of([one], plain(target, [one]))

    def same(log: int) -> bool:
        drafter = ScriptedDrafter((4, 0), OracleDrafter(truth))
        got = states_by_length(target, one, drafter, log)
        return all(same_state(state, want[length]) for length, state in got.items())

    assert same(0)
    assert same(16)
    commit = Log.commit

    def stale(log: Log, path: tuple[int, ...]) -> None:
        commit(log, path)
        if len(path) == 1:
            log.bank = 1 - log.bank

    monkeypatch.setattr(Log, "commit", stale)
    assert not same(16)


def forced(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """Logits after `tokens` that went through one-node rounds only, no prefill."""
    state = State(target.info.recurrent, num_slots=1, max_nodes=1, dtype=target.dtype)
    slot = state.acquire()
    for token in tokens:
        logits = target.verify(state.begin([slot], [DraftTree.root(token)]), state)
        state.commit([slot], [(0,)])
    return logits[0]


def test_case_02_prompts_as_short_as_a_round(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#53051: a prefill whose length happened to be 1 + k was taken for a decode batch, and
    none of its state was written. Every length from 1 to 2 (k + 1), one to four rows."""
    model = load_target(tmp_path, dtype=torch.float64)  # type: ignore[arg-type]
    prompts = [PROMPT[:length] for length in range(1, 7)]
    want = [int(forced(model, prompt).argmax()) for prompt in prompts]

    def first_tokens(slots: int) -> list[int]:
        rows = [request(str(i), prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
        done = drive(make_engine(model, slots=slots, nodes=3), rows).completions
        return [done[str(i)].token_ids[0] for i in range(len(prompts))]

    for slots in range(1, 5):
        assert first_tokens(slots) == want
    prefill = model.prefill
    skipped = 3

    def skip(tokens: Sequence[int], slot: int, state: State, features: object = None) -> None:
        if len(tokens) == skipped:
            state.advance(slot, len(tokens))
        else:
            prefill(tokens, slot, state)

    monkeypatch.setattr(model, "prefill", skip)
    assert first_tokens(2) != want


def chain_logits(target: TargetModel, state: State, slot: int, tokens: Sequence[int]) -> Tensor:
    """One round over a chain that is not committed."""
    return target.verify(state.begin([slot], [DraftTree.chain(tokens[0], tokens[1:])]), state)


def test_case_04_keeping_a_part_of_a_block(target: TargetModel) -> None:
    """transformers#49036: cropping the cache rewound the conv window but not the recurrent
    state, so verifying a block and keeping a part of it was not lossless."""
    block, kept, after = (5, 9, 14, 15, 16, 17, 10, 22), 5, 11
    want = forced(target, (*block[:kept], after))

    def got(num_kept: int, log: int) -> Tensor:
        state = State(target.info.recurrent, num_slots=1, max_nodes=8, log_capacity=log)
        slot = state.acquire()
        chain_logits(target, state, slot, block)
        state.commit([slot], [tuple(range(num_kept))])
        return chain_logits(target, state, slot, (after,))[0]

    assert torch.equal(got(kept, 0), want)
    assert torch.equal(got(kept, 16), want)
    assert not torch.equal(got(len(block), 0), want)


def test_case_05_a_block_after_a_prompt(target: TargetModel) -> None:
    """transformers PR#45513: a forward of several tokens with a filled cache began from a zero
    state."""
    prompt, block = PROMPT, (11, 5, 6, 7, 8)
    state = State(target.info.recurrent, num_slots=2, max_nodes=5)
    slots = [state.acquire(), state.acquire()]
    for slot in slots:
        target.prefill(prompt, slot, state)
    at_once = chain_logits(target, state, slots[0], block)
    for i, token in enumerate(block):
        one = chain_logits(target, state, slots[1], (token,))
        state.commit([slots[1]], [(0,)])
        assert torch.equal(one[0], at_once[i])
    state.layers[0].S[slots[0]].zero_()
    assert not torch.equal(chain_logits(target, state, slots[0], block), at_once)


def test_case_11_a_tree_is_not_a_chain(target: TargetModel) -> None:
    """sglang PR#27463: a backend without parent pointers verified a tree as if it were a chain,
    so a node saw its siblings."""
    tokens, parents = (5, 6, 7, 8, 9, 10), (-1, 0, 0, 1, 2, 2)
    tree = DraftTree(tokens, parents)

    def logits(tree: DraftTree) -> Tensor:
        state = State(target.info.recurrent, num_slots=1, max_nodes=6)
        slot = state.acquire()
        return target.verify(state.begin([slot], [tree]), state)

    def is_right(got: Tensor) -> bool:
        paths = [[tokens[v] for v in tree.path_to(node)] for node in range(6)]
        return all(torch.equal(got[i], forced(target, path)) for i, path in enumerate(paths))

    assert is_right(logits(tree))
    assert not is_right(logits(DraftTree.chain(tokens[0], tokens[1:])))


def test_case_12_lengths_in_a_batch_do_not_mix(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """maxtext PR#5295, rtp-llm PR#829: padding went through the convolution and stayed in the
    state for good."""
    rows = [request("3", PROMPT[:3]), request("17", (PROMPT * 2)[:17])]

    def states(requests: Sequence[Request]) -> dict[str, States]:
        engine = make_engine(target)
        for one in requests:
            engine.add(one)
        engine.step()
        engine.step()
        running = engine.scheduler.running
        return {name: engine.state.committed_state(row.slot) for name, row in running.items()}

    alone = {**states(rows[:1]), **states(rows[1:])}

    def is_clean() -> bool:
        batch = states(rows)
        return all(same_state(batch[name], alone[name]) for name in alone)

    assert is_clean()
    prefill = target.prefill

    def padded(tokens: Sequence[int], slot: int, state: State, features: object = None) -> None:
        prefill((*[0] * (16 - len(tokens)), *tokens), slot, state)
        state.logs[slot].durable_len -= 16 - len(tokens)

    monkeypatch.setattr(target, "prefill", padded)
    assert not is_clean()


def test_case_14_nothing_is_left_for_the_next_request(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RWKV-Runner PR#441: with caching off, the state of one request was the start of the next."""
    one, other = request("b", (5,), temperature=1.0), request("a", PROMPT)
    want = plain(target, [one])["b"].token_ids

    def second() -> tuple[int, ...]:
        engine = make_engine(target, slots=1)
        engine.add(other)
        engine.add(one)
        while engine.has_work:
            last = engine.step()
        assert last[0].completion is not None
        return last[0].completion.token_ids

    assert second() == want
    monkeypatch.setattr(State, "reset", lambda state, slot: None)
    assert second() != want


@pytest.mark.parametrize("nodes", [1, 4, 16])
def test_case_15_buffers_are_as_large_as_asked_for(target: TargetModel, nodes: int) -> None:
    """sglang PR#23643: gigabytes of speculation buffers for slots that never speculate. Here a
    slot's candidates cost 2 banks of N factor records, and N is 1 without a drafter."""
    s = target.info.recurrent
    record = 4 * (s.num_key_heads * s.key_dim + s.num_value_heads * (s.value_dim + 1))
    state = make_engine(target, slots=3, nodes=nodes).state
    assert state.bytes().candidate == s.num_layers * record
    assert state.bytes().candidates == s.num_layers * 2 * nodes * record
    tensors = [t for x in state.layers for t in (x.S, *x.factors, x.tail, x.inputs)]
    assert sum(t.nbytes for t in tensors) == 4 * state.bytes().total


def test_case_29_ties_go_to_the_lowest_id(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#54506, #42960, llama.cpp#25618: at near ties greedy text changed with the number of
    rows, because kernels for 1 and k + 1 rows round differently. Here ties are exact."""
    model = load_target(tmp_path)  # type: ignore[arg-type]
    head = model.head.weight  # type: ignore[attr-defined]
    for high in range(7, 24, 2):
        head[high] = head[high - 1]
    one = request("a", PROMPT, max_tokens=24)
    want = plain(model, [one])["a"].token_ids

    def got() -> tuple[int, ...]:
        drafter = OracleDrafter(lambda row: want, decoys=1, vocab_size=24)
        return drive(make_engine(model, drafter, nodes=8), [one]).completions["a"].token_ids

    assert got() == want
    assert len(set(want)) > 2
    assert not set(want) & set(range(7, 24, 2)), "the higher id of a tie"

    def last_of_equals(logits: Tensor) -> tuple[list[int], list[bool]]:
        tokens = logits.shape[1] - 1 - logits.flip(-1).max(-1).indices
        return tokens.tolist(), [True] * len(logits)

    monkeypatch.setattr(accept, "greedy", last_of_equals)
    assert got() != want
