# SPDX-License-Identifier: Apache-2.0
"""What the device form of an EAGLE drafter needs besides products, norms and the walk.

`begin`, `take_features`, `encode_inputs` and `settle` stand around the re-encoding of what the
target accepted, one chain per row; with a recurrent mixer that is a verify (`ops.gdn.triton`), and
`mix` is this mixer in a growing tree: convolution, gates and delta rule of a frontier in one
kernel. Attention's is in `triton_branch`.

A frontier node's state is never built. With G_n the log decays summed from the committed state S
down to node n, and u, k the factors of the steps above it,

    S_n x = e^{G_n} S x + sum_i e^{G_n - G_i} u_i (k_i . x)

so that a tile of S is read once and meets two vectors, k and q, and every step above costs two
dot products. What is committed but not folded are steps like the draft's own. Beside it, walking
with a live state would cost two sums over K per node one after the other, and a copy of S per
frontier node 1 MB each way; the bits of the three differ, which costs a drafter nothing: accepting
is lossless whatever it proposes. No sum here depends on timing, so runs repeat.

Draft-time factors live in buffers of the drafter's own, not in a bank: they cannot be committed.

Source: Yang et al. (arXiv 2412.06464), section 3; the closed form is that of `ops.gdn.triton_wy`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.drafters.triton_grow import read_token
from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn.triton_prepare import _log1p, _silu, softplus  # noqa: F401 - jit looks it up
from specla.ops.rows import round_to
from specla.ops.walk import WALK

_WALK = tl.constexpr(WALK)
TILE = 16
"""Rows of V per program of `mix`."""
ABOVE = 16
"""Steps above a node that `mix` takes at a time: all there are for a depth of 8 and less."""


class Cursors(NamedTuple):
    """Rows of the drafter on the device, all int32 [B] at fixed addresses.

    bank, path_len: as in DeviceRound, of the drafter's own log, whose path is 0 .. path_len - 1;
    a mixer without a log leaves them alone. length: tokens encoded. started: whether the slot has
    an output to grow from. fed: whether the target's last round ran here, so that its path waits
    to be encoded.
    """

    bank: Tensor
    path_len: Tensor
    length: Tensor
    started: Tensor
    fed: Tensor


class Steps(NamedTuple):
    """Draft-time factors of X steps per row; step 0 is the root's and has none. k [B, X, H, K],
    u [B, X, G, V], g [B, X, G] float32; inputs [B, X, C] raw conv inputs; chain int32 [B, X, L]:
    see `triton_grow.Reading`."""

    k: Tensor
    u: Tensor
    g: Tensor
    inputs: Tensor
    chain: Tensor


def begin(
    rnd: DeviceRound, cursors: Cursors, enc: DeviceRound, source: Tensor, start: Tensor,
    longest: int,
) -> None:  # fmt: skip
    """What to encode: the path that the target's last round accepted, as a chain.

    rnd: the target's, node 0's token being the next root. enc: slot, num_nodes, tokens [B, P] and
    the count of a chain's walk are written; 0 nodes where nothing waits, or where the row is
    longer than `longest` now. source int32 [B * P]: rows of the target's last round. start int32
    [B]: tokens encoded before. A plain launch: kernels after it may read this before they wait.
    """
    num_rows, num_nodes = rnd.tokens.shape
    _begin_kernel[(num_rows,)](
        rnd.slot,
        rnd.num_nodes,
        rnd.tokens,
        rnd.path_len,
        rnd.path,
        cursors.fed,
        cursors.length,
        enc.slot,
        enc.num_nodes,
        enc.tokens,
        enc.walk,
        source,
        start,
        num_nodes,
        rnd.path.shape[1],
        enc.walk.stride(0),
        longest,
        P=enc.tokens.shape[1],
        num_warps=1,
    )


def chain_walk(num_rows: int, num_nodes: int, device: torch.device) -> Tensor:
    """Compiled walks [B, 1, words] of chains, as `ops.walk` lays them out; `begin` counts."""
    words = torch.arange(-1, 2 * num_nodes, dtype=torch.int32, device=device) | WALK
    return words.repeat(num_rows, 1, 1).contiguous()


def take_features(
    features: Tensor,
    count: Tensor,
    source: Tensor,
    norms: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    """features [L, M, T], each [M, T] contiguous -> out [B * P, L * T], normed by norms [L, T];
    from a row's first count[b] sources, the others become zero."""
    layers, _, width = features.shape
    _features_kernel[(out.shape[0], layers)](
        features,
        source,
        count,
        features if norms is None else norms,
        out,
        features.stride(0),
        eps,
        P=out.shape[0] // count.shape[0],
        T=width,
        BLOCK=triton.next_power_of_2(width),
        NORMED=norms is not None,
        num_warps=4,
    )


