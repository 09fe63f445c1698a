# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What all tiles of a row and key head multiply with, made where it is used: the convolution, the
gates and the triangular systems of `ops.gdn.triton_wy_fused`. Letters as in `ops.gdn.triton_wy`.

The chain of waits counts here, not the arithmetic: nothing else runs meanwhile. So loads are asked
for before the first is waited for, by threads that have a node and eight columns; each warp holds
all of what is small, where sums and changes of layout stay in it; and systems are solved by
substitution, a column a lane, coefficients read four at a time: 16 steps of a few cycles instead
of six products in a row with shared memory in between.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specla.ops.gdn.triton_wy_operands import COLUMNS, barrier, pieces

# Later Tritons renamed it.
_view = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"
viewed = getattr(gl.shared_memory_descriptor, _view)
_COLUMNS = gl.constexpr(COLUMNS)
_N = gl.constexpr(16)  # nodes, and entries of the log


@gluon.constexpr_function
def tile_layout():
    """Of tiles [16, 64] of the convolution: a node and eight columns in a row per thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def small_layout():
    """Of the products that the systems are made of."""
    return gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])


@gluon.constexpr_function
def cube_layout():
    """Of [2, 16, 16]: (value head, node, node or entry). A warp has all of a head."""
    return gl.BlockedLayout([1, 2, 4], [1, 8, 4], [2, 2, 1], [2, 1, 0])


@gluon.constexpr_function
def line_layout():
    """Of [2, 16]: (value head, column), one a lane, in every warp."""
    return gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])


@gluon.constexpr_function
def plain():
    """Shared memory in the order of rows."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _sum(x, axis: gl.constexpr):
    return gl.reduce(x, axis, _add)


