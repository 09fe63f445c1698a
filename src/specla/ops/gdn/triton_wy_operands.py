# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the kernel of `ops.gdn.triton_wy_stream` reads: how it is asked for, where it waits, and
the layouts it is read in. Letters as in `ops.gdn.triton_wy`, whose part this is.

Rows of V are held in an order, `rows_of`, in which a quarter of a warp that reads pairs of S finds
them in all 32 banks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from specla.ops.gdn.triton_wy_solve import BLOCK

# Later Tritons renamed these.
load_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ROWS = 64  # of V per tile: what one warp group multiplies with
COLUMNS = 64  # of K per piece of the ring
STAGES = 4  # pieces
_ROWS, _COLUMNS, _STAGES = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(STAGES)
_BLOCK = gl.constexpr(BLOCK)


@gluon.constexpr_function
def product_layout(columns):
    """Of a product [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_layout(columns):
    """Of the left operand of such a product."""
    return gl.DotOperandLayout(0, product_layout(columns), 2)


@gluon.constexpr_function
def state_layout():
    """A piece of S as it is read: the layout of a left operand, but for the order of rows."""
    register = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]]
    lane = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(register, lane, [[16, 0], [32, 0]], [], [64, 64])


@gluon.jit
def rows_of(layout: gl.constexpr):
    """[ROWS, 1] of a matrix in this layout: where a product's rows lie in their tile."""
    r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    return ((r & -8) + (r & 3) * 2 + ((r >> 2) & 1))[:, None]


@gluon.jit
def pieces(x):
    """As `triton_wy_solve.pieces`."""
    high = (x.to(gl.int32, bitcast=True) + 0x8000) & -0x10000
    high = high.to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def product(x_high, x_low, y_high, y_low, acc):
    """acc + x y, all but the product of the low pieces; small terms first. Not waited for."""
    acc = warpgroup_mma(x_low, y_high, acc, is_async=True)
    acc = warpgroup_mma(x_high, y_low, acc, is_async=True)
    return warpgroup_mma(x_high, y_high, acc, is_async=True)


@gluon.jit
def place_of(tiles, q, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """(row, column, whether it is there) of piece q of this program's tiles."""
    PIECES: gl.constexpr = K // _COLUMNS
    TILES: gl.constexpr = V // _ROWS
    first, last, slot_ptr = tiles
    tile = first + q // PIECES
    here = tile < last
    slot = gl.load(slot_ptr + tile // (G * TILES), mask=here, other=0)
    return slot * (G * V) + tile % (G * TILES) * _ROWS, q % PIECES * _COLUMNS, here


@gluon.jit
def ask(ring, q, place):
    """Piece q on its way into the ring. An idle row's too: it has a slot, if only the first."""
    S_blocks, ss, full = ring
    row, column, here = place
    s = q % ss.shape[0]
    mbarrier.expect(full.index(s), 4 * _ROWS * _COLUMNS, pred=here)
    load_block(S_blocks, [row, column], full.index(s), ss.index(s), pred=here)


@gluon.jit
def wait_for(full, q):
    """Piece q is here."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(q % STAGES), (q // STAGES) & 1)


@gluon.jit
def _ask_pieces(blocks, out, ready, first, step):
    """A matrix in two pieces, `step` rows apart, from row `first` on, all of its columns."""
    mbarrier.expect(ready, 2 * out.shape[0] * out.shape[1] * out.shape[2])
    for c in gl.static_range(out.shape[0] // 2):
        load_block(blocks, [first, c * _COLUMNS], ready, out.index(2 * c))
        load_block(blocks, [first + step, c * _COLUMNS], ready, out.index(2 * c + 1))


@gluon.jit
def ask_head(heads, problem, H: gl.constexpr, LOG: gl.constexpr):
    """What all tiles of a row and key head multiply with."""
    x_blocks, e_blocks, xs, es, x_ready, e_ready, ring_len_ptr, path_len_ptr, threshold = heads
    WIDE: gl.constexpr = xs.shape[1]
    _ask_pieces(x_blocks, xs, x_ready, problem * (2 * WIDE), WIDE)
    b = problem // H
    if gl.load(ring_len_ptr + b) + gl.load(path_len_ptr + b) > threshold:
        _ask_pieces(e_blocks, es, e_ready, problem * (2 * LOG), LOG)


@gluon.jit
def ask_solution(solutions, problem):
    """P T and T, and the first block of F and E, of a row and value head."""
    solution_blocks, reads_blocks, solution, reads, ready = solutions
    WIDE: gl.constexpr = solution.shape[1]
    first = problem * (2 * WIDE)
    mbarrier.expect(ready, 4 * WIDE * (solution.shape[2] + _BLOCK))
    for piece in gl.static_range(2):
        load_block(solution_blocks, [first + piece * WIDE, 0], ready, solution.index(piece))
        load_block(reads_blocks, [first + piece * WIDE, 0], ready, reads.index(piece))


@gluon.jit
def entries(
    u_at, places_ptr, first, log_len, WIDTH: gl.constexpr, STRIDE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """u [ROWS, WIDTH] of the log's entries from `first` on, 0 beyond it."""
    j = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    place = gl.load(places_ptr + j, mask=j < log_len, other=0)
    at = u_at + (place[None, :] * STRIDE + rows_of(layout))
    return gl.load(at, mask=(j < log_len)[None, :], other=0.0)


@gluon.jit
def faded(u, fade_ptr, first, log_len, layout: gl.constexpr):
    """These entries as they are at the end of the log, in pieces."""
    j = first + gl.arange(0, u.shape[1], layout=gl.SliceLayout(0, layout))
    fade = gl.load(fade_ptr + j, mask=j < log_len, other=0.0)
    return pieces(u * fade[None, :])


@gluon.jit
def _copy_rows(out, at_ptr, stride):
    """Rows in memory -> a shared buffer."""
    R: gl.constexpr = out.shape[0]
    C: gl.constexpr = out.shape[1]
    lanes: gl.constexpr = min(32, C // 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [32 // lanes, lanes], [4, 1], [1, 0])
    r = gl.arange(0, R, layout=gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, C, layout=gl.SliceLayout(0, layout))[None, :]
    out.store(gl.load(at_ptr + r * stride + c))


@gluon.jit
def copy_pieces(out, at_ptr, stride, step):
    """A matrix in two pieces, `step` elements apart, for products to read."""
    barrier()  # nobody reads what was there any more
    _copy_rows(out.index(0), at_ptr, stride)
    _copy_rows(out.index(1), at_ptr + step, stride)
    fence_async_shared()
    barrier()
