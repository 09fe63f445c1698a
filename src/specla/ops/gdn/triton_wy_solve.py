# SPDX-License-Identifier: Apache-2.0
"""The part of the closed form that needs neither state nor values: what is above what, operands in
two pieces, and the triangular systems of one row and key head. Letters as in `ops.gdn.triton_wy`,
whose part this is.
"""

# Kernel bodies are Triton's language, not Python's.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.rows import round_to

BLOCK = 16  # log entries per block: the least width of a matrix product
_BLOCK = tl.constexpr(BLOCK)
_INTERPRET = tl.constexpr(knobs.runtime.interpret)


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
def row_of_round(
    slot_ptr, bank_ptr, ring_len_ptr, path_len_ptr, places_ptr, b,
    num_path, log_capacity, LOG: tl.constexpr,
):  # fmt: skip
    """(slot, entries of the ring, entries of the log, first entry to write, places)."""
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    candidates = log_capacity + (1 - tl.load(bank_ptr + b)) * num_path
    return tl.load(slot_ptr + b).to(tl.int64), ring_len, log_len, candidates, places_ptr + b * LOG


@triton.jit
def log_decay(log_g, places_ptr, j, log_len, G: tl.constexpr, LOG: tl.constexpr):
    """(C - c_j, C); sums over what comes after an entry, not differences of large numbers."""
    m = tl.arange(0, LOG)
    g = tl.load(log_g + tl.load(places_ptr + m) * G, mask=m < log_len, other=0.0)
    later = m[:, None] > j[None, :]  # summed down: mostly in a thread
    return tl.sum(tl.where(later, g[:, None], 0.0), axis=0), tl.sum(g, axis=0)


@triton.jit
def pieces(x):
    """(high, low), bfloat16, whose sum has 17 of x's bits. By integers, so that the rounded value
    costs no conversion; what is not finite stays so in `low`."""
    high = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    high = high.to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), round_to(x - high, tl.bfloat16)


@triton.jit
def dot(x_high, x_low, y_high, y_low, acc):
    """acc + x y, all but the product of the low pieces; small terms first."""
    if _INTERPRET:  # which multiplies the bits of bfloat16 as integers
        x_high, x_low = x_high.to(tl.float32), x_low.to(tl.float32)
        y_high, y_low = y_high.to(tl.float32), y_low.to(tl.float32)
    acc = tl.dot(x_low, y_high, acc)
    acc = tl.dot(x_high, y_low, acc)
    return tl.dot(x_high, y_high, acc)


@triton.jit
def _store_pieces(at, stride, x):
    """x at `at`, its low piece `stride` elements on."""
    high, low = pieces(x)
    tl.store(at, high)
    tl.store(at + stride, low)


@triton.jit
def _times(x, y):
    """x y."""
    x_high, x_low = pieces(x)
    y_high, y_low = pieces(y)
    return dot(x_high, x_low, y_high, y_low, tl.zeros([x.shape[0], y.shape[1]], tl.float32))


