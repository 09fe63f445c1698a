# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The walk of `ops.gdn.triton` on Hopper, with what it reads in shared memory.

Same sums, same bits as `ops.gdn.triton._walk_kernel` (a test on the device compares them), the
same inputs and outputs. What differs is where operands wait. A program of several warps copies
the k and q of a row's nodes, and the log's k and u, into shared memory once; each warp then walks
by itself, with its own rows of the state, and finds an operand 30 cycles away instead of one trip
to L2. So nothing is fetched ahead into registers, and more warps fit on a multiprocessor.

Every shared buffer is written before one barrier and read after it: inside the walk there is none.
A node's u, which a replay needs, stays in registers, node n in lane n % LANES of those that share
the row.

Sums over K end in a reduction over the lanes of a row. Where a lane has several rows, lanes first
trade half of their rows for half of the lanes, so that each sums fewer; pairs are added in the
order of `ops.gdn.triton`'s butterfly, hence the same bits from a third of the shuffles.

Source: as `ops.gdn.triton`; docs/adr/0015.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.triton_prepare import overlap
from specla.ops.walk import NODE_MASK, RESTORE, SAVE, WALK

# Later Tritons renamed these.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

_WALK, _RESTORE, _SAVE = gl.constexpr(WALK), gl.constexpr(RESTORE), gl.constexpr(SAVE)
_NODE = gl.constexpr(NODE_MASK)

LOG = 8
"""Log entries that are in shared memory at a time."""


class StreamTile(NamedTuple):
    """How a value head is cut for this kernel. Speed, never bits.

    rows: of V per program. warps: share them; each has 32 / lanes times 1, 2 or 4 rows.
    registers: most per thread; 0 leaves it to the compiler.
    late: a node's output is summed over lanes beside the next node's u, and u in all lanes at
    once: more shuffles and fewer waits, for warps that have a scheduler to themselves.
    """

    rows: int
    warps: int
    registers: int = 0
    late: bool = False


