# SPDX-License-Identifier: Apache-2.0
"""`drafters.grow` on the device: a draft tree grown level by level, without the host.

    top_blocks   logits -> for every frontier node and block of the draft vocabulary, the likeliest
                 tokens and the block's share of the softmax
    extend       those  -> the tree with a level more, pruned, and the nodes that go on; also what
                 the drafter's layer reads next at each of them

What `Growing` keeps of a tree that ends here is all that can ever be kept of it: scores only fall
from a node to its children, and a node that is not among the best `max_drafts` now is not later.
So the tree after every level is the final one, were there no more levels; nodes that dropped out
are forgotten, and a node's place is its order of appearance. Lower places are never deeper, so
that ties in (score, depth, index) are ties in (score, place). Scores are float64 sums of float32
log-probabilities, as on the host: for the same log-probabilities the tree is the same.

Every frontier node has its own program, and all of them settle the whole level: that is a few
thousand comparisons, and a launch less than telling each other. They read one set of buffers and
the first writes another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import DeviceRound
from specla.ops.rows import round_to

BLOCK = 2048
"""Tokens of a block of the vocabulary."""
# Below every key of a token.
_NONE = tl.constexpr(-(2**63))
_IDS = tl.constexpr(2**31 - 1)
_INF = tl.constexpr(float("inf"))


class Best(NamedTuple):
    """From `top_blocks`, for m rows of logits and P blocks.

    key int64 [m, P, k]: the likeliest tokens of a block in order, the lowest id among equals;
    top, total float32 [m, P]: the block's largest logit, and the sum of e^(logit - top).
    """

    key: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, top_k: int, device: torch.device | str) -> Best:
        """Room for that many rows of logits."""
        size = rows, triton.cdiv(vocab, BLOCK)
        return cls(
            torch.zeros(*size, top_k, dtype=torch.int64, device=device),
            torch.zeros(size, device=device),
            torch.zeros(size, device=device),
        )


class Grown(NamedTuple):
    """A level's result. Trees of B rows, at most N nodes each: tokens, parents int32 [B, N] and
    num_nodes int32 [B] as in DeviceRound; score float64, spine int32 [B, N]. Its frontier, at most
    F nodes: place int32 [B, F] in the tree, count int32 [B]."""

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    score: Tensor
    spine: Tensor
    place: Tensor
    count: Tensor


class Rules(NamedTuple):
    """Of one drafter: see `grow.Growing`. max_drafts: of rows with more than one token to go."""

    top_k: int
    max_drafts: int
    tau: float
    spine: bool


class Reading(NamedTuple):
    """What the drafter's layer reads at a frontier node: the embedding of its token, and the
    output of its parent's step, both normed, side by side.

    embeddings [vocab, T]; embed_norm [T], feature_norm [D]; before [B * E, D], the outputs of the
    frontier's parents. Written: x [B * F, T + D]; residual [B * F, D], the parent's output; chain
    int32 [B, X, L] of the F steps from `first` on: the steps above, nearest first, 0 from the root
    on, whose step that is. L, a power of two, is more than any node's depth here.
    """

    embeddings: Tensor
    embed_norm: Tensor
    feature_norm: Tensor
    before: Tensor
    x: Tensor
    residual: Tensor
    chain: Tensor
    first: int
    eps: float


class Lookup(NamedTuple):
    """Of a drafter that reads a frontier's tokens only: x [B * F, R], rows of table [vocab, R]."""

    table: Tensor
    x: Tensor


def levels(rnd: DeviceRound, grown: list[Grown], depth: int) -> Iterator[tuple[int, Grown, Grown]]:
    """(level, before, after) for `extend`. grown: the root's, and two that take turns; the last
    level's tree is the round's."""
    before = grown[0]._replace(tokens=rnd.tokens)
    for level in range(depth):
        after = grown[1 + level % 2]
        if level + 1 == depth:
            after = after._replace(tokens=rnd.tokens, parents=rnd.parents, num_nodes=rnd.num_nodes)
        yield level, before, after
        before = after


