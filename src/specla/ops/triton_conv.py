# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""`conv.packed` on a GPU in one pass: texts from their starts, end to end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.rows import round_to, silu

TOKENS, CHANNELS = 16, 128
"""Of a program."""


def packed(x: Tensor, weight: Tensor, same: Tensor) -> Tensor:
    """See `conv.packed`. x may be columns of a wider matrix."""
    length, channels = x.shape
    assert x.stride(1) == 1
    y = x.new_empty(length, channels)
    grid = triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS)
    _packed_kernel[grid](
        x, weight.contiguous(), same.contiguous().view(torch.uint8), y, length, x.stride(0),
        C=channels, W=weight.shape[1], TOKENS=TOKENS, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["length"])
def _packed_kernel(
    x_ptr, weight_ptr, same_ptr, y_ptr, length, stride,
    C: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    acc = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(W):  # oldest tap first
        at = t - (W - 1 - j)
        bit = tl.load(same_ptr + t * W + j, mask=t < length, other=0)
        # No token comes before the first one.
        seen = tl.where(at >= 0, bit, 0)
        inside = tl.where(seen != 0, C, 0)[:, None] > c[None, :]
        x = tl.load(x_ptr + at[:, None] * stride + c[None, :], mask=inside, other=0.0)
        w = tl.load(weight_ptr + c * W + j, mask=c < C, other=0.0).to(tl.float32)
        acc += x.to(tl.float32) * w[None, :]
    inside = tl.where(t < length, C, 0)[:, None] > c[None, :]
    y = round_to(silu(acc), y_ptr.dtype.element_ty)
    tl.store(y_ptr + t[:, None] * C + c[None, :], y, mask=inside)
