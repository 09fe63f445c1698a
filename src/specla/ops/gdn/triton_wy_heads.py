# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What all tiles of a row and key head multiply with, made where it is used: the convolution, the
gates and the triangular systems of `ops.gdn.triton_wy_fused`. Letters as in `ops.gdn.triton_wy`.

Two value heads share the keys. Their systems are the blocks of one matrix [32, 32], so that both
are solved in the time of one. Rows of x [32, K] are q_0 k_0 q_1 k_1 ...: one tile of the
convolution holds both, and x x^T all of q k^T and k k^T.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specla.ops.gdn.triton_wy_operands import COLUMNS, barrier, pieces

_COLUMNS = gl.constexpr(COLUMNS)
_N = gl.constexpr(16)  # nodes, and entries of the log


@gluon.constexpr_function
def tile_layout():
    """Of tiles of the convolution: eight columns in a row per thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def small_layout():
    """Of the products that make the systems."""
    return gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _sum(x, axis: gl.constexpr):
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
def _softplus(x):
    """As `triton_prepare.softplus`."""
    e = gl.exp(gl.minimum(x, 20.0))
    y = 1 + e
    log1p = gl.where(y == 1, e, gl.log(y) * (e / (y - 1)))
    return gl.where(x > 20, x, log1p)


@gluon.jit
def _climb(parents_ptr, node, steps: gl.constexpr):
    """As `triton_prepare._climb`."""
    beyond = gl.where(node < 0, 1, 1)
    for _ in gl.static_range(steps):
        beyond = gl.where(node < 0, beyond + 1, beyond)
        node = gl.load(parents_ptr + node, mask=node >= 0, other=-1)
    return node, beyond


@gluon.jit
def _origin(row, node, back: gl.constexpr, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where the raw input `back` steps before a node begins."""
    y_ptr, inputs_ptr, tail_ptr, parents_ptr, path_ptr, path_len, m = row
    at, beyond = _climb(parents_ptr, node, back)
    origin = y_ptr + (m + at) * STRIDE
    if back > 0:
        entry = path_len - beyond
        place = gl.load(path_ptr + entry, mask=(at < 0) & (entry >= 0), other=0)
        above = gl.where(entry >= 0, inputs_ptr + place * C, tail_ptr + (W - 1 + entry) * C)
        origin = gl.where(at < 0, above, origin)
    return origin


