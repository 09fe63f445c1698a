# SPDX-License-Identifier: Apache-2.0
"""What state costs, by purpose. Tier: exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
from plain_run import PlainRun
from tiny_decoder import SHAPE, tiny_decoder
from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.state import State

GDN_1B = RecurrentShape(
    num_layers=1, num_key_heads=8, num_value_heads=8, key_dim=256, value_dim=256, conv_width=4
)


def new_state(shape: RecurrentShape = SHAPE, **sizes: int) -> State:
    return State(shape, **{"num_slots": 2, "max_nodes": 5, "log_capacity": 3, **sizes})


def formula(
    s: RecurrentShape, nodes: int, capacity: int, dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Bytes of one slot from the sizes alone."""
    wide = 8 if dtype == torch.float64 else 4
    narrow, heads, layers = dtype.itemsize, s.num_value_heads, s.num_layers
    entry = wide * (s.num_key_heads * s.key_dim + heads * s.value_dim + heads)
    parts = {
        "base": wide * heads * s.value_dim * s.key_dim,
        "log": entry * capacity,
        "candidates": entry * 2 * nodes,
        "conv": narrow * s.conv_channels * 2 * (s.conv_width - 1 + nodes),
    }
    one = {"candidate": entry, "candidate_conv": narrow * s.conv_channels}
    return {k: v * layers for k, v in (parts | one | {"total": sum(parts.values())}).items()}


def held(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor reachable from an object's attributes, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        if thing.untyped_storage().data_ptr() not in seen:
            seen.add(thing.untyped_storage().data_ptr())
            yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from held(value, seen)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            yield from held(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from held(vars(thing), seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("nodes", "capacity"), [(1, 0), (5, 0), (5, 3), (16, 16)])
def test_formula(nodes: int, capacity: int, dtype: torch.dtype) -> None:
    state = State(SHAPE, num_slots=2, max_nodes=nodes, log_capacity=capacity, dtype=dtype)
    assert asdict(state.bytes()) == formula(SHAPE, nodes, capacity, dtype)


@pytest.mark.parametrize("slots", [1, 4])
def test_nothing_is_held_beyond_the_formula(slots: int) -> None:
    """Slots that never speculate have banks of one node, and no hidden buffers (sglang 23643)."""
    for nodes in (1, 8):
        state = new_state(num_slots=slots, max_nodes=nodes)
        storages = sum(t.untyped_storage().nbytes() for t in held(state))
        assert storages == (slots + 1) * state.bytes().total


def test_rounds_allocate_nothing_that_stays() -> None:
    plain = PlainRun(tiny_decoder(), SHAPE)
    state, slot = plain._prefilled(3)
    before = {t.untyped_storage().data_ptr() for t in held(state)}
    for token in range(6):
        plain._round(state, slot, token)
    state.materialise(slot)
    assert {t.untyped_storage().data_ptr() for t in held(state)} == before


def test_a_candidate_is_127_times_smaller_than_a_state() -> None:
    """k, u, g in float32 at 8 heads of 256 x 256, per layer. The raw conv input, which commit
    needs too, is counted beside, in the activations' type: 12 KiB, together 73x."""
    state = State(GDN_1B, num_slots=1, max_nodes=1, dtype=torch.bfloat16)
    size = state.bytes()
    assert size.base == 2 * 2**20
    assert size.candidate == 8 * (256 + 256 + 1) * 4 == 16_416
    assert size.base >= 127 * size.candidate
    assert size.candidate_conv == 3 * 8 * 256 * 2 == 12_288
    assert size.base / (size.candidate + size.candidate_conv) == pytest.approx(73.1, abs=0.05)
