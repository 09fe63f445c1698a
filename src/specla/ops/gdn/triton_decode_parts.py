# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What a unit of `ops.gdn.triton_decode` is made of: its tile of S asked for, its records copied,
the log replayed, its nodes walked.

Nodes are walked as `ops.gdn.triton_stream` walks them: same sums, same bits. Of up to four nodes
no checkpoint is needed: the light children are leaves, as a light subtree has fewer than half of
the nodes below its parent. A leaf's state is used up by its own two sums, and what it was made of
stays where it was. Larger trees keep a checkpoint, and a replayed node's u in registers.

Source: as `ops.gdn.triton`; docs/adr/0012 and 0017.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from specla.ops.gdn.triton_stream import (
    _across,
    _back,
    _copy,
    _log2,
    _log_entry,
    _partial,
    _scalar,
    _stay,
    _sum,
    _traded,
    _update,
)
from specla.ops.walk import RESTORE, SAVE, WALK

# Later Tritons renamed it.
_load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

WIDTH = 32
"""Elements in a row of the matrix that the copy engine sees: 256 of them are one message."""

_WIDTH = gl.constexpr(WIDTH)
_WALK, _RESTORE, _SAVE = gl.constexpr(WALK), gl.constexpr(RESTORE), gl.constexpr(SAVE)


