# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Attention of a growing tree: a frontier over its rows' contexts, over the steps above each of
its nodes, and over itself.

All nodes of a frontier and all query heads of a key head are one tile of queries, so that a
context is read once per level, in parts that programs share where it may be long
(`triton_block`). The steps of a tree lie side by side whoever's they are, and a mask by `chain`
lets a node see its own branch: a tile of products that are mostly thrown away is less than a
gather per node. Keys are kept rotated; no step ever enters a context.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specla.drafters import triton_block as blocks
from specla.drafters.triton_block import (
    _INF,
    LEAST,
    Parts,
    _leave,
    _meet,
    _tile,
    _turned,
)


class Steps(NamedTuple):
    """Draft-time keys and values [B, X, H, d] of X steps per row, in the compute dtype; step 0 is
    the root's and has none. chain int32 [B, X, L]: see `triton_grow.Reading`."""

    k: Tensor
    v: Tensor
    chain: Tensor


def branch(
    y: Tensor,
    slot: Tensor,
    length: Tensor,
    steps: Steps,
    count: Tensor,
    first: int,
    turns: Tensor,
    kept: Tensor,
    parts: Parts,
    o: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """y [B * F, (Q + 2 H) d]: raw queries, keys and values of a frontier of count[b] <= F nodes
    per row, whose steps are `first` .. first + F - 1 -> o [B * F, Q d]; their keys and values go
    to `steps`.

    length [B]: tokens of a row's context, in kept [2, slots, room, H, d]. A node of the first
    level stands right behind it, whatever its parent's token: turns [positions, 2, d / 2] know
    that far. parts: written where there are several.
    """
    _, _, room, heads, width = kept.shape
    num_rows, num = slot.shape[0], parts.sums.shape[2]
    frontier, group = y.shape[0] // num_rows, o.shape[1] // (heads * width)
    queries = min(blocks.TILE, max(LEAST, triton.next_power_of_2(frontier * group)))
    _branch_kernel[(heads, num_rows, triton.cdiv(frontier * group, queries) * num)](
        y,
        turns,
        kept,
        *steps,
        *parts,
        o,
        slot,
        length,
        count,
        room,
        kept.stride(0),
        steps.chain.shape[1],
        first,
        (first - 1) // frontier,
        width**-0.5,
        H=heads,
        GROUP=group,
        D=width,
        D_BLOCK=max(LEAST, triton.next_power_of_2(width)),
        F=frontier,
        OWN=max(LEAST, triton.next_power_of_2(frontier)),
        QUERIES=queries,
        CHAIN=steps.chain.shape[2],
        STEPS=LEAST,
        TILE=blocks.TILE,
        PARTS=num,
        PDL=pdl,
        num_warps=blocks.warps_for(queries, width),
        num_stages=blocks.stages_for(width * kept.element_size()),
        launch_pdl=pdl,
    )
    blocks.combine(parts, count, o, pdl=pdl)


@triton.jit
def _above(chain_ptr, present, s, CHAIN: tl.constexpr):
    """Which of steps s [T] are above the nodes whose chains are at chain_ptr [R]: [R, T]."""
    seen = tl.zeros([chain_ptr.shape[0], s.shape[0]], tl.int32)
    for back in tl.static_range(CHAIN):
        at = tl.load(chain_ptr + back, mask=present > 0, other=0)
        seen = tl.where(at[:, None] == s[None, :], 1, seen)
    return tl.where(s > 0, 1, 0)[None, :] * seen


@triton.jit(do_not_specialize=["room", "values", "num_steps", "first_step", "level"])
def _branch_kernel(
    y_ptr, turns_ptr, kept_ptr, step_k_ptr, step_v_ptr, chain_ptr, sums_ptr, scale_ptr, o_ptr,
    slot_ptr, length_ptr, count_ptr,
    room, values, num_steps, first_step, level, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
    F: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr, CHAIN: tl.constexpr,
    STEPS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = (GROUP + 2) * H * D
    head, b, part = tl.program_id(0), tl.program_id(1), tl.program_id(2) % PARTS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(count_ptr + b)
    if count == 0:
        return
    length = tl.load(length_ptr + b)
    r = tl.program_id(2) // PARTS * QUERIES + tl.arange(0, QUERIES)
    mine, query = r // GROUP, head * GROUP + r % GROUP
    present = tl.where(r < count * GROUP, 1, 0)
    first = (b * F).to(tl.int64)
    column = tl.arange(0, D_BLOCK)
    # All of a level stand at one position.
    q = _turned(
        y_ptr, (first + mine) * STRIDE + query * D, present, y_ptr, turns_ptr,
        length + level + 0 * mine, 0.0, D, D_BLOCK, False,
    )  # fmt: skip
    acc = tl.zeros([QUERIES, D_BLOCK], tl.float32)
    top = tl.full([QUERIES], -_INF, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)

    kept_ptr += (tl.load(slot_ptr + b).to(tl.int64) * room * H + head) * D
    share = tl.cdiv(tl.cdiv(length, TILE), PARTS) * TILE
    end = tl.minimum((part + 1) * share, length)
    for tile in tl.range(part * share, end, TILE):
        t = tile + tl.arange(0, TILE)
        k, v, seen = _tile(
            kept_ptr, kept_ptr + values.to(tl.int64), t, length, QUERIES, H, D, column
        )  # fmt: skip
        acc, top, total = _meet(acc, top, total, q, k, v, seen, scale)

    # The steps above, and the frontier itself, are the first part's.
    steps = (b * num_steps).to(tl.int64)
    step_k_ptr += (steps * H + head) * D
    step_v_ptr += (steps * H + head) * D
    chain_ptr += (steps + first_step + mine) * CHAIN
    for tile in tl.range(0, tl.where(part == 0, first_step, 0), STEPS):
        s = tile + tl.arange(0, STEPS)
        k, v, _ = _tile(step_k_ptr, step_v_ptr, s, first_step, QUERIES, H, D, column)
        seen = _above(chain_ptr, present, s, CHAIN)
        acc, top, total = _meet(acc, top, total, q, k, v, seen, scale)

    own = tl.arange(0, OWN)
    there = tl.where((own < count) & (part == 0), 1, 0)
    at = (first + own) * STRIDE + (GROUP * H + head) * D
    k = _turned(
        y_ptr, at, there, y_ptr, turns_ptr, length + level + 0 * own, 0.0, D, D_BLOCK, False
    )  # fmt: skip
    inside = tl.where(there > 0, D, 0)[:, None] > column[None, :]
    v = tl.load(y_ptr + at[:, None] + H * D + column[None, :], mask=inside, other=0.0)
    seen = tl.where(mine[:, None] == own[None, :], 1, 0) * there[None, :]
    acc, top, total = _meet(acc, top, total, q, k, v, seen, scale)
    at = (first + mine) * (H * GROUP) + query
    _leave(acc, top, total, at, present, part, sums_ptr, scale_ptr, o_ptr, D, D_BLOCK, PARTS)
    if tl.program_id(2) == 0:
        place = (first_step + own) * (H * D)
        tl.store(step_k_ptr + place[:, None] + column[None, :], k, mask=inside)
        tl.store(step_v_ptr + place[:, None] + column[None, :], v, mask=inside)
