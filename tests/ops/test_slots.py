# SPDX-License-Identifier: Apache-2.0
"""Slots erased and copied by one launch: bits, and nothing beside them. Tier: exact.

What a state makes of it is in tests/state/test_state.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from specla.ops.contract import Factors, LayerState
from specla.ops.slots import TILE, SlotKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Sizes:
    """Letters as in the design; E entries, C conv channels, N nodes."""

    H: int
    G: int
    K: int
    V: int
    E: int
    C: int
    N: int
    slots: int = 5
    dtype: torch.dtype = torch.bfloat16


SIZES = {
    "16 bytes at once": Sizes(H=2, G=4, K=32, V=64, E=8, C=256, N=3),
    "any word": Sizes(H=1, G=3, K=5, V=7, E=3, C=23, N=1),
    "float64": Sizes(H=1, G=1, K=3, V=5, E=5, C=9, N=2, dtype=torch.float64),
}


def random_layers(sizes: Sizes, num_layers: int = 3) -> list[LayerState]:
    """Any bits at all, NaNs included."""
    z = sizes
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)

    def words(*size: int, dtype: torch.dtype = wide) -> Tensor:
        count = z.slots * torch.Size(size).numel() * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        return raw.to(DEVICE).view(dtype).view(z.slots, *size)

    return [
        LayerState(
            S=words(z.G, z.V, z.K),
            factors=Factors(words(z.E, z.H, z.K), words(z.E, z.G, z.V), words(z.E, z.G)),
            tail=words(2, 3, z.C, dtype=z.dtype),
            inputs=words(2, z.N, z.C, dtype=z.dtype),
        )
        for _ in range(num_layers)
    ]


def raw(layers: list[LayerState]) -> list[Tensor]:
    """Every tensor's bytes, [slots, ...]."""
    held = [t for x in layers for t in (x.S, *x.factors, x.tail, x.inputs)]
    return [t.flatten(1).view(torch.uint8) for t in held]


def numbers(*slots: int) -> Tensor:
    """At an address that nothing is known about."""
    return torch.tensor([0, *slots], dtype=torch.int32, device=DEVICE)[1:]


@pytest.mark.parametrize("name", SIZES)
def test_reset_erases_those_slots_and_nothing_else(name: str) -> None:
    layers = random_layers(SIZES[name])
    assert sum(x.S[0].numel() for x in layers) > TILE or name != "16 bytes at once"
    want = [t.clone() for t in raw(layers)]
    for t in want:
        t[[3, 1]] = 0
    SlotKernels(layers).reset(numbers(3, 0, 1))
    assert all(map(torch.equal, raw(layers), want))


@pytest.mark.parametrize("name", SIZES)
def test_fork_copies_every_bit(name: str) -> None:
    """From one slot to two, and beside it from another; a row that has nothing to do."""
    layers = random_layers(SIZES[name])
    want = [t.clone() for t in raw(layers)]
    for t in want:
        t[1], t[4] = t[2], t[2]
    SlotKernels(layers).fork(numbers(2, 3, 2), numbers(4, 0, 1))
    assert all(map(torch.equal, raw(layers), want))


def test_sizes_that_have_one_word_too_many_move_word_by_word() -> None:
    units = {name: SlotKernels(random_layers(sizes))._unit for name, sizes in SIZES.items()}
    assert units == {"16 bytes at once": 4, "any word": 1, "float64": 1}
