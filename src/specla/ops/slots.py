# SPDX-License-Identifier: Apache-2.0
"""Erasing and copying slots on the GPU: one launch for all tensors of all layers, bit by bit.

A slot's part of a tensor is a run of 4-byte words, cut into tiles; one program per tile, layer and
slot. Tensors are found through a table of addresses, so that layers need not lie side by side.
Slot numbers are read from device memory and nothing is allocated: a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import LayerState

TILE = 4096
"""Words of a tile, 16 KiB: enough programs to fill a GPU, long runs of memory for each."""


class SlotKernels:
    """Works on the tensors that `layers` hold now, which must stay where they are.

    Args:
        layers: L layers of the same sizes, all on one device, axis 0 of each tensor the slot.
    """

    def __init__(self, layers: Sequence[LayerState]) -> None:
        held = [(x.S, *x.factors, x.tail, x.inputs) for x in layers]
        assert all(tensor.is_contiguous() for one in held for tensor in one)
        self._layers = tuple(layers)  # the addresses are good for as long as these live
        words = [tensor[0].nbytes // 4 for tensor in held[0]]
        assert all([t[0].nbytes for t in one] == [4 * count for count in words] for one in held)
        device = held[0][0].device
        tiles = [(i, at) for i, count in enumerate(words) for at in range(0, count, TILE)]
        self._address = torch.tensor(
            [[t.data_ptr() for t in one] for one in held], dtype=torch.int64, device=device
        )
        self._words = torch.tensor(words, dtype=torch.int32, device=device)
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._numbers = torch.arange(held[0][0].shape[0], dtype=torch.int32, device=device)
        # Whether every slot begins where 16 bytes can be moved at once. Speed, no bits.
        aligned = all(t.data_ptr() % 16 == 0 for one in held for t in one)
        self._unit = 4 if aligned and all(count % 4 == 0 for count in words) else 1

    def number(self, slot: int) -> Tensor:
        """A slot's number on the device, int32 [1]: a view, so that nothing is copied there."""
        return self._numbers[slot : slot + 1]

    def reset(self, targets: Tensor) -> None:
        """Every word of these slots becomes zero.

        targets: int32 [n], on the device; slot 0, the padding, stands for nothing to do.
        """
        self._launch(targets, targets, fork=False)

    def fork(self, sources: Tensor, targets: Tensor) -> None:
        """Every word of slot sources[i] goes to slot targets[i].

        sources, targets: int32 [n], on the device; no target twice or among the sources; target
        0 stands for nothing to do.
        """
        self._launch(sources, targets, fork=True)

    def _launch(self, sources: Tensor, targets: Tensor, *, fork: bool) -> None:
        num_layers, num_tensors = self._address.shape
        # A request may end while another model's GPU is the current one. Nothing on a CPU.
        with torch.cuda.device_of(self._address):
            _slots_kernel[(self._tiles.shape[0], num_layers, targets.shape[0])](
                self._address,
                self._words,
                self._tiles,
                sources,
                targets,
                TENSORS=num_tensors,
                TILE=TILE,
                UNIT=self._unit,
                FORK=fork,
                num_warps=4,
            )


# Slot numbers are looked up anywhere in a list: no kernel for each alignment.
@triton.jit(do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _slots_kernel(
    address_ptr,
    words_ptr,
    tile_ptr,
    source_ptr,
    target_ptr,
    TENSORS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    FORK: tl.constexpr,
):
    tile, layer, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    target = tl.load(target_ptr + row)
    if target == 0:
        return
    tensor = tl.load(tile_ptr + 2 * tile)
    first = tl.load(tile_ptr + 2 * tile + 1)
    words = tl.load(words_ptr + tensor)
    address = tl.load(address_ptr + layer * TENSORS + tensor)
    base = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4 * UNIT)
    lane = tl.multiple_of(first, TILE) + tl.arange(0, TILE)
    there = lane < tl.multiple_of(words, UNIT)
    at = tl.multiple_of(target.to(tl.int64) * words, UNIT) + lane
    if FORK:
        come = tl.multiple_of(tl.load(source_ptr + row).to(tl.int64) * words, UNIT) + lane
        tl.store(base + at, tl.load(base + come, mask=there, other=0), mask=there)
    else:
        tl.store(base + at, tl.zeros([TILE], tl.int32), mask=there)
