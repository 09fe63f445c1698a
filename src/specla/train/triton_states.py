# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The gated delta rule over packed texts, token by token, on a GPU: what `states` wants of it.

A program takes a tile of V rows of one head through one document, from an empty state, and writes
the tile down wherever it is asked for. Everything is float32. A state holds a hundred times what a
token of it reads, so one pass over the tokens costs less than the chunked form's few over states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8
"""Rows of V of a program, a warp."""


def states_at(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, asked: Tensor, num_documents: int
) -> Tensor:
    """The states of documents laid end to end before A places, [A, G, V, K].

    k [M, H, K] normalised, v [M, G, V], g, beta [M, G], all float32. asked [3 n + A] int32: of n
    documents with places the first token, the first of its places, and the one past its last;
    then the places, ascending.
    """
    G, V = v.shape[1:]
    H, K = k.shape[1:]
    assert all(x.is_contiguous() for x in (k, v, g, beta, asked))
    assert all(x.dtype == torch.float32 for x in (k, v, g, beta))
    S = k.new_empty(len(asked) - 3 * num_documents, G, V, K)
    tiles = triton.cdiv(V, TILE)
    _states_kernel[(G * tiles, num_documents)](
        k, v, g, beta, asked, S,
        H=H, G=G, K=K, V=V, TILE=TILE, K_BLOCK=triton.next_power_of_2(K), num_warps=1,
    )  # fmt: skip
    return S


@triton.jit
def _token(k_ptr, v_ptr, g_ptr, beta_ptr, t, k_used, v_used, H, K, G, V):
    """What one token does to a state."""
    k, v = tl.arange(0, k_used.shape[0]), tl.arange(0, v_used.shape[0])
    key = tl.load(k_ptr + t * (H * K) + k, mask=k_used, other=0.0)
    value = tl.load(v_ptr + t * (G * V) + v, mask=v_used, other=0.0)
    return key, value, tl.load(g_ptr + t * G), tl.load(beta_ptr + t * G)


@triton.jit
def _states_kernel(
    k_ptr, v_ptr, g_ptr, beta_ptr, asked_ptr, S_ptr,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + TILE - 1) // TILE
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    count = tl.num_programs(1)
    asked_ptr += tl.program_id(1)
    start = tl.load(asked_ptr).to(tl.int64)
    a, end = tl.load(asked_ptr + count), tl.load(asked_ptr + 2 * count)
    places_ptr = asked_ptr + 3 * count - tl.program_id(1)
    last = tl.load(places_ptr + end - 1).to(tl.int64)
    v, k = tile * TILE + tl.arange(0, TILE), tl.arange(0, K_BLOCK)
    k_used, v_used = k < K, v < V
    k_ptr += head // (G // H) * K
    v_ptr += head * V + tile * TILE
    g_ptr += head
    beta_ptr += head
    at = v[:, None] * K + k[None, :]
    inside = v_used[:, None] & k_used[None, :]
    wanted = tl.load(places_ptr + a)
    # Nothing, but laid out as it will be written: else it is carried in two layouts.
    S = tl.load(S_ptr + at, mask=inside & (at < 0), other=0.0)
    key, value, g, beta = _token(k_ptr, v_ptr, g_ptr, beta_ptr, start, k_used, v_used, H, K, G, V)
    for t in range(start, last + 1):
        # The next token's factors travel while this one's are at work.
        ahead = tl.minimum(t + 1, last)
        next_key, next_value, next_g, next_beta = _token(
            k_ptr, v_ptr, g_ptr, beta_ptr, ahead, k_used, v_used, H, K, G, V
        )
        if t == wanted:
            tl.store(S_ptr + (a.to(tl.int64) * G + head) * (V * K) + at, S, mask=inside)
            a += 1
            wanted = tl.load(places_ptr + a, mask=a < end, other=-1)
        decay = tl.exp(g)
        u = beta * (value - decay * tl.sum(S * key[None, :], axis=1))
        u, key = tl.broadcast_to(u[:, None], S.shape), tl.broadcast_to(key[None, :], S.shape)
        S = tl.fma(u, key, S * decay)
        key, value, g, beta = next_key, next_value, next_g, next_beta
