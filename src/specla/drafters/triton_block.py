# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the device form of a block drafter needs besides products and norms.

    begin    where the accepted path's tokens go and how long the rows are now; the block's tokens
    append   keys and values of these tokens, of all layers, into the caches
    attend   a layer's attention: a block's positions over their context, then over the block;
             long contexts in parts that programs share, and a launch more to `combine` them

Contexts lie at fixed addresses, kept [layers, 2, slots, room, H, d], keys before values, and their
lengths are the device's: a program goes through as many tiles of the context as its row has. Every
sum is in an order that the row's own length settles. Keys and queries are rotated by a table,
turns [positions, 2, d / 2] float32: cosines, then sines.

Source: the online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specla.drafters.triton_grow import look_up
from specla.ops.contract import DeviceRound
from specla.ops.gemm import _add_product
from specla.ops.rows import round_to

TILE = 64
"""Tokens of a context's tile, and most queries of a program."""
LEAST = 16
"""Rows and columns that a product of tiles must have."""
WIDE = 512
"""Bytes of a head above which two tiles of keys and values do not fit a multiprocessor."""
MAX_BLOCK = 64
"""Positions of a block: one tile of keys."""
MAX_HEAD = 256
"""Width of a head: a tile of keys and one of values fit a multiprocessor."""
PARTS, UNDIVIDED = 8, 512
"""Parts of a context, where there is room for more tokens than the second."""
_INF = tl.constexpr(float("inf"))


class Cursors(NamedTuple):
    """Rows on the device, both int32 [B] at fixed addresses. length: committed tokens whose
    features have come. fed: whether the target's last round ran here, so that its path waits."""

    length: Tensor
    fed: Tensor


class Given(NamedTuple):
    """What a launch is about, all int32. start, count [B]: the position of the first token to be
    appended, and how many. source [B * P]: their rows of the target's last round. tokens [B, n]:
    the block, the anchor first. size [B]: n, or 0 where nothing is drafted. frontier [B]: 1 where
    something is."""

    start: Tensor
    count: Tensor
    source: Tensor
    tokens: Tensor
    size: Tensor
    frontier: Tensor


class Parts(NamedTuple):
    """What `attend` leaves of n parts, float32: sums [M, Q, n, d], not yet divided; scale [M, Q,
    n, 2]: the largest score, and the sum of e^(score - it)."""

    sums: Tensor
    scale: Tensor


def num_parts(room: int) -> int:
    """For contexts of up to `room` tokens."""
    return PARTS if room > UNDIVIDED else 1


def stages_for(head: int) -> int:
    """Of `attend`'s pipeline, for heads of so many bytes."""
    return 1 if head > WIDE else 3


def warps_for(queries: int, width: int) -> int:
    """Of a program with so many queries of heads [width]."""
    return 4 if queries * width <= 32 * 128 else 8


def begin(
    rnd: DeviceRound,
    cursors: Cursors,
    given: Given,
    table: Tensor | None,
    x: Tensor | None,
    *,
    mask_id: int,
    longest: int,
) -> None:
    """Take over the path that the target's last round accepted.

    rnd: the target's, node 0's token being the next anchor. Rows longer than `longest` draft
    nothing. table [vocab, R], x [B, R]: what the first level looks up of the anchors. A plain
    launch: kernels after it may read this before they wait.
    """
    num_rows, num_nodes = rnd.tokens.shape
    width = 1 if table is None else table.shape[1]
    dummy = given.source
    _begin_kernel[(num_rows,)](
        rnd.num_nodes,
        rnd.tokens,
        rnd.path_len,
        rnd.path,
        *cursors,
        *given,
        dummy if table is None else table,
        dummy if x is None else x,
        num_nodes,
        rnd.path.shape[1],
        mask_id,
        longest,
        P=given.source.shape[0] // num_rows,
        BLOCK=given.tokens.shape[1],
        TOKENS=triton.next_power_of_2(given.tokens.shape[1]),
        R=width,
        R_BLOCK=triton.next_power_of_2(width),
        LOOKS=table is not None,
        num_warps=1,
    )