@gluon.jit
def worked_out(x):
    """x, and what follows from it worked out where it is used: known ahead of the loop it would
    have to be kept, and there are no registers."""
    text: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(text, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_line(at, there):
    """The 128 bytes around each `at` into L2."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""", "=r,l,r", [at.to(gl.int64), there.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


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
def _climb(parents_ptr, node, beyond):
    """One step up: as `triton_prepare._climb`."""
    beyond = gl.where(node < 0, beyond + 1, beyond)
    return gl.load(parents_ptr + node, mask=node >= 0, other=-1), beyond


@gluon.jit
def _origin(row, at, beyond, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where the raw input begins of a node `at`, or of what is so far beyond the root."""
    y_ptr, inputs_ptr, tail_ptr, _, path_ptr, path_len, m = row
    entry = path_len - beyond
    place = gl.load(path_ptr + entry, mask=(at < 0) & (entry >= 0), other=0)
    above = gl.where(entry >= 0, inputs_ptr + place * C, tail_ptr + (W - 1 + entry) * C)
    return gl.where(at < 0, above, y_ptr + (m + at) * STRIDE)


@gluon.jit
def _origins(row, node, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where the raw inputs of each node's four steps begin, oldest first."""
    one, from_one = _climb(row[3], node, gl.where(node < 0, 1, 1))
    two, from_two = _climb(row[3], one, from_one)
    three, from_three = _climb(row[3], two, from_two)
    return (
        _origin(row, three, from_three, C, W, STRIDE), _origin(row, two, from_two, C, W, STRIDE),
        _origin(row, one, from_one, C, W, STRIDE), row[0] + (row[6] + node) * STRIDE,
    )  # fmt: skip


@gluon.jit
def _raw(origins, taps_ptr, column, mask, C: gl.constexpr, KEEP: gl.constexpr):
    """A tile's raw inputs and taps, oldest first."""
    x = ()
    for i in gl.static_range(4):
        at = origins[i][:, None] + column[None, :]
        x += (gl.load(at, mask=mask, other=0.0, eviction_policy=KEEP),)
    for i in gl.static_range(4):
        x += (gl.load(taps_ptr + column + i * C),)
    return x


@gluon.jit
def _ask_next(
    origins, place, log_k, log_u, n, log_len, key_head, H: gl.constexpr, G: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """What the row's next key head reads into L2; log_k: of the one before it."""
    lines: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, lines)
    node = worked_out(gl.arange(0, _N, layout=rows))[:, None]
    line = worked_out(gl.arange(0, 8, layout=gl.SliceLayout(0, lines)))[None, :]
    column = line * 64
    of_key = (column // K * H + key_head) * K + column % K
    of_value = 2 * (H - 1) * K + key_head * (2 * V) + column
    at = gl.where(column < 2 * K, of_key, of_value)
    live = (node < n) & (line >= 0)
    for i in gl.static_range(4):
        ask_line(gl.convert_layout(origins[i], rows, assert_trivial=True)[:, None] + at, live)
    known = (node < log_len) & (line >= 0)
    entry = gl.convert_layout(place, rows, assert_trivial=True)[:, None]
    ask_line(log_u + (entry * (G * V) + key_head * (2 * V) + line * 32), known)
    ask_line(log_k + (entry * (H * K) + K + line * 32), known & (line < K // 32))


@gluon.jit
def _convolved(raw):
    """SiLU of the convolution."""
    acc = raw[0].to(gl.float32) * raw[4].to(gl.float32)[None, :]
    for i in gl.static_range(1, 4):
        acc = raw[i].to(gl.float32) * raw[4 + i].to(gl.float32)[None, :] + acc
    return _rounded(acc * _sigmoid(acc))


@gluon.jit
def _move_tail(
    row, key_head, out_ptr, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """The newest W - 1 inputs above the root become the tail."""
    C: gl.constexpr = 2 * H * K + G * V
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    _, inputs_ptr, tail_ptr, _, path_ptr, path_len, _ = row
    i = worked_out(gl.arange(0, 4, layout=gl.SliceLayout(1, wide)))
    f = gl.arange(0, 2 * K + 2 * V, layout=gl.SliceLayout(0, wide))
    of_values = 2 * (H - 1) * K + key_head * (2 * V) + f
    column = gl.where(f < 2 * K, (f // K * H + key_head) * K + f % K, of_values)[None, :]
    entry = path_len - (W - 1) + i
    known = i < W - 1
    place = gl.load(path_ptr + entry, mask=(entry >= 0) & known, other=0)
    at = gl.where(entry >= 0, inputs_ptr + place * C, tail_ptr + (W - 1 + entry) * C)
    newest = gl.load(at[:, None] + column, mask=known[:, None], other=0.0)
    gl.store(out_ptr + (i[:, None] * C + column), newest, mask=known[:, None])


@gluon.jit
def _dot(a_high, a_low, b_high, b_low, acc):
    """acc + a b, all but the product of the low pieces; small terms first."""
    acc = mma_v2(a_low, b_high, acc)
    acc = mma_v2(a_high, b_low, acc)
    return mma_v2(a_high, b_high, acc)


@gluon.jit
def _keep(out, x):
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
def _pairs(x):
    """Neighbours of a tuple along a new last axis."""
    out = ()
    for i in gl.static_range(len(x) // 2):
        out += (gl.join(x[2 * i], x[2 * i + 1]),)
    return out


@gluon.jit
def _scores(x, at):
    """Rows 2i and 2i + 1 of x [32, 16], by way of `at`, as two matrices [16, 16] of the cube."""
    layout: gl.constexpr = gl.SliceLayout(0, cube_layout())
    at.store(x)
    x = at.load(gl.BlockedLayout([4, 4], [8, 4], [4, 1], [1, 0]))
    of_q, of_k = x.reshape([_N, 2, _N]).permute((0, 2, 1)).split()
    return gl.convert_layout(of_q, layout), gl.convert_layout(of_k, layout)


@gluon.jit
def _gate_inputs(gates, ancestors_ptr, n, G: gl.constexpr, STRIDE: gl.constexpr):
    """What the gates [2, 16] come from, and the nodes above each as bits."""
    gates_ptr, A_ptr, dt_bias_ptr = gates
    layout: gl.constexpr = gl.SliceLayout(1, cube_layout())
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, layout)))
    i = gl.arange(0, _N, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube_layout())))
    at = gates_ptr + (node[None, :] * STRIDE + h[:, None])
    live = (node < n)[None, :] & (h >= 0)[:, None]
    over = gl.load(ancestors_ptr + i, mask=i < n, other=0).to(gl.int32)
    return (
        gl.load(at, mask=live, other=0.0), gl.load(at + G, mask=live, other=0.0),
        gl.load(A_ptr + h), gl.load(dt_bias_ptr + h), live, over,
    )  # fmt: skip


@gluon.jit
def _gates(inputs, g_ptr, candidates, beta_scale, G: gl.constexpr):
    """(g, beta) [2, 16]; g is kept."""
    a, logit, A, dt_bias, live, _ = inputs
    layout: gl.constexpr = gl.SliceLayout(1, cube_layout())
    g = A[:, None] * _softplus(a.to(gl.float32) + dt_bias[:, None])
    beta = beta_scale / (1 + gl.exp(-logit.to(gl.float32)))
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, layout)))
    gl.store(g_ptr + ((candidates + node)[None, :] * G + h[:, None]), g, mask=live)
    return gl.where(live, g, 0.0), gl.where(live, beta, 0.0)


@gluon.jit
def _log_gates(g_ptr, places_ptr, ring_len, log_len, end, G: gl.constexpr):
    """g [2, 16] of the log's entries; what moves to the ring is stored there."""
    layout: gl.constexpr = gl.SliceLayout(2, cube_layout())
    h = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))[:, None]
    entry = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, layout)))
    place = gl.load(places_ptr + entry, mask=entry < log_len, other=0)
    known = (entry < log_len)[None, :] & (h >= 0)
    g = gl.load(g_ptr + (place[None, :] * G + h), mask=known, other=0.0)
    moving = ((entry >= ring_len) & (entry < end))[None, :] & (h >= 0)
    gl.store(g_ptr + (entry[None, :] * G + h), g, mask=moving)
    return g


