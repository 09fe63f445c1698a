# SPDX-License-Identifier: Apache-2.0
"""The other ways to verify and commit, as plain Triton kernels, for the benchmark only.

One program per (row, value head, tile of V rows) with the state tile in registers, as in the
engine's own kernel; what differs is what goes through memory. Inputs are prepared: q, k [M, H, K]
normalised (q scaled), v [M, G, V], g, beta [M, G], all float32; S [slots, G, V, K] float32.
Tuning: tiles of 32 registers a thread, the size at which these kernels reach the memory's speed.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import Factors
from specla.ops.gdn import Inputs

TILE_ELEMENTS, NUM_WARPS = 4096, 4
WY_NODES, WY_ROWS, WY_COLUMNS = 16, 64, 64


class ReadTile(NamedTuple):
    """Launch shape of the read-only kernel: a program reads `steps` blocks."""

    block: int
    steps: int
    warps: int

    @property
    def elements(self) -> int:
        return self.block * self.steps


READ_TILES = (ReadTile(4096, 16, 8), ReadTile(2048, 16, 4), ReadTile(8192, 4, 8))


def read_only(x: Tensor, sums: Tensor, tile: ReadTile) -> None:
    """Read all of x [n] float32; one sum per program keeps the compiler honest."""
    _read_kernel[(sums.numel(),)](
        x, sums, BLOCK=tile.block, STEPS=tile.steps, num_warps=tile.warps
    )


def snapshot_tree(
    S: Tensor, slot: Tensor, parents: Tensor, saved: Tensor, x: Inputs, o: Tensor
) -> None:
    """Walk the nodes in order; every node stores its whole state, its children load it back.

    slot [B], parents [B, N], saved [B, N, G, V, K], o [M, G, V].
    """
    _snapshot_kernel[_grid(S, slot)](
        S, slot, parents, saved, x.q, x.k, x.v, x.g, x.beta, o, parents.shape[1], **_sizes(S, x)
    )


def scatter(S: Tensor, slot: Tensor, saved: Tensor, last: Tensor) -> None:
    """Copy the state of node last[b] to the row's slot: a snapshot tree's commit."""
    size = S[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    _scatter_kernel[(triton.cdiv(size, block), slot.numel())](
        S, slot, saved, last, saved.shape[1], SIZE=size, BLOCK=block
    )


def commit(S: Tensor, slot: Tensor, factors: Factors, entries: Tensor) -> None:
    """Fold log entries [B, T] into S, in a launch of its own."""
    heads = factors.k.shape[2]
    sizes = {"H": heads, **_state_sizes(S)}
    _commit_kernel[_grid(S, slot)](
        S, slot, factors.k, factors.u, factors.g, entries,
        entries.shape[1], factors.k.shape[1], **sizes,
    )  # fmt: skip


def replay_tokens(S: Tensor, slot: Tensor, nodes: Tensor, num_nodes: int, x: Inputs) -> None:
    """Run the recurrence again over nodes [T] of each row and store S: a commit without
    factors."""
    _replay_kernel[_grid(S, slot)](
        S, slot, nodes, x.k, x.v, x.g, x.beta, nodes.numel(), num_nodes, **_sizes(S, x)
    )


def one_path(S: Tensor, slot: Tensor, nodes: Tensor, num_nodes: int, x: Inputs, o: Tensor) -> None:
    """Outputs of one root-to-leaf path, nodes [T], for every row, starting from S."""
    _path_kernel[_grid(S, slot)](
        S, slot, nodes, x.q, x.k, x.v, x.g, x.beta, o, nodes.numel(), num_nodes, **_sizes(S, x)
    )


def decode_in_place(S: Tensor, slot: Tensor, x: Inputs, o: Tensor) -> None:
    """One token per row, S read and written: plain decoding that folds every token."""
    _decode_kernel[_grid(S, slot)](S, slot, x.q, x.k, x.v, x.g, x.beta, o, **_sizes(S, x))


def chain_wy(
    S: Tensor,
    slot: Tensor,
    factors: Factors,
    entries: Tensor,
    x: Inputs,
    u: Tensor,
    o: Tensor,
    num_nodes: int,
) -> None:
    """A chain of at most 16 nodes in closed form on tensor cores (tf32), S only read.

    entries [B, T]: the pending log, replayed on the live tile. u, o [M, G, V].
    """
    assert num_nodes <= WY_NODES, f"one block of {WY_NODES} nodes, got {num_nodes}"
    _, heads, rows, keys = S.shape
    tile, step = min(rows, WY_ROWS), min(keys, WY_COLUMNS)
    _chain_wy_kernel[(rows // tile, heads, slot.numel())](
        S, slot, factors.k, factors.u, factors.g, entries,
        x.q, x.k, x.v, x.g, x.beta, u, o, entries.shape[1], factors.k.shape[1], num_nodes,
        H=x.k.shape[1], G=heads, V=rows, K=keys, BV=tile, CK=step, N=WY_NODES,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _tile_rows(S: Tensor) -> int:
    rows = max(1, TILE_ELEMENTS // S.shape[3])
    return min(rows, S.shape[2])


def _grid(S: Tensor, slot: Tensor) -> tuple[int, int, int]:
    return (S.shape[2] // _tile_rows(S), S.shape[1], slot.numel())


def _state_sizes(S: Tensor) -> dict[str, int]:
    _, heads, rows, keys = S.shape
    return {"G": heads, "V": rows, "K": keys, "BV": _tile_rows(S), "num_warps": NUM_WARPS}


def _sizes(S: Tensor, x: Inputs) -> dict[str, int]:
    return {"H": x.k.shape[1], **_state_sizes(S)}


@triton.jit
def _read_kernel(x_ptr, sums_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    at = x_ptr + tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(STEPS):
        acc += tl.load(at + i * BLOCK)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(acc, axis=0))


@triton.jit
def _tile(slot, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """Offsets of this program's tile [BV, K] in a tensor [slots, G, V, K]."""
    row = tl.program_id(0) * BV + tl.arange(0, BV)
    start = (slot.to(tl.int64) * G + tl.program_id(1)) * V
    return (start + row)[:, None] * K + tl.arange(0, K)[None, :]