@gluon.constexpr_function
def _state_matrix(TILE, DEEP, LANES, HIGH, WARPS):
    """The layout of S [TILE, K] as a matrix [TILE K / WIDTH, WIDTH], elements in order."""
    K = 4 * LANES * DEEP

    def at(element):
        return [element // WIDTH, element % WIDTH]

    register = [at(1), at(2)] + [at(4 * LANES << i) for i in range(_log2(DEEP))]
    register += [at(K << i) for i in range(_log2(HIGH))]
    lane = [at(4 << i) for i in range(_log2(LANES))]
    lane += [at(HIGH * K << i) for i in range(_log2(32 // LANES))]
    warp = [at(HIGH * 32 // LANES * K << i) for i in range(_log2(WARPS))]
    return gl.DistributedLinearLayout(register, lane, warp, [], [TILE * K // WIDTH, WIDTH])


@gluon.jit
def _unit(q, first, apart, CHUNK: gl.constexpr):
    """A program's q-th."""
    unit = first + q
    if CHUNK:
        unit += q // CHUNK * apart
    return unit


@gluon.jit
def _ask(ring, q, slot, unit, here, UNITS: gl.constexpr):
    """S of a unit, the q-th of this program, on its way. An idle row's too: it has a slot."""
    S_blocks, ss, full = ring
    STAGES: gl.constexpr = ss.shape[0]
    ROWS: gl.constexpr = ss.shape[1]
    s = q % STAGES
    row = (slot * UNITS + unit % UNITS) * ROWS
    mbarrier.expect(full.index(s), 4 * ROWS * ss.shape[2], pred=here)
    _load_block(S_blocks, [row, 0], full.index(s), ss.index(s), pred=here)


@gluon.jit
def _entries(
    start, SIZE: gl.constexpr, layout: gl.constexpr, ring_len, log_len, path_ptr, first_in_bank
):
    """Where SIZE entries of the log are; path_ptr is moved back by ring_len."""
    j = start + gl.arange(0, SIZE, gl.SliceLayout(1, layout))
    return _log_entry(j, ring_len, log_len, path_ptr, first_in_bank)


@gluon.jit
def _copy_entries(out, at_ptr, entry, start, log_len, STRIDE: gl.constexpr, layout: gl.constexpr):
    """Records `entry`, the log's from the start-th on -> a shared buffer."""
    j = start + gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    _copy(out, at_ptr + (entry[:, None] * STRIDE + column), mask=j < log_len)


@gluon.jit
def _move_entries(
    at_ptr, buffer, start, ring_len, log_len, STRIDE: gl.constexpr, layout: gl.constexpr
):
    """What came from the last path -> the ring."""
    j = start + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))[None, :]
    moving = (j >= ring_len) & (j < log_len)
    gl.store(at_ptr + (j * STRIDE + column), buffer.load(layout), mask=moving)


@gluon.jit
def _copy_row(out, at_ptr, there, layout: gl.constexpr):
    """WIDTH elements in memory -> a shared buffer [1, WIDTH]."""
    row = gl.arange(0, 1, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    _copy(out, at_ptr + (row + column), mask=there & (row + column >= 0))


@gluon.jit
def _entry(
    S, log, i_k, i_u, along_k: gl.constexpr, rows: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """S after one entry."""
    ks, us, decays = log
    k = ks.index(i_k).load(along_k)[None, :, :, :]
    u = us.index(i_u).load(rows)
    return _update(S * _scalar(decays.index(i_u), WARPS), u, k)


@gluon.jit
def _replay(
    S, log, first_k, first_u, count, along_k: gl.constexpr, rows: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """S after `count` entries, two a pass: operands travel while the one before computes."""
    pairs = count & -2
    for j in range(0, pairs, 2):
        S = _entry(S, log, first_k + j, first_u + j, along_k, rows, WARPS)
        S = _entry(S, log, first_k + j + 1, first_u + j + 1, along_k, rows, WARPS)
    for j in range(pairs, count):
        S = _entry(S, log, first_k + j, first_u + j, along_k, rows, WARPS)
    return S


@gluon.jit
def _copy_nodes(out, at_ptr, count, STRIDE: gl.constexpr, layout: gl.constexpr):
    """A record of each of a row's `count` nodes -> a shared buffer."""
    if out.shape[0] == 1:
        _copy_row(out, at_ptr, count > 0, layout)
    else:
        node = gl.arange(0, out.shape[0], gl.SliceLayout(1, layout))
        _copy_entries(out, at_ptr, node, 0, count, STRIDE, layout)


@gluon.jit
def _copy_words(out, at_ptr, size, layout: gl.constexpr):
    """`size` words of a row's walk list -> a shared buffer."""
    row = gl.arange(0, 1, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, out.shape[1], gl.SliceLayout(0, layout))[None, :]
    _copy(out, at_ptr + (row + column), mask=row + column < size)


@gluon.jit
def _number_of_each(
    at_ptr, count, STRIDE: gl.constexpr, NODES: gl.constexpr, listed: gl.constexpr
):
    """A number of each of a row's `count` nodes; of one node, not as a list."""
    if NODES == 1:
        x = gl.load(at_ptr, mask=count > 0, other=0.0)
    else:
        node = gl.arange(0, NODES, listed)
        x = gl.load(at_ptr + node * STRIDE, mask=node < count, other=0.0)
    return x


@gluon.constexpr_function
def _state_layout(DEEP, LANES, HIGH, WARPS):
    """Of S [TILE, DEEP, LANES, 4], as in `ops.gdn.triton_stream`."""
    return gl.BlockedLayout(
        [HIGH, DEEP, 1, 4], [32 // LANES, 1, LANES, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]
    )


@gluon.jit
def _operand(rows, i, S):
    """The i-th vector over K, as S x it asks for it."""
    return rows.index(i).load(gl.SliceLayout(0, S.type.layout))[None, :, :, :]


@gluon.jit
def _step(S, k, q, v_at, beta, u_at, o_at, WARPS: gl.constexpr):
    """S after a node, of what its decay has left, and its u, which is stored as its o is."""
    TILE: gl.constexpr = S.shape[0]
    LANES: gl.constexpr = S.shape[2]
    HIGH: gl.constexpr = TILE // (32 // LANES * WARPS)
    TRADES: gl.constexpr = _log2(HIGH)
    TRADES_U: gl.constexpr = TRADES if HIGH > 2 else 0
    sums: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, S.type.layout))
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    rows_u: gl.constexpr = gl.SliceLayout(1, _traded(TILE, LANES, HIGH, WARPS, TRADES_U, True))
    rows_o: gl.constexpr = gl.SliceLayout(1, _traded(TILE, LANES, HIGH, WARPS, TRADES, True))
    v = v_at.load(rows_u).to(gl.float32)
    u = beta * (v - _across(_partial(S, k, sums), TRADES_U, HIGH, WARPS))
    gl.store(u_at + gl.arange(0, TILE, rows_u), u)
    u = _back(u, rows, LANES, TRADES_U, HIGH, WARPS)
    S = _update(S, u, k)
    o = _across(_partial(S, q, sums), TRADES, HIGH, WARPS)
    gl.store(o_at + gl.arange(0, TILE, rows_o), o)
    return S, u


@gluon.jit
def _node(S, node, nodes, out, WARPS: gl.constexpr):
    """`_step` of a row's node, its decay applied first.

    nodes: shared buffers of k and q and where this row's begin, then of v, decay and beta and
    where these begin. out: pointers to u and o of node 0, elements from node to node."""
    ks, qs, first_k, vs, decays, betas, first = nodes
    u_at, o_at, step = out
    k, q = _operand(ks, first_k + node, S), _operand(qs, first_k + node, S)
    S = S * _scalar(decays.index(first + node), WARPS)
    beta = _scalar(betas.index(first + node), WARPS)
    at = node * step
    return _step(S, k, q, vs.index(first + node), beta, u_at + at, o_at + at, WARPS)


@gluon.jit
def _walk_chain(S, count, nodes, out, WARPS: gl.constexpr):
    """Two nodes a pass: the first one's o is summed beside the second one's u."""
    pairs = count & -2
    for i in range(0, pairs, 2):
        S, _ = _node(S, i, nodes, out, WARPS)
        S, _ = _node(S, i + 1, nodes, out, WARPS)
    for i in range(pairs, count):
        S, _ = _node(S, i, nodes, out, WARPS)


@gluon.jit
def _walk_bush(S, words, first_word, nodes, out, NODES: gl.constexpr, WARPS: gl.constexpr):
    """A tree of at most four nodes: what restarts from the checkpoint follows upon a leaf."""
    num_ops = _scalar(words.index(first_word), WARPS)
    word = _scalar(words.index(first_word + 1), WARPS)
    for i in range(num_ops):
        following = _scalar(words.index(first_word + 2 + i), WARPS)
        if (following & _RESTORE) != 0:
            _stay()
            _node(S, word & (NODES - 1), nodes, out, WARPS)
        else:
            S, _ = _node(S, word & (NODES - 1), nodes, out, WARPS)
        word = following


@gluon.jit
def _walk_tree(S, words, first_word, nodes, out, NODES: gl.constexpr, WARPS: gl.constexpr):
    """Any tree, with a checkpoint; the u of node n is in lane n of those that share a row."""
    TILE: gl.constexpr = S.shape[0]
    LANES: gl.constexpr = S.shape[2]
    HIGH: gl.constexpr = TILE // (32 // LANES * WARPS)
    gl.static_assert(NODES <= LANES)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(1, S.type.layout)))
    kept: gl.constexpr = gl.BlockedLayout([HIGH, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    lane = gl.arange(0, LANES, gl.SliceLayout(0, kept))[None, :]
    us = gl.zeros([TILE, LANES], gl.float32, kept)
    ks, _, first_k, _, decays, _, first = nodes
    num_ops = _scalar(words.index(first_word), WARPS)
    word = _scalar(words.index(first_word + 1), WARPS)
    C = S
    for i in range(num_ops):
        following = _scalar(words.index(first_word + 2 + i), WARPS)
        node = word & (NODES - 1)
        if (word & _RESTORE) != 0:
            _stay()
            S = C
        if (word & _WALK) != 0:
            S, u = _node(S, node, nodes, out, WARPS)
            walked = gl.convert_layout(u, gl.SliceLayout(1, kept), assert_trivial=True)
            us = gl.where(lane == node, walked.expand_dims(1), us)
        else:
            source = gl.full([TILE, 1], node, gl.int32, layout=kept)
            bits = _sum(gl.gather(us.to(gl.int32, bitcast=True), source, axis=1), axis=1)
            replayed = gl.convert_layout(bits, rows, assert_trivial=True)
            replayed = replayed.to(gl.float32, bitcast=True)
            S = S * _scalar(decays.index(first + node), WARPS)
            S = _update(S, replayed, _operand(ks, first_k + node, S))
        if (word & _SAVE) != 0:
            _stay()
            C = S
        word = following
