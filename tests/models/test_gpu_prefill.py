# SPDX-License-Identifier: Apache-2.0
"""Chunks of prompts on a GPU, GDN-1.3B's shape in a few layers.

pytest -m gpu tests/models/test_gpu_prefill.py
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from test_gpu_free import no_waiting
from torch import Tensor

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.models.features import Features
from specla.state import State

pytestmark = pytest.mark.gpu
LENGTHS = (1, 63, 64, 65, 200, 512, 513, 1024, 1025)


@cache
def model() -> RandomGDN:
    return gdn_1_3b(layers=3)


def run(state: State, slot: int, length: int, layers: tuple[int, ...] = ()) -> list[Tensor]:
    """S and tail of every layer after so many tokens, and features."""
    state.reset(slot)
    features = prefilled(state, slot, length, layers)
    found = [x.clone() for pair in state.committed_state(slot) for x in pair]
    return [*found, features] if layers else found


def prefilled(state: State, slot: int, length: int, layers: tuple[int, ...]) -> Tensor:
    """So many tokens; their features."""
    features = Features(layers) if layers else None
    tokens = [(37 * length + 11 * i) % 31000 + 5 for i in range(length)]
    model().prefill(tokens, slot, state, features)
    return features.rows() if features else torch.empty(0)


def new_state(num_slots: int = 3) -> State:
    return State(
        model().info.recurrent, num_slots=num_slots, max_nodes=1, dtype=model().dtype,
        device=model().device,
    )  # fmt: skip


def test_a_prompt_is_its_own_whatever_ran_before() -> None:
    state = new_state()
    slots = [state.acquire() for _ in range(3)]
    first = {n: run(state, slots[0], n) for n in LENGTHS}
    for i, n in enumerate(reversed(LENGTHS)):
        run(state, slots[i % 3], 100 + i, (2, 0))
        *again, features = run(state, slots[(i + 1) % 3], n, (1, 2))
        assert features.shape == (n, 2 * 2048)
        for a, b in zip(first[n], again, strict=True):
            assert torch.equal(a, b), n


def test_prompts_side_by_side_are_their_own() -> None:
    """Whoever is beside them, in whichever lane, first time and again: the bits of one alone."""
    alone, state = new_state(), new_state(40)
    slot, slots = alone.acquire(), [state.acquire() for _ in range(40)]
    lengths = [1 + (53 * i) % 640 for i in range(38)] + [1025, 1200]
    first = [run(alone, slot, n, (1, 2)) for n in lengths]
    for turn in range(3):
        order = list(range(40))[turn:] + list(range(turn))
        rows: dict[int, Tensor] = {}
        for one in slots:
            state.reset(one)
        with model().side_by_side():
            for i in order:
                rows[i] = prefilled(state, slots[i], lengths[i], (1, 2))
        for i in order:
            found = [*(x for pair in state.committed_state(slots[i]) for x in pair), rows[i]]
            for a, b in zip(first[i], found, strict=True):
                assert torch.equal(a, b), (turn, lengths[i])


def test_a_graph_is_what_launches_would_have_been() -> None:
    """Padded or not, replayed or not: other products of other sizes round otherwise, no more."""
    state, chunks = new_state(), model()._chunks
    assert chunks is not None
    slot = state.acquire()
    for n in LENGTHS[:-1]:
        replayed = run(state, slot, n, (0, 2))
        chunks._short.takes = lambda num_tokens: False  # type: ignore[method-assign]
        launched = run(state, slot, n, (0, 2))
        del chunks._short.takes  # type: ignore[attr-defined]
        for a, b in zip(replayed, launched, strict=True):
            far = (a.float() - b.float()).abs().max() / b.float().abs().max()
            assert far < 0.02, (n, float(far))


def test_no_prompt_waits() -> None:
    """Once graphs are there, and kernels compiled: beside others, with a graph and without."""
    state, lengths = new_state(4), (1, 100, 600, 1025)
    slots = [state.acquire() for _ in lengths]
    for context in (nullcontext, no_waiting):
        for slot in slots:
            state.reset(slot)
        with context(), model().side_by_side():
            for slot, n in zip(slots, lengths, strict=True):
                prefilled(state, slot, n, (1, 2))
        torch.cuda.synchronize()
        assert [state.logs[slot].durable_len for slot in slots] == list(lengths)


def test_the_torch_recurrence_is_replayed_too() -> None:
    """What float32 has, and bfloat16 where fla is not installed."""
    target = gdn_1_3b(layers=2, dtype=torch.float32)
    sizes = {"num_slots": 1, "max_nodes": 1}
    state = State(target.info.recurrent, **sizes, dtype=target.dtype, device=target.device)
    chunks, slot = target._chunks, state.acquire()
    assert chunks is not None
    assert chunks._short.graphs

    def after(num_tokens: int) -> list[Tensor]:
        state.reset(slot)
        target.prefill([(11 * i) % 31000 + 5 for i in range(num_tokens)], slot, state)
        return [x.clone() for pair in state.committed_state(slot) for x in pair]

    for n in (65, 600):
        replayed, again = after(n), after(n)
        chunks._short.graphs = False
        launched = after(n)
        chunks._short.graphs = True
        assert all(map(torch.equal, replayed, again))
        for a, b in zip(replayed, launched, strict=True):
            far = (a - b).abs().max() / b.abs().max()
            assert far < 1e-3, (n, float(far))