def tile_for(
    shape: RecurrentShape, programs: int, num_nodes: int, *, lanes: int, branching: bool
) -> StreamTile:
    """`programs` share a tile's rows. As measured on an H200 (docs/adr/0015): two rows a lane;
    four where states of many rows wait for issue slots, unless a checkpoint of short rows is kept.
    More warps share a program's operands as these leave room for fewer programs."""
    elements = programs * shape.num_value_heads * shape.value_dim * shape.key_dim
    node_bytes = 8 * shape.key_dim * triton.next_power_of_2(num_nodes)
    two_rows = 8 * (32 // lanes)  # of four warps
    long, halves = shape.key_dim >= 256, shape.value_dim // two_rows
    if elements >= 1 << 24 and node_bytes <= 32768 and (long or not branching) and not halves % 2:
        return StreamTile(2 * two_rows, 4, registers=168 if branching else 0)
    if elements < 1 << 22 and long and not halves % 4:
        # A few rows: fewer warps leave the products' weights room to come early.
        if node_bytes > 98304:
            return StreamTile(4 * two_rows, 8, late=True)
        rows = two_rows if elements <= 1 << 20 and num_nodes > 2 else 2 * two_rows
        return StreamTile(rows, 4, late=num_nodes > 2)
    share = 4 if node_bytes > 98304 else 2 if node_bytes > 49152 else 1
    if branching and long and 1 << 22 <= elements < 1 << 24:
        share = max(share, 2)
    share = gcd(share, halves)  # tiles are the whole of a value head
    return StreamTile(share * two_rows, share * 4)


def launch(
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    meta: dict[str, Any],
    tile: StreamTile,
    num_nodes: int,
) -> None:
    """Run the kernel over what `ops.gdn.triton.walk` gives its own.

    meta: H, G, K, V, LANES, PARTS, BRANCHING, PDL.
    """
    assert tile.rows * meta["LANES"] // (32 * tile.warps) in (1, 2, 4), tile
    registers = {"maxnreg": tile.registers} if tile.registers else {}
    _stream_kernel[grid](
        *arguments,
        **meta,
        LATE=tile.late,
        NODES=triton.next_power_of_2(num_nodes),
        LOG=LOG,
        TILE=tile.rows,
        num_warps=tile.warps,
        **registers,
        **overlap(meta["PDL"]),
    )


@gluon.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _copied(width, vector, warps):
    """Of [rows, width]: threads side by side along the rows, `vector` elements each."""
    lanes = min(32, width // vector)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def _traded(TILE, LANES, HIGH, WARPS, step, summed):
    """Of sums [TILE, LANES], HIGH rows a lane, after `step` trades of half of the rows for half
    of the lanes; `summed`: the lanes that came in have been added up, their axis is as much
    shorter."""
    high, width = _log2(HIGH), LANES >> (step if summed else step - 1)
    register = [[1 << i, 0] for i in range(high - step)] + ([] if summed else [[0, width // 2]])
    lane = [[0, 1 << i] for i in range(_log2(LANES) - step)]
    lane += [[1 << i, 0] for i in range(high - step, high + _log2(32 // LANES))]
    warp = [[HIGH * 32 // LANES << i, 0] for i in range(_log2(WARPS))]
    return gl.DistributedLinearLayout(register, lane, warp, [], [TILE, width])


@gluon.jit
def _stay():
    """Keeps the branch around it: a select in its place is paid for in every step."""
    gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _another(x):
    """x, as a number that the compiler knows nothing of: two branches that multiply by it would be
    made into a copy in one of them and a product behind both."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sum(x, axis: gl.constexpr):
    return gl.reduce(x, axis, _add)


@gluon.jit
def _rows(buffer, shape: gl.constexpr):
    """A shared buffer [N, ...], written as a matrix, as N buffers of another shape."""
    order: gl.constexpr = [2, 1, 0] if len(shape) == 4 else [0]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order)
    if _PUBLIC:
        rows = buffer.reinterpret(buffer.dtype, shape, layout)
    else:
        rows = buffer._reinterpret(buffer.dtype, shape, layout)
    return rows


@gluon.jit
def _scalar(cell, WARPS: gl.constexpr):
    """The one element of a shared buffer."""
    return _sum(cell.load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def _log_entry(j, ring_len, log_len, path_ptr, first_in_bank):
    """As `ops.gdn.triton._log_entry`, of a list."""
    place = gl.load(path_ptr + j, mask=(j >= ring_len) & (j < log_len), other=0)
    return gl.where(j < ring_len, j, first_in_bank + place)


@gluon.jit
def _runs(x):
    """[TILE, DEEP, LANES, 4] -> DEEP (2 or 4) tensors without that axis."""
    TILE: gl.constexpr = x.shape[0]
    LANES: gl.constexpr = x.shape[2]
    if x.shape[1] == 2:
        runs = x.permute([0, 2, 3, 1]).split()
    else:
        even, odd = x.reshape([TILE, 2, 2, LANES, 4]).permute([0, 3, 4, 1, 2]).split()
        first, third = even.split()
        second, fourth = odd.split()
        runs = (first, second, third, fourth)
    return runs


@gluon.jit
def _partial(S, x, layout: gl.constexpr):
    """S [TILE, DEEP, LANES, 4] times x, summed in registers: [TILE, LANES] in `layout`. The order
    is what the compiler makes of `ops.gdn.triton._dot`; left to it, it is not always the same."""
    x, _ = gl.broadcast(x, S)
    S, x = _runs(S), _runs(x)
    total = gl.fma(S[0], x[0], S[1] * x[1])
    for i in gl.static_range(2, len(S)):
        total = gl.fma(S[i], x[i], total)
    return gl.convert_layout(_sum(total, axis=2), layout, assert_trivial=True)


@gluon.jit
def _across(x, STEPS: gl.constexpr, HIGH: gl.constexpr, WARPS: gl.constexpr):
    """x [TILE, LANES] summed over LANES, with STEPS trades; the layout is _traded's last one."""
    TILE: gl.constexpr = x.shape[0]
    LANES: gl.constexpr = x.shape[1]
    for step in gl.static_range(1, STEPS + 1):
        x = gl.convert_layout(x, _traded(TILE, LANES, HIGH, WARPS, step, False))
        x = _sum(x.reshape([TILE, 2, LANES >> step]), axis=1)
    last: gl.constexpr = _traded(TILE, LANES, HIGH, WARPS, STEPS, True)
    return _sum(gl.convert_layout(x, last, assert_trivial=True), axis=1)


@gluon.jit
def _back(
    x, layout: gl.constexpr, LANES: gl.constexpr, STEPS: gl.constexpr, HIGH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """One value a lane -> all HIGH of its rows; one trade at a time stays inside the warp."""
    for step in gl.static_range(STEPS - 1, 0, -1):
        between: gl.constexpr = _traded(x.shape[0], LANES, HIGH, WARPS, step, True)
        x = gl.convert_layout(x, gl.SliceLayout(1, between))
    return gl.convert_layout(x, layout)


@gluon.jit
def _update(S, u, k):
    """S + u k^T, rounded once; u [TILE]."""
    u, _ = gl.broadcast(u.expand_dims(1).expand_dims(2).expand_dims(1), S)
    k, _ = gl.broadcast(k, S)
    return gl.fma(u, k, S)


@gluon.jit(
    do_not_specialize=[
        "num_columns", "num_path", "num_entries", "log_capacity", "walk_stride", "threshold",
    ]
)  # fmt: skip
def _stream_kernel(  # noqa: C901 - one kernel, one pass
    S_ptr, k_ptr, u_ptr, g_ptr, q_ptr, v_ptr, beta_ptr, o_ptr, arrivals_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr, walk_ptr,
    num_columns, num_path, num_entries, log_capacity, walk_stride, threshold,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NODES: gl.constexpr,
    LOG: gl.constexpr, TILE: gl.constexpr, LANES: gl.constexpr, PARTS: gl.constexpr,
    BRANCHING: gl.constexpr, PDL: gl.constexpr, LATE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Program (value head and tile, row, part), as in `ops.gdn.triton`."""
    TILES: gl.constexpr = V // TILE
    DEEP: gl.constexpr = K // (4 * LANES)
    HIGH: gl.constexpr = TILE // (32 // LANES * num_warps)  # rows of a lane
    TRADES: gl.constexpr = _log2(HIGH)
    # u must be back in all lanes of a row: that takes as long as two rows' shuffles save.
    TRADES_U: gl.constexpr = TRADES if HIGH > 2 and not LATE else 0
    # A warp's load covers 4 LANES consecutive elements of a row; DEEP such runs are the row.
    state: gl.constexpr = gl.BlockedLayout(
        [HIGH, DEEP, 1, 4], [32 // LANES, 1, LANES, 1], [num_warps, 1, 1, 1], [3, 2, 1, 0]
    )
    along_k: gl.constexpr = gl.SliceLayout(0, state)
    sums: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, state))
    rows: gl.constexpr = gl.SliceLayout(1, sums)
    rows_u: gl.constexpr = gl.SliceLayout(1, _traded(TILE, LANES, HIGH, num_warps, TRADES_U, True))
    rows_o: gl.constexpr = gl.SliceLayout(1, _traded(TILE, LANES, HIGH, num_warps, TRADES, True))
    copied_k: gl.constexpr = _copied(K, 4, num_warps)
    copied_u: gl.constexpr = _copied(TILE, 4, num_warps)
    VECTOR: gl.constexpr = min(TILE, 128 // v_ptr.dtype.element_ty.primitive_bitwidth)
    copied_v: gl.constexpr = _copied(TILE, VECTOR, num_warps)
    listed: gl.constexpr = gl.SliceLayout(1, _copied(1, 1, num_warps))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    b, part = gl.program_id(1), gl.program_id(2)
    head, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    key_head = head // (G // H)
    num_nodes = gl.load(num_nodes_ptr + b)
    slot = gl.load(slot_ptr + b).to(gl.int64)
    bank = gl.load(bank_ptr + b)
    ring_len = gl.load(ring_len_ptr + b)
    log_len = ring_len + gl.load(path_len_ptr + b)
    if PDL:
        gdc_launch_dependents()
    if num_nodes == 0:
        if PDL:
            gdc_wait()
        return
    fold = log_len > threshold
    row = gl.arange(0, TILE, layout=rows).expand_dims(1).expand_dims(2).expand_dims(1)
    deep = gl.arange(0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, state))))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, state))))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, state))))
    wide = deep[None, :, None, None] * (4 * LANES) + lane[None, None, :, None] * 4
    S_at = S_ptr + ((slot * G + head) * V + tile * TILE) * K
    S_at = S_at + (row * K + wide + four[None, None, None, :])
    S = gl.load(S_at)

    # The log, LOG entries at a time. What is not folded moves to the ring.
    k_ptr += (slot * num_entries * H + key_head) * K
    u_ptr += (slot * num_entries * G + head) * V + tile * TILE
    g_ptr += slot * num_entries * G + head
    path_ptr += b * num_path - ring_len
    first_in_bank = log_capacity + bank * num_path
    owns_k = (tile == 0) & (head % (G // H) == 0)
    column_k = gl.arange(0, K, gl.SliceLayout(0, copied_k))[None, :]
    column_u = gl.arange(0, TILE, gl.SliceLayout(0, copied_u))[None, :]
    log_k = gl.allocate_shared_memory(gl.float32, [LOG, K], flat)
    log_u = gl.allocate_shared_memory(gl.float32, [LOG, TILE], flat)
    log_decay = gl.allocate_shared_memory(gl.float32, [LOG, 1], flat)
    log_ks = _rows(log_k, [LOG, DEEP, LANES, 4])
    log_us = _rows(log_u, [LOG, TILE])
    log_decays = _rows(log_decay, [LOG, 1])
    for start in range(0, log_len, LOG):
        j_k = start + gl.arange(0, LOG, gl.SliceLayout(1, copied_k))[:, None]
        j_u = start + gl.arange(0, LOG, gl.SliceLayout(1, copied_u))[:, None]
        j_g = start + gl.arange(0, LOG, listed)
        at = _log_entry(j_k, ring_len, log_len, path_ptr, first_in_bank) * (H * K) + column_k
        _copy(log_k, k_ptr + at, mask=j_k < log_len)
        at_u = _log_entry(j_u, ring_len, log_len, path_ptr, first_in_bank) * (G * V) + column_u
        _copy(log_u, u_ptr + at_u, mask=j_u < log_len)
        async_copy.commit_group()
        at_g = _log_entry(j_g, ring_len, log_len, path_ptr, first_in_bank) * G
        g = gl.load(g_ptr + at_g, mask=j_g < log_len, other=0.0)
        log_decay.store(gl.exp(g)[:, None])
        async_copy.wait_group(0)
        _barrier()
        for j in range(min(LOG, log_len - start)):
            k = log_ks.index(j).load(along_k)[None, :, :, :]
            u = log_us.index(j).load(rows)
            S = _update(S * _scalar(log_decays.index(j), num_warps), u, k)
        if (fold == 0) & (part == 0):
            moved_u = (j_u >= ring_len) & (j_u < log_len)
            gl.store(u_ptr + (j_u * (G * V) + column_u), log_u.load(copied_u), mask=moved_u)
            if tile == 0:
                gl.store(g_ptr + j_g * G, g, mask=(j_g >= ring_len) & (j_g < log_len))
            if owns_k:
                moved_k = (j_k >= ring_len) & (j_k < log_len)
                gl.store(k_ptr + (j_k * (H * K) + column_k), log_k.load(copied_k), mask=moved_k)
    if fold:
        is_last = True
        if PARTS > 1:
            # S may be written once every part has read it: the last one to come does.
            arrivals_ptr += (b * G + head) * TILES + tile
            _barrier()
            is_last = gl.atomic_add(arrivals_ptr, 1) == PARTS - 1
            if is_last:
                gl.store(arrivals_ptr, 0)
        if is_last:
            gl.store(S_at, S)
    walk_ptr += (b * PARTS + part) * walk_stride
    num_ops = gl.load(walk_ptr)
    word = gl.load(walk_ptr + 1)
    following = gl.load(walk_ptr + 2, mask=num_ops > 1, other=0)
    if PDL:
        gdc_wait()

    # All nodes' operands at once.
    candidates = log_capacity + (1 - bank) * num_path
    k_ptr += candidates * (H * K)
    u_ptr += candidates * (G * V)
    g_ptr += candidates * G
    m = b * num_columns
    q_ptr += (m * H + key_head) * K
    v_ptr += (m * G + head) * V + tile * TILE
    n_k = gl.arange(0, NODES, gl.SliceLayout(1, copied_k))[:, None]
    n_v = gl.arange(0, NODES, gl.SliceLayout(1, copied_v))[:, None]
    n = gl.arange(0, NODES, listed)
    column_v = gl.arange(0, TILE, gl.SliceLayout(0, copied_v))[None, :]
    node_k = gl.allocate_shared_memory(gl.float32, [NODES, K], flat)
    node_q = gl.allocate_shared_memory(gl.float32, [NODES, K], flat)
    node_v = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [NODES, TILE], flat)
    node_decay = gl.allocate_shared_memory(gl.float32, [NODES, 1], flat)
    node_beta = gl.allocate_shared_memory(gl.float32, [NODES, 1], flat)
    at_k = n_k * (H * K) + column_k
    _copy(node_k, k_ptr + at_k, mask=n_k < num_nodes)
    _copy(node_q, q_ptr + at_k, mask=n_k < num_nodes)
    at_v = n_v * (G * V) + column_v
    _copy(node_v, v_ptr + at_v, mask=n_v < num_nodes)
    async_copy.commit_group()
    node_g = gl.load(g_ptr + n * G, mask=n < num_nodes, other=0.0)
    strength = gl.load(beta_ptr + m * G + head + n * G, mask=n < num_nodes, other=0.0)
    node_decay.store(gl.exp(node_g)[:, None])
    node_beta.store(strength[:, None])
    async_copy.wait_group(0)
    _barrier()
    ks = _rows(node_k, [NODES, DEEP, LANES, 4])
    qs = _rows(node_q, [NODES, DEEP, LANES, 4])
    vs = _rows(node_v, [NODES, TILE])
    decays = _rows(node_decay, [NODES, 1])
    betas = _rows(node_beta, [NODES, 1])

    u_at = u_ptr + gl.arange(0, TILE, rows_u)
    o_at = o_ptr + (m * G + head) * V + tile * TILE + gl.arange(0, TILE, rows_o)
    if BRANCHING:
        SLOTS: gl.constexpr = (NODES + LANES - 1) // LANES
        kept: gl.constexpr = gl.BlockedLayout(
            [HIGH, SLOTS, 1], [32 // LANES, 1, LANES], [num_warps, 1, 1], [2, 1, 0]
        )
        kept_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, kept))
        slot_of = gl.arange(0, SLOTS, gl.SliceLayout(0, gl.SliceLayout(2, kept)))[None, :, None]
        lane_of = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, kept)))[None, None, :]
        us = gl.zeros([TILE, SLOTS, LANES], gl.float32, kept)
        C = S
    if LATE:
        waiting, before = gl.zeros([TILE, LANES], gl.float32, sums), word & _NODE
    # A pass ends with the next operation's decay: at the head of a chain's loop it would cost
    # moving half of the state between registers.
    node = word & _NODE
    S = S * _scalar(decays.index(node), num_warps)
    for i in range(num_ops):
        after = gl.load(walk_ptr + 3 + i, mask=i + 2 < num_ops, other=0)
        next_node = following & _NODE
        next_decay = _scalar(decays.index(next_node), num_warps)
        k = ks.index(node).load(along_k)[None, :, :, :]
        if BRANCHING and (word & _WALK) == 0:
            mine = gl.where(slot_of == node // LANES, us.to(gl.int32, bitcast=True), 0)
            mine = _sum(mine, axis=1)
            source = gl.full([TILE, 1], node % LANES, gl.int32, layout=mine.type.layout)
            replayed = _sum(gl.gather(mine, source, axis=1), axis=1)
            replayed = gl.convert_layout(replayed, rows, assert_trivial=True)
            S = _update(S, replayed.to(gl.float32, bitcast=True), k)
        else:
            beta = _scalar(betas.index(node), num_warps)
            v = vs.index(node).load(rows_u).to(gl.float32)
            if LATE:
                # The first operation is a walk: from the second one on there is an output.
                o = _across(waiting, TRADES, HIGH, num_warps)
                gl.store(o_at + before * (G * V), o, mask=gl.arange(0, TILE, rows_o) < i * TILE)
            u = beta * (v - _across(_partial(S, k, sums), TRADES_U, HIGH, num_warps))
            gl.store(u_at + node * (G * V), u)
            u = _back(u, rows, LANES, TRADES_U, HIGH, num_warps)
            S = _update(S, u, k)
            if BRANCHING:
                spread = gl.convert_layout(u, kept_row, assert_trivial=True)
                spread = spread.expand_dims(1).expand_dims(1)
                us = gl.where(slot_of * LANES + lane_of == node, spread, us)
            q = qs.index(node).load(along_k)[None, :, :, :]
            if LATE:
                waiting, before = _partial(S, q, sums), node
            else:
                o = _across(_partial(S, q, sums), TRADES, HIGH, num_warps)
                gl.store(o_at + node * (G * V), o)
        if BRANCHING and (word & _SAVE) != 0:
            _stay()
            C = S
        word, following, node = following, after, next_node
        if BRANCHING and (word & _RESTORE) != 0:  # noqa: SIM108 - a branch
            S = C * _another(next_decay)
        else:
            S = S * next_decay
    if LATE and num_ops > 0:
        gl.store(o_at + before * (G * V), _across(waiting, TRADES, HIGH, num_warps))