def encode_inputs(
    tokens: Tensor,
    count: Tensor,
    partials: Tensor,
    num_partials: int,
    max_partials: int,
    embeddings: Tensor,
    embed_norm: Tensor,
    feature_norm: Tensor,
    x: Tensor,
    residual: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """The layer's inputs x [B * P, T + D] (see `triton_grow.Reading`) and residual [B * P, D]:
    the sum of fc's partial sums, rounded. tokens [B, P] int32, of which a row's first count[b]
    are there."""
    inputs, hidden = embed_norm.shape[0], feature_norm.shape[0]
    _inputs_kernel[(x.shape[0],)](
        tokens,
        count,
        partials,
        embeddings,
        embed_norm,
        feature_norm,
        x,
        residual,
        x.shape[0],
        num_partials,
        eps,
        P=tokens.shape[1],
        PARTIALS=max_partials,
        T=inputs,
        D=hidden,
        T_BLOCK=triton.next_power_of_2(inputs),
        D_BLOCK=triton.next_power_of_2(hidden),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def settle(
    rnd: DeviceRound, enc: DeviceRound, cursors: Cursors, encoded: Tensor, last: Tensor,
    norm: Tensor, residual: Tensor, h: Tensor, count: Tensor, longest: int, eps: float,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """Commit what was encoded, and start the tree from the last output of every row.

    encoded [B * P, D]: the layer's outputs. last [slots, D]: of every slot; read where nothing was
    encoded, else written. residual, h [B, D]: that output, and normed by `norm` [D]. count int32
    [B]: 1 where there is one and the row is not longer than `longest`, the frontier of the first
    level.
    """
    width = norm.shape[0]
    _settle_kernel[(h.shape[0],)](
        rnd.slot,
        rnd.num_nodes,
        enc.num_nodes,
        *cursors,
        encoded,
        last,
        norm,
        residual,
        h,
        count,
        longest,
        eps,
        P=enc.tokens.shape[1],
        D=width,
        BLOCK=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def mix(
    layer: LayerState,
    rnd: DeviceRound,
    cursors: Cursors,
    steps: Steps,
    count: Tensor,
    first: int,
    y: Tensor,
    conv_taps: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    o: Tensor,
    *,
    shape: RecurrentShape,
    pdl: bool = False,
) -> None:
    """Outputs o [B * F, G, V] float32 of a frontier of count[b] <= F nodes per row, whose steps
    are `first` .. first + F - 1; their factors and conv inputs go to `steps`.

    y [B * F, C_in]: raw projections, as `ops.gdn.triton.prepare` takes them. layer: of a state
    without a ring. Before it waits it reads what the launch before its predecessor has waited for:
    S and the log.
    """
    s, num_rows = shape, count.shape[0]
    width = y.shape[0] // num_rows
    assert steps.chain.shape[2] >= s.conv_width - 1
    num_path = layer.factors.k.shape[1] // 2
    assert layer.inputs.shape[2] == num_path, "the log must have no ring"
    _mix_kernel[(s.num_value_heads * s.value_dim // TILE, width, num_rows)](
        y,
        conv_taps,
        A,
        dt_bias,
        layer.S,
        layer.tail,
        layer.inputs,
        *layer.factors,
        *steps,
        o,
        rnd.slot,
        cursors.bank,
        cursors.path_len,
        count,
        num_path,
        steps.chain.shape[1],
        first,
        s.key_dim**-0.5,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        F=width,
        CHAIN=steps.chain.shape[2],
        STRIDE=y.stride(0),
        TILE=TILE,
        ABOVE=ABOVE,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["num_columns", "num_path", "walk_stride", "longest"])
def _begin_kernel(
    slot_ptr, num_nodes_ptr, tokens_ptr, path_len_ptr, path_ptr, fed_ptr, length_ptr,
    enc_slot_ptr, enc_num_nodes_ptr, enc_tokens_ptr, walk_ptr, source_ptr, start_ptr,
    num_columns, num_path, walk_stride, longest,
    P: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    is_live = tl.load(num_nodes_ptr + b) > 0
    fed = tl.load(fed_ptr + b)
    n = tl.where(is_live & (fed > 0), tl.load(path_len_ptr + b), 0)
    start = tl.load(length_ptr + b)
    tl.store(start_ptr + b, start)
    tl.store(length_ptr + b, start + n)
    n = tl.where(start + n <= longest, n, 0)
    tl.store(enc_slot_ptr + b, tl.load(slot_ptr + b))
    tl.store(enc_num_nodes_ptr + b, n)
    tl.store(walk_ptr + b * walk_stride, n)
    j = tl.arange(0, P)
    node = tl.load(path_ptr + b * num_path + j, mask=j < n, other=0)
    below = tl.load(path_ptr + b * num_path + j + 1, mask=j + 1 < n, other=0)
    token = tl.load(tokens_ptr + b * num_columns + below, mask=j < n, other=0)
    tl.store(enc_tokens_ptr + b * P + j, token)
    tl.store(source_ptr + b * P + j, b * num_columns + node)


@triton.jit(do_not_specialize=["stride"])
def _features_kernel(
    features_ptr, source_ptr, num_nodes_ptr, norm_ptr, out_ptr, stride, eps,
    P: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    exists = row % P < tl.load(num_nodes_ptr + row // P)
    present = column < tl.where(exists, T, 0)
    source = tl.load(source_ptr + row).to(tl.int64)
    features_ptr += layer.to(tl.int64) * stride + source * T
    x = tl.load(features_ptr + column, mask=present, other=0.0).to(tl.float32)
    if NORMED:
        weight = tl.load(norm_ptr + layer * T + column, mask=column < T, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / T + eps) * weight.to(tl.float32)
    out_ptr += (row.to(tl.int64) * tl.num_programs(1) + layer) * T
    tl.store(out_ptr + column, round_to(x, out_ptr.dtype.element_ty), mask=column < T)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _inputs_kernel(
    tokens_ptr, num_nodes_ptr, partials_ptr, embeddings_ptr, embed_norm_ptr, feature_norm_ptr,
    x_ptr, residual_ptr, num_rows, num_partials, eps,
    P: tl.constexpr, PARTIALS: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, T_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row % P >= tl.load(num_nodes_ptr + row // P):
        return
    column = tl.arange(0, D_BLOCK)
    total = tl.zeros([D_BLOCK], tl.float32)
    for s in tl.static_range(PARTIALS):
        present = column < tl.where(s < num_partials, D, 0)
        part = partials_ptr + (s * num_rows.to(tl.int64) + row) * D + column
        total += tl.load(part, mask=present, other=0.0)
    g = round_to(total, residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + row * D + column, g, mask=column < D)
    read_token(
        x_ptr + row * (T + D), tl.load(tokens_ptr + row), g.to(tl.float32), embeddings_ptr,
        embed_norm_ptr, feature_norm_ptr, eps, T, D, T_BLOCK, D_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["longest"])
def _settle_kernel(
    slot_ptr, live_ptr, num_nodes_ptr,
    bank_ptr, path_len_ptr, length_ptr, started_ptr, fed_ptr,
    encoded_ptr, last_ptr, norm_ptr, residual_ptr, h_ptr, count_ptr, longest, eps,
    P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(live_ptr + b) == 0:
        tl.store(count_ptr + b, 0)
        return
    n = tl.load(num_nodes_ptr + b)
    started = tl.where(n > 0, 1, tl.load(started_ptr + b))
    column = tl.arange(0, BLOCK)
    inside = column < D
    last_ptr += tl.load(slot_ptr + b).to(tl.int64) * D
    y_ptr = tl.where(n > 0, encoded_ptr + (b * P + n - 1).to(tl.int64) * D, last_ptr)
    y = tl.load(y_ptr + column, mask=inside, other=0.0)
    tl.store(last_ptr + column, y, mask=inside)
    at = b.to(tl.int64) * D + column
    tl.store(residual_ptr + at, y, mask=inside)
    x = y.to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    h = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    tl.store(h_ptr + at, round_to(h, h_ptr.dtype.element_ty), mask=inside)
    bank = tl.load(bank_ptr + b)
    path_len = tl.load(path_len_ptr + b)
    tl.store(bank_ptr + b, tl.where(n > 0, 1 - bank, bank))
    tl.store(path_len_ptr + b, tl.where(n > 0, n, path_len))
    tl.store(started_ptr + b, started)
    tl.store(fed_ptr + b, 1)
    tl.store(count_ptr + b, tl.where(tl.load(length_ptr + b) <= longest, started, 0))


@triton.jit
def _convolve(places, taps_ptr, channel, C: tl.constexpr, W: tl.constexpr):
    """silu of the convolution at `channel`, rounded as `prepare` does; places: oldest first."""
    acc = tl.zeros(channel.shape, tl.float32)
    x = tl.load(places[0] + channel)
    for i in tl.static_range(W):
        x = tl.load(places[i] + channel)
        tap = tl.load(taps_ptr + i * C + channel)
        acc = tl.fma(x.to(tl.float32), tap.to(tl.float32), acc)
    return round_to(_silu(acc), x.dtype).to(tl.float32), x


@triton.jit(do_not_specialize=["num_path", "num_steps", "first_step"])
def _mix_kernel(
    y_ptr, taps_ptr, A_ptr, dt_bias_ptr, S_ptr, tail_ptr, inputs_ptr, k_ptr, u_ptr, g_ptr,
    step_k_ptr, step_u_ptr, step_g_ptr, step_inputs_ptr, chain_ptr, o_ptr,
    slot_ptr, bank_ptr, path_len_ptr, count_ptr,
    num_path, num_steps, first_step, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    F: tl.constexpr, CHAIN: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr,
    ABOVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + G * V
    TILES: tl.constexpr = V // TILE
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    j, b = tl.program_id(1), tl.program_id(2)
    key_head = head // (G // H)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    path_len = tl.load(path_len_ptr + b)
    row = tile * TILE + tl.arange(0, TILE)
    key = tl.arange(0, K)
    S_at = S_ptr + ((slot * G + head) * V + row)[:, None] * K + key[None, :]
    S = tl.load(S_at)
    A, dt_bias = tl.load(A_ptr + head), tl.load(dt_bias_ptr + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if j >= tl.load(count_ptr + b):
        return
    m = (b * F + j).to(tl.int64)
    step = first_step + j
    steps = (b * num_steps).to(tl.int64)
    chain_ptr += (steps + step) * CHAIN
    at = tl.load(chain_ptr + tl.arange(0, CHAIN))
    num_above = tl.sum((at > 0).to(tl.int32), axis=0)

    # Raw conv inputs, newest first: this node's, its steps' above, the committed path's, the tail.
    places = (y_ptr + m * STRIDE,)
    for back in tl.static_range(W - 1):
        at = tl.load(chain_ptr + back)
        entry = path_len - 1 - back + num_above
        committed = inputs_ptr + ((slot * 2 + bank) * num_path + entry) * C
        older = tail_ptr + ((slot * 2 + bank) * (W - 1) + W - 1 + entry) * C
        committed = tl.where(entry >= 0, committed, older)
        places = (tl.where(at > 0, step_inputs_ptr + (steps + at) * C, committed),) + places  # noqa: RUF005
    q, raw_q = _convolve(places, taps_ptr, key_head * K + key, C, W)
    k, raw_k = _convolve(places, taps_ptr, (H + key_head) * K + key, C, W)
    v, raw_v = _convolve(places, taps_ptr, 2 * H * K + head * V + row, C, W)
    q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    gates = y_ptr + m * STRIDE + (STRIDE - 2 * G) + head
    g = A * softplus(tl.load(gates).to(tl.float32) + dt_bias)
    beta = 1 / (1 + tl.exp(-tl.load(gates + G).to(tl.float32)))

    # Up the tree, then down the log from its end, a few steps at a time.
    pk, pq = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    decay = g
    first_entry = slot * (2 * num_path) + bank * num_path
    for start in range(0, num_above + path_len, ABOVE):
        i = start + tl.arange(0, ABOVE)
        is_step, exists = i < num_above, i < num_above + path_len
        origin = steps + tl.load(chain_ptr + i, mask=is_step, other=0)
        origin = tl.where(is_step, origin, first_entry + path_len - 1 - (i - num_above))
        u_at = tl.where(is_step, step_u_ptr + origin * (G * V), u_ptr + origin * (G * V))
        k_at = tl.where(is_step, step_k_ptr + origin * (H * K), k_ptr + origin * (H * K))
        g_at = tl.where(is_step, step_g_ptr + origin * G, g_ptr + origin * G)
        gs = tl.load(g_at + head, mask=exists, other=0.0)
        there = tl.where(exists, K, 0)[:, None] > key[None, :]
        keys = tl.load(k_at[:, None] + key_head * K + key[None, :], mask=there, other=0.0)
        there = tl.where(exists, V, 0)[:, None] > row[None, :]
        us = tl.load(u_at[:, None] + head * V + row[None, :], mask=there, other=0.0)
        share = tl.exp(decay + tl.cumsum(gs, axis=0) - gs)
        pk += tl.sum((share * tl.sum(keys * k[None, :], axis=1))[:, None] * us, axis=0)
        pq += tl.sum((share * tl.sum(keys * q[None, :], axis=1))[:, None] * us, axis=0)
        decay += tl.sum(gs, axis=0)
    w = tl.exp(decay)
    pk += w * tl.sum(S * k[None, :], axis=1)
    pq += w * tl.sum(S * q[None, :], axis=1)
    u = beta * (v - pk)
    tl.store(o_ptr + (m * G + head) * V + row, pq + u * tl.sum(k * q, axis=0))

    place = steps + step
    tl.store(step_u_ptr + (place * G + head) * V + row, u)
    tl.store(step_inputs_ptr + place * C + 2 * H * K + head * V + row, raw_v)
    if tile == 0:
        tl.store(step_g_ptr + place * G + head, g)
        if head % (G // H) == 0:
            tl.store(step_k_ptr + (place * H + key_head) * K + key, k)
            tl.store(step_inputs_ptr + place * C + key_head * K + key, raw_q)
            tl.store(step_inputs_ptr + place * C + (H + key_head) * K + key, raw_k)
