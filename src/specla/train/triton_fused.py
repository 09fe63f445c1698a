# SPDX-License-Identifier: Apache-2.0
"""Two things of an EAGLE step that would read and write large tensors many times, on a GPU.

`law_slopes` is `cross_entropy.law_entropy` between its products, `convolution` and
`convolution_gradients` are `unroll.convolution`; those have the formulas. Everything is computed
in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.rows import round_to

COLUMNS = 4096  # of one row's logits at a time
TOKENS, CHANNELS = 8, 128  # of one program of a convolution


def law_slopes(logits: Tensor, laws: Tensor, weights: Tensor) -> Tensor:
    """logits [N, vocab], laws [N, vocab] float32 (sums 1), weights [N] float32 -> weighted
    entropies [N] float32; the logits become the entropies' gradients."""
    count, vocab = logits.shape
    assert laws.shape == logits.shape
    assert all(x.is_contiguous() for x in (logits, laws, weights))
    losses = torch.empty_like(weights)
    _law_kernel[(count,)](
        logits, laws, weights, losses,
        VOCAB=vocab, BLOCK=min(COLUMNS, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return losses


def convolution(sources: Sequence[Tensor], taps: Tensor, weight: Tensor) -> Tensor:
    """sources: of each of W taps, oldest first, [B, T, C]; taps [B, T, W] bool; weight [C, W]
    float32 -> [B, T, C] float32."""
    rows, length, channels = sources[0].shape
    out = torch.empty(sources[0].shape, dtype=torch.float32, device=weight.device)
    grid = rows, triton.cdiv(length, TOKENS), triton.cdiv(channels, CHANNELS)
    _convolve_kernel[grid](
        *_arguments(sources, taps, weight), out, length,
        **_sizes(sources), num_warps=4,
    )  # fmt: skip
    return out


def convolution_gradients(
    sources: Sequence[Tensor], taps: Tensor, weight: Tensor, grad: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Those of `sources`, in their dtype, and of `weight`; grad [B, T, C]: that of the output."""
    rows, length, channels = grad.shape
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sources]
    # Beyond the row's end: what no later token reads has no gradient.
    grid = rows, triton.cdiv(length + 3, TOKENS), triton.cdiv(channels, CHANNELS)
    parts = weight.new_empty(rows * grid[1], 4, channels)
    _convolve_back_kernel[grid](
        *_arguments(sources, taps, weight), grad.contiguous(), *grads, parts, length,
        **_sizes(sources), num_warps=4,
    )  # fmt: skip
    return grads, parts.sum(0).T


def _arguments(sources: Sequence[Tensor], taps: Tensor, weight: Tensor) -> tuple[object, ...]:
    """Four sources of one layout, a row of channels after the other."""
    length, stride = sources[0].shape[1], sources[0].stride(1)
    assert len(sources) == weight.shape[1] == 4
    assert all(x.stride() == (length * stride, stride, 1) for x in sources)
    return (*sources, taps.contiguous().view(torch.uint8), weight.contiguous())


def _sizes(sources: Sequence[Tensor]) -> dict[str, int]:
    """Known to the compiler, so that it sees which addresses go together."""
    stride, channels = sources[0].stride(1), sources[0].shape[2]
    return {"STRIDE": stride, "C": channels, "W": 4, "TOKENS": TOKENS, "CHANNELS": CHANNELS}


@triton.jit
def _law_kernel(
    logits_ptr, laws_ptr, weights_ptr, losses_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * VOCAB
    laws_ptr += row * VOCAB
    lanes = tl.arange(0, BLOCK)
    # Per lane: the largest logit so far, the sum of exponentials below it, and law . logits.
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        inside = start + lanes < VOCAB
        z = tl.load(logits_ptr + start + lanes, mask=inside, other=-1e30).to(tl.float32)
        p = tl.load(laws_ptr + start + lanes, mask=inside, other=0.0)
        new = tl.maximum(top, z)
        total = total * tl.exp(top - new) + tl.exp(z - new)
        cross += p * z
        top = new
    most = tl.max(top, 0)
    log_sum = most + tl.log(tl.sum(total * tl.exp(top - most), 0))
    weight = tl.load(weights_ptr + row)
    tl.store(losses_ptr + row, weight * (log_sum - tl.sum(cross, 0)))
    for start in range(0, VOCAB, BLOCK):
        inside = start + lanes < VOCAB
        z = tl.load(logits_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        p = tl.load(laws_ptr + start + lanes, mask=inside, other=0.0)
        slope = weight * (tl.exp(z - log_sum) - p)
        slope = round_to(slope, logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + start + lanes, slope, mask=inside)


@triton.jit
def _tap(
    x_ptr, bits_ptr, weight_ptr, t, c, inside, length, back, STRIDE: tl.constexpr, W: tl.constexpr
):
    """A source `back` tokens before t where it is of the same document (else 0), and its weights:
    [TOKENS, CHANNELS] and [1, CHANNELS]."""
    row = tl.program_id(0).to(tl.int64) * length
    bit = tl.load(bits_ptr + (row + t) * W + (W - 1 - back), mask=t < length, other=0)
    seen = inside & (t >= back) & (bit != 0)
    x = tl.load(x_ptr + (row + t - back) * STRIDE + c, mask=seen, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + c * W + (W - 1 - back), mask=inside, other=0.0)
    return x, tl.where(seen, w, 0.0)


@triton.jit
def _convolve_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, bits_ptr, weight_ptr, out_ptr, length,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (t < length) & (c < C)
    x0, w0 = _tap(x0_ptr, bits_ptr, weight_ptr, t, c, inside, length, 3, STRIDE, W)
    x1, w1 = _tap(x1_ptr, bits_ptr, weight_ptr, t, c, inside, length, 2, STRIDE, W)
    x2, w2 = _tap(x2_ptr, bits_ptr, weight_ptr, t, c, inside, length, 1, STRIDE, W)
    x3, w3 = _tap(x3_ptr, bits_ptr, weight_ptr, t, c, inside, length, 0, STRIDE, W)
    y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    at = out_ptr + (tl.program_id(0).to(tl.int64) * length + t) * C + c
    tl.store(at, y / (1.0 + tl.exp(-y)), mask=inside)


@triton.jit
def _gradient(g_ptr, part_ptr, slope, x, w, t, c, length, back, C: tl.constexpr, W: tl.constexpr):
    """Store a source's gradient, `back` tokens before t, and a program's part of its weight's."""
    row = tl.program_id(0).to(tl.int64) * length
    u = t - back
    to = g_ptr + (row + u) * C + c
    kept = (u >= 0) & (u < length) & (c < C)
    tl.store(to, round_to(slope * w, g_ptr.dtype.element_ty), mask=kept)
    one = tl.sum(slope * x, 0)
    column = part_ptr + (W - 1 - back) * C + tl.reshape(c, (c.shape[1],))
    tl.store(column, one, mask=tl.reshape(c, (c.shape[1],)) < C)


@triton.jit
def _convolve_back_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, bits_ptr, weight_ptr,
    grad_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr, part_ptr, length,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (t < length) & (c < C)
    x0, w0 = _tap(x0_ptr, bits_ptr, weight_ptr, t, c, inside, length, 3, STRIDE, W)
    x1, w1 = _tap(x1_ptr, bits_ptr, weight_ptr, t, c, inside, length, 2, STRIDE, W)
    x2, w2 = _tap(x2_ptr, bits_ptr, weight_ptr, t, c, inside, length, 1, STRIDE, W)
    x3, w3 = _tap(x3_ptr, bits_ptr, weight_ptr, t, c, inside, length, 0, STRIDE, W)
    y = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
    row = tl.program_id(0).to(tl.int64) * length
    grad = tl.load(grad_ptr + (row + t) * C + c, mask=inside, other=0.0)
    s = 1.0 / (1.0 + tl.exp(-y))
    slope = grad * s * (1.0 + y * (1.0 - s))
    part_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * W * C
    _gradient(g0_ptr, part_ptr, slope, x0, w0, t, c, length, 3, C, W)
    _gradient(g1_ptr, part_ptr, slope, x1, w1, t, c, length, 2, C, W)
    _gradient(g2_ptr, part_ptr, slope, x2, w2, t, c, length, 1, C, W)
    _gradient(g3_ptr, part_ptr, slope, x3, w3, t, c, length, 0, C, W)
