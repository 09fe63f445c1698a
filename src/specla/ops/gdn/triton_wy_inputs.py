# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What a row and key head's operands are made of, where they are used: the convolution and the
gates of `ops.gdn.triton_wy_fused`. Letters as in `ops.gdn.triton_wy`.

The chain of waits counts here, not the arithmetic: nothing else of the program runs meanwhile. So
where a row's inputs lie is found out once for all of its key heads; all that can be is asked for
before the first of it is waited for, by threads that have a node and eight columns; the taps lie
in shared memory, which leaves their registers to inputs on their way; and what is small is held a
number a lane by every warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specla.ops.gdn.triton_wy_asks import column_of, viewed, worked_out
from specla.ops.gdn.triton_wy_operands import COLUMNS, barrier, pieces, rows_of

_COLUMNS = gl.constexpr(COLUMNS)
_N = gl.constexpr(16)  # nodes, and entries of the log


@gluon.constexpr_function
def tile_layout():
    """Of tiles [16, 64] of the convolution: a node and eight columns in a row per thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def line_layout():
    """Of [2, 16]: (value head, column), one a lane, in every warp."""
    return gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def cube_layout():
    """Of [2, 16, 16]: (value head, node, node or entry). A warp has all of a head."""
    return gl.BlockedLayout([1, 2, 4], [1, 8, 4], [2, 2, 1], [2, 1, 0])


@gluon.constexpr_function
def plain():
    """Shared memory in the order of rows."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def summed(x, axis: gl.constexpr):
    return gl.reduce(x, axis, _add)


@gluon.jit
def _sigmoid(x):
    """By approximations that are good to 2^-21: a division and an exponential cost more than the
    convolution."""
    return gl.inline_asm_elementwise(
        """{
        mul.f32 $0, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 $0, $0;
        add.f32 $0, $0, 0f3F800000;
        rcp.approx.ftz.f32 $0, $0;
        }""", "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _rounded(x):
    """To bfloat16 and back."""
    return gl.inline_asm_elementwise(
        """{
        cvt.rn.bf16x2.f32 $1, $3, $2;
        shl.b32 $0, $1, 16;
        and.b32 $1, $1, 0xFFFF0000;
        }""", "=&r,=&r,r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _widened(x):
    """bfloat16 to float32, neighbours in a register, by an instruction each."""
    return gl.inline_asm_elementwise(
        """{
        shl.b32 $0, $2, 16;
        and.b32 $1, $2, 0xFFFF0000;
        }""", "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _softplus(x):
    """As `triton_prepare.softplus`."""
    e = gl.exp(gl.minimum(x, 20.0))
    y = 1 + e
    log1p = gl.where(y == 1, e, gl.log(y) * (e / (y - 1)))
    return gl.where(x > 20, x, log1p)


@gluon.jit
def _climb(parents_ptr, node, beyond):
    """One step up: as `triton_prepare._climb`."""
    beyond = gl.where(node < 0, beyond + 1, beyond)
    return gl.load(parents_ptr + node, mask=node >= 0, other=-1), beyond


@gluon.jit
def _lying(node, beyond, path_ptr, path_len, W: gl.constexpr):
    """Where an input lies: of a node itself; of what is so far beyond the root -1 to 1 - W in the
    tail, newest first, or -W - p for place p of the bank."""
    entry = path_len - beyond
    place = gl.load(path_ptr + entry, mask=(node < 0) & (entry >= 0), other=0)
    return gl.where(node < 0, gl.where(entry < 0, entry, -W - place), node)


@gluon.jit
def find_inputs(found, parents_ptr, path_ptr, path_len, ring_len, bank_at, n, W: gl.constexpr):
    """Where what a row's key heads read lies, into `found` [5, 16]: the inputs (`_lying`) of each
    node's three steps up, oldest first; the log's entries; the inputs above the root. bank_at: the
    bank's first entry."""
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, tile_layout())))
    waiting = node - ring_len
    of_bank = gl.load(path_ptr + waiting, mask=(waiting >= 0) & (waiting < path_len), other=0)
    place = gl.where(waiting < 0, node, bank_at + of_bank)
    live = gl.where(node < n, node, -1)
    one, from_one = _climb(parents_ptr, live, gl.where(live < 0, 1, 1))
    two, from_two = _climb(parents_ptr, one, from_one)
    three, from_three = _climb(parents_ptr, two, from_two)
    above_root = gl.where(node < W - 1, W - 1 - node, 1)
    oldest = _lying(three, from_three, path_ptr, path_len, W)
    middle = _lying(two, from_two, path_ptr, path_len, W)
    newest = _lying(one, from_one, path_ptr, path_len, W)
    top = _lying(gl.where(node < 0, 0, -1), above_root, path_ptr, path_len, W)
    found.index(0).store(oldest)
    found.index(1).store(middle)
    found.index(2).store(newest)
    found.index(3).store(place)
    found.index(4).store(top)


