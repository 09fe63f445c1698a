# SPDX-License-Identifier: Apache-2.0
"""What acts on one row at a time between the products, on the GPU: embedding, residual, norms.

One program per row (or row and head). Its block, its warps and hence its order of additions come
from the width alone, and each function is one compiled kernel for every row count, so a row's bits
are the same in any batch. Formulas and roundings are those of `ops.norm` and the decoder: sums and
norms in float32, rounded to the activation dtype where the CPU path rounds.

With `pdl` a kernel is part of a chain of dependent launches (see `ops.gemm`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

INTERPRET: bool = triton.knobs.runtime.interpret
_INTERPRET = tl.constexpr(INTERPRET)


def embed_norm(
    tokens: Tensor,
    num_nodes: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    x: Tensor,
    h: Tensor,
    eps: float,
    *,
    pdl: bool = False,
    early: bool = False,
) -> None:
    """x = embeddings[tokens], h = rms_norm(x) * weight.

    tokens [B, N] int32, num_nodes [B] int32: rows of nodes that do not exist become zero.
    embeddings [vocab, D]; weight [D]; x, h [B * N, D].
    """
    num_rows, nodes = tokens.shape
    width = embeddings.shape[1]
    assert all(tensor.is_contiguous() for tensor in (embeddings, x, h))
    _embed_norm_kernel[(num_rows * nodes,)](
        tokens,
        num_nodes,
        embeddings,
        weight,
        x,
        h,
        nodes,
        eps,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        PDL=pdl,
        EARLY=early,
        num_warps=_warps(width),
        launch_pdl=pdl,
    )


def add_partials_norm(
    x: Tensor | None,
    partials: Tensor,
    weight: Tensor,
    h: Tensor,
    eps: float,
    *,
    num_partials: int,
    max_partials: int,
    copy: Tensor | None = None,
    pdl: bool = False,
    early: bool = False,
) -> None:
    """x += the sum of partials, rounded first, in place; h = rms_norm(x) * weight.

    x, h [M, D]; weight [D]. partials: float32, the first num_partials * M * D elements are
    [num_partials, M, D] and are added in order, starting from zero. max_partials is the same for
    every call on a weight, so that all of them run one compiled kernel. With 0 partials x stays
    as it is. x None: zero, and not kept. copy [M, D]: where the new x is written as well.
    """
    num_rows, width = h.shape
    other = h if copy is None else copy
    assert all(tensor.is_contiguous() for tensor in (h if x is None else x, h, other))
    assert other.shape == h.shape
    assert num_partials <= max_partials
    _add_partials_norm_kernel[(num_rows,)](
        h if x is None else x,
        partials,
        weight,
        h,
        other,
        num_rows,
        num_partials,
        eps,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        PARTIALS=max_partials,
        KEEP=x is not None,
        COPY=copy is not None,
        PDL=pdl,
        EARLY=early,
        num_warps=_warps(width),
        launch_pdl=pdl,
    )


def gated_norm(
    o: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    *,
    pdl: bool = False,
    early: bool = False,
) -> None:
    """out = rms_norm(o) * weight * silu(gate), per head, rounded once.

    o [M, G, V] float32, contiguous; gate [M, G * V], columns of a wider matrix, or None; weight
    [V]; out [M, G * V].
    """
    num_rows, heads, width = o.shape
    assert all(tensor.is_contiguous() for tensor in (o, out))
    assert gate is None or gate.stride(1) == 1
    _gated_norm_kernel[(num_rows, heads)](
        o,
        o if gate is None else gate,
        weight,
        out,
        eps,
        HEADS=heads,
        V=width,
        STRIDE=0 if gate is None else gate.stride(0),
        BLOCK=triton.next_power_of_2(width),
        LEVELS=triton.next_power_of_2(width).bit_length() - 1,
        GATED=gate is not None,
        PDL=pdl,
        EARLY=early,
        num_warps=_warps(width),
        launch_pdl=pdl,
    )


def keep(features: Tensor, len_tokens: Tensor, num_nodes: Tensor, kept: Tensor) -> None:
    """Put aside the features of trees of one node: kept[(len_tokens[b] - 1) % most, :, b] =
    features[:, b] for every row b whose num_nodes is not 0.

    features [layers, M, D], each [M, D] contiguous; len_tokens, num_nodes int32 [B], the tokens
    up to the node; kept [most, layers, >= B, D].
    """
    most, layers, places, width = kept.shape
    assert len(num_nodes) <= places
    assert features[0].is_contiguous()
    assert kept.is_contiguous()
    _keep_kernel[(len(num_nodes), layers)](
        features, len_tokens, num_nodes, kept, features.stride(0), most, places, D=width,
        BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip


def _warps(width: int) -> int:
    """At most 8 elements a thread up to a width of 2,048; from the width alone."""
    return max(1, min(8, triton.next_power_of_2(width) // 256))


@triton.jit
def _wait(EARLY: tl.constexpr):
    """For the kernel before; the next one, which will wait for this one, may start already."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    if not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in `dtype`, rounded to nearest even. The interpreter's own conversion to bfloat16 cuts."""
    if _INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def silu(x):
    """x / (1 + e^-x), float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    """x [BLOCK] float32, zero from WIDTH on."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight


