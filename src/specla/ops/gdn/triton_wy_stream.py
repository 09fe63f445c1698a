# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The second kernel of `ops.gdn.triton_wy` on Hopper, with the state on its way before its turn.

Same inputs, outputs and products as `triton_wy._apply_kernel`, other roundings. What differs is
when memory is asked: programs are as many as the device holds at a time, each goes through tiles
(row, value head, 64 rows of V) in order, and a ring of pieces of S is always in flight by the copy
engine, past the ends of tiles. Only `slot` and `num_nodes` say where S lies, so the ring fills
before the kernels before this one have ended: of those only the solve can still be running, which
lets this one begin after its own wait and does not touch S. Where the fold is due, S goes from
shared memory back to where it came from, by the copy engine too.

Where it is used: key and value width 128, up to 16 nodes, and several tiles for each program
(`fits`, `pays`), where `ops.gdn.triton_wy_fused` does not fit. A round of 64 rows at 16/32x128
takes, solve included, 136 us instead of 143 (a tree of 16, folded) and 87 instead of 113 (a chain
of 8, only read) on an H200. At 8x256x256 it brings nothing (126 instead of 129, 95 instead of 92),
so the rest stays with `_apply_kernel` (docs/log.md).

Source: as `ops.gdn.triton_wy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.triton import is_hopper
from specla.ops.gdn.triton_decode import processors
from specla.ops.gdn.triton_wy_operands import (
    COLUMNS,
    ROWS,
    STAGES,
    ask,
    ask_head,
    ask_solution,
    barrier,
    copy_pieces,
    entries,
    faded,
    left_layout,
    pieces,
    place_of,
    product,
    product_layout,
    rows_of,
    state_layout,
    store_block,
    wait_for,
)
from specla.ops.gdn.triton_wy_solve import BLOCK

if TYPE_CHECKING:
    from specla.ops.gdn.triton_wy_form import ClosedForm

_ROWS, _COLUMNS, _STAGES = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(STAGES)
_BLOCK = gl.constexpr(BLOCK)
WARPS = 4
MAX_FOLD = 32
"""Entries folded while S passes: with more, registers spill and two programs have no room."""


class StreamTile(NamedTuple):
    """programs: per multiprocessor, which has room for two. Speed, never bits."""

    programs: int = 2


def fits(key_dim: int, value_dim: int, nodes: int, fold: int) -> bool:
    """Whether the kernel can do it; nodes, fold: padded."""
    return key_dim == value_dim == 128 and nodes == BLOCK and fold <= MAX_FOLD


def pays(
    shape: RecurrentShape, num_rows: int, nodes: int, fold: int, device: torch.device
) -> bool:
    """Whether it fits, on the device that this is for, and programs have tiles to be ahead of."""
    if not fits(shape.key_dim, shape.value_dim, nodes, fold):
        return False
    if not is_hopper(device) or knobs.runtime.interpret:
        return False
    tiles = num_rows * shape.num_value_heads * (shape.value_dim // ROWS)
    return tiles >= 3 * StreamTile().programs * processors(device)


def launch(
    S: Tensor,
    values: tuple[Tensor, ...],
    form: ClosedForm,
    rows: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    meta: dict[str, Any],
    tile: StreamTile,
) -> None:
    """Run the kernel over what `triton_wy.walk_wy` gives its own.

    values: u, v, o. meta: H, G, K, V, NODES, LOG, FOLD, PDL.
    """
    K, V, nodes, log, fold = (meta[name] for name in ("K", "V", "NODES", "LOG", "FOLD"))
    assert fits(K, V, nodes, fold), f"takes 128 x 128, 16 nodes, folds of up to 32, got {meta}"
    heads = rows[0].numel() * meta["G"]
    key_heads, tiles = rows[0].numel() * meta["H"], heads * (V // ROWS)
    _stream_kernel[(min(processors(S.device) * tile.programs, tiles),)](
        _blocks(S, S.numel(), K, ROWS, COLUMNS),
        _blocks(form.x, key_heads * 4 * nodes * K, K, 2 * nodes, COLUMNS),
        _blocks(form.e, key_heads * 2 * log * K, K, fold, COLUMNS),
        _blocks(form.solution, heads * 4 * nodes * nodes, nodes, 2 * nodes, nodes),
        _blocks(form.reads, heads * 4 * nodes * log, log, 2 * nodes, BLOCK),
        *(*values, form.places, form.e, form.reads, form.decay, *rows, tiles, *sizes),
        **meta,
        num_warps=WARPS,
        **({"launch_pdl": True} if meta["PDL"] else {}),
    )


def _blocks(x: Tensor, size: int, width: int, rows: int, columns: int) -> TensorDescriptor:
    """As `triton_wy._blocks`; a descriptor is a launch's argument, by value, also in a graph."""
    dtype = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    matrix = x.view(-1)[:size].view(-1, width)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.jit
def _add_log(
    acc, u, reads, u_at, first, ring_len, end, STRIDE: gl.constexpr, layout: gl.constexpr
):
    """acc + what a block of the log says; and its u on the way to the ring, below `end`."""
    j = first + gl.arange(0, u.shape[1], layout=gl.SliceLayout(0, layout))
    moving = ((j >= ring_len) & (j < end))[None, :]
    gl.store(u_at + (j[None, :] * STRIDE + rows_of(layout)), u, mask=moving)
    high, low = pieces(u)
    acc = product(high, low, reads.index(0).permute((1, 0)), reads.index(1).permute((1, 0)), acc)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _stream(
    ring, tiles, q, xs, es, rest, S_row, u, u_at, e_ptr, places_ptr, fade_ptr, log_len,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, LOG: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """S x^T [ROWS, 2 NODES]; if FOLDS, with S decayed, the log added, and written."""
    WIDE: gl.constexpr = xs.shape[1]
    FOLD: gl.constexpr = es.shape[1]
    operand: gl.constexpr = left_layout(WIDE)
    wide: gl.constexpr = product_layout(_COLUMNS)
    left: gl.constexpr = left_layout(_COLUMNS)
    S_blocks, ss, full = ring
    acc = gl.zeros([_ROWS, WIDE], gl.float32, product_layout(WIDE))
    if FOLDS:
        u_high, u_low = faded(u, fade_ptr, 0, log_len, left)
        fade = gl.load(fade_ptr + LOG)
    for c in gl.static_range(K // _COLUMNS):
        s = (q + c) % _STAGES
        after = q + (c + _STAGES - 1)
        place = place_of(tiles, after, G, K, V)
        wait_for(full, q + c)
        # The order of rows that was loaded is the product's by another name: no value moves.
        S = ss.index(s).load(state_layout())
        S = S.reshape([_ROWS // 8, 4, 2, _COLUMNS]).permute((0, 2, 1, 3))
        S = gl.convert_layout(S.reshape([_ROWS, _COLUMNS]), operand, assert_trivial=True)
        if not FOLDS:
            barrier()  # all have passed the piece before this one: its place is free
            ask(ring, after, place)
        high, low = pieces(S)
        x_high = xs.index(2 * c).permute((1, 0))
        x_low = xs.index(2 * c + 1).permute((1, 0))
        acc = product(high, low, x_high, x_low, acc)
        if FOLDS:
            new = gl.zeros([_ROWS, _COLUMNS], gl.float32, wide)
            new = product(u_high, u_low, es.index(2 * c), es.index(2 * c + 1), new)
            acc, new = warpgroup_mma_wait(0, deps=(acc, new))
            for f in range(FOLD, log_len, _BLOCK):
                copy_pieces(rest, e_ptr + f * K + c * _COLUMNS, K, LOG * K)
                more = entries(u_at, places_ptr, f, log_len, _BLOCK, G * V, left)
                more_high, more_low = faded(more, fade_ptr, f, log_len, left)
                new = product(more_high, more_low, rest.index(0), rest.index(1), new)
                new = warpgroup_mma_wait(0, deps=(new,))
            # S stays out of the sum in the tensor core, which cuts where it should round.
            new = gl.convert_layout(S, wide, assert_trivial=True) * fade + new
            new = new.reshape([_ROWS // 8, 2, 4, _COLUMNS]).permute((0, 2, 1, 3))
            new = new.reshape([_ROWS, _COLUMNS])
            new = gl.convert_layout(new, state_layout(), assert_trivial=True)
            ss.index(s).store(new)
            fence_async_shared()
            tma.store_wait(0)  # has read the piece before this one: its place is free
            barrier()
            store_block(S_blocks, [S_row, c * _COLUMNS], ss.index(s))
            ask(ring, after, place)
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


@gluon.jit(
    do_not_specialize=[
        "num_tiles", "num_columns", "num_path", "num_entries", "log_capacity", "threshold",
    ]
)  # fmt: skip
def _stream_kernel(  # noqa: C901 - one kernel, one pass
    S_blocks, x_blocks, e_blocks, solution_blocks, reads_blocks, u_ptr, v_ptr, o_ptr,
    places_ptr, e_ptr, reads_ptr, decay_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr,
    num_tiles, num_columns, num_path, num_entries, log_capacity, threshold,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NODES: gl.constexpr,
    LOG: gl.constexpr, FOLD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program i of P: tiles i / P to (i + 1) / P of all, in the order row, value head, rows."""
    TILES: gl.constexpr = V // _ROWS
    GROUP: gl.constexpr = G // H
    PIECES: gl.constexpr = K // _COLUMNS
    WIDE: gl.constexpr = 2 * NODES
    mma: gl.constexpr = product_layout(WIDE)
    operand: gl.constexpr = left_layout(WIDE)
    left: gl.constexpr = left_layout(_COLUMNS)
    bf16: gl.constexpr = gl.bfloat16
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    first = gl.program_id(0) * num_tiles // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * num_tiles // gl.num_programs(0)
    ss = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS, _COLUMNS], S_blocks.layout)
    xs = gl.allocate_shared_memory(bf16, [2 * PIECES, WIDE, _COLUMNS], x_blocks.layout)
    es = gl.allocate_shared_memory(bf16, [2 * PIECES, FOLD, _COLUMNS], e_blocks.layout)
    rest = gl.allocate_shared_memory(bf16, [2, _BLOCK, _COLUMNS], e_blocks.layout)
    solution = gl.allocate_shared_memory(bf16, [2, WIDE, NODES], solution_blocks.layout)
    reads = gl.allocate_shared_memory(bf16, [2, WIDE, _BLOCK], reads_blocks.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bar)
    x_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    e_ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    ready = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(_STAGES):
        mbarrier.init(full.index(s), count=1)
    mbarrier.init(x_ready, count=1)
    mbarrier.init(e_ready, count=1)
    mbarrier.init(ready, count=1)
    fence_async_shared()
    barrier()
    ring = (S_blocks, ss, full)
    tiles = (first, last, slot_ptr)
    heads = (x_blocks, e_blocks, xs, es, x_ready, e_ready, ring_len_ptr, path_len_ptr, threshold)
    solutions = (solution_blocks, reads_blocks, solution, reads, ready)
    for q in gl.static_range(_STAGES - 1):
        ask(ring, q, place_of(tiles, q, G, K, V))
    n = gl.load(num_nodes_ptr + first // (G * TILES), mask=first < last, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if n > 0:
        ask_head(heads, first // (GROUP * TILES), H, LOG)
        ask_solution(solutions, first // TILES)

    q = 0
    x_phase = 0
    e_phase = 0
    phase = 0
    for tile in range(first, last):
        b = tile // (G * TILES)
        head = tile % (G * TILES) // TILES
        part = tile % TILES
        # The next tile: of another key head, of another row?
        then = tile + 1
        another = then < last
        turn = another & (then % (GROUP * TILES) == 0)
        n_then = n
        if turn & (then % (G * TILES) == 0):
            n_then = gl.load(num_nodes_ptr + b + 1)
        turn = turn & (n_then > 0)
        if n > 0:
            slot = gl.load(slot_ptr + b).to(gl.int64)
            ring_len = gl.load(ring_len_ptr + b)
            log_len = ring_len + gl.load(path_len_ptr + b)
            candidates = log_capacity + (1 - gl.load(bank_ptr + b)) * num_path
            fold = log_len > threshold
            end = gl.where(fold, 0, log_len)  # only what is not folded moves to the ring
            u_at = u_ptr + ((slot * num_entries * G + head) * V + part * _ROWS)
            S_row = slot.to(gl.int32) * (G * V) + head * V + part * _ROWS
            key_problem = (b * H + head // GROUP).to(gl.int64)
            problem = (b * G + head).to(gl.int64)
            decay_at = decay_ptr + problem * (NODES + LOG + 1)
            places_at = places_ptr + b * LOG
            # On their way while S passes.
            u = entries(u_at, places_at, 0, log_len, _BLOCK, G * V, operand)
            row = head * V + part * _ROWS + rows_of(operand)
            node = gl.arange(0, NODES, layout=gl.SliceLayout(0, operand))[None, :]
            m = b * num_columns
            v = gl.load(v_ptr + ((m + node) * (G * V) + row), mask=node < n, other=0.0)
            column = gl.arange(0, WIDE, layout=gl.SliceLayout(0, mma))
            decay = gl.load(decay_at + column // 2)
            if (tile % (GROUP * TILES) == 0) | (tile == first):
                mbarrier.wait(x_ready, x_phase)
                x_phase ^= 1
                if fold:
                    mbarrier.wait(e_ready, e_phase)
                    e_phase ^= 1
            if fold:
                if FOLD == _BLOCK:
                    folded = gl.convert_layout(u, left, assert_trivial=True)
                else:
                    folded = entries(u_at, places_at, 0, log_len, FOLD, G * V, left)
                acc = _stream(
                    ring, tiles, q, xs, es, rest, S_row, folded, u_at,
                    e_ptr + key_problem * (2 * LOG * K), places_at, decay_at + NODES, log_len,
                    G, K, V, LOG, True,
                )  # fmt: skip
            else:
                acc = _stream(
                    ring, tiles, q, xs, es, rest, S_row, u, u_at, e_ptr, places_at,
                    decay_at + NODES, log_len, G, K, V, LOG, False,
                )  # fmt: skip
            if turn:
                barrier()  # nobody reads x any more
                ask_head(heads, then // (GROUP * TILES), H, LOG)
            mbarrier.wait(ready, phase)
            phase ^= 1
            said = gl.zeros([_ROWS, WIDE], gl.float32, mma)
            said = _add_log(said, u, reads, u_at, 0, ring_len, end, G * V, operand)
            for f in range(_BLOCK, log_len, _BLOCK):
                u = entries(u_at, places_at, f, log_len, _BLOCK, G * V, operand)
                reads_at = reads_ptr + problem * (2 * WIDE * LOG) + f
                copy_pieces(reads, reads_at, LOG, WIDE * LOG)
                said = _add_log(said, u, reads, u_at, f, ring_len, end, G * V, operand)
            acc = acc * decay[None, :] + said

            # What log and state say of each value, against the value: corrections, once solved.
            o, told = acc.reshape([_ROWS, NODES, 2]).split()
            high, low = pieces(v.to(gl.float32) - gl.convert_layout(told, operand))
            acc = gl.zeros([_ROWS, WIDE], gl.float32, mma)
            solved_high = solution.index(0).permute((1, 0))
            acc = product(high, low, solved_high, solution.index(1).permute((1, 0)), acc)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            corrected, w = acc.reshape([_ROWS, NODES, 2]).split()
            o += corrected
            apart: gl.constexpr = o.type.layout
            i = gl.arange(0, NODES, layout=gl.SliceLayout(0, apart))[None, :]
            row = rows_of(apart)
            o_at = o_ptr + (head * V + part * _ROWS)
            gl.store(o_at + ((m + i) * (G * V) + row), o, mask=i < n)
            gl.store(u_at + ((candidates + i) * (G * V) + row), w, mask=i < n)
            tma.store_wait(0)
        else:
            for c in gl.static_range(PIECES):
                after = q + (c + _STAGES - 1)
                wait_for(full, q + c)
                barrier()
                ask(ring, after, place_of(tiles, after, G, K, V))
            if turn:
                ask_head(heads, then // (GROUP * TILES), H, LOG)
        n = n_then
        if another & (n > 0):
            barrier()  # nobody reads this head's solution any more
            ask_solution(solutions, then // TILES)
        q += PIECES