@gluon.jit
def _origin(row, lying, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where a raw input begins."""
    y_ptr, inputs_ptr, tail_ptr, m = row
    above = gl.where(lying > -W, tail_ptr + (W - 1 + lying) * C, inputs_ptr - (W + lying) * C)
    return gl.where(lying < 0, above, y_ptr + (m + lying) * STRIDE)


@gluon.jit
def _origins(row, node, found, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where the raw inputs of each node's four steps begin, oldest first."""
    layout: gl.constexpr = gl.SliceLayout(1, tile_layout())
    oldest, middle = found.index(0).load(layout), found.index(1).load(layout)
    newest = found.index(2).load(layout)
    return (
        _origin(row, oldest, C, W, STRIDE), _origin(row, middle, C, W, STRIDE),
        _origin(row, newest, C, W, STRIDE), row[0] + (row[3] + node) * STRIDE,
    )  # fmt: skip


@gluon.jit
def _raw(origins, column, mask):
    """A tile's raw inputs, oldest first."""
    x = ()
    for i in gl.static_range(4):
        x += (gl.load(origins[i][:, None] + column[None, :], mask=mask, other=0.0),)
    return x


@gluon.jit
def _taps(taps_ptr, key_head, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """[32, 64]: four taps, oldest first, of each tile."""
    C: gl.constexpr = 2 * H * K + G * V
    layout: gl.constexpr = tile_layout()
    r = worked_out(gl.arange(0, 2 * _N, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, layout))
    at = r % 4 * C + column_of(key_head, r // 4 * _COLUMNS, H, K, V)
    return gl.load(taps_ptr + (at[:, None] + column[None, :]))


@gluon.jit
def _convolved(raw, taps, tile: gl.constexpr):
    """SiLU of the convolution."""
    layout: gl.constexpr = gl.SliceLayout(0, tile_layout())
    acc = _widened(raw[0]) * _widened(taps.index(4 * tile).load(layout))[None, :]
    for i in gl.static_range(1, 4):
        acc = _widened(raw[i]) * _widened(taps.index(4 * tile + i).load(layout))[None, :] + acc
    return _rounded(acc * _sigmoid(acc))


@gluon.jit
def _tail_columns(key_head, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """(inputs, columns) of a tail's part."""
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    i = worked_out(gl.arange(0, 4, layout=gl.SliceLayout(1, wide)))[:, None]
    f = gl.arange(0, 2 * K + 2 * V, layout=gl.SliceLayout(0, wide))[None, :]
    return i, column_of(key_head, f, H, K, V)


@gluon.jit
def _newest_inputs(
    row, found, key_head, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """The W - 1 above the root: the tail to be."""
    C: gl.constexpr = 2 * H * K + G * V
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    i, column = _tail_columns(key_head, H, K, V)
    four = viewed(found.index(4), gl.int32, [4, 4], found.layout).index(0)
    at = _origin(row, four.load(gl.SliceLayout(1, wide)), C, W, STRIDE)
    return gl.load(at[:, None] + column, mask=i < W - 1, other=0.0)


@gluon.jit
def keep(out, x):
    """x [B, R, C] in pieces into the shared buffers `out` [2 B, R, C], low pieces behind high ones
    of the same R rows. At once: between stores to one buffer the compiler puts a barrier."""
    B: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    C: gl.constexpr = x.shape[2]
    high, low = pieces(x)
    both = gl.join(high, low).permute((0, 3, 1, 2)).reshape([2 * B * R, C])
    viewed(out, gl.bfloat16, [1, 2 * B * R, C], out.layout).index(0).store(both)


@gluon.jit
def _beside(first, second):
    """Two halves of the columns -> [2, rows, columns]."""
    return gl.join(first, second).permute((2, 0, 1))


@gluon.jit
def _woven(q, k):
    """q_0 k_0 q_1 k_1 ..."""
    return gl.join(q, k).permute((0, 2, 1)).reshape([2 * q.shape[0], q.shape[1]])


@gluon.jit
def _gate_inputs(gates, n, G: gl.constexpr, STRIDE: gl.constexpr):
    """What the gates [2, 16] come from."""
    gates_ptr, A_ptr, dt_bias_ptr = gates
    line: gl.constexpr = line_layout()
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, line))
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, line)))
    at = gates_ptr + (node[None, :] * STRIDE + h[:, None])
    live = (node < n)[None, :] & (h >= 0)[:, None]
    return (
        gl.load(at, mask=live, other=0.0), gl.load(at + G, mask=live, other=0.0),
        gl.load(A_ptr + h), gl.load(dt_bias_ptr + h), live,
    )  # fmt: skip