@triton.jit
def _invert(A, NODES: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [NODES, NODES], by blocks that double: with the
    inverses D of its diagonal blocks, [D1 0; -D2 B D1 D2] is the inverse of [L1 0; B L2]."""
    i = tl.arange(0, NODES)
    r, c = i[:, None], i[None, :]
    T = tl.where(r == c, 1.0, tl.where(r // 2 == c // 2, -A, 0.0))
    for level in tl.static_range(1, 6):
        if 1 << level < NODES:
            pair = (r >> (level + 1)) == (c >> (level + 1))
            B = tl.where(pair & ((r >> level) > (c >> level)), A, 0.0)
            T -= _times(T, _times(B, T))
    return T


@triton.jit
def _tree_scores(
    q_at, k_at, used, x_at,
    K: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """q k^T and k k^T [NODES, NODES]; q and k, in pieces, as rows 2i and 2i + 1 of x."""
    qk = tl.zeros([NODES, NODES], tl.float32)
    kk = tl.zeros([NODES, NODES], tl.float32)
    for start in range(0, K, CHUNK):
        q_high, q_low = pieces(tl.load(q_at + start, mask=used[:, None], other=0.0))
        k_high, k_low = pieces(tl.load(k_at + start, mask=used[:, None], other=0.0))
        tl.store(x_at + start, q_high)
        tl.store(x_at + start + K, k_high)
        tl.store(x_at + start + 2 * NODES * K, q_low)
        tl.store(x_at + start + (2 * NODES + 1) * K, k_low)
        qk = dot(q_high, q_low, tl.trans(k_high), tl.trans(k_low), qk)
        kk = dot(k_high, k_low, tl.trans(k_high), tl.trans(k_low), kk)
    return qk, kk


@triton.jit
def _log_scores(
    q_at, k_at, used, e_at, e_used, e_out, due,
    K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """q e^T and k e^T [NODES, _BLOCK] with keys e of the log; kept in pieces if `due`."""
    qe = tl.zeros([NODES, _BLOCK], tl.float32)
    ke = tl.zeros([NODES, _BLOCK], tl.float32)
    for start in range(0, K, CHUNK):
        e_high, e_low = pieces(tl.load(e_at + start, mask=e_used[:, None], other=0.0))
        if due:
            tl.store(e_out + start, e_high)
            tl.store(e_out + start + LOG * K, e_low)
        q_high, q_low = pieces(tl.load(q_at + start, mask=used[:, None], other=0.0))
        qe = dot(q_high, q_low, tl.trans(e_high), tl.trans(e_low), qe)
        k_high, k_low = pieces(tl.load(k_at + start, mask=used[:, None], other=0.0))
        ke = dot(k_high, k_low, tl.trans(e_high), tl.trans(e_low), ke)
    return qe, ke


@triton.jit
def _solve_tree(
    qk, kk, above, total, beta, solution_ptr, NODES: tl.constexpr,
):  # fmt: skip
    """T and P T of one value head."""
    node = tl.arange(0, NODES)
    decay = tl.exp(tl.where(above, total[:, None] - total[None, :], float("-inf")))
    A = tl.where(node[:, None] == node[None, :], 0.0, beta[:, None] * decay * kk)
    T = _invert(A, NODES) * beta[None, :]
    at = solution_ptr + (2 * node)[:, None] * NODES + node[None, :]
    _store_pieces(at + NODES, 2 * NODES * NODES, T)
    _store_pieces(at, 2 * NODES * NODES, _times(decay * qk, T))


@triton.jit
def _totals(log_g, candidates, used, below, G: tl.constexpr, NODES: tl.constexpr):
    """Log decay of each node from the base of the tree; below: `above`, transposed."""
    g = tl.load(log_g + (candidates + tl.arange(0, NODES)) * G, mask=used, other=0.0)
    return tl.sum(tl.where(below, g[:, None], 0.0), axis=0)


@triton.jit
def _read_log(
    q_at, k_at, used, below, log_k, log_g, candidates, places_ptr, e_ptr, reads_ptr, decay_ptr,
    ring_len, log_len, end, due,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr,
    FOLD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """F and E, block by block, of all value heads; what of the path moves to the ring, below
    `end`; decays. The fold reads whole blocks of FOLD keys, the last one padded with zeros; the
    kernel for Hopper always reads a block of F and E."""
    GROUP: tl.constexpr = G // H
    node = tl.arange(0, NODES)
    chunk = tl.arange(0, CHUNK)[None, :]
    padded = tl.where(due, (log_len + FOLD - 1) // FOLD * FOLD, tl.maximum(log_len, _BLOCK))
    for first in range(0, padded, _BLOCK):
        j = first + tl.arange(0, _BLOCK)
        e_at = log_k + tl.load(places_ptr + j)[:, None] * (H * K) + chunk
        e_out = e_ptr + j[:, None] * K + chunk
        qe, ke = _log_scores(q_at, k_at, used, e_at, j < log_len, e_out, due, K, NODES, LOG, CHUNK)
        for h in tl.range(0, GROUP, num_stages=1):
            left, _ = log_decay(log_g + h, places_ptr, j, log_len, G, LOG)
            total = _totals(log_g + h, candidates, used, below, G, NODES)
            tl.store(decay_ptr + h * (NODES + LOG + 1) + NODES + j, tl.exp(left))
            decay = tl.exp(total[:, None] + left[None, :])
            at = reads_ptr + (h * 4 * NODES + 2 * node)[:, None] * LOG + j[None, :]
            _store_pieces(at, 2 * NODES * LOG, decay * qe)
            _store_pieces(at + LOG, 2 * NODES * LOG, decay * ke)
        moving = ((j >= ring_len) & (j < end))[:, None]
        for start in range(0, K, CHUNK):
            e = tl.load(e_at + start, mask=moving, other=0.0)
            tl.store(log_k + j[:, None] * (H * K) + chunk + start, e, mask=moving)
    j = tl.arange(0, LOG)
    moving = (j >= ring_len) & (j < end)
    for h in tl.range(0, GROUP, num_stages=1):
        late = tl.load(log_g + h + tl.load(places_ptr + j) * G, mask=moving, other=0.0)
        tl.store(log_g + h + j * G, late, mask=moving)
        _, faded = log_decay(log_g + h, places_ptr, j, log_len, G, LOG)
        total = _totals(log_g + h, candidates, used, below, G, NODES)
        tl.store(decay_ptr + h * (NODES + LOG + 1) + node, tl.exp(faded + total))
        tl.store(decay_ptr + h * (NODES + LOG + 1) + NODES + LOG, tl.exp(faded))


@triton.jit(
    do_not_specialize=["num_columns", "num_path", "num_entries", "log_capacity", "threshold"]
)
def solve_kernel(
    k_ptr, g_ptr, q_ptr, beta_ptr,
    ancestors_ptr, places_ptr, x_ptr, e_ptr, solution_ptr, reads_ptr, decay_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr,
    num_columns, num_path, num_entries, log_capacity, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr,
    FOLD: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    key_head, b = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = G // H
    n = tl.load(num_nodes_ptr + b)
    if n == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    slot, ring_len, log_len, candidates, places_ptr = row_of_round(
        slot_ptr, bank_ptr, ring_len_ptr, path_len_ptr, places_ptr, b, num_path, log_capacity, LOG
    )
    log_k = k_ptr + (slot * num_entries * H + key_head) * K
    log_g = g_ptr + slot * num_entries * G + key_head * GROUP
    problem = (b * H + key_head).to(tl.int64)
    m = b * num_columns
    node = tl.arange(0, NODES)
    used = node < n
    bits = tl.load(ancestors_ptr + m + node, mask=used, other=0)
    above = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
    below = ((bits[None, :] >> node[:, None].to(tl.int64)) & 1) != 0
    chunk = tl.arange(0, CHUNK)[None, :]
    k_at = log_k + (candidates + node)[:, None] * (H * K) + chunk
    q_at = q_ptr + ((m + node)[:, None] * H + key_head) * K + chunk
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    # The tree and the log do not need each other.
    if tl.program_id(2) == 0:
        x_at = x_ptr + (problem * (4 * NODES) + 2 * node[:, None]) * K + chunk
        qk, kk = _tree_scores(q_at, k_at, used, x_at, K, NODES, CHUNK)
        for h in tl.range(0, GROUP, num_stages=1):
            total = _totals(log_g + h, candidates, used, below, G, NODES)
            beta_at = beta_ptr + (m + node) * G + key_head * GROUP + h
            beta = tl.load(beta_at, mask=used, other=0.0)
            solution_at = solution_ptr + (problem * GROUP + h) * (4 * NODES * NODES)
            _solve_tree(qk, kk, above, total, beta, solution_at, NODES)
    else:
        # Only what is not folded moves to the ring.
        due = log_len > threshold
        _read_log(
            q_at, k_at, used, below, log_k, log_g, candidates, places_ptr,
            e_ptr + problem * (2 * LOG * K), reads_ptr + problem * (GROUP * 4 * NODES * LOG),
            decay_ptr + problem * (GROUP * (NODES + LOG + 1)), ring_len, log_len,
            tl.where(due, 0, log_len), due, H, G, K, NODES, LOG, FOLD, CHUNK,
        )  # fmt: skip
