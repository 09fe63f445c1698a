# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Weights into L2 while the memory has nothing to do.

Between a layer's first product and its second stand `prepare` and the walk. A tree's walk reads
little for microseconds, and the product after next cannot ask for its weights before the walk's
programs are gone: their shared memory is full. Requests into L2 need no room there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of a product's tile (`ops.gemm_stream`'s for gate_up).
TILE_ROWS = 128


class Ahead(NamedTuple):
    """A weight [O, I], contiguous, that is wanted soon: the first `rows` of every TILE_ROWS rows
    are asked for. Speed, never bits.

    All tiles of a product read on at the same pace: what each has in L2 is what memory need not
    bring, and both bring at the same time.
    """

    weight: torch.Tensor
    rows: int


def asked_for(ahead: Ahead | None, unused: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """What `request_ahead` is given."""
    if ahead is None:
        return unused, 0, 0, 0
    weight, rows = ahead
    width = weight.stride(0) * weight.element_size()
    assert 0 < rows <= TILE_ROWS, rows
    assert width % 16 == 0, width
    return weight, len(weight) // TILE_ROWS, TILE_ROWS * weight.stride(0), rows * width


@gluon.jit
def request_ahead(weight_ptr, num_tiles, step, size):
    """`size` bytes of each tile, `step` elements apart, shared by all programs. One thread asks;
    its hardware takes requests of up to a megabyte."""
    programs = gl.num_programs(0) * gl.num_programs(1) * gl.num_programs(2)
    program = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    program = program * gl.num_programs(0) + gl.program_id(0)
    for tile in range(program, num_tiles, programs):
        at = weight_ptr + tile.to(gl.int64) * step
        gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x;"
            " setp.eq.u32 first, thread, 0;"
            " @first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r",
            [at.to(gl.int64, bitcast=True), size],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
