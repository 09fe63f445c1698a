# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What the kernel of `ops.gdn.triton_wy_fused` asks for before its turn, and where it lies.

When counts as much as what. While a program works through one unit, 100 MB pass through L2, which
holds 50: what is asked for when a unit begins should be gone again when the next one reads it
(counted; when that was done, S included, ncu saw 55 MB read more than there are). So it is asked
for a tile ahead.
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
def ask_lasting_line(at, there):
    """As `ask_line`, to be kept there before others."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $2, 0;
        @p prefetch.global.L2::evict_last [$1];
        mov.b32 $0, 0;
        }""", "=r,l,r", [at.to(gl.int64), there.to(gl.int32)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _ask_stretch(at, BYTES: gl.constexpr):
    """BYTES from each `at` on into L2."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [at.to(gl.int64), gl.full(at.shape, BYTES, gl.int32, at.type.layout)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def origin(row, lying, C: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr):
    """Where a raw input begins."""
    y_ptr, inputs_ptr, tail_ptr, m = row
    above = gl.where(lying > -W, tail_ptr + (W - 1 + lying) * C, inputs_ptr - (W + lying) * C)
    return gl.where(lying < 0, above, y_ptr + (m + lying) * STRIDE)


@gluon.jit
def column_of(key_head, f, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Where element f of a key head's q, k and both v lies."""
    of_value = 2 * (H - 1) * K + key_head * (2 * V) + f
    return gl.where(f < 2 * K, (f // K * H + key_head) * K + f % K, of_value)


@gluon.jit
def _lines():
    """(row of 16, line of 8), one a thread."""
    lines: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    row = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(1, lines)))[:, None]
    return row, worked_out(gl.arange(0, 8, layout=gl.SliceLayout(0, lines)))[None, :]


@gluon.jit
def ask_nodes(
    y_ptr, unit, num_columns, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STRIDE: gl.constexpr, STAYS: gl.constexpr,
):  # fmt: skip
    """What a unit (row, key head) reads of the row's nodes, idle ones too, into L2. STAYS: as long
    as there is anything else to make room with."""
    node, line = _lines()
    at = y_ptr + (unit // H * num_columns + node) * STRIDE
    at += column_of(unit % H, line * 64, H, K, V)
    there = (node < num_columns) & (line >= 0)
    if STAYS:
        ask_lasting_line(at, there)
    else:
        ask_line(at, there)


@gluon.jit
def ask_above(
    row, found, log_k, log_u, log_len, key_head, H: gl.constexpr, G: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """What a key head reads of the log and above the root into L2; log_k: of the one before it."""
    C: gl.constexpr = 2 * H * K + G * V
    j, line = _lines()
    rows: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
    entry = found.index(3).load(rows)[:, None]
    top = origin(row, found.index(4).load(rows), C, W, STRIDE)[:, None]
    known = (j < log_len) & (line >= 0)
    ask_line(log_u + (entry * (G * V) + key_head * (2 * V) + line * 32), known)
    ask_line(log_k + (entry * (H * K) + K + line * 32), known & (line < K // 32))
    ask_line(top + column_of(key_head, line * 64, H, K, V), (j < W - 1) & (line >= 0))


@gluon.jit
def ask_state(
    unit, last, S_ptr, slot_ptr, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Tiles of a unit that the ring does not hold into L2: the memory has something to do while
    no program has."""
    if AHEAD > 0:  # noqa: SIM102 - one of them is known when compiling
        if unit < last:
            each: gl.constexpr = AHEAD * _ROWS * K // 128
            thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
            slot = gl.load(slot_ptr + unit // H).to(gl.int64)
            row = (slot * G + unit % H * 2) * V + 2 * _ROWS
            _ask_stretch(S_ptr + (row * K + thread * each), 4 * each)


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
    lines lie in turn in the same pages of memory."""
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
