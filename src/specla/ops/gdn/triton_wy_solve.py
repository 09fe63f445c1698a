# SPDX-License-Identifier: Apache-2.0
"""The part of the closed form that needs neither state nor values: what is above what, and the
triangular system of one row and value head. Letters as in `ops.gdn.triton_wy`, whose part this is.
"""

# Kernel bodies are Triton's language, not Python's.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 16  # nodes or log entries per block: the least width of a matrix product
_BLOCK = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["num_columns", "num_path", "log_capacity"])
def mask_kernel(
    parents_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr,
    ancestors_ptr, places_ptr, num_columns, num_path, log_capacity,
    NODES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    node = tl.arange(0, NODES)
    used = node < tl.load(num_nodes_ptr + b)
    parents_ptr += b * num_columns
    # All nodes climb at once.
    bits = tl.full([NODES], 1, tl.int64) << node.to(tl.int64)
    climb = tl.load(parents_ptr + node, mask=used, other=-1)
    while tl.max(climb, axis=0) >= 0:
        bit = tl.full([NODES], 1, tl.int64) << tl.maximum(climb, 0).to(tl.int64)
        bits = tl.where(climb >= 0, bits | bit, bits)
        climb = tl.load(parents_ptr + climb, mask=climb >= 0, other=-1)
    tl.store(ancestors_ptr + b * num_columns + node, bits, mask=used)

    j = tl.arange(0, LOG)
    ring_len = tl.load(ring_len_ptr + b)
    mask = (j >= ring_len) & (j < ring_len + tl.load(path_len_ptr + b))
    place = tl.load(path_ptr + b * num_path + j - ring_len, mask=mask, other=0)
    place += log_capacity + tl.load(bank_ptr + b) * num_path
    tl.store(places_ptr + b * LOG + j, tl.where(mask, place, tl.where(j < ring_len, j, 0)))


@triton.jit
def log_decay(log_g, places_ptr, j, log_len, G: tl.constexpr, LOG: tl.constexpr):
    """(C - c_j, C); sums over what comes after an entry, not differences of large numbers."""
    m = tl.arange(0, LOG)
    g = tl.load(log_g + tl.load(places_ptr + m) * G, mask=m < log_len, other=0.0)
    later = m[None, :] > j[:, None]
    return tl.sum(tl.where(later, g[None, :], 0.0), axis=1), tl.sum(g, axis=0)


@triton.jit
def _invert(A, NODES: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [NODES, NODES]."""
    BLOCKS: tl.constexpr = NODES // _BLOCK
    r = tl.arange(0, _BLOCK)[None, :, None]
    c = tl.arange(0, _BLOCK)[None, None, :]
    T = tl.where(r == c, 1.0, 0.0) + tl.zeros([BLOCKS, _BLOCK, _BLOCK], tl.float32)
    p = tl.arange(0, BLOCKS)[:, None, None, None]
    same = p == tl.arange(0, BLOCKS)[None, None, :, None]
    if BLOCKS == 1:
        D = tl.reshape(A, [1, _BLOCK, _BLOCK])
    else:
        A = tl.reshape(A, [BLOCKS, _BLOCK, BLOCKS, _BLOCK])
        D = tl.sum(tl.where(same, A, 0.0), axis=2)
    # All diagonal blocks at once; row i of an inverse rests on the rows above it.
    for i in range(1, _BLOCK):
        a = tl.sum(tl.where(r == i, D, 0.0), axis=1)
        T = tl.where(r == i, T - tl.sum(a[:, :, None] * T, axis=1)[:, None, :], T)
    if BLOCKS == 1:
        out = tl.reshape(T, [NODES, NODES])
    else:
        # Block rows: T_i = D_i - D_i A_i T with T the rows above. Round i has rows 0 .. i right,
        # each from right ones; what it makes of the others is not used.
        D = tl.reshape(tl.where(same, T[:, :, None, :], 0.0), [NODES, NODES])
        A = tl.reshape(tl.where(same, 0.0, A), [NODES, NODES])
        DA = tl.dot(D, A, input_precision="tf32x3")
        out = D
        for _ in range(1, BLOCKS):
            out = D - tl.dot(DA, out, input_precision="tf32x3")
    return out


@triton.jit
def _scores(
    x_at, x_used, y_at, y_used,
    K: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x y^T over K; x_at and y_at point to columns 0 .. CHUNK - 1 of their rows."""
    out = tl.zeros([x_at.shape[0], y_at.shape[0]], tl.float32)
    for start in range(0, K, CHUNK):
        x = tl.load(x_at + start, mask=x_used[:, None], other=0.0)
        y = tl.load(y_at + start, mask=y_used[:, None], other=0.0)
        out = tl.dot(x, tl.trans(y), out, input_precision=PRECISION)
    return out


@triton.jit
def _solve_tree(
    q_at, k_at, used, above, total, beta, solution_ptr,
    K: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T and P T."""
    node = tl.arange(0, NODES)
    decay = tl.exp(tl.where(above, total[:, None] - total[None, :], float("-inf")))
    A = beta[:, None] * decay * _scores(k_at, used, k_at, used, K, CHUNK, PRECISION)
    T = _invert(tl.where(node[:, None] == node[None, :], 0.0, A), NODES) * beta[None, :]
    P = decay * _scores(q_at, used, k_at, used, K, CHUNK, PRECISION)
    at = solution_ptr + (2 * node)[:, None] * NODES + node[None, :]
    tl.store(at, tl.dot(P, T, input_precision="tf32x3"))
    tl.store(at + NODES, T)


@triton.jit
def _read_log(
    q_at, k_at, used, total, log_k, log_g, places_ptr, reads_ptr, ring_len, log_len, end,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """F and E, block by block; and the keys of the path on their way to the ring, below `end`."""
    node = tl.arange(0, NODES)
    chunk = tl.arange(0, CHUNK)[None, :]
    for first in range(0, log_len, _BLOCK):
        j = first + tl.arange(0, _BLOCK)
        e_at = log_k + tl.load(places_ptr + j)[:, None] * (H * K) + chunk
        F = _scores(q_at, used, e_at, j < log_len, K, CHUNK, PRECISION)
        E = _scores(k_at, used, e_at, j < log_len, K, CHUNK, PRECISION)
        left, _ = log_decay(log_g, places_ptr, j, log_len, G, LOG)
        decay = tl.exp(total[:, None] + left[None, :])
        at = reads_ptr + (2 * node)[:, None] * LOG + j[None, :]
        tl.store(at, decay * F)
        tl.store(at + LOG, decay * E)
        moving = ((j >= ring_len) & (j < end))[:, None]
        for start in range(0, K, CHUNK):
            e = tl.load(e_at + start, mask=moving, other=0.0)
            tl.store(log_k + j[:, None] * (H * K) + chunk + start, e, mask=moving)


@triton.jit(
    do_not_specialize=["num_columns", "num_path", "num_entries", "log_capacity", "threshold"]
)
def solve_kernel(
    k_ptr, g_ptr, q_ptr, beta_ptr,
    ancestors_ptr, places_ptr, solution_ptr, reads_ptr, decay_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr,
    num_columns, num_path, num_entries, log_capacity, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, b = tl.program_id(0), tl.program_id(1)
    key_head = head // (G // H)
    n = tl.load(num_nodes_ptr + b)
    if n == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    places_ptr += b * LOG
    candidates = log_capacity + (1 - bank) * num_path
    log_k = k_ptr + (slot * num_entries * H + key_head) * K
    log_g = g_ptr + slot * num_entries * G + head
    problem = (b * G + head).to(tl.int64)
    m = b * num_columns
    node = tl.arange(0, NODES)
    used = node < n
    bits = tl.load(ancestors_ptr + m + node, mask=used, other=0)
    above = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    g = tl.load(log_g + (candidates + node) * G, mask=used, other=0.0)
    total = tl.sum(tl.where(above, g[None, :], 0.0), axis=1)
    chunk = tl.arange(0, CHUNK)[None, :]
    k_at = log_k + (candidates + node)[:, None] * (H * K) + chunk
    q_at = q_ptr + ((m + node)[:, None] * H + key_head) * K + chunk
    # The tree and the log do not need each other.
    if tl.program_id(2) == 0:
        beta = tl.load(beta_ptr + (m + node) * G + head, mask=used, other=0.0)
        _solve_tree(
            q_at, k_at, used, above, total, beta, solution_ptr + problem * (2 * NODES * NODES),
            K, NODES, CHUNK, PRECISION,
        )  # fmt: skip
    else:
        # Only what is not folded moves to the ring.
        end = tl.where(log_len <= threshold, log_len, 0)
        j = tl.arange(0, LOG)
        moving = (j >= ring_len) & (j < end)
        late = tl.load(log_g + tl.load(places_ptr + j) * G, mask=moving, other=0.0)
        tl.store(log_g + j * G, late, mask=moving)
        _, faded = log_decay(log_g, places_ptr, j, log_len, G, LOG)
        tl.store(decay_ptr + problem * NODES + node, tl.exp(faded + total))
        _read_log(
            q_at, k_at, used, total, log_k, log_g, places_ptr,
            reads_ptr + problem * (2 * NODES * LOG), ring_len, log_len,
            tl.where(head % (G // H) == 0, end, 0), H, G, K, NODES, LOG, CHUNK, PRECISION,
        )  # fmt: skip
