# SPDX-License-Identifier: Apache-2.0
"""A chunk of one prompt on a GPU: from the raw projections to what the chunked recurrence reads.

The same formulas as the decode path's `triton.prepare`, with consecutive tokens in place of a
tree. One program per block of tokens and head; what a token's values are made of, and in which
order, depends on no other token than those its convolution sees. Rows past the last token come
out as tokens that leave a state as it is: nothing to read or write, no decay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.ops.gdn import Inputs
from specla.ops.gdn.triton_prepare import softplus
from specla.ops.rows import round_to, silu

BLOCK_TOKENS = 16


def allocate(
    shape: RecurrentShape, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Room for `num_tokens` tokens. dtype is that of q, k and v; g and beta are float32."""

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_tokens, *size), dtype=dtype, device=device)

    keys = (shape.num_key_heads, shape.key_dim)
    return Inputs(
        q=empty(*keys, dtype=dtype),
        k=empty(*keys, dtype=dtype),
        v=empty(shape.num_value_heads, shape.value_dim, dtype=dtype),
        g=empty(shape.num_value_heads),
        beta=empty(shape.num_value_heads),
    )


def prepare(
    y: Tensor,
    conv_weight: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    tail: Tensor,
    count: Tensor,
    x: Inputs,
    *,
    shape: RecurrentShape,
    beta_scale: float = 1.0,
) -> None:
    """Convolution, SiLU, norms and gates of consecutive tokens; moves the tail on.

    y [T, C_in]: raw projections, columns q | k | v | ... | a | b (the last 2 G are a and b);
    conv_weight [C, W]; A, dt_bias [G] float32. count [1] int32: the tokens, 1 to T. tail
    [W-1, C]: the raw inputs before the first token; becomes those before the token after the
    last. Fills x (see `Inputs`; q, k and v are rounded to the dtype they are allocated in, v to
    y's first), with zeros past the last token.
    """
    s, num_rows = shape, y.shape[0]
    assert all(t.is_contiguous() for t in (y, tail, conv_weight, *x))
    _prepare_kernel[
        (triton.cdiv(num_rows, BLOCK_TOKENS), 2 * s.num_key_heads + s.num_value_heads)
    ](
        y,
        conv_weight,
        A,
        dt_bias,
        tail,
        count,
        *x,
        num_rows,
        s.key_dim**-0.5,
        beta_scale,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        STRIDE=y.shape[1],
        BLOCK=triton.next_power_of_2(max(s.key_dim, s.value_dim)),
        TOKENS=BLOCK_TOKENS,
        num_warps=4,
    )


@triton.jit
def _shift_tail(tail_ptr, y_ptr, channel, used, num_tokens, C, STRIDE, W: tl.constexpr):
    """The W - 1 newest raw inputs, oldest first. A row is read before it is written."""
    for j in tl.static_range(W - 1):
        token = num_tokens.to(tl.int64) - (W - 1) + j
        x = tl.load(
            y_ptr + token * STRIDE + channel, mask=tl.where(used, token, -1) >= 0, other=0.0
        )
        kept = tail_ptr + (W - 1 + token) * C + channel
        x += tl.load(kept, mask=tl.where(used, token, 0) < 0, other=0.0)
        tl.store(tail_ptr + j * C + channel, x, mask=used)


@triton.jit(do_not_specialize=["num_rows"])
def _prepare_kernel(
    y_ptr, weight_ptr, A_ptr, dt_bias_ptr, tail_ptr, count_ptr, q_ptr, k_ptr, v_ptr, g_ptr,
    beta_ptr, num_rows, scale, beta_scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + G * V
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Programs 0 .. H-1 are q's heads, the next H are k's, then v's.
    is_value = part >= 2 * H
    head = tl.where(is_value, part - 2 * H, part % H)
    column = tl.arange(0, BLOCK)
    used = column < tl.where(is_value, V, K)
    channel = tl.where(is_value, 2 * H * K + head * V, part * K) + column
    token = block * TOKENS + tl.arange(0, TOKENS)
    num_tokens = tl.load(count_ptr)
    real, there = token < num_tokens, token < num_rows
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for back in tl.static_range(W - 1, -1, -1):  # oldest tap first
        at = (token - back)[:, None]
        mask = used[None, :] & real[:, None]
        x = tl.load(y_ptr + at * STRIDE + channel[None, :], mask=mask & (at >= 0), other=0.0)
        if block == 0:
            above = tail_ptr + (W - 1 + at) * C + channel[None, :]
            x += tl.load(above, mask=mask & (at < 0), other=0.0)
        w = tl.load(weight_ptr + channel * W + (W - 1 - back), mask=used, other=0.0)
        w = tl.broadcast_to(w.to(tl.float32)[None, :], [TOKENS, BLOCK])
        acc = tl.fma(x.to(tl.float32), w, acc)
    if block == 0:
        tl.debug_barrier()  # other threads of this program read the tail, no other program does
        _shift_tail(tail_ptr, y_ptr, channel, used, num_tokens, C, STRIDE, W)

    y = round_to(silu(acc), y_ptr.dtype.element_ty).to(tl.float32)
    mask = used[None, :] & there[:, None]
    if is_value:
        place = (token[:, None] * G + head) * V + column[None, :]
        tl.store(v_ptr + place, round_to(y, v_ptr.dtype.element_ty), mask=mask)
        gates = y_ptr + token * STRIDE + (STRIDE - 2 * G) + head
        a = tl.load(gates, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
        g = tl.where(real, tl.load(A_ptr + head) * softplus(a), 0.0)
        tl.store(g_ptr + token * G + head, g, mask=there)
        b = tl.load(gates + G, mask=real, other=0.0).to(tl.float32)
        beta = tl.where(real, beta_scale / (1 + tl.exp(-b)), 0.0)
        tl.store(beta_ptr + token * G + head, beta, mask=there)
    else:
        y = y / tl.sqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
        place = (token[:, None] * H + head) * K + column[None, :]
        if part < H:
            tl.store(q_ptr + place, round_to(y * scale, q_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(k_ptr + place, round_to(y, k_ptr.dtype.element_ty), mask=mask)
