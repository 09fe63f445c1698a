# SPDX-License-Identifier: Apache-2.0
"""The short convolution along tree paths. Tier: algebra against the oracle; exact elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import SHAPE, TREES, random_parents
from torch import Tensor

from specla.ops import conv
from specla.ops.oracle import conv_paths
from specla.state import State
from specla.topology.tree import DraftTree

CHANNELS = SHAPE.conv_channels
WIDTHS = (2, 3, 4)


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def agree(got: Tensor, truth: Tensor) -> None:
    assert got.shape == truth.shape
    assert (got - truth).abs().max() <= 1e-10 * truth.abs().max()


def tree(parents: tuple[int, ...]) -> DraftTree:
    return DraftTree(tuple(range(len(parents))), parents)


def new_state(width: int, slots: int = 3, dtype: torch.dtype = torch.float64) -> State:
    shape = replace(SHAPE, conv_width=width)
    return State(shape, num_slots=slots, max_nodes=24, log_capacity=4, dtype=dtype)


def play(state: State, slot: int, parents: tuple[int, ...], x: Tensor, weight: Tensor) -> Tensor:
    return conv.verify(state.layers[0], state.begin([slot], [tree(parents)]), x, weight)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TREES)
def test_verify(name: str, width: int) -> None:
    verify_equals_oracle(TREES[name], width, seed=0)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 24),
    reach=st.integers(1, 24),
    width=st.sampled_from(WIDTHS),
)
def test_verify_on_any_tree(seed: int, size: int, reach: int, width: int) -> None:
    verify_equals_oracle(random_parents(seed, size, reach), width, seed)


def verify_equals_oracle(parents: tuple[int, ...], width: int, seed: int) -> None:
    """Two rounds: the second falls through the first one's path into the tail."""
    state = new_state(width)
    slot, weight = state.acquire(), normal(seed + 1, CHANNELS, width)
    tail = normal(seed + 2, width - 1, CHANNELS)
    state.tail(0, slot).copy_(tail)
    first, second = (normal(seed + i, len(parents), CHANNELS) for i in (3, 4))
    agree(play(state, slot, parents, first, weight), conv_paths(first, weight, tail, parents))
    path = tree(parents).path_to(len(parents) - 1)
    state.commit([slot], [path])
    moved = torch.cat([tail, first[list(path)]])[-(width - 1) :]
    agree(play(state, slot, parents, second, weight), conv_paths(second, weight, moved, parents))
    assert torch.equal(state.layers[0].tail[slot, 0], moved)


@pytest.mark.parametrize("width", WIDTHS)
def test_siblings_never_see_each_other(width: int) -> None:
    """Poison in one branch stays in it."""
    parents, weight = TREES["binary"], normal(1, CHANNELS, width)
    x = normal(2, len(parents), CHANNELS)
    state = new_state(width)
    clean = play(state, state.acquire(), parents, x, weight)
    for bad in range(1, len(parents)):
        poisoned = x.clone()
        poisoned[bad] = float("nan")
        got = play(state := new_state(width), state.acquire(), parents, poisoned, weight)
        for node in range(len(parents)):
            path = tree(parents).path_to(node)
            if bad in path[-width:]:
                assert got[node].isnan().all()
            else:
                assert torch.equal(got[node], clean[node])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7])
def test_histories_shorter_than_the_window(length: int, width: int) -> None:
    """Before the text there are zeros, never another request's tail."""
    weight, x = normal(1, CHANNELS, width), normal(2, length + 3, CHANNELS)
    state = new_state(width)
    slot = state.acquire()
    if length:
        _, tail = conv.prefill(x[:length], weight, state.tail(0, slot))
        state.tail(0, slot).copy_(tail)
    got = play(state, slot, (-1, 0, 1), x[length:], weight)
    agree(got, conv_paths(x, weight, torch.zeros(width - 1, CHANNELS), chain(length + 3))[length:])


def chain(count: int) -> tuple[int, ...]:
    return tuple(range(-1, count - 1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_prefill_continues_at_every_cut(dtype: torch.dtype, width: int) -> None:
    """Exact, and so is a verify that takes over at the cut."""
    x, weight = normal(1, 12, CHANNELS, dtype=dtype), normal(2, CHANNELS, width, dtype=dtype)
    tail = normal(3, width - 1, CHANNELS, dtype=dtype)
    whole, last = conv.prefill(x, weight, tail)
    for cut in range(1, 12):
        first, middle = conv.prefill(x[:cut], weight, tail)
        second, end = conv.prefill(x[cut:], weight, middle)
        assert torch.equal(torch.cat([first, second]), whole)
        assert torch.equal(end, last)
        state = new_state(width, dtype=dtype)
        slot = state.acquire()
        state.tail(0, slot).copy_(middle)
        assert torch.equal(play(state, slot, chain(12 - cut), x[cut:], weight), whole[cut:])


@pytest.mark.parametrize("width", WIDTHS)
def test_prefill(width: int) -> None:
    x, weight, tail = (
        normal(1, 9, CHANNELS),
        normal(2, CHANNELS, width),
        normal(3, width - 1, CHANNELS),
    )
    y, last = conv.prefill(x, weight, tail)
    agree(y, conv_paths(x, weight, tail, chain(9)))
    assert torch.equal(last, x[9 - width + 1 :])


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_different_length_do_not_mix(width: int) -> None:
    """Exact. A batch of 3 and 17 tokens, either first, equals each alone, in this round and the
    next: nothing is padded, so no padding can enter a window or a tail."""
    weight = normal(1, CHANNELS, width, dtype=torch.float32)
    sizes = (3, 17)
    xs = [normal(2 + i, n, CHANNELS, dtype=torch.float32) for i, n in enumerate(sizes)]

    def two_rounds(order: list[int]) -> dict[int, list[Tensor]]:
        state = new_state(width, dtype=torch.float32)
        slots = [state.acquire() for _ in sizes]
        got: dict[int, list[Tensor]] = {i: [] for i in order}
        for _ in range(2):
            rows = [slots[i] for i in order]
            plan = state.begin(rows, [tree(chain(sizes[i])) for i in order])
            y = conv.verify(state.layers[0], plan, torch.cat([xs[i] for i in order]), weight)
            for i, part in zip(order, y.split([sizes[i] for i in order]), strict=True):
                got[i].append(part)
            state.commit(rows, [range(sizes[i] - 1) for i in order])
        return got

    alone = {i: two_rounds([i])[i] for i in (0, 1)}
    for order in ([0, 1], [1, 0]):
        together = two_rounds(order)
        for i in order:
            for a, b in zip(together[i], alone[i], strict=True):
                assert torch.equal(a, b)
