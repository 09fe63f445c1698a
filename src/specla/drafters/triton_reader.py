# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The state reader's own kernels: `reader` on the device.

    read    a layer's committed states -> what their tiles add to R = V^T S U^T and to |S|^2
    ask     that, and what the positions ask (z) -> what the reader's MLP is given

A tile of V rows of the base lies in registers while its row's log goes over it, entry by entry as
in the walk (`ops.gdn.triton`), and is projected there: the state as it is committed is in no
memory. Tiles add up in `ask`, in order. What `read` reads was written by earlier rounds, so that
it does all of its work before it waits.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specla.drafters.reader import LEAST_SQUARE
from specla.ops.contract import DeviceRound, LayerState
from specla.ops.rows import round_to

TILE = 16
"""Rows of V of a program of `read`."""
AHEAD = 8
"""Log entries that are on their way at a time."""
POSITIONS = 8
"""Of a block, in a program of `ask`."""
_AHEAD = tl.constexpr(AHEAD)
_LEAST = tl.constexpr(LEAST_SQUARE)


class Parts(NamedTuple):
    """What `read` leaves of L layers, t tiles each, float32: R [L, B, G, t, r, r]; square
    [L, B, G, t]."""

    R: Tensor
    square: Tensor


def num_tiles(value_dim: int) -> int:
    """Of a head's state."""
    return triton.cdiv(value_dim, TILE)


