# SPDX-License-Identifier: Apache-2.0
"""Heavy-light chains in waves, states between them through memory, for the benchmark only.

SpecLA's hybrid: one launch per wave, one program per (tile of a value head, row, chain of the
wave). The root's chain starts from S with the log replayed on it, and folds; every other one from
the state that an earlier wave stored after the node it hangs below. Layout, sums and update are
those of `ops.gdn.triton`, so what differs from that walk is what goes through memory and how many
launches there are.

Source: SpecLA (arXiv 2607.16673), section 4.3; `topology/schedule.py` for the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import Factors, RecurrentShape
from specla.ops.gdn import Inputs
from specla.ops.gdn.triton import _dot, _factors, _operands, _update, lanes_for, tile_for
from specla.ops.gdn.triton_prepare import FORWARD
from specla.topology.schedule import Layout, Schedule


class Waves(NamedTuple):
    """One tree's schedule on the device, the same for every row.

    words [9 + 5 N] int32, packed. first: each wave's first chain, and the number of chains.
    num_boundaries: states stored per row.
    """

    words: Tensor
    first: tuple[int, ...]
    num_boundaries: int

    @classmethod
    def compile(cls, parents: Sequence[int], device: torch.device) -> Waves:
        """The schedule of the tree with these parents."""
        schedule = Schedule.from_parents(parents)
        first = tuple(schedule.wave.index(wave) for wave in range(schedule.num_waves))
        words = torch.from_numpy(schedule.pack(schedule.num_nodes)).to(device)
        return cls(words, (*first, schedule.num_chains), schedule.num_boundaries)

    def allocate(self, shape: RecurrentShape, num_rows: int) -> Tensor:
        """Boundary states [B, boundaries, G, V, K] float32, for one layer after another."""
        heads = (shape.num_value_heads, shape.value_dim, shape.key_dim)
        size = (num_rows, self.num_boundaries, *heads)
        return torch.empty(size, dtype=torch.float32, device=self.words.device)


class Log(NamedTuple):
    """What is pending: entries [B, T] of factors, in order; fold: whether S is written."""

    factors: Factors
    entries: Tensor
    fold: bool


def walk(
    S: Tensor,
    slot: Tensor,
    log: Log,
    waves: Waves,
    saved: Tensor,
    x: Inputs,
    u: Tensor,
    o: Tensor,
    *,
    shape: RecurrentShape,
) -> None:
    """All waves of one layer: u, o [M, G, V] float32; saved as `Waves.allocate` makes it."""
    num_rows, num_nodes = slot.numel(), o.shape[0] // slot.numel()
    at = Layout.of(num_nodes)
    for wave, first in enumerate(waves.first[:-1]):
        chains = waves.first[wave + 1] - first
        tile = tile_for(shape, num_rows * chains, branching=False)
        assert shape.value_dim % tile.rows == 0, (shape, tile)
        grid = (shape.value_dim // tile.rows * shape.num_value_heads, num_rows, chains)
        _chain_kernel[grid](
            S, slot, *log.factors, log.entries, waves.words, saved,
            x.q, x.k, x.v, x.g, x.beta, u, o, log.entries.shape[1], log.factors.k.shape[1],
            num_nodes, waves.num_boundaries, first,
            at.order, at.chain_offsets, at.parent_boundary, at.node_boundary,
            H=shape.num_key_heads, G=shape.num_value_heads, K=shape.key_dim, V=shape.value_dim,
            TILE=tile.rows, LANES=lanes_for(shape.key_dim), WARPS=tile.warps,
            ROOT=wave == 0, FOLD=log.fold and wave == 0, FORWARD=FORWARD, num_warps=tile.warps,
        )  # fmt: skip


@triton.jit
def _axis(size: tl.constexpr, place: tl.constexpr, rank: tl.constexpr):
    """0 .. size - 1 along one of `rank` axes."""
    x = tl.arange(0, size)
    for i in tl.static_range(rank):
        if i != place:
            x = tl.expand_dims(x, i)
    return x


@triton.jit
def _places(
    K: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    FORWARD: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile [TILE, K], of a key and of a tile's rows, on the axes of the engine's
    walk: [rows, warps, R, K / WIDE, WIDE], or the first four the other way round."""
    WIDE: tl.constexpr = 4 * LANES
    ROWS: tl.constexpr = 32 // LANES
    HIGH: tl.constexpr = TILE // (ROWS * WARPS)
    lane_row = _axis(ROWS, 0 if FORWARD else 3, 5)
    warp = _axis(WARPS, 1 if FORWARD else 2, 5)
    high = _axis(HIGH, 2 if FORWARD else 1, 5)
    column = _axis(K // WIDE, 3 if FORWARD else 0, 5) * WIDE + _axis(WIDE, 4, 5)
    row = _axis(ROWS, 0 if FORWARD else 2, 3) + _axis(HIGH, 2 if FORWARD else 0, 3) * ROWS
    row += _axis(WARPS, 1, 3) * (ROWS * HIGH)
    tile = ((warp * HIGH + high) * ROWS + lane_row) * K + column
    return tile, column + (lane_row + warp) * 0, row


@triton.jit(
    do_not_specialize=[
        "log_len", "num_entries", "num_nodes", "num_saved", "first",
        "order", "offsets", "starts", "stores",
    ]
)  # fmt: skip
def _chain_kernel(
    S_ptr, slot_ptr, log_k_ptr, log_u_ptr, log_g_ptr, entries_ptr, words_ptr, saved_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, o_ptr,
    log_len, num_entries, num_nodes, num_saved, first, order, offsets, starts, stores,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, ROOT: tl.constexpr, FOLD: tl.constexpr,
    FORWARD: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = V // TILE
    b, chain = tl.program_id(1), first + tl.program_id(2)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    key_head = head // (G // H)
    tile_at, key_at, row_at = _places(K, TILE, LANES, WARPS, FORWARD)
    state_at = (head * V + tile * TILE) * K + tile_at
    row_at += head * V + tile * TILE
    at = tl.load(words_ptr + offsets + chain)
    stop = tl.load(words_ptr + offsets + chain + 1)
    node = tl.load(words_ptr + order + at)
    following = tl.load(words_ptr + order + at + 1, mask=at + 1 < stop, other=0)
    saved_ptr += (b * num_saved).to(tl.int64) * (G * V * K)
    if ROOT:
        slot = tl.load(slot_ptr + b).to(tl.int64)
        S_at = S_ptr + slot * (G * V * K) + state_at
        S = tl.load(S_at)
        S = _replay(
            S, log_k_ptr + (slot * num_entries * H + key_head) * K + key_at,
            log_u_ptr + slot * num_entries * (G * V) + row_at,
            log_g_ptr + slot * num_entries * G + head,
            entries_ptr + b * log_len, log_len, H * K, G * V, G, FORWARD,
        )  # fmt: skip
        if FOLD:
            tl.store(S_at, S)
    else:
        start = tl.load(words_ptr + starts + chain).to(tl.int64)
        S = tl.load(saved_ptr + start * (G * V * K) + state_at)

    m = b * num_nodes
    q_at = q_ptr + (m * H + key_head) * K + key_at
    k_at = k_ptr + (m * H + key_head) * K + key_at
    v_at = v_ptr + m * (G * V) + row_at
    u_at = u_ptr + m * (G * V) + row_at
    o_at = o_ptr + m * (G * V) + row_at
    g_at, beta_at = g_ptr + m * G + head, beta_ptr + m * G + head
    k, v, g, beta = _operands(k_at, v_at, g_at, beta_at, node, H * K, G * V, G)
    q, keep = tl.load(q_at + node * (H * K)), tl.load(words_ptr + stores + node)
    for i in range(at, stop):
        # The next node's operands travel while this one computes.
        after = tl.load(words_ptr + order + i + 2, mask=i + 2 < stop, other=0)
        next_k, next_v, next_g, next_beta = _operands(
            k_at, v_at, g_at, beta_at, following, H * K, G * V, G
        )
        next_q = tl.load(q_at + following * (H * K))
        next_keep = tl.load(words_ptr + stores + following)
        S = S * tl.exp(g)
        u = beta * (v.to(tl.float32) - _dot(S, k, FORWARD))
        tl.store(u_at + node * (G * V), u)
        S = _update(S, u, k, FORWARD)
        tl.store(o_at + node * (G * V), _dot(S, q, FORWARD))
        if keep >= 0:
            tl.store(saved_ptr + keep.to(tl.int64) * (G * V * K) + state_at, S)
        node, following, keep = following, after, next_keep
        k, v, g, beta, q = next_k, next_v, next_g, next_beta, next_q


@triton.jit
def _replay(
    S, k_at, u_at, g_at, entries_ptr, log_len,
    k_step: tl.constexpr, u_step: tl.constexpr, g_step: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """S after the log's entries, in order; the next one's factors travel meanwhile."""
    entry = tl.load(entries_ptr, mask=log_len > 0, other=0)
    k, u, g = _factors(k_at, u_at, g_at, entry, k_step, u_step, g_step)
    for j in range(log_len):
        entry = tl.load(entries_ptr + j + 1, mask=j + 1 < log_len, other=0)
        next_k, next_u, next_g = _factors(k_at, u_at, g_at, entry, k_step, u_step, g_step)
        S = _update(S * tl.exp(g), u, k, FORWARD)
        k, u, g = next_k, next_u, next_g
    return S
