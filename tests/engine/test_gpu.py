# SPDX-License-Identifier: Apache-2.0
"""Exactness on a GPU (rule I4): tokens and folded state equal the bytes of each row's own plain
decoding, alone. GDN-1.3B's shape with random bfloat16 weights, and the demo model.

    pytest -m gpu tests/engine/test_gpu.py -s
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from behind import Turns
from torch import Tensor

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.drafters.base import DeviceDrafter, Drafter, DraftRow, Shape
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.request import Request, SamplingParams
from specla.state import State
from specla.testing import AdversarialDrafter, OracleDrafter, RandomTreeDrafter

pytestmark = pytest.mark.gpu
TOKENS = 512
Prompt = tuple[int, ...]
States = list[tuple[Tensor, Tensor]]
# Tokens, how many are in the state, and the state.
Outcome = tuple[tuple[int, ...], int, States]


class Remembering(State):
    """Keeps what a slot's committed state came to when it is given back."""

    kept: dict[int, tuple[int, States]]

    def release(self, slot: int) -> None:
        self.kept[slot] = self.logs[slot].committed_len, self.committed_state(slot)
        super().release(slot)


@cache
def model() -> RandomGDN:
    return gdn_1_3b()


def prompt(row: int) -> Prompt:
    """Lengths differ, so that rows are at different phases of their logs."""
    return tuple((37 * row + 11 * i) % 31000 + 5 for i in range(3 + 7 * row % 90))


def sampling(row: int, count: int = TOKENS) -> SamplingParams:
    """Every third row samples."""
    temperature = 0.8 if row % 3 == 2 else 0.0
    return SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)


def new_engine(
    drafter: Drafter, *, slots: int, max_nodes: int, turns: Sequence[int] = ()
) -> tuple[Engine, Remembering]:
    """turns: numbers of nodes that rounds on the device have by turns."""
    target = model()
    state = Remembering(
        target.info.recurrent,
        num_slots=slots,
        max_nodes=max_nodes,
        log_capacity=16,
        dtype=target.dtype,
        device=target.device,
    )
    state.kept = {}
    budget = "paying" if turns else "off"
    engine = Engine(target, state, drafter, mode="exact", prefill_chunk=256, budget=budget)
    if turns:
        assert engine.spending is not None
        assert engine.spending.free is not None
        assert isinstance(drafter, DeviceDrafter)
        wanted = [Shape(nodes, drafter.depths(nodes)[-1]) for nodes in turns]
        engine.spending.free = Turns(wanted, every=7)  # type: ignore[assignment]
    return engine, state


def decode(
    rows: Sequence[int],
    drafter: Drafter,
    *,
    max_nodes: int,
    count: int = TOKENS,
    at_once: int = 8,
    turns: Sequence[int] = (),
) -> list[Outcome]:
    """What these rows come to, all in one engine; `at_once` of them join between two rounds."""
    engine, state = new_engine(drafter, slots=len(rows), max_nodes=max_nodes, turns=turns)
    outcomes: dict[int, Outcome] = {}
    slots: dict[int, int] = {}
    waiting = list(enumerate(rows))
    while waiting or engine.has_work:
        for i, row in waiting[:at_once]:
            engine.add(
                Request(
                    request_id=str(i),
                    prompt=None,
                    prompt_token_ids=prompt(row),
                    params=sampling(row, count),
                    seed=row,
                )
            )
        del waiting[:at_once]
        for delta in engine.step():
            if delta.completion is not None:
                i = int(delta.request_id)
                outcomes[i] = (delta.completion.token_ids, *state.kept[slots[i]])
        for name, running in engine.scheduler.running.items():
            slots[int(name)] = running.slot
    return [outcomes[i] for i in range(len(rows))]


@cache
def alone(row: int, count: int = TOKENS) -> Outcome:
    """Plain decoding of one row, in an engine of its own, through the host's trees."""
    return decode([row], HostNone(), max_nodes=1, count=count)[0]


class HostNone(NoDrafter):
    """No drafts, and no rounds without the host either: cursors stay the host's."""

    launch = None  # type: ignore[assignment]


def truth(row: DraftRow) -> Sequence[int]:
    """The whole plain output of the row's prompt."""
    return _by_prompt()[tuple(row.tokens[: row.num_prompt_tokens])]


@cache
def _by_prompt() -> dict[Prompt, tuple[int, ...]]:
    return {prompt(row): alone(row)[0] for row in ROWS}


ROWS = range(8)
VOCAB = 32000
DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "every draft rejected": lambda nodes: AdversarialDrafter(
        truth, vocab_size=VOCAB, depth=nodes - 1
    ),
    "every draft accepted": lambda nodes: OracleDrafter(
        truth, depth=max(1, (nodes - 1) // 3), decoys=2, vocab_size=VOCAB
    ),
    "random acceptance": lambda nodes: RandomTreeDrafter(
        5, VOCAB, max_depth=12, max_children=4, truth=truth, p_right=0.7
    ),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("batch", "nodes"), [(1, 4), (1, 64), (8, 16), (8, 64)])
def test_trees_give_the_bytes_of_plain_decoding(kind: str, batch: int, nodes: int) -> None:
    rows = ROWS[:batch]
    _assert_as_alone(rows, decode(rows, DRAFTERS[kind](nodes), max_nodes=nodes))


def test_sixty_four_rows_of_sixteen_nodes() -> None:
    """Eight prompts, each in eight rows that start and end at different rounds."""
    drafter = RandomTreeDrafter(6, VOCAB, max_depth=8, truth=truth, p_right=0.6)
    rows = [i % 8 for i in range(64)]
    _assert_as_alone(rows, decode(rows, drafter, max_nodes=16, at_once=4))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["none", "ngram"])
def test_rounds_without_the_host_give_the_same_tokens(name: str, batch: int) -> None:
    drafter: Drafter = NoDrafter() if name == "none" else NgramDrafter()
    rows = ROWS[:batch]
    got = decode(rows, drafter, max_nodes=16 if name == "ngram" else 1)
    for row, (tokens, *_) in zip(rows, got, strict=True):
        assert tokens == alone(row)[0], row


@pytest.mark.parametrize("batch", [1, 8])
def test_rounds_of_a_number_of_nodes_by_turns_give_the_same_tokens(batch: int) -> None:
    """The budget of rounds on the device, at its most restless."""
    rows = ROWS[:batch]
    got = decode(rows, NgramDrafter(), max_nodes=16, turns=(16, 1, 4, 2, 8))
    for row, (tokens, *_) in zip(rows, got, strict=True):
        assert tokens == alone(row)[0], row


def test_a_free_round_never_synchronises() -> None:
    engine, _ = new_engine(NgramDrafter(), slots=1, max_nodes=16)
    engine.add(
        Request(
            request_id="r",
            prompt=None,
            prompt_token_ids=prompt(1),
            params=sampling(0, 64),
            seed=0,
        )
    )
    for _ in range(4):
        engine.step()
    replay = engine.last_graph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _assert_as_alone(rows: Sequence[int], got: Sequence[Outcome]) -> None:
    for row, (tokens, committed, states) in zip(rows, got, strict=True):
        assert tokens == alone(row)[0], f"row {row}: tokens"
        # An accepted draft that ends the row is in the state; plain decoding's last token is not.
        _, same_length, want = alone(row, TOKENS + committed - alone(row)[1])
        assert same_length == committed
        for i, ((S, tail), (S2, tail2)) in enumerate(zip(states, want, strict=True)):
            assert torch.equal(S, S2), f"row {row}: S of layer {i}"
            assert torch.equal(tail, tail2), f"row {row}: tail of layer {i}"