@gluon.jit
def _gates(inputs, log_g, kept, g_ptr, candidates, ring_len, end, beta_scale, G: gl.constexpr):
    """g and beta of the nodes and g of the log [2, 16] into `kept` [8, 16], in this order. g of
    the nodes goes to memory too, and of the log what moves to the ring."""
    a, logit, A, dt_bias, live = inputs
    line: gl.constexpr = line_layout()
    g = A[:, None] * _softplus(a.to(gl.float32) + dt_bias[:, None])
    beta = beta_scale / (1 + gl.exp(-logit.to(gl.float32)))
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, line))
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, line)))
    gl.store(g_ptr + ((candidates + node)[None, :] * G + h[:, None]), g, mask=live)
    moving = ((node >= ring_len) & (node < end))[None, :] & (h >= 0)[:, None]
    gl.store(g_ptr + (node[None, :] * G + h[:, None]), log_g, mask=moving)
    g, beta = gl.where(live, g, 0.0), gl.where(live, beta, 0.0)
    x = gl.join(gl.join(g, beta), gl.join(log_g, log_g))  # [2, 16, 2, 2]
    kept.store(x.permute((3, 2, 0, 1)).reshape([8, _N]))


@gluon.jit
def _log_gates(g_ptr, found, log_len, G: gl.constexpr):
    """g [2, 16] of the log's entries."""
    line: gl.constexpr = line_layout()
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, line))[:, None]
    entry = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, line)))
    place = found.index(3).load(gl.SliceLayout(0, line))
    known = (entry < log_len)[None, :] & (h >= 0)
    return gl.load(g_ptr + (place[None, :] * G + h), mask=known, other=0.0)


@gluon.jit
def log_values(u_at, places, log_len, here, STRIDE: gl.constexpr, layout: gl.constexpr):
    """u [ROWS, 16] of the log's entries, 0 beyond it."""
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, layout))
    known = ((j < log_len) & here)[None, :]
    return gl.load(u_at + (places[None, :] * STRIDE + rows_of(layout)), mask=known, other=0.0)