@triton.jit
def squares(x, LEVELS: tl.constexpr):
    """The sum of x * x over x [2^LEVELS], neighbours first: in an order that no layout changes.
    The fma keeps the compiler from merging a product into a sum in one layout only."""
    total = tl.fma(x, x, tl.zeros_like(x))
    for _ in tl.static_range(LEVELS):
        total = tl.sum(tl.reshape(total, [total.shape[0] // 2, 2]), axis=1)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["nodes"])
def _embed_norm_kernel(
    tokens_ptr,
    num_nodes_ptr,
    embeddings_ptr,
    weight_ptr,
    x_ptr,
    h_ptr,
    nodes,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:
        _wait(EARLY)
    exists = row % nodes < tl.load(num_nodes_ptr + row // nodes)
    token = tl.load(tokens_ptr + row, mask=exists, other=0).to(tl.int64)
    present = column < tl.where(exists, D, 0)
    x = tl.load(embeddings_ptr + token * D + column, mask=present, other=0.0)
    at = row.to(tl.int64) * D + column
    tl.store(x_ptr + at, x, mask=column < D)
    h = _normed(x.to(tl.float32), weight, eps, D)
    tl.store(h_ptr + at, round_to(h, h_ptr.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _add_partials_norm_kernel(
    x_ptr,
    partials_ptr,
    weight_ptr,
    h_ptr,
    copy_ptr,
    num_rows,
    num_partials,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
    KEEP: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row * D + column
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        _wait(EARLY)
    x = tl.zeros([BLOCK], tl.float32)
    if KEEP:
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    parts = ()
    for s in tl.static_range(PARTIALS):
        part = partials_ptr + (s * num_rows.to(tl.int64)) * D + at
        # A partial sum that does not exist adds 0.0, which changes no bit of a sum that
        # started from +0.0.
        present = column < tl.where(s < num_partials, D, 0)
        parts += (tl.load(part, mask=present, other=0.0),)
    # Always so, but the compiler does not know and moves no load past the branch: without it
    # registers are saved and memory waited for twice.
    if num_rows > 0:
        if PARTIALS > 0:
            total = tl.zeros([BLOCK], tl.float32)
            for s in tl.static_range(PARTIALS):
                total += parts[s]
            x = round_to(x + round_to(total, dtype).to(tl.float32), dtype)
            if KEEP:
                tl.store(x_ptr + at, x, mask=inside)
            x = x.to(tl.float32)
        if COPY:
            tl.store(copy_ptr + at, round_to(x, dtype), mask=inside)
        h = _normed(x, weight, eps, D)
        tl.store(h_ptr + at, round_to(h, h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_kernel(
    o_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < V
    at = (row * HEADS + head) * V + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        _wait(EARLY)
    o = tl.load(o_ptr + at, mask=inside, other=0.0)
    # The same operations as in ops.gemm_stream, which does this for few rows.
    y = o * tl.rsqrt(squares(o, LEVELS) / V + eps) * weight
    if GATED:
        gate = tl.load(gate_ptr + row * STRIDE + head * V + column, mask=inside, other=0.0)
        y = y * silu(gate.to(tl.float32))
    tl.store(out_ptr + at, round_to(y, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride", "most", "places"])
def _keep_kernel(
    features_ptr, len_ptr, num_nodes_ptr, kept_ptr, stride, most, places,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, layer, layers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tl.load(num_nodes_ptr + b) == 0:
        return
    column = tl.arange(0, BLOCK)
    at = layer.to(tl.int64) * stride + b * D + column
    x = tl.load(features_ptr + at, mask=column < D, other=0.0)
    place = (tl.load(len_ptr + b) - 1) % most
    row = (place * layers + layer).to(tl.int64) * places + b
    tl.store(kept_ptr + row * D + column, x, mask=column < D)
