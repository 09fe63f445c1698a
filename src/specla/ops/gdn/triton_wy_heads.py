# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What all tiles of a row and key head multiply with, from what `ops.gdn.triton_wy_inputs` has
made: the triangular systems of `ops.gdn.triton_wy_fused`. Letters as in `ops.gdn.triton_wy`.

Each warp holds all of what is small, where sums and changes of layout stay in it; and systems are
solved by substitution, a column a lane, coefficients read four at a time: 16 steps of a few cycles
instead of six products in a row with shared memory in between.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from specla.ops.gdn.triton_wy_asks import viewed, worked_out
from specla.ops.gdn.triton_wy_inputs import cube_layout, keep, line_layout, plain, summed
from specla.ops.gdn.triton_wy_operands import barrier

_N = gl.constexpr(16)  # nodes, and entries of the log


@gluon.constexpr_function
def small_layout():
    """Of the products that the systems are made of."""
    return gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])


@gluon.jit
def _dot(a_high, a_low, b_high, b_low, acc):
    """acc + a b, all but the product of the low pieces; small terms first."""
    acc = mma_v2(a_low, b_high, acc)
    acc = mma_v2(a_high, b_low, acc)
    return mma_v2(a_high, b_high, acc)


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
    xk, xe, solution, reads, decays, fades, ends, over, gates,
):  # fmt: skip
    """P T and T, F and E, and decays of both value heads into shared memory.

    xk, xe [32, 16]: rows of x times keys of nodes and of the log. over: the nodes above each as
    bits. gates: as `_gates` keeps them."""
    cube: gl.constexpr = cube_layout()
    rows: gl.constexpr = gl.SliceLayout(2, cube)
    matrix: gl.constexpr = gl.SliceLayout(0, cube)
    i = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, matrix)))[:, None]
    j = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, matrix)))[None, :]
    kept = viewed(gates, gl.float32, [4, 2, _N], plain())
    g, beta = kept.index(0).load(gl.SliceLayout(1, cube)), kept.index(1).load(rows)
    log_g = kept.index(2).load(rows)
    of_columns = kept.index(1).load(line_layout())
    above = (((over[:, None] >> j) & 1) != 0)[None, :, :]
    total = summed(gl.where(above, g[:, None, :], 0.0), axis=2)
    past = gl.convert_layout(total, gl.SliceLayout(1, cube))[:, None, :]
    decay = gl.exp(gl.where(above, total[:, :, None] - past, float("-inf")))
    left = summed(gl.where((i > j)[None, :, :], log_g[:, :, None], 0.0), axis=1)
    end = gl.convert_layout(summed(log_g, axis=1), gl.SliceLayout(1, rows))[:, None]

    scratch = gl.allocate_shared_memory(gl.float32, [2 * _N, _N], plain())
    qk, kk = _scores(xk, scratch)
    A = decay * beta[:, :, None] * kk[None, :, :]
    P = decay * qk[None, :, :]
    AP = gl.join(A, P).reshape([2, _N, _N // 2, 2, 2]).permute((1, 2, 0, 3, 4))
    coefficients = viewed(reads, gl.float32, [_N * _N, 4], plain())
    coefficients.store(AP.reshape([_N * _N, 4]))
    qe, ke = _scores(xe, scratch)
    solved = viewed(solution, gl.float32, [2 * _N, 2 * _N], plain())
    pairs = viewed(reads, gl.float32, [_N * _N // 2, 2, 4], plain())
    solved.store(_substitute(pairs, of_columns))

    reach = gl.exp(total[:, :, None] + left[:, None, :])
    FE = gl.join(reach * qe[None, :, :], reach * ke[None, :, :]).permute((0, 1, 3, 2))
    keep(reads, FE.reshape([2, 2 * _N, _N]))
    whole = gl.exp(end + total)
    decays.store(gl.join(whole, whole).reshape([2, 2 * _N]))
    fades.store(gl.exp(left))
    ends.store(gl.exp(end))

    x = solved.load(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
    keep(solution, x.reshape([2 * _N, 2, _N]).permute((1, 0, 2)))


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


@gluon.jit
def make_operands(xs, es, solution, reads, decays, fades, ends, over, kept):
    """The rest of what all tiles of a row and key head multiply with, from `make_inputs`'s."""
    xk0, xe0 = _gram(xs, es, 0)
    xk1, xe1 = _gram(xs, es, 1)
    _systems(xk0 + xk1, xe0 + xe1, solution, reads, decays, fades, ends, over, kept)
    fence_async_shared()
    barrier()