def top_blocks(
    logits: Tensor, count: Tensor, best: Best, base: Tensor | None = None, *, pdl: bool = False
) -> None:
    """logits float32 [B * E, vocab]: of the first count[b] of each row's E nodes; NaN counts as
    -inf. One program per node and block. base float32 [B, vocab], of any row stride: added to all
    nodes of a row."""
    num_flat, vocab = logits.shape
    blocks, top_k = best.key.shape[1:]
    assert logits.is_contiguous()
    assert base is None or base.stride(1) == 1
    assert blocks == triton.cdiv(vocab, BLOCK)
    _top_kernel[(num_flat, blocks)](
        logits,
        logits if base is None else base,
        count,
        best.key,
        best.top,
        best.total,
        num_flat // count.shape[0],
        vocab,
        0 if base is None else base.stride(0),
        TOP=top_k,
        BLOCK=BLOCK,
        ADD=base is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def extend(
    best: Best,
    target_ids: Tensor | None,
    remaining: Tensor,
    live: Tensor,
    before: Grown,
    after: Grown,
    best_score: Tensor,
    rules: Rules,
    reading: Reading | Lookup | None,
    *,
    is_first: bool,
    pdl: bool = False,
) -> None:
    """Give the nodes of a frontier their children and settle what stays.

    Args:
        best: of its nodes, E per row.
        target_ids: int64 [draft vocabulary], or None where ids are the target's.
        remaining: int32 [B], tokens that may still be emitted; with 1 nothing is drafted.
        live: int32 [B], 0 for rows that are left alone.
        before: the tree so far; `is_first`: of its `tokens` column 0, and its count, are all.
        after: written; other tensors than `before`'s, except those of the first level's tokens.
        best_score: float64 [B], the best score of depth 1; written by the first level.
        reading: None after the last level: nothing goes on.
    """
    num_rows, num_columns = after.tokens.shape
    per_row, width = (best.key.shape[0] // num_rows, after.place.shape[1])
    blocks, top_k = best.key.shape[1:]
    r = Reading(*(best.top,) * 6, chain=after.place[None], first=0, eps=0.0)
    inputs = hidden = 1
    if isinstance(reading, Reading):
        r, inputs, hidden = reading, reading.embed_norm.shape[0], reading.feature_norm.shape[0]
    elif reading is not None:
        r = r._replace(embeddings=reading.table, x=reading.x)
        inputs = reading.table.shape[1]
    nodes = triton.next_power_of_2(num_columns)
    _extend_kernel[(num_rows, width if reading else 1)](
        *best,
        best.key if target_ids is None else target_ids,
        remaining,
        live,
        *before,
        *after,
        best_score,
        *r[:7],
        num_columns,
        rules.max_drafts,
        r.first,
        r.chain.shape[1],
        rules.tau,
        r.eps,
        E=per_row,
        EXPANDED=triton.next_power_of_2(per_row),
        F=width,
        TOP=top_k,
        PARTS=blocks,
        KEYS=triton.next_power_of_2(blocks * top_k),
        NODES=nodes,
        ALL=triton.next_power_of_2(nodes + per_row * top_k),
        MAPPED=target_ids is not None,
        SPINE=rules.spine,
        FIRST=is_first,
        LAST=reading is None,
        LAYER=isinstance(reading, Reading),
        CHAIN=r.chain.shape[2] if isinstance(reading, Reading) else 1,
        T=inputs,
        D=hidden,
        T_BLOCK=triton.next_power_of_2(inputs),
        D_BLOCK=triton.next_power_of_2(hidden),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


@triton.jit
def _to_key(x, ids):
    """Orders by x, then by the lowest id; x is not NaN."""
    # No two zeros.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (ids ^ _IDS).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = (key >> 32).to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True), ((key & _IDS) ^ _IDS).to(tl.int32)


@triton.jit(do_not_specialize=["per_row", "vocab_size", "stride"])
def _top_kernel(
    logits_ptr, base_ptr, count_ptr, key_ptr, top_ptr, total_ptr, per_row, vocab_size, stride,
    TOP: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if m % per_row >= tl.load(count_ptr + m // per_row):
        return
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits_ptr + m.to(tl.int64) * vocab_size + ids, mask=inside, other=-_INF)
    if ADD:
        base_ptr += (m // per_row).to(tl.int64) * stride
        x += tl.load(base_ptr + ids, mask=inside, other=0.0)
    x = tl.where(x == x, x, -_INF)
    top = tl.max(x, axis=0)
    at = m * tl.num_programs(1) + part
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, tl.sum(tl.exp(x - tl.where(top > -_INF, top, 0.0)), axis=0))
    key = tl.where(inside, _to_key(x, ids), _NONE)
    for i in tl.static_range(TOP):
        best = tl.max(key, axis=0)
        tl.store(key_ptr + at * TOP + i, best)
        key = tl.where(key == best, _NONE, key)


@triton.jit
def _norm_into(out_ptr, x, weight_ptr, column, eps, WIDTH: tl.constexpr):
    """rms_norm(x) * weight; x float32, zero from WIDTH on."""
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    tl.store(out_ptr + column, round_to(y, out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def read_token(
    x_ptr, token, feature, embeddings_ptr, embed_norm_ptr, feature_norm_ptr, eps,
    T: tl.constexpr, D: tl.constexpr, T_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of x, see `Reading`; feature [D_BLOCK] float32, zero from D on."""
    column = tl.arange(0, T_BLOCK)
    embedding = tl.load(
        embeddings_ptr + token.to(tl.int64) * T + column, mask=column < T, other=0.0
    )
    _norm_into(x_ptr, embedding.to(tl.float32), embed_norm_ptr, column, eps, T)
    _norm_into(x_ptr + T, feature, feature_norm_ptr, tl.arange(0, D_BLOCK), eps, D)


@triton.jit
def look_up(x_ptr, token, table_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A token's row of a table."""
    column = tl.arange(0, BLOCK)
    x = tl.load(table_ptr + token.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(x_ptr + column, x, mask=column < WIDTH)


@triton.jit
def children(
    key_ptr, top_ptr, total_ptr, target_ids_ptr, b, count, slot, rank,
    E: tl.constexpr, EXPANDED: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """(token, log-probability, exists) of the child `rank` of frontier node `slot`, each [ALL]."""
    e = tl.arange(0, EXPANDED)
    used = (e < E) & (e < count)
    column = tl.arange(0, KEYS)
    m = b * E + e
    inside = tl.where(used, PARTS * TOP, 0)[:, None] > column[None, :]
    key = tl.load(key_ptr + m[:, None] * (PARTS * TOP) + column[None, :], mask=inside, other=_NONE)
    inside = tl.where(used, PARTS, 0)[:, None] > column[None, :]
    at = m[:, None] * PARTS + column[None, :]
    tops = tl.load(top_ptr + at, mask=inside, other=-_INF)
    totals = tl.load(total_ptr + at, mask=inside, other=0.0)
    top = tl.max(tops, axis=1)
    base = tl.where(top > -_INF, top, 0.0)
    total = tl.sum(totals * tl.exp(tops - base[:, None]), axis=1)
    log_total = base + tl.log(tl.where(total > 0, total, 1.0))

    # Log-probability and token in one word, which is 0 where there is no child.
    packed = slot.to(tl.int64) * 0
    for i in tl.static_range(TOP):
        first = tl.max(key, axis=1)
        key = tl.where(key == first[:, None], _NONE, key)
        x, token_id = _from_key(first)
        there = used & (first > _NONE) & (x > -_INF)
        if MAPPED:
            token_id = tl.load(target_ids_ptr + token_id, mask=there, other=0).to(tl.int32)
        word = tl.minimum(x - log_total, 0.0).to(tl.int32, bitcast=True).to(tl.int64) << 32
        word = tl.where(there, word | (token_id + 1).to(tl.int64), 0)
        here = (rank == i)[:, None] & (slot[:, None] == e[None, :])
        packed += tl.sum(tl.where(here, word[None, :], 0), axis=1)
    logprob = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return (packed & _IDS).to(tl.int32) - 1, logprob, packed != 0


@triton.jit(do_not_specialize=["num_columns", "max_drafts", "first_step", "num_steps", "tau"])
def _extend_kernel(  # noqa: C901 - one kernel, one pass
    key_ptr, top_ptr, total_ptr, target_ids_ptr, remaining_ptr, live_ptr,
    old_tokens, old_parents, old_num_nodes, old_score, old_spine, old_place, old_count,
    new_tokens, new_parents, new_num_nodes, new_score, new_spine, new_place, new_count,
    best_ptr,
    embeddings_ptr, embed_norm_ptr, feature_norm_ptr, before_ptr, x_ptr, residual_ptr, chain_ptr,
    num_columns, max_drafts, first_step, num_steps, tau, eps,
    E: tl.constexpr, EXPANDED: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr,
    PARTS: tl.constexpr, KEYS: tl.constexpr, NODES: tl.constexpr, ALL: tl.constexpr,
    MAPPED: tl.constexpr, SPINE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    LAYER: tl.constexpr, CHAIN: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, T_BLOCK: tl.constexpr, D_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b, mine = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(live_ptr + b) == 0:
        if not LAST:
            tl.store(new_count + b, 0)
        return
    # Candidates: the tree's nodes in places 0 .. NODES - 1, then the children of the frontier in
    # order, likeliest first.
    i = tl.arange(0, ALL)
    child = i - NODES
    slot = tl.where(child >= 0, child // TOP, -1)
    count = tl.load(old_count + b)
    row = b * num_columns
    if FIRST:
        num_nodes = 1
        is_old = i == 0
        token = tl.load(old_tokens + row + i, mask=is_old, other=0)
        parent = tl.where(is_old, -1, 0)
        score = i.to(tl.float64) * 0
        spine = is_old.to(tl.int32)
    else:
        num_nodes = tl.load(old_num_nodes + b)
        is_old = i < num_nodes
        token = tl.load(old_tokens + row + i, mask=is_old, other=0)
        parent = tl.load(old_parents + row + i, mask=is_old, other=0)
        score = tl.load(old_score + row + i, mask=is_old, other=0.0)
        spine = tl.load(old_spine + row + i, mask=is_old, other=0)
    born, logprob, exists = children(
        key_ptr, top_ptr, total_ptr, target_ids_ptr, b, count, slot, child % TOP,
        E, EXPANDED, TOP, PARTS, KEYS, MAPPED,
    )  # fmt: skip
    is_new = exists & (child >= 0) & (slot < count)
    above = child * 0
    if not FIRST:
        above = tl.load(old_place + b * F + slot, mask=is_new, other=0)
    token = tl.where(is_new, born, token)
    parent = tl.where(is_new, above, parent)
    high = tl.gather(score, tl.where(is_new, above, 0), axis=0)
    score = tl.where(is_new, high + logprob.to(tl.float64), score)
    on_spine = tl.gather(spine, tl.where(is_new, above, 0), axis=0)
    if SPINE:
        spine = tl.where(is_new, tl.where(child % TOP == 0, on_spine, 0), spine)
    else:
        spine = spine * 0
    if FIRST:
        best = tl.max(tl.where(is_new, score, -_INF), axis=0)
        if mine == 0:
            tl.store(best_ptr + b, best)
    else:
        best = tl.load(best_ptr + b)

    # The order in which nodes stay: the spine, then by score, then by place.
    is_draft = (is_old & (i > 0)) | (is_new & (best - score <= tau))
    better = (score[:, None] > score[None, :]) | (
        (score[:, None] == score[None, :]) & (i[:, None] < i[None, :])
    )
    better = (spine[:, None] > spine[None, :]) | ((spine[:, None] == spine[None, :]) & better)
    before = tl.where(better & is_draft[:, None], 1, 0)
    rank = tl.sum(before, axis=0)
    allowed = tl.where(tl.load(remaining_ptr + b) > 1, max_drafts, 0)
    kept = is_draft & (rank < allowed)
    stays = tl.where(kept | (i == 0), 1, 0)
    place = tl.cumsum(stays, axis=0) - stays
    if mine == 0:
        parent_place = tl.gather(place, tl.maximum(parent, 0), axis=0)
        tl.debug_barrier()  # the first level may write where it reads
        tl.store(new_tokens + row + place, token, mask=stays > 0)
        tl.store(new_parents + row + place, tl.where(i == 0, -1, parent_place), mask=stays > 0)
        tl.store(new_num_nodes + b, tl.sum(stays, axis=0))
    if LAST:
        return
    if mine == 0:
        tl.store(new_score + row + place, score, mask=stays > 0)
        tl.store(new_spine + row + place, spine, mask=stays > 0)

    # The frontier: the best of the new ones, in order of appearance.
    fresh = kept & is_new
    ahead = tl.sum(before * tl.where(fresh, 1, 0)[:, None], axis=0)
    goes_on = tl.where(fresh & (ahead < F), 1, 0)
    order = tl.cumsum(goes_on, axis=0) - goes_on
    total = tl.sum(goes_on, axis=0)
    if mine == 0:
        tl.store(new_place + b * F + order, place, mask=goes_on > 0)
        tl.store(new_count + b, total)
    if mine >= total:
        return
    is_mine = (goes_on > 0) & (order == mine)
    my_token = tl.sum(tl.where(is_mine, token, 0), axis=0)
    m = (b * F + mine).to(tl.int64)
    if not LAYER:
        look_up(x_ptr + m * T, my_token, embeddings_ptr, T, T_BLOCK)
        return
    my_slot = tl.sum(tl.where(is_mine, slot, 0), axis=0)
    # Step 0 is the root's; the ones of this frontier's parents come right before its own.
    step = tl.where(first_step == 1, 0, first_step - E + my_slot)
    chain_ptr += b * num_steps * CHAIN
    back = tl.arange(0, CHAIN)
    higher = back > tl.where(first_step > 1, 0, CHAIN)
    above = tl.load(chain_ptr + step * CHAIN + back - 1, mask=higher, other=0)
    above = tl.where(back == 0, step, above)
    tl.store(chain_ptr + (first_step + mine) * CHAIN + back, above)
    column = tl.arange(0, D_BLOCK)
    y = tl.load(before_ptr + (b * E + my_slot).to(tl.int64) * D + column, mask=column < D, other=0)
    tl.store(residual_ptr + m * D + column, y, mask=column < D)
    read_token(
        x_ptr + m * (T + D), my_token, y.to(tl.float32), embeddings_ptr, embed_norm_ptr,
        feature_norm_ptr, eps, T, D, T_BLOCK, D_BLOCK,
    )  # fmt: skip
