# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the kernel of `ops.gdn.triton_wy_fused` asks for before its turn, and where it lies.

S always, into the ring; the rest for a program's first unit only, into L2, while there is nothing
to work on. To ask for the next one's cost more than it brought: a tile ahead 3 us of 114 (H200, 64
trees of 16 nodes at 16/32x128); any earlier it should be gone when its turn comes, as during a
unit 100 MB pass through L2, which holds 50. To keep y and o there before S brought nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specla.ops.gdn.triton_wy_operands import COLUMNS, ROWS, barrier, load_block

# Later Tritons renamed it.
_view = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"
viewed = getattr(gl.shared_memory_descriptor, _view)
_ROWS, _COLUMNS = gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_N = gl.constexpr(16)  # nodes, and entries of the log


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
def column_of(key_head, f, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Where element f of a key head's q, k and both v lies."""
    of_value = 2 * (H - 1) * K + key_head * (2 * V) + f
    return gl.where(f < 2 * K, (f // K * H + key_head) * K + f % K, of_value)


@gluon.jit
def ask_nodes(
    y_ptr, unit, num_columns, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """What a unit (row, key head) reads of the row's nodes, idle ones too, into L2."""
    lines: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    node = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, lines)))[:, None]
    line = worked_out(gl.arange(0, 8, layout=gl.SliceLayout(0, lines)))[None, :]
    at = y_ptr + (unit // H * num_columns + node) * STRIDE
    at += column_of(unit % H, line * 64, H, K, V)
    ask_line(at, (node < num_columns) & (line >= 0))


@gluon.jit
def ask_log(
    unit, last, k_ptr, u_ptr, places_ptr, slot_ptr, ring_len_ptr, path_len_ptr, num_entries,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """A unit's log into L2."""
    lines: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    here = unit < last
    b = unit // H
    key_head = unit % H
    slot = gl.load(slot_ptr + b, mask=here, other=0).to(gl.int64)
    log_len = gl.load(ring_len_ptr + b, mask=here, other=0)
    log_len += gl.load(path_len_ptr + b, mask=here, other=0)
    j = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, lines)))
    line = gl.arange(0, 16, layout=gl.SliceLayout(0, lines))[None, :]
    known = (j < log_len) & here
    entry = slot * num_entries + gl.load(places_ptr + (b * _N + j), mask=known, other=0)
    k_at = k_ptr + ((entry[:, None] * H + key_head) * K + line * 32)
    u_at = u_ptr + (entry[:, None] * (G * V) + key_head * (2 * V) + (line * 32 - K))
    there = known[:, None] & (line < (K + 2 * V) // 32)
    ask_line(gl.where(line < K // 32, k_at, u_at), there)


@gluon.jit
def ask_tile(ring, q, row, here, K: gl.constexpr):
    """A tile into the places of pieces q and q + 1, at once, announced as the first of them: its
    lines lie in turn in the same pages of memory (by pieces: 1 us of 114 more)."""
    S_blocks, ss, full = ring
    s = q % ss.shape[0]
    mbarrier.expect(full.index(s), 4 * _ROWS * K, pred=here)
    for c in gl.static_range(K // _COLUMNS):
        load_block(S_blocks, [row, c * _COLUMNS], full.index(s), ss.index(s + c), pred=here)


@gluon.jit
def ask_next(
    ring, q, unit, last, t, slot, slot_then, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr,
):  # fmt: skip
    """The tile after tile t of a unit, whose first piece is q; a program's first two were asked
    for before. slot_then: of the next unit."""
    TILES: gl.constexpr = 2 * V // _ROWS
    barrier()  # all have passed the tile before: its places are free
    inside = t + 1 < TILES
    row = gl.where(inside, slot, slot_then).to(gl.int32) * (G * V)
    row += (unit % H * TILES + t + 1) % (H * TILES) * _ROWS
    here = (inside | (unit + 1 < last)) & (q + t > 0)
    ask_tile(ring, q + (t + 1) * (K // _COLUMNS), row, here, K)