@gluon.jit
def _substitute(coefficients, beta):
    """Rows 2i and 2i + 1 of P T and T, T = (I + A)^-1 diag(beta), of both heads: [32, 32], a
    head's column a lane."""
    line: gl.constexpr = line_layout()
    head: gl.constexpr = gl.SliceLayout(1, line)
    four: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 1, 4], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    )
    c = gl.arange(0, _N, layout=gl.SliceLayout(0, line))[None, :]
    rows = ()
    both = ()
    for i in gl.static_range(_N):
        t = gl.where(c == i, beta, 0.0)
        pt = gl.zeros([2, _N], gl.float32, line)
        # Two of A and two of P at a time; the last ones of P are of this row itself.
        for pair in gl.static_range((i + 2) // 2):
            x = coefficients.index(i * (_N // 2) + pair).load(four)
            of_A, of_P = x.reshape([2, 2, 2]).split()
            a0, a1 = of_A.split()
            p0, p1 = of_P.split()
            if 2 * pair < i:
                t = t - gl.convert_layout(a0, head)[:, None] * rows[2 * pair]
                pt = pt + gl.convert_layout(p0, head)[:, None] * rows[2 * pair]
            else:
                rows += (t,)
                pt = pt + gl.convert_layout(p0, head)[:, None] * t
            if 2 * pair + 1 < i:
                t = t - gl.convert_layout(a1, head)[:, None] * rows[2 * pair + 1]
                pt = pt + gl.convert_layout(p1, head)[:, None] * rows[2 * pair + 1]
            elif 2 * pair + 1 == i:
                rows += (t,)
                pt = pt + gl.convert_layout(p1, head)[:, None] * t
        both += (gl.join(pt, t),)
    x = _pairs(_pairs(_pairs(_pairs(both))))[0]
    return x.permute((6, 5, 4, 3, 2, 0, 1)).reshape([2 * _N, 2 * _N])


@gluon.jit
def _systems(
    xk, xe, solution, reads, decays, fades, ends, of_nodes, log_g, g_ptr, candidates, beta_scale,
    G: gl.constexpr,
):  # fmt: skip
    """P T and T, F and E, and decays of both value heads into shared memory; gates into memory.

    xk, xe [32, 16]: rows of x times keys of nodes and of the log."""
    cube: gl.constexpr = cube_layout()
    rows: gl.constexpr = gl.SliceLayout(2, cube)
    matrix: gl.constexpr = gl.SliceLayout(0, cube)
    i = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, matrix)))[:, None]
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, matrix))[None, :]
    g, beta = _gates(of_nodes, g_ptr, candidates, beta_scale, G)
    above = (((of_nodes[5][:, None] >> j) & 1) != 0)[None, :, :]
    total = _sum(gl.where(above, g[:, None, :], 0.0), axis=2)
    past = gl.convert_layout(total, gl.SliceLayout(1, cube))[:, None, :]
    decay = gl.exp(gl.where(above, total[:, :, None] - past, float("-inf")))
    left = _sum(gl.where((i > j)[None, :, :], log_g[:, :, None], 0.0), axis=1)
    end = gl.convert_layout(_sum(log_g, axis=1), gl.SliceLayout(1, rows))[:, None]

    scratch = gl.allocate_shared_memory(gl.float32, [2 * _N, _N], plain())
    qk, kk = _scores(xk, scratch)
    A = decay * gl.convert_layout(beta, rows)[:, :, None] * kk[None, :, :]
    P = decay * qk[None, :, :]
    AP = gl.join(A, P).reshape([2, _N, _N // 2, 2, 2]).permute((1, 2, 0, 3, 4))
    coefficients = viewed(reads, gl.float32, [_N * _N, 4], plain())
    coefficients.store(AP.reshape([_N * _N, 4]))
    qe, ke = _scores(xe, scratch)
    solved = viewed(solution, gl.float32, [2 * _N, 2 * _N], plain())
    pairs = viewed(reads, gl.float32, [_N * _N // 2, 2, 4], plain())
    solved.store(_substitute(pairs, gl.convert_layout(beta, line_layout())))

    reach = gl.exp(total[:, :, None] + left[:, None, :])
    FE = gl.join(reach * qe[None, :, :], reach * ke[None, :, :]).permute((0, 1, 3, 2))
    _keep(reads, FE.reshape([2, 2 * _N, _N]))
    whole = gl.exp(end + total)
    decays.store(gl.join(whole, whole).reshape([2, 2 * _N]))
    fades.store(gl.exp(left))
    ends.store(gl.exp(end))

    x = solved.load(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    _keep(solution, x.reshape([2 * _N, 2, _N]).permute((1, 0, 2)))


@gluon.jit
def make_operands(
    row, xs, es, vs, solution, reads, decays, fades, ends, gates, taps_ptr, inputs_out, tail_out,
    log_k, log_u, g_ptr, ancestors_ptr, places_ptr, candidates, n, ring_len, log_len, end,
    key_head, another, beta_scale, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """What all tiles of a row and key head multiply with, in shared memory. another: whether the
    next unit is the row's next key head."""
    C: gl.constexpr = 2 * H * K + G * V
    tile: gl.constexpr = tile_layout()
    column = gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, tile))
    all_of_it = (column >= 0)[None, :]
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, tile)))
    live = node < n
    mask = live[:, None] & all_of_it
    place = gl.load(places_ptr + node, mask=node < log_len, other=0)
    origins = _origins(row, gl.where(live, node, -1), C, W, STRIDE)
    of_nodes = _gate_inputs(gates, ancestors_ptr, n, G, STRIDE)
    q_at = key_head * K + column
    v_at = 2 * H * K + key_head * (2 * V) + column
    if another:
        _ask_next(origins, place, log_k, log_u, n, log_len, key_head + 1, H, G, K, V)
    # Two tiles are in flight: more have no room in registers.
    q0 = _raw(origins, taps_ptr, q_at, mask, C, KEEP)
    q1 = _raw(origins, taps_ptr, q_at + _COLUMNS, mask, C, KEEP)
    inputs_at = inputs_out + node[:, None] * C
    at = inputs_at + q_at[None, :]
    gl.store(at, q0[3], mask=mask)
    xq0 = _convolved(q0)
    k0 = _raw(origins, taps_ptr, q_at + H * K, mask, C, KEEP)
    gl.store(at + _COLUMNS, q1[3], mask=mask)
    xq1 = _convolved(q1)
    k1 = _raw(origins, taps_ptr, q_at + (H * K + _COLUMNS), mask, C, KEEP)
    gl.store(at + H * K, k0[3], mask=mask)
    xk0 = _convolved(k0)
    known = (node < log_len)[:, None] & all_of_it
    e_at = log_k + (place[:, None] * (H * K) + column[None, :])
    e0 = gl.load(e_at, mask=known, other=0.0)
    e1 = gl.load(e_at + _COLUMNS, mask=known, other=0.0)
    log_g = _log_gates(g_ptr, places_ptr, ring_len, log_len, end, G)
    gl.store(at + (H * K + _COLUMNS), k1[3], mask=mask)
    xk1 = _convolved(k1)
    v0 = _raw(origins, taps_ptr, v_at, mask, C, KEEP)
    norm_q = (K**-0.5 / gl.sqrt(_sum(xq0 * xq0 + xq1 * xq1, axis=1) + 1e-6))[:, None]
    norm_k = (1.0 / gl.sqrt(_sum(xk0 * xk0 + xk1 * xk1, axis=1) + 1e-6))[:, None]
    xk0 *= norm_k
    xk1 *= norm_k
    _keep(xs, _beside(_woven(xq0 * norm_q, xk0), _woven(xq1 * norm_q, xk1)))
    _keep(es, _beside(e0, e1))
    k_at = log_k + ((candidates + node)[:, None] * (H * K) + column[None, :])
    gl.store(k_at, xk0, mask=mask)
    gl.store(k_at + _COLUMNS, xk1, mask=mask)
    if end > 0:
        moving = ((node >= ring_len) & (node < end))[:, None] & all_of_it
        ring_at = log_k + (node[:, None] * (H * K) + column[None, :])
        gl.store(ring_at, e0, mask=moving)
        gl.store(ring_at + _COLUMNS, e1, mask=moving)
    v1 = _raw(origins, taps_ptr, v_at + _COLUMNS, mask, C, KEEP)
    at = inputs_at + v_at[None, :]
    gl.store(at, v0[3], mask=mask)
    of_v0 = _convolved(v0).to(gl.bfloat16)
    v2 = _raw(origins, taps_ptr, v_at + 2 * _COLUMNS, mask, C, KEEP)
    gl.store(at + _COLUMNS, v1[3], mask=mask)
    of_v1 = _convolved(v1).to(gl.bfloat16)
    v3 = _raw(origins, taps_ptr, v_at + 3 * _COLUMNS, mask, C, KEEP)
    gl.store(at + 2 * _COLUMNS, v2[3], mask=mask)
    gl.store(at + 3 * _COLUMNS, v3[3], mask=mask)
    of_v23 = gl.join(_convolved(v2).to(gl.bfloat16), _convolved(v3).to(gl.bfloat16))
    x = gl.join(gl.join(of_v0, of_v1), of_v23).permute((3, 2, 0, 1)).reshape([4 * _N, _COLUMNS])
    viewed(vs, gl.bfloat16, [1, 4 * _N, _COLUMNS], vs.layout).index(0).store(x)
    _move_tail(row, key_head, tail_out, H, G, K, V, W)
    fence_async_shared()
    barrier()

    xk0, xe0 = _gram(xs, es, 0)
    xk1, xe1 = _gram(xs, es, 1)
    _systems(
        xk0 + xk1, xe0 + xe1, solution, reads, decays, fades, ends, of_nodes, log_g, g_ptr,
        candidates, beta_scale, G,
    )  # fmt: skip
    fence_async_shared()
    barrier()


@gluon.jit
def _gram(xs, es, half: gl.constexpr):
    """This half's part of x k^T and x e^T, both [32, 16]."""
    layout: gl.constexpr = small_layout()
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    a_high = xs.index(2 * half).load(left)
    a_low = xs.index(2 * half + 1).load(left)
    b_high = xs.index(2 * half).permute((1, 0)).load(right)
    b_low = xs.index(2 * half + 1).permute((1, 0)).load(right)
    xx = gl.zeros([2 * _N, 2 * _N], gl.float32, layout)
    xx = _dot(a_high, a_low, b_high, b_low, xx)
    b_high = es.index(2 * half).permute((1, 0)).load(right)
    b_low = es.index(2 * half + 1).permute((1, 0)).load(right)
    xe = gl.zeros([2 * _N, _N], gl.float32, layout)
    xe = _dot(a_high, a_low, b_high, b_low, xe)
    _, xk = xx.reshape([2 * _N, _N, 2]).split()
    return xk, xe