def read(
    layer: LayerState,
    rnd: DeviceRound,
    size: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: Parts,
    *,
    log_capacity: int,
    pdl: bool = False,
) -> None:
    """Of the rows' slots, base and log, where size [B] int32 is not 0; other rows' parts stay.

    rnd: of the target, as its last round left it. keys [G, r, K], values [G, V, r] float32: U and
    V. parts: those of this layer, without L.
    """
    _, G, V, K = layer.S.shape
    num_rows, rank = size.shape[0], keys.shape[1]
    assert all(x.is_contiguous() for x in (layer.S, keys, values, *parts))
    _read_kernel[(G * num_tiles(V), num_rows)](
        layer.S,
        *layer.factors,
        keys,
        values,
        *parts,
        rnd.slot,
        size,
        rnd.bank,
        rnd.ring_len,
        rnd.path_len,
        rnd.path,
        rnd.path.shape[1],
        layer.factors.k.shape[1],
        log_capacity,
        H=layer.factors.k.shape[2],
        G=G,
        K=K,
        V=V,
        RANK=rank,
        TILE=TILE,
        K_BLOCK=triton.next_power_of_2(K),
        R_BLOCK=triton.next_power_of_2(rank),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def ask(
    parts: Parts, size: Tensor, z: Tensor, f: Tensor, *, key_dim: int, value_dim: int,
    pdl: bool = False,
) -> None:  # fmt: skip
    """parts of B rows; z [B * n, L G r]: of the blocks' positions; f [B * n, F]: its first
    L G (r + 1) columns are written, per state u and log rms, where size [B] is not 0."""
    layers, num_rows, G, tiles, rank, _ = parts.R.shape
    assert all(x.is_contiguous() for x in (*parts, z, f))
    block = len(z) // num_rows
    _ask_kernel[(layers * G, num_rows, triton.cdiv(block, POSITIONS))](
        *parts,
        z,
        f,
        size,
        block,
        num_rows,
        key_dim**-0.5,
        G=G,
        STATES=layers * G,
        SIZE=key_dim * value_dim,
        RANK=rank,
        STRIDE=f.shape[1],
        TILES=tiles,
        T_BLOCK=triton.next_power_of_2(tiles),
        R_BLOCK=triton.next_power_of_2(rank),
        POSITIONS=POSITIONS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["num_path", "num_entries", "log_capacity"])
def _read_kernel(
    S_ptr, k_ptr, u_ptr, g_ptr, keys_ptr, values_ptr, R_ptr, square_ptr,
    slot_ptr, size_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr,
    num_path, num_entries, log_capacity,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr,
    TILE: tl.constexpr, K_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + TILE - 1) // TILE
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(size_ptr + b) == 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    slot = tl.load(slot_ptr + b).to(tl.int64)
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    first_in_bank = log_capacity + tl.load(bank_ptr + b) * num_path
    path_ptr += b * num_path - ring_len
    v, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, K_BLOCK)
    at = ((slot * G + head) * V + v)[:, None] * K + k[None, :]
    S = tl.load(S_ptr + at, mask=(v < V)[:, None] & (k < K)[None, :], other=0.0)
    k_ptr += (slot * num_entries * H + head // (G // H)) * K
    u_ptr += (slot * num_entries * G + head) * V
    g_ptr += slot * num_entries * G + head
    for first in range(0, log_len, _AHEAD):
        factors = ()
        for i in tl.static_range(_AHEAD):
            j = first + i
            place = tl.load(path_ptr + j, mask=(j >= ring_len) & (j < log_len), other=0)
            entry = tl.where(j < ring_len, j, first_in_bank + place)
            # Past the end: a factor that changes nothing.
            g = tl.load(g_ptr + entry * G, mask=j < log_len, other=0.0)
            keys = k < tl.where(j < log_len, K, 0)
            values = v < tl.where(j < log_len, V, 0)
            key = tl.load(k_ptr + entry * (H * K) + k, mask=keys, other=0.0)
            u = tl.load(u_ptr + entry * (G * V) + v, mask=values, other=0.0)
            factors += ((key, u, g),)
        for i in tl.static_range(_AHEAD):
            key, u, g = factors[i]
            S = S * tl.exp(g) + u[:, None] * key[None, :]

    part = (b * G + head) * TILES + tile
    tl.store(square_ptr + part, tl.sum(tl.sum(S * S, axis=1), axis=0))
    r = tl.arange(0, R_BLOCK)
    at = (head * V + v)[:, None] * RANK + r[None, :]
    values = tl.load(values_ptr + at, mask=(v < V)[:, None] & (r < RANK)[None, :], other=0.0)
    for i in tl.static_range(RANK):
        key = tl.load(keys_ptr + (head * RANK + i) * K + k, mask=k < K, other=0.0)
        x = tl.sum(S * key[None, :], axis=1)
        column = tl.sum(values * x[:, None], axis=0)
        tl.store(R_ptr + (part * RANK + r) * RANK + i, column, mask=r < RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["block", "num_rows"])
def _ask_kernel(
    R_ptr, square_ptr, z_ptr, f_ptr, size_ptr, block, num_rows, scale,
    G: tl.constexpr, STATES: tl.constexpr, SIZE: tl.constexpr, RANK: tl.constexpr,
    STRIDE: tl.constexpr, TILES: tl.constexpr, T_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    state, b = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(size_ptr + b) == 0:
        return
    part = ((state // G * num_rows + b) * G + state % G).to(tl.int64) * TILES
    tile, r = tl.arange(0, T_BLOCK), tl.arange(0, R_BLOCK)
    square = tl.sum(tl.load(square_ptr + part + tile, mask=tile < TILES, other=0.0), axis=0)
    rms = tl.sqrt(square / SIZE + _LEAST)
    at = (tile[:, None, None] * RANK + r[None, :, None]) * RANK + r[None, None, :]
    inside = (tile < TILES)[:, None, None] & (r < RANK)[None, :, None]
    inside = inside & (r < RANK)[None, None, :]
    R = tl.sum(tl.load(R_ptr + part * RANK * RANK + at, mask=inside, other=0.0), axis=0) / rms
    position = tl.program_id(2) * POSITIONS + tl.arange(0, POSITIONS)
    row = (b * block + position).to(tl.int64)
    there = position < block
    at = row[:, None] * (STATES * RANK) + state * RANK + r[None, :]
    mask = there[:, None] & (r < RANK)[None, :]
    z = tl.load(z_ptr + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.sum(R[None, :, :] * z[:, None, :], axis=2) * scale
    dtype: tl.constexpr = f_ptr.dtype.element_ty
    f_ptr += row * STRIDE + state * (RANK + 1)
    tl.store(f_ptr[:, None] + r[None, :], round_to(u, dtype), mask=mask)
    size = round_to(tl.zeros([POSITIONS], tl.float32) + tl.log(rms), dtype)
    tl.store(f_ptr + RANK, size, mask=there)