@triton.jit
def _vectors(
    m, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr
):
    """Offsets of node m's k (or q) [K], v (or o) [BV] and g (or beta)."""
    head = tl.program_id(1)
    key = (m * H + head // (G // H)) * K + tl.arange(0, K)
    value = (m * G + head) * V + tl.program_id(0) * BV + tl.arange(0, BV)
    return key, value, m * G + head


@triton.jit
def _token(
    S, m, k_ptr, v_ptr, g_ptr, beta_ptr,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """S after node m: decay, then the delta against the decayed state."""
    key, value, gate = _vectors(m, H, G, V, K, BV)
    k, v = tl.load(k_ptr + key), tl.load(v_ptr + value)
    S = S * tl.exp(tl.load(g_ptr + gate))
    u = tl.load(beta_ptr + gate) * (v - tl.sum(S * k[None, :], axis=1))
    return S + u[:, None] * k[None, :]


@triton.jit
def _read_out(
    S, m, q_ptr, o_ptr,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """o of node m from the state after it."""
    key, value, _ = _vectors(m, H, G, V, K, BV)
    tl.store(o_ptr + value, tl.sum(S * tl.load(q_ptr + key)[None, :], axis=1))


@triton.jit(do_not_specialize=["num_nodes"])
def _snapshot_kernel(
    S_ptr, slot_ptr, parents_ptr, saved_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr,
    num_nodes,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    S = tl.load(S_ptr + _tile(tl.load(slot_ptr + b), G, V, K, BV))
    for i in range(0, num_nodes):
        m = b * num_nodes + i
        if i > 0:
            parent = tl.load(parents_ptr + m)
            S = tl.load(saved_ptr + _tile(b * num_nodes + parent, G, V, K, BV))
        S = _token(S, m, k_ptr, v_ptr, g_ptr, beta_ptr, H, G, V, K, BV)
        _read_out(S, m, q_ptr, o_ptr, H, G, V, K, BV)
        tl.store(saved_ptr + _tile(m, G, V, K, BV), S)
        tl.debug_barrier()  # a child may be loaded by other threads than those that stored


@triton.jit(do_not_specialize=["num_nodes"])
def _scatter_kernel(
    S_ptr, slot_ptr, saved_ptr, last_ptr, num_nodes, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = (b * num_nodes + tl.load(last_ptr + b)).to(tl.int64) * SIZE
    state = tl.load(saved_ptr + source + i, mask=i < SIZE)
    tl.store(S_ptr + tl.load(slot_ptr + b).to(tl.int64) * SIZE + i, state, mask=i < SIZE)


@triton.jit(do_not_specialize=["log_len", "num_entries"])
def _commit_kernel(
    S_ptr, slot_ptr, k_ptr, u_ptr, g_ptr, entries_ptr, log_len, num_entries,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    slot = tl.load(slot_ptr + b)
    at = S_ptr + _tile(slot, G, V, K, BV)
    entries_ptr += b * log_len
    S = tl.load(at)
    for j in range(0, log_len):
        key, value, gate = _vectors(slot * num_entries + tl.load(entries_ptr + j), H, G, V, K, BV)
        k, u, g = tl.load(k_ptr + key), tl.load(u_ptr + value), tl.load(g_ptr + gate)
        S = S * tl.exp(g) + u[:, None] * k[None, :]
    tl.store(at, S)


@triton.jit(do_not_specialize=["length", "num_nodes"])
def _replay_kernel(
    S_ptr, slot_ptr, nodes_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, length, num_nodes,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    at = S_ptr + _tile(tl.load(slot_ptr + b), G, V, K, BV)
    S = tl.load(at)
    for j in range(0, length):
        m = b * num_nodes + tl.load(nodes_ptr + j)
        S = _token(S, m, k_ptr, v_ptr, g_ptr, beta_ptr, H, G, V, K, BV)
    tl.store(at, S)


@triton.jit(do_not_specialize=["length", "num_nodes"])
def _path_kernel(
    S_ptr, slot_ptr, nodes_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr, length, num_nodes,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    S = tl.load(S_ptr + _tile(tl.load(slot_ptr + b), G, V, K, BV))
    for j in range(0, length):
        m = b * num_nodes + tl.load(nodes_ptr + j)
        S = _token(S, m, k_ptr, v_ptr, g_ptr, beta_ptr, H, G, V, K, BV)
        _read_out(S, m, q_ptr, o_ptr, H, G, V, K, BV)


@triton.jit
def _decode_kernel(
    S_ptr, slot_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, o_ptr,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    at = S_ptr + _tile(tl.load(slot_ptr + b), G, V, K, BV)
    S = _token(tl.load(at), b, k_ptr, v_ptr, g_ptr, beta_ptr, H, G, V, K, BV)
    _read_out(S, b, q_ptr, o_ptr, H, G, V, K, BV)
    tl.store(at, S)


@triton.jit(do_not_specialize=["log_len", "num_entries", "num_nodes"])
def _chain_wy_kernel(
    S_ptr, slot_ptr, log_k_ptr, log_u_ptr, log_g_ptr, entries_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, o_ptr, log_len, num_entries, num_nodes,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, CK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(2), tl.program_id(1)
    slot = tl.load(slot_ptr + b)
    key_head = head // (G // H)
    entries_ptr += b * log_len
    i = tl.arange(0, N)
    used = i < num_nodes
    m = b * num_nodes + i
    row = tl.program_id(0) * BV + tl.arange(0, BV)

    # One pass over K: the state's chunk with the log replayed on it, against k and q.
    k_S, q_S = tl.zeros([N, BV], tl.float32), tl.zeros([N, BV], tl.float32)
    k_k, q_k = tl.zeros([N, N], tl.float32), tl.zeros([N, N], tl.float32)
    for start in range(0, K, CK):
        column = start + tl.arange(0, CK)
        S = tl.load(
            S_ptr + ((slot.to(tl.int64) * G + head) * V + row)[:, None] * K + column[None, :]
        )
        for j in range(0, log_len):
            entry = slot * num_entries + tl.load(entries_ptr + j)
            log_k = tl.load(log_k_ptr + (entry * H + key_head) * K + column)
            log_u = tl.load(log_u_ptr + (entry * G + head) * V + row)
            g = tl.load(log_g_ptr + entry * G + head)
            S = S * tl.exp(g) + log_u[:, None] * log_k[None, :]
        keys = (m * H + key_head)[:, None] * K + column[None, :]
        k = tl.load(k_ptr + keys, mask=used[:, None], other=0.0)
        q = tl.load(q_ptr + keys, mask=used[:, None], other=0.0)
        k_S = tl.dot(k, tl.trans(S), k_S, input_precision="tf32")
        q_S = tl.dot(q, tl.trans(S), q_S, input_precision="tf32")
        k_k = tl.dot(k, tl.trans(k), k_k, input_precision="tf32")
        q_k = tl.dot(q, tl.trans(k), q_k, input_precision="tf32")

    values = (m * G + head)[:, None] * V + row[None, :]
    v = tl.load(v_ptr + values, mask=used[:, None], other=0.0)
    g = tl.load(g_ptr + m * G + head, mask=used, other=0.0)
    beta = tl.load(beta_ptr + m * G + head, mask=used, other=0.0)
    total = tl.cumsum(g, axis=0)
    before = i[:, None] > i[None, :]
    gap = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(before | (i[:, None] == i[None, :]), gap, float("-inf")))
    A = tl.where(before, beta[:, None] * decay * k_k, 0.0)
    grow = tl.exp(total)[:, None]
    u = beta[:, None] * (v - grow * k_S)
    for j in range(0, num_nodes - 1):
        # Substitution by columns: node j is solved, take it out of the nodes below.
        solved = tl.sum(tl.where((i == j)[:, None], u, 0.0), axis=0)
        weight = tl.sum(tl.where((i == j)[None, :], A, 0.0), axis=1)
        u -= weight[:, None] * solved[None, :]
    tl.store(u_ptr + values, u, mask=used[:, None])
    o = grow * q_S + tl.dot(decay * q_k, u, input_precision="tf32")
    tl.store(o_ptr + values, o, mask=used[:, None])