@gluon.jit
def _origins(row, node, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where the raw inputs of each node's four steps begin, oldest first."""
    return (
        _origin(row, node, 3, C, W, STRIDE), _origin(row, node, 2, C, W, STRIDE),
        _origin(row, node, 1, C, W, STRIDE), _origin(row, node, 0, C, W, STRIDE),
    )  # fmt: skip


@gluon.jit
def _raw(origins, column, mask):
    """A tile's raw inputs, oldest first."""
    return (
        gl.load(origins[0][:, None] + column, mask=mask, other=0.0),
        gl.load(origins[1][:, None] + column, mask=mask, other=0.0),
        gl.load(origins[2][:, None] + column, mask=mask, other=0.0),
        gl.load(origins[3][:, None] + column, mask=mask, other=0.0),
    )  # fmt: skip


@gluon.jit
def _convolved(raw, taps_ptr, column, C: gl.constexpr):
    """SiLU of the convolution."""
    acc = raw[0].to(gl.float32) * gl.load(taps_ptr + column).to(gl.float32)
    acc = raw[1].to(gl.float32) * gl.load(taps_ptr + (column + C)).to(gl.float32) + acc
    acc = raw[2].to(gl.float32) * gl.load(taps_ptr + (column + 2 * C)).to(gl.float32) + acc
    acc = raw[3].to(gl.float32) * gl.load(taps_ptr + (column + 3 * C)).to(gl.float32) + acc
    return _rounded(acc * _sigmoid(acc))


@gluon.jit
def _value(raw, taps_ptr, column, at, mask, out, C: gl.constexpr):
    """A tile of v into shared memory, its raw input into the bank."""
    gl.store(at, raw[3], mask=mask)
    out.store(_convolved(raw, taps_ptr, column, C).to(gl.bfloat16))


@gluon.jit
def _new_tail(row, column, out_ptr, C: gl.constexpr, W: gl.constexpr):
    """The newest W - 1 inputs above the root."""
    _, inputs_ptr, tail_ptr, _, path_ptr, path_len, _ = row
    for i in gl.static_range(W - 1):
        entry = path_len - (W - 1) + i
        place = gl.load(path_ptr + entry, mask=entry >= 0, other=0)
        at = gl.where(entry >= 0, inputs_ptr + place * C, tail_ptr + (W - 1 + entry) * C)
        gl.store(out_ptr + (i * C + column), gl.load(at + column))


@gluon.jit
def _dot(a_high, a_low, b_high, b_low, acc):
    """acc + a b, all but the product of the low pieces; small terms first."""
    acc = mma_v2(a_low, b_high, acc)
    acc = mma_v2(a_high, b_low, acc)
    return mma_v2(a_high, b_high, acc)


@gluon.jit
def _times(x, y):
    """x y of two results in pieces."""
    layout: gl.constexpr = small_layout()
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    x_high, x_low = gl.convert_layout(x[0], left), gl.convert_layout(x[1], left)
    y_high, y_low = gl.convert_layout(y[0], right), gl.convert_layout(y[1], right)
    return _dot(x_high, x_low, y_high, y_low, gl.zeros([2 * _N, 2 * _N], gl.float32, layout))


@gluon.jit
def _where(mask, x):
    """Both pieces where `mask` is set, 0 elsewhere."""
    zero = gl.zeros(x[0].shape, gl.bfloat16, small_layout())
    return gl.where(mask, x[0], zero), gl.where(mask, x[1], zero)


@gluon.jit
def _gate_inputs(gates, ancestors_ptr, r, n, G: gl.constexpr, STRIDE: gl.constexpr):
    """What the gates of (value head, node) r come from, and the nodes above it as bits."""
    gates_ptr, A_ptr, dt_bias_ptr = gates
    node = r % _N
    live = node < n
    at = gates_ptr + (node * STRIDE + r // _N)
    return (
        gl.load(at, mask=live, other=0.0), gl.load(at + G, mask=live, other=0.0),
        gl.load(A_ptr + r // _N), gl.load(dt_bias_ptr + r // _N),
        gl.load(ancestors_ptr + node, mask=live, other=0).to(gl.int32), live,
    )  # fmt: skip


@gluon.jit
def _gates(inputs, beta_scale):
    """(g, beta, nodes above)."""
    a, logit, A, dt_bias, over, live = inputs
    g = A * _softplus(a.to(gl.float32) + dt_bias)
    beta = beta_scale / (1 + gl.exp(-logit.to(gl.float32)))
    return gl.where(live, g, 0.0), gl.where(live, beta, 0.0), over


@gluon.jit
def _both(x):
    """x [16, 16] -> [32, 32], in each of its quarters."""
    x = gl.join(x, x)
    x = gl.join(x, x).permute((2, 0, 3, 1)).reshape([2 * _N, 2 * _N])
    return gl.convert_layout(x, small_layout())


@gluon.jit
def _apart(x):
    """x [R, 16, 2] -> its two halves."""
    columns: gl.constexpr = x.shape[0] // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, columns, 2], [2 * columns, 16 // columns, 1], [4, 1, 1], [2, 1, 0]
    )
    return gl.convert_layout(x, layout).split()


@gluon.jit
def _keep(out, first, x):
    """x in pieces into two shared buffers."""
    high, low = pieces(x)
    out.index(first).store(high)
    out.index(first + 1).store(low)


@gluon.jit
def _systems(
    xx, xe, solution, reads, of_nodes, log_g, g_ptr, decay_ptr, candidates, n,
    beta_scale, G: gl.constexpr, LOG: gl.constexpr,
):  # fmt: skip
    """P T and T, F and E of both value heads into shared memory; gates and decays into memory.
    One matrix [32, 32] has both heads' systems as its blocks."""
    layout: gl.constexpr = small_layout()
    SIZE: gl.constexpr = _N + LOG + 1
    r = gl.arange(0, 2 * _N, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 2 * _N, layout=gl.SliceLayout(0, layout))
    g, beta, over = _gates(of_nodes, beta_scale)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    g_c, beta_c = gl.convert_layout(g, columns), gl.convert_layout(beta, columns)
    gl.store(g_ptr + ((candidates + r % _N) * G + r // _N), g, mask=r % _N < n)
    same = (r // _N)[:, None] == (c // _N)[None, :]
    above = same & (((over[:, None] >> (c % _N)[None, :]) & 1) != 0)
    total = _sum(gl.where(above, g_c[None, :], 0.0), axis=1)
    total_c = gl.convert_layout(total, columns)
    decay = gl.exp(gl.where(above, total[:, None] - total_c[None, :], float("-inf")))

    _, xk = xx.reshape([2 * _N, _N, 2]).split()
    qk, kk = _apart(xk.reshape([_N, 2, _N]).permute((0, 2, 1)))
    i, j = r[:, None], c[None, :]
    A = gl.where(i == j, 0.0, beta[:, None] * decay * _both(kk))
    T = gl.where(i == j, 1.0, gl.where((i >> 1) == (j >> 1), -A, 0.0))
    cut = pieces(A)
    for level in range(1, 4):
        under = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
        solved = pieces(T)
        T = T - _times(solved, pieces(_times(_where(under, cut), solved)))
    T = T * beta_c[None, :]
    PT = _times(pieces(decay * _both(qk)), pieces(T))
    # What is beside the blocks is zero.
    T = _sum(T.reshape([2 * _N, 2, _N]), axis=1)
    PT = _sum(PT.reshape([2 * _N, 2, _N]), axis=1)
    both = gl.join(PT, T).permute((0, 2, 1)).reshape([4 * _N, _N])
    first, second = _apart(both.reshape([2, 2 * _N, _N]).permute((1, 2, 0)))
    _keep(solution, 0, first)
    _keep(solution, 2, second)

    entry = gl.arange(0, _N, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, layout))
    g0, g1 = log_g
    later = entry[:, None] > j[None, :]
    left0 = _sum(gl.where(later, g0[:, None], 0.0), axis=0)
    left1 = _sum(gl.where(later, g1[:, None], 0.0), axis=0)
    fade0 = _sum(g0, axis=0)
    fade1 = _sum(g1, axis=0)
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    total0, total1 = gl.convert_layout(total.reshape([2, _N]).permute((1, 0)), pairs).split()
    wide0 = gl.convert_layout(gl.join(total0, total0).reshape([2 * _N]), gl.SliceLayout(1, layout))
    wide1 = gl.convert_layout(gl.join(total1, total1).reshape([2 * _N]), gl.SliceLayout(1, layout))
    _keep(reads, 0, xe * gl.exp(wide0[:, None] + left0[None, :]))
    _keep(reads, 2, xe * gl.exp(wide1[:, None] + left1[None, :]))
    fade = gl.where(r < _N, fade0, fade1)
    gl.store(decay_ptr + (r // _N) * SIZE + r % _N, gl.exp(fade + total))
    gl.store(decay_ptr + (_N + j), gl.exp(left0))
    gl.store(decay_ptr + (SIZE + _N + j), gl.exp(left1))
    gl.store(decay_ptr + (_N + LOG), gl.exp(fade0))
    gl.store(decay_ptr + (SIZE + _N + LOG), gl.exp(fade1))


@gluon.jit
def _log_gates(g_ptr, places_ptr, ring_len, log_len, end, G: gl.constexpr):
    """g of the log's entries, of both value heads; what moves to the ring is stored there."""
    layout: gl.constexpr = gl.SliceLayout(1, small_layout())
    entry = gl.arange(0, _N, layout=layout)
    at = g_ptr + gl.load(places_ptr + entry, mask=entry < log_len, other=0) * G
    g0 = gl.load(at, mask=entry < log_len, other=0.0)
    g1 = gl.load(at + 1, mask=entry < log_len, other=0.0)
    moving = (entry >= ring_len) & (entry < end)
    gl.store(g_ptr + entry * G, g0, mask=moving)
    gl.store(g_ptr + (entry * G + 1), g1, mask=moving)
    return g0, g1


@gluon.jit
def make_operands(
    row, xs, es, vs, solution, reads, gates, taps_ptr, inputs_out, tail_out, log_k, g_ptr,
    decay_ptr, ancestors_ptr, places_ptr, candidates, n, ring_len, log_len, end, key_head,
    beta_scale, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr, LOG: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """What all tiles of a row and key head multiply with, in shared memory."""
    C: gl.constexpr = 2 * H * K + G * V
    CHUNKS: gl.constexpr = K // _COLUMNS
    tile: gl.constexpr = tile_layout()
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, tile))[None, :]
    r = gl.arange(0, 2 * _N, layout=gl.SliceLayout(1, tile))
    is_key = r % 2 == 1
    live = r // 2 < n
    entry = gl.arange(0, _N, layout=gl.SliceLayout(1, tile))
    # All that comes from memory is on its way before the first of it is waited for.
    place = gl.load(places_ptr + entry, mask=entry < log_len, other=0)
    known = (entry < log_len)[:, None] & (column >= 0)
    e_at = log_k + (place[:, None] * (H * K) + column)
    e0 = gl.load(e_at, mask=known, other=0.0)
    e1 = gl.load(e_at + _COLUMNS, mask=known, other=0.0)
    log_g = _log_gates(g_ptr, places_ptr, ring_len, log_len, end, G)
    start = gl.where(is_key, H + key_head, key_head) * K
    mask = live[:, None] & (column >= 0)
    origins = _origins(row, gl.where(live, r // 2, -1), C, W, STRIDE)
    x_at = start[:, None] + column
    raw0 = _raw(origins, x_at, mask)
    raw1 = _raw(origins, x_at + _COLUMNS, mask)
    v_live = entry < n
    v_mask = v_live[:, None] & (column >= 0)
    origins = _origins(row, gl.where(v_live, entry, -1), C, W, STRIDE)
    v_at = (2 * H * K + key_head * (2 * V)) + column + (entry * 0)[:, None]
    rows: gl.constexpr = gl.SliceLayout(1, small_layout())
    of_nodes = _gate_inputs(gates, ancestors_ptr, gl.arange(0, 2 * _N, layout=rows), n, G, STRIDE)

    x0 = _convolved(raw0, taps_ptr, x_at, C)
    x1 = _convolved(raw1, taps_ptr, x_at + _COLUMNS, C)
    inputs_at = inputs_out + ((r // 2)[:, None] * C + x_at)
    gl.store(inputs_at, raw0[3], mask=mask)
    gl.store(inputs_at + _COLUMNS, raw1[3], mask=mask)
    values0 = _raw(origins, v_at, v_mask)
    values1 = _raw(origins, v_at + _COLUMNS, v_mask)
    values2 = _raw(origins, v_at + 2 * _COLUMNS, v_mask)
    values3 = _raw(origins, v_at + 3 * _COLUMNS, v_mask)
    square = _sum(x0 * x0 + x1 * x1, axis=1)
    norm = gl.where(is_key, 1.0, K**-0.5) / gl.sqrt(square + 1e-6)
    x0 = x0 * norm[:, None]
    x1 = x1 * norm[:, None]
    k_at = log_k + ((candidates + r // 2)[:, None] * (H * K) + column)
    kept = mask & is_key[:, None]
    gl.store(k_at, x0, mask=kept)
    gl.store(k_at + _COLUMNS, x1, mask=kept)
    _keep(xs, 0, x0)
    _keep(xs, 2, x1)
    moving = ((entry >= ring_len) & (entry < end))[:, None] & (column >= 0)
    ring_at = log_k + (entry[:, None] * (H * K) + column)
    gl.store(ring_at, e0, mask=moving)
    gl.store(ring_at + _COLUMNS, e1, mask=moving)
    _keep(es, 0, e0)
    _keep(es, 2, e1)
    out_at = inputs_out + (entry[:, None] * C + v_at)
    _value(values0, taps_ptr, v_at, out_at, v_mask, vs.index(0), C)
    _value(values1, taps_ptr, v_at + _COLUMNS, out_at + _COLUMNS, v_mask, vs.index(1), C)
    _value(values2, taps_ptr, v_at + 2 * _COLUMNS, out_at + 2 * _COLUMNS, v_mask, vs.index(2), C)
    _value(values3, taps_ptr, v_at + 3 * _COLUMNS, out_at + 3 * _COLUMNS, v_mask, vs.index(3), C)
    flat: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    f = gl.arange(0, 256, layout=flat)
    _new_tail(row, gl.where(f < K, key_head * K, (H + key_head - 1) * K) + f, tail_out, C, W)
    _new_tail(row, 2 * H * K + key_head * (2 * V) + f, tail_out, C, W)
    fence_async_shared()
    barrier()

    layout: gl.constexpr = small_layout()
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    xx = gl.zeros([2 * _N, 2 * _N], gl.float32, layout)
    xe = gl.zeros([2 * _N, _N], gl.float32, layout)
    for half in gl.static_range(CHUNKS):
        a_high = xs.index(2 * half).load(left)
        a_low = xs.index(2 * half + 1).load(left)
        b_high = xs.index(2 * half).permute((1, 0)).load(right)
        b_low = xs.index(2 * half + 1).permute((1, 0)).load(right)
        xx = _dot(a_high, a_low, b_high, b_low, xx)
        b_high = es.index(2 * half).permute((1, 0)).load(right)
        b_low = es.index(2 * half + 1).permute((1, 0)).load(right)
        xe = _dot(a_high, a_low, b_high, b_low, xe)
    _systems(
        xx, xe, solution, reads, of_nodes, log_g, g_ptr, decay_ptr, candidates, n,
        beta_scale, G, LOG,
    )  # fmt: skip
    fence_async_shared()
    barrier()
