# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up on the GPU, for products with a weight that `gemm.pack_swiglu` has packed.

Decoding has this in the product's own kernel. A prompt's chunk goes through cuBLAS, and so that
the weight is held once, its rows stay interleaved and are told apart here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.ops.gemm import GROUP
from specla.ops.rows import round_to, silu

BLOCK = 128  # groups of one program


def packed_swiglu(hidden: Tensor, out: Tensor) -> None:
    """hidden [T, 2 I], columns in groups of 8 gate, 8 up; out [T, I] as `ops.norm.swiglu`."""
    num_rows, width = out.shape
    assert hidden.shape == (num_rows, 2 * width)
    assert all(tensor.is_contiguous() for tensor in (hidden, out))
    groups = width // GROUP
    _swiglu_kernel[(num_rows, triton.cdiv(groups, BLOCK))](
        hidden, out, GROUPS=groups, GROUP=GROUP, BLOCK=BLOCK, num_warps=4
    )


@triton.jit
def _swiglu_kernel(
    hidden_ptr, out_ptr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = group < GROUPS
    lane = tl.arange(0, GROUP)[None, :]
    row = tl.program_id(0).to(tl.int64) * (GROUPS * GROUP)
    at = hidden_ptr + 2 * row + group * (2 * GROUP) + lane
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + GROUP, mask=inside, other=0.0).to(tl.float32)
    y = round_to(silu(gate) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + group * GROUP + lane, y, mask=inside)