def append(
    kv: Tensor,
    slot: Tensor,
    start: Tensor,
    count: Tensor,
    norms: Tensor | None,
    turns: Tensor,
    kept: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> None:
    """kv [B * P, layers * 2 H d], per layer keys before values, of any row stride -> kept, from
    position start [B] on, the first count [B] of each row. norms [layers, d]: of keys, if they
    have any. What is past the caches' end is dropped."""
    layers, _, _, room, heads, width = kept.shape
    num_rows = slot.shape[0]
    _append_kernel[(num_rows, layers * heads)](
        kv,
        kv if norms is None else norms,
        turns,
        kept,
        slot,
        start,
        count,
        room,
        kept.stride(0),
        kept.stride(1),
        eps,
        P=kv.shape[0] // num_rows,
        H=heads,
        D=width,
        D_BLOCK=triton.next_power_of_2(width),
        STRIDE=kv.stride(0),
        NORMED=norms is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def attend(
    y: Tensor,
    slot: Tensor,
    length: Tensor,
    size: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    turns: Tensor,
    kept: Tensor,
    parts: Parts,
    o: Tensor,
    eps: float,
    *,
    window: int | None,
    causal: bool,
    pdl: bool = False,
) -> None:
    """y [B * n, (Q + 2 H) d]: raw queries, keys and values of the blocks -> o [B * n, Q d].

    length, size [B]: tokens of a row's context, and how many of its n positions are there. kept
    [2, slots, room, H, d]: of this layer. parts: written where there are several. norms [d]: of
    queries and keys, if they have any. window: how many tokens back, itself included, a position
    sees. causal: of its block's positions, earlier ones only.
    """
    _, _, room, heads, width = kept.shape
    num_rows = slot.shape[0]
    block = y.shape[0] // num_rows
    group, num = o.shape[1] // (heads * width), parts.sums.shape[2]
    queries = min(TILE, max(LEAST, triton.next_power_of_2(block * group)))
    _attend_kernel[(heads, num_rows, triton.cdiv(block * group, queries) * num)](
        y,
        *((y, y) if norms is None else norms),
        turns,
        kept,
        *parts,
        o,
        slot,
        length,
        size,
        room,
        kept.stride(0),
        window or 0,
        width**-0.5,
        eps,
        H=heads,
        GROUP=group,
        D=width,
        D_BLOCK=max(LEAST, triton.next_power_of_2(width)),
        BLOCK=block,
        OWN=max(LEAST, triton.next_power_of_2(block)),
        QUERIES=queries,
        TILE=TILE,
        PARTS=num,
        WINDOW=window is not None,
        CAUSAL=causal,
        NORMED=norms is not None,
        PDL=pdl,
        num_warps=warps_for(queries, width),
        num_stages=stages_for(width * kept.element_size()),
        launch_pdl=pdl,
    )
    combine(parts, size, o, pdl=pdl)


def combine(parts: Parts, size: Tensor, o: Tensor, *, pdl: bool = False) -> None:
    """What several parts have left -> o [B * n, Q d], of the first size[b] of each row's n."""
    _, heads, num, width = parts.sums.shape
    if num == 1:
        return
    _combine_kernel[(o.shape[0], heads)](
        *parts,
        size,
        o,
        o.shape[0] // size.shape[0],
        D=width,
        D_BLOCK=triton.next_power_of_2(width),
        PARTS=num,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["num_columns", "num_path", "mask_id", "longest"])
def _begin_kernel(
    num_nodes_ptr, tokens_ptr, path_len_ptr, path_ptr, length_ptr, fed_ptr,
    start_ptr, count_ptr, source_ptr, block_ptr, size_ptr, frontier_ptr, table_ptr, x_ptr,
    num_columns, num_path, mask_id, longest,
    P: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr,
    R_BLOCK: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    is_live = tl.load(num_nodes_ptr + b) > 0
    fed = tl.load(fed_ptr + b)
    start = tl.load(length_ptr + b)
    count = tl.where(is_live & (fed > 0), tl.load(path_len_ptr + b), 0)
    tl.store(start_ptr + b, start)
    tl.store(count_ptr + b, count)
    tl.store(length_ptr + b, start + count)
    tl.store(fed_ptr + b, tl.where(is_live, 1, fed))
    j = tl.arange(0, P)
    node = tl.load(path_ptr + b * num_path + j, mask=j < count, other=0)
    tl.store(source_ptr + b * P + j, b * num_columns + node)
    drafts = tl.where(is_live & (start + count <= longest), 1, 0)
    anchor = tl.load(tokens_ptr + b * num_columns)
    i = tl.arange(0, TOKENS)
    tl.store(block_ptr + b * BLOCK + i, tl.where(i == 0, anchor, mask_id), mask=i < BLOCK)
    tl.store(size_ptr + b, drafts * BLOCK)
    tl.store(frontier_ptr + b, drafts)
    if LOOKS:
        # A row that is not live has no token.
        look_up(x_ptr + b * R, tl.where(is_live, anchor, 0), table_ptr, R, R_BLOCK)


@triton.jit
def _turned(
    x_ptr, at, present, norm_ptr, turns_ptr, position, eps,
    D: tl.constexpr, D_BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Heads x [D] at x_ptr + at [R] where present [R] > 0, normed if NORMED, and rotated to
    position [R]: [R, D_BLOCK] in x's dtype; rounded as `block_model` rounds."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    column = tl.arange(0, D_BLOCK)
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    inside = tl.where(present > 0, D, 0)[:, None] > column[None, :]
    x = tl.load(x_ptr + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    across = tl.load(x_ptr + at[:, None] + partner[None, :], mask=inside, other=0.0)
    if NORMED:
        weight = tl.load(norm_ptr + column, mask=column < D, other=0.0).to(tl.float32)
        across_weight = tl.load(norm_ptr + partner, mask=column < D, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = round_to(x * scale * weight[None, :], dtype).to(tl.float32)
        across = round_to(across.to(tl.float32) * scale * across_weight[None, :], dtype)
    turn = turns_ptr + position[:, None] * D + (column % HALF)[None, :]
    cos = tl.load(turn, mask=inside, other=0.0)
    sin = tl.load(turn + HALF, mask=inside, other=0.0)
    sin = tl.where(column < HALF, -1.0, 1.0)[None, :] * sin
    return round_to(x * cos + across.to(tl.float32) * sin, dtype)


@triton.jit(do_not_specialize=["room", "layer_stride", "values"])
def _append_kernel(
    kv_ptr, norms_ptr, turns_ptr, kept_ptr, slot_ptr, start_ptr, count_ptr,
    room, layer_stride, values, eps,
    P: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, layer, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(count_ptr + b)
    if count == 0:
        return
    j = tl.arange(0, P)
    position = tl.load(start_ptr + b) + j
    present = tl.where((j < count) & (position < room), 1, 0)
    at = (b * P + j).to(tl.int64) * STRIDE + (layer * 2 * H + head) * D
    k = _turned(
        kv_ptr, at, present, norms_ptr + layer * D, turns_ptr, position, eps, D, D_BLOCK, NORMED
    )  # fmt: skip
    column = tl.arange(0, D_BLOCK)
    inside = tl.where(present > 0, D, 0)[:, None] > column[None, :]
    v = tl.load(kv_ptr + at[:, None] + H * D + column[None, :], mask=inside, other=0.0)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    kept_ptr += layer * layer_stride.to(tl.int64)
    place = ((slot * room + position) * H + head) * D
    tl.store(kept_ptr + place[:, None] + column[None, :], k, mask=inside)
    kept_ptr += values.to(tl.int64)
    tl.store(kept_ptr + place[:, None] + column[None, :], v, mask=inside)


@triton.jit
def _meet(acc, top, total, q, k, v, seen, scale):
    """One more tile of keys and values [T, d]; seen [R, T] > 0."""
    scores = _add_product(tl.zeros(seen.shape, tl.float32), q, tl.trans(k)) * scale
    scores = tl.where(seen > 0, scores, -_INF)
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher > -_INF, higher, 0.0)
    old = tl.exp(top - base)
    share = tl.exp(scores - base[:, None])
    acc = _add_product(acc * old[:, None], round_to(share, v.dtype), v)
    return acc, higher, total * old + tl.sum(share, axis=1)


@triton.jit
def _tile(
    keys_ptr, values_ptr, t, length, QUERIES: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    column,
):  # fmt: skip
    """Keys and values [T, d] of one head at positions t [T] of a context, and which of them is
    there: [QUERIES, T], for `_meet`."""
    inside = tl.where(t < length, D, 0)[:, None] > column[None, :]
    at = t[:, None] * (H * D) + column[None, :]
    k = tl.load(keys_ptr + at, mask=inside, other=0.0)
    v = tl.load(values_ptr + at, mask=inside, other=0.0)
    return k, v, tl.where(t < length, 1, 0)[None, :] + tl.zeros([QUERIES, 1], tl.int32)


@triton.jit
def _leave(
    acc, top, total, at, present, part, sums_ptr, scale_ptr, o_ptr,
    D: tl.constexpr, D_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Outputs of queries at [R], for `combine` where there are several parts."""
    column = tl.arange(0, D_BLOCK)
    inside = tl.where(present > 0, D, 0)[:, None] > column[None, :]
    if PARTS > 1:
        at = at * PARTS + part
        tl.store(sums_ptr + (at * D)[:, None] + column[None, :], acc, mask=inside)
        tl.store(scale_ptr + at * 2, top, mask=present > 0)
        tl.store(scale_ptr + at * 2 + 1, total, mask=present > 0)
    else:
        o = round_to(acc / tl.where(total > 0, total, 1.0)[:, None], o_ptr.dtype.element_ty)
        tl.store(o_ptr + (at * D)[:, None] + column[None, :], o, mask=inside)


@triton.jit(do_not_specialize=["room", "values", "window"])
def _attend_kernel(
    y_ptr, q_norm_ptr, k_norm_ptr, turns_ptr, kept_ptr, sums_ptr, scale_ptr, o_ptr,
    slot_ptr, length_ptr, size_ptr,
    room, values, window, scale, eps,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, NORMED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = (GROUP + 2) * H * D
    head, b = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    size = tl.load(size_ptr + b)
    if size == 0:
        return
    length = tl.load(length_ptr + b)
    r = tl.program_id(2) // PARTS * QUERIES + tl.arange(0, QUERIES)
    mine, query = r // GROUP, head * GROUP + r % GROUP
    present = tl.where(r < size * GROUP, 1, 0)
    first = (b * BLOCK).to(tl.int64)
    q = _turned(
        y_ptr, (first + mine) * STRIDE + query * D, present, q_norm_ptr, turns_ptr,
        length + mine, eps, D, D_BLOCK, NORMED,
    )  # fmt: skip
    acc = tl.zeros([QUERIES, D_BLOCK], tl.float32)
    top = tl.full([QUERIES], -_INF, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    column = tl.arange(0, D_BLOCK)

    kept_ptr += (tl.load(slot_ptr + b).to(tl.int64) * room * H + head) * D
    values_ptr = kept_ptr + values.to(tl.int64)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window + 1, 0) // TILE * TILE
    end = length
    if PARTS > 1:
        part = tl.program_id(2) % PARTS
        share = tl.cdiv(tl.cdiv(length - begin, TILE), PARTS) * TILE
        begin = begin + part * share
        end = tl.minimum(begin + share, length)
    for tile in tl.range(begin, end, TILE):
        t = tile + tl.arange(0, TILE)
        k, v, seen = _tile(kept_ptr, values_ptr, t, length, QUERIES, H, D, column)
        if WINDOW:
            seen = tl.where((length + mine)[:, None] - t[None, :] < window, seen, 0)
        acc, top, total = _meet(acc, top, total, q, k, v, seen, scale)

    own = tl.arange(0, OWN)
    there = tl.where(own < size, 1, 0)
    if PARTS > 1:
        # The block is the first part's.
        there = tl.where(part == 0, there, 0)
    at = (first + own) * STRIDE + (GROUP * H + head) * D
    k = _turned(y_ptr, at, there, k_norm_ptr, turns_ptr, length + own, eps, D, D_BLOCK, NORMED)
    inside = tl.where(there > 0, D, 0)[:, None] > column[None, :]
    v = tl.load(y_ptr + at[:, None] + H * D + column[None, :], mask=inside, other=0.0)
    gap = mine[:, None] - own[None, :]
    seen = there[None, :] + tl.zeros([QUERIES, 1], tl.int32)
    if CAUSAL:
        seen = tl.where(gap >= 0, seen, 0)
    if WINDOW:
        seen = tl.where(tl.abs(gap) < window, seen, 0)
    acc, top, total = _meet(acc, top, total, q, k, v, seen, scale)

    at = (first + mine) * (H * GROUP) + query
    _leave(acc, top, total, at, present, tl.program_id(2) % PARTS, sums_ptr, scale_ptr, o_ptr, D,
           D_BLOCK, PARTS)  # fmt: skip


@triton.jit(do_not_specialize=["block"])
def _combine_kernel(
    sums_ptr, scale_ptr, size_ptr, o_ptr, block,
    D: tl.constexpr, D_BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if m % block >= tl.load(size_ptr + m // block):
        return
    row = m.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    part, column = tl.arange(0, PARTS), tl.arange(0, D_BLOCK)
    at = row * PARTS + part
    top = tl.load(scale_ptr + at * 2)
    share = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(tl.load(scale_ptr + at * 2 + 1) * share, axis=0)
    inside = tl.where(part >= 0, D, 0)[:, None] > column[None, :]
    sums = tl.load(sums_ptr + (at * D)[:, None] + column[None, :], mask=inside, other=0.0)
    o = round_to(tl.sum(sums * share[:, None], axis=0) / total, o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * D + column, o, mask=column < D)