@gluon.jit
def _tile_at(key_head, tile: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Where a tile of 64 columns begins: two of q, two of k, two of each v."""
    if tile < 4:
        at = (tile // 2 * H + key_head) * K + tile % 2 * _COLUMNS
    else:
        at = 2 * H * K + key_head * (2 * V) + (tile - 4) * _COLUMNS
    return at


@gluon.jit
def make_inputs(
    row, found, xs, es, vs, reads, kept, gates, taps_ptr, inputs_out, tail_out, log_k, g_ptr,
    ancestors_ptr, candidates, n, ring_len, log_len, end, key_head, beta_scale, H: gl.constexpr,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Convolution and gates of a row and key head: x, e, v and g, beta (`_gates`) into shared
    memory, k, g and the convolution's inputs into memory. Gives the nodes above each as bits.
    reads: room for the taps."""
    C: gl.constexpr = 2 * H * K + G * V
    tile: gl.constexpr = tile_layout()
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, tile))
    all_of_it = (column >= 0)[None, :]
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, tile)))
    mask = (node < n)[:, None] & all_of_it
    origins = _origins(row, node, found, C, W, STRIDE)
    place = found.index(3).load(gl.SliceLayout(1, tile))
    own_taps = _taps(taps_ptr, key_head, H, G, K, V)
    of_nodes = _gate_inputs(gates, n, G, STRIDE)
    log_g = _log_gates(g_ptr, found, log_len, G)
    known = (node < log_len)[:, None] & all_of_it
    e_at = log_k + (place[:, None] * (H * K) + column[None, :])
    e0 = gl.load(e_at, mask=known, other=0.0)
    e1 = gl.load(e_at + _COLUMNS, mask=known, other=0.0)
    raw = ()
    for i in gl.static_range(8):
        raw += (_raw(origins, _tile_at(key_head, i, H, K, V) + column, mask),)
    taps = viewed(reads, gl.bfloat16, [2 * _N, _COLUMNS], found.layout)
    viewed(reads, gl.bfloat16, [1, 2 * _N, _COLUMNS], plain()).index(0).store(own_taps)
    barrier()
    out = inputs_out + (node[:, None] * C + column[None, :])
    x = ()
    for i in gl.static_range(4):
        if i == 1:
            newest = _newest_inputs(row, found, key_head, H, G, K, V, W, STRIDE)
        x += (_convolved(raw[i], taps, i),)
        gl.store(out + _tile_at(key_head, i, H, K, V), raw[i][3], mask=mask)
    xq0, xq1, xk0, xk1 = x
    norm_q = (K**-0.5 / gl.sqrt(summed(xq0 * xq0 + xq1 * xq1, axis=1) + 1e-6))[:, None]
    norm_k = (1.0 / gl.sqrt(summed(xk0 * xk0 + xk1 * xk1, axis=1) + 1e-6))[:, None]
    xk0 *= norm_k
    xk1 *= norm_k
    keep(xs, _beside(_woven(xq0 * norm_q, xk0), _woven(xq1 * norm_q, xk1)))
    keep(es, _beside(e0, e1))
    k_at = log_k + ((candidates + node)[:, None] * (H * K) + column[None, :])
    gl.store(k_at, xk0, mask=mask)
    gl.store(k_at + _COLUMNS, xk1, mask=mask)
    moving = ((node >= ring_len) & (node < end))[:, None] & all_of_it
    ring_at = log_k + (node[:, None] * (H * K) + column[None, :])
    gl.store(ring_at, e0, mask=moving)
    gl.store(ring_at + _COLUMNS, e1, mask=moving)
    for i in gl.static_range(4, 8):
        x += (_convolved(raw[i], taps, i),)
        gl.store(out + _tile_at(key_head, i, H, K, V), raw[i][3], mask=mask)
    v01 = gl.join(x[4].to(gl.bfloat16), x[5].to(gl.bfloat16))
    v = gl.join(v01, gl.join(x[6].to(gl.bfloat16), x[7].to(gl.bfloat16)))
    v = v.permute((3, 2, 0, 1)).reshape([4 * _N, _COLUMNS])
    viewed(vs, gl.bfloat16, [1, 4 * _N, _COLUMNS], vs.layout).index(0).store(v)
    _gates(of_nodes, log_g, kept, g_ptr, candidates, ring_len, end, beta_scale, G)
    i, columns = _tail_columns(key_head, H, K, V)
    gl.store(tail_out + (i * C + columns), newest, mask=i < W - 1)
    nodes = gl.arange(0, _N, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube_layout())))
    over = gl.load(ancestors_ptr + nodes, mask=nodes < n, other=0).to(gl.int32)
    fence_async_shared()
    barrier()
    return over
