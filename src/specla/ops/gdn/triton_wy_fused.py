# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Convolution, gates, systems and states of a tree round in one kernel, for Hopper.

Does what `ops.gdn.triton.prepare` and `ops.gdn.triton_wy.walk_wy` do, letters and products as
there, but q, v, beta, operands in pieces, solutions and decays stay in shared memory: `workspace`
gets o alone. Programs are as many as the device holds at a time; each goes through units (row, key
head, the two value heads that share it) in order, with the ring of `ops.gdn.triton_wy_stream` in
flight past the ends of tiles and units:

  what all its tiles multiply with (`ops.gdn.triton_wy_heads`), and what the next unit's will be
  made of into L2
  its four tiles of 64 rows, as in `ops.gdn.triton_wy_stream`, each with the next one's u of the
  log on its way

Roundings differ from those kernels' by approximated exponentials: k, u, o and S are as close to
the reference, their bits are not the same. A row's bits do not depend on other rows.

Takes two value heads a key head, states of 128 x 128, up to 16 nodes and logs of up to 16 entries
(`fits`): folded from 9 on, with paths of up to 8 nodes.

Source: as `ops.gdn.triton_wy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn.triton import is_hopper
from specla.ops.gdn.triton_decode import processors
from specla.ops.gdn.triton_prepare import overlap
from specla.ops.gdn.triton_wy_heads import ask_line, make_operands, viewed, worked_out
from specla.ops.gdn.triton_wy_operands import (
    COLUMNS,
    ROWS,
    STAGES,
    ask,
    barrier,
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

USED = False
"""Whether `pays` may say yes."""
LEAST_NODES, LEAST_UNITS = 9, 128
"""Of what pays (H200, 16/32x128; us per layer, three kernels against one): 64 trees of 16 nodes
163.7 / 129.4. Of its first form, which took 144.0 there: 8 trees 34.2 / 28.5 (128 units), but one
18.8 / 20.8 (16 units: no program has another unit to be ahead of), 64 chains of 8 nodes 99.1 /
106.5 and 64 trees of 8 nodes 139.8 / 144.1 (a head costs the same for half the nodes)."""
WARPS = 4
_ROWS, _COLUMNS = gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_N = gl.constexpr(BLOCK)


class FusedTile(NamedTuple):
    """programs: per multiprocessor, which has room for two, or for three with 2 stages and 168
    registers. ahead: tiles of a unit's four that are asked into L2 when it begins (0 was faster
    than 2, by 8 us of 131). whole: S is asked for by tiles, not by pieces (2 us). stages: pieces
    of the ring. registers: of a thread, at most; 0: as many as there are. keep: y and o stay in L2
    if they can, past which S streams. Speed, never bits."""

    programs: int = 2
    ahead: int = 0
    whole: bool = True
    stages: int = STAGES
    registers: int = 0
    keep: bool = False


def fits(shape: RecurrentShape, num_nodes: int, max_log: int) -> bool:
    """Whether the kernel can do it."""
    s = shape
    return (
        s.key_dim == s.value_dim == 128
        and s.num_value_heads == 2 * s.num_key_heads
        and s.conv_width == 4
        and num_nodes <= BLOCK
        and max_log <= BLOCK
    )


def faster(units: int, num_nodes: int) -> bool:
    """Whether one kernel was measured to be faster than three (see `LEAST_NODES`)."""
    return num_nodes >= LEAST_NODES and units >= LEAST_UNITS


def pays(
    shape: RecurrentShape,
    rnd: DeviceRound,
    y: Tensor,
    max_log: int,
) -> bool:
    """Whether it is used and fits, on the device that it is for, where it was faster."""
    num_rows, num_nodes = rnd.parents.shape
    if not USED or not fits(shape, num_nodes, max_log):
        return False
    if not is_hopper(y.device) or knobs.runtime.interpret or y.dtype != torch.bfloat16:
        return False
    return faster(num_rows * shape.num_key_heads, num_nodes)


def launch(
    layer: LayerState,
    rnd: DeviceRound,
    y: Tensor,
    conv_taps: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    o: Tensor,
    form: ClosedForm,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    max_log: int,
    threshold: int,
    beta_scale: float = 1.0,
    tile: FusedTile | None = None,
    pdl: bool = False,
) -> None:
    """Run the kernel over what `prepare` and `walk_wy` are given.

    o: the workspace's. form: its masks are compiled. max_log: most entries of a log.
    """
    s, tile = shape, tile or FusedTile()
    num_rows, num_nodes = rnd.parents.shape
    num_path = rnd.path.shape[1]
    assert fits(s, num_nodes, max_log), (
        "takes two value heads a key head, states of 128 x 128, 16 nodes, logs of 16 entries at "
        f"most; got {s}, {num_nodes} nodes, {max_log} entries"
    )
    assert y.dtype == torch.bfloat16, f"projections must be bfloat16, got {y.dtype}"
    need = num_rows * num_nodes
    assert len(y) >= need, f"y must have {need} rows, one per node; it has {len(y)}"
    assert len(o) >= need, f"o must have {need} rows, one per node; it has {len(o)}"
    two_tiles = 2 * s.key_dim // COLUMNS
    assert tile.stages == two_tiles or not tile.whole, "the ring must hold two tiles"
    units = num_rows * s.num_key_heads
    assert form.places.numel() >= num_rows * BLOCK, "form is for fewer rows"
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    S_blocks = TensorDescriptor.from_tensor(layer.S.view(-1, s.key_dim), [ROWS, COLUMNS], layout)
    _fused_kernel[(min(processors(y.device) * tile.programs, units),)](
        *(S_blocks, layer.S, y, conv_taps, A, dt_bias, layer.tail, layer.inputs),
        *(*layer.factors, o, form.ancestors, form.places),
        *(rnd.slot, rnd.num_nodes, rnd.parents, rnd.bank, rnd.ring_len, rnd.path_len, rnd.path),
        *(units, num_nodes, num_path, layer.factors.k.shape[1], log_capacity, threshold),
        beta_scale,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        STRIDE=y.stride(0),
        STAGES=tile.stages,
        AHEAD=tile.ahead,
        WHOLE=tile.whole,
        KEEP="evict_last" if tile.keep else "",
        PDL=pdl,
        num_warps=WARPS,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **overlap(pdl),
    )


@gluon.jit
def _ask_stretch(at, BYTES: gl.constexpr):
    """BYTES from each `at` on into L2."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [at.to(gl.int64), gl.full(at.shape, BYTES, gl.int32, at.type.layout)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _ask_state(
    unit, last, S_ptr, slot_ptr, H: gl.constexpr, G: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """A unit's last tiles into L2: the memory has something to do while a program has not."""
    TILES: gl.constexpr = 2 * V // _ROWS
    if AHEAD > 0:  # noqa: SIM102 - one of them is known when compiling
        if unit < last:
            each: gl.constexpr = AHEAD * _ROWS * K // 128
            thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
            slot = gl.load(slot_ptr + unit // H).to(gl.int64)
            row = (slot * G + unit % H * 2) * V + (TILES - AHEAD) * _ROWS
            _ask_stretch(S_ptr + (row * K + thread * each), 4 * each)


@gluon.jit
def _ask_log(
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
def _ask_tile(ring, tiles, q, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """The tile after that of pieces q and q + 1 on its way, at once: its lines lie in turn in the
    same pages of memory. The first two were asked for before the first unit."""
    barrier()  # all have passed the last tile: its places are free
    for c in gl.static_range(K // _COLUMNS):
        after = q + (K // _COLUMNS + c)
        row, column, here = place_of(tiles, after, G, K, V)
        ask(ring, after, (row, column, here & (q > 0)))


@gluon.jit
def _stream(
    ring, tiles, q, xs, es, S_row, u, fades, ends,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WHOLE: gl.constexpr, FOLDS: gl.constexpr,
):  # fmt: skip
    """As `triton_wy_stream._stream`, for logs of one block."""
    WIDE: gl.constexpr = xs.shape[1]
    operand: gl.constexpr = left_layout(WIDE)
    wide: gl.constexpr = product_layout(_COLUMNS)
    left: gl.constexpr = left_layout(_COLUMNS)
    S_blocks, ss, full = ring
    acc = gl.zeros([_ROWS, WIDE], gl.float32, product_layout(WIDE))
    if FOLDS:
        late = gl.convert_layout(u, left, assert_trivial=True)
        u_high, u_low = pieces(late * fades.load(gl.SliceLayout(0, left))[None, :])
        fade = ends.load(gl.SliceLayout(0, wide))[None, :]
    for c in gl.static_range(K // _COLUMNS):
        s = (q + c) % ss.shape[0]
        if not WHOLE:
            after = q + (c + ss.shape[0] - 1)
            place = place_of(tiles, after, G, K, V)
        wait_for(full, q + c)
        S = ss.index(s).load(state_layout())
        S = S.reshape([_ROWS // 8, 4, 2, _COLUMNS]).permute((0, 2, 1, 3))
        S = gl.convert_layout(S.reshape([_ROWS, _COLUMNS]), operand, assert_trivial=True)
        if not FOLDS and not WHOLE:
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
            # S stays out of the sum in the tensor core, which cuts where it should round.
            new = gl.convert_layout(S, wide, assert_trivial=True) * fade + new
            new = new.reshape([_ROWS // 8, 2, 4, _COLUMNS]).permute((0, 2, 1, 3))
            new = new.reshape([_ROWS, _COLUMNS])
            new = gl.convert_layout(new, state_layout(), assert_trivial=True)
            ss.index(s).store(new)
            fence_async_shared()
            if not WHOLE:
                tma.store_wait(0)  # has read the piece before this one: its place is free
            barrier()
            store_block(S_blocks, [S_row, c * _COLUMNS], ss.index(s))
            if not WHOLE:
                ask(ring, after, place)
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


@gluon.jit
def _log_values(u_at, places, log_len, here, STRIDE: gl.constexpr, layout: gl.constexpr):
    """u [ROWS, 16] of the log's entries, 0 beyond it."""
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, layout))
    known = ((j < log_len) & here)[None, :]
    return gl.load(u_at + (places[None, :] * STRIDE + rows_of(layout)), mask=known, other=0.0)


@gluon.constexpr_function
def value_layout():
    """As `state_layout`, 16 columns."""
    register = [[0, 1], [8, 0], [0, 8]]
    lane = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(register, lane, [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def _tile(
    ring, tiles, q, xs, es, vs, solution, reads, decays, t, u, u_ptr, o_ptr, places,
    slot, m, n, key_head, ring_len, log_len, end, fold, candidates,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WHOLE: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """One tile: [ROWS, K] of S of a value head. Gives the log's u of the next one, on its way."""
    TILES: gl.constexpr = V // _ROWS
    f32: gl.constexpr = gl.float32
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = xs.shape[1]
    mma: gl.constexpr = product_layout(WIDE)
    operand: gl.constexpr = left_layout(WIDE)
    h = t // TILES
    column = key_head * (2 * V) + t * _ROWS  # of u, v and o
    u_at = u_ptr + column
    S_row = slot.to(gl.int32) * (G * V) + column
    decays, fades, ends = decays
    fades = viewed(fades, f32, [2, _N], row).index(h)
    ends = viewed(ends, f32, [2, 1], row).index(h)
    if WHOLE:
        _ask_tile(ring, tiles, q, G, K, V)
    if fold:
        acc = _stream(ring, tiles, q, xs, es, S_row, u, fades, ends, G, K, V, WHOLE, True)
    else:
        acc = _stream(ring, tiles, q, xs, es, S_row, u, fades, ends, G, K, V, WHOLE, False)
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, operand))
    if end > 0:
        j = worked_out(j)
        moving = ((j >= ring_len) & (j < end))[None, :]
        gl.store(u_at + (j[None, :] * (G * V) + rows_of(operand)), u, mask=moving)
    high, low = pieces(u)
    then = _log_values(u_at + _ROWS, places, log_len, t + 1 < 2 * TILES, G * V, operand)
    said = gl.zeros([_ROWS, WIDE], gl.float32, mma)
    read_high = reads.index(2 * h).permute((1, 0))
    said = product(high, low, read_high, reads.index(2 * h + 1).permute((1, 0)), said)
    said = warpgroup_mma_wait(0, deps=(said,))
    decay = viewed(decays, f32, [2, WIDE], row).index(h).load(gl.SliceLayout(0, mma))
    acc = acc * decay[None, :] + said

    # What log and state say of each value, against the value: corrections, once solved.
    v = vs.index(t).permute((1, 0)).load(value_layout())
    v = v.reshape([_ROWS // 8, 4, 2, _N]).permute((0, 2, 1, 3)).reshape([_ROWS, _N])
    v = gl.convert_layout(v, operand, assert_trivial=True)
    o, told = acc.reshape([_ROWS, _N, 2]).split()
    high, low = pieces(v.to(gl.float32) - gl.convert_layout(told, operand))
    acc = gl.zeros([_ROWS, WIDE], gl.float32, mma)
    solved_high = solution.index(2 * h).permute((1, 0))
    acc = product(high, low, solved_high, solution.index(2 * h + 1).permute((1, 0)), acc)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    corrected, w = acc.reshape([_ROWS, _N, 2]).split()
    o += corrected
    apart: gl.constexpr = o.type.layout
    i = worked_out(gl.arange(0, _N, layout=gl.SliceLayout(0, apart)))[None, :]
    at = column + rows_of(apart)
    gl.store(o_ptr + ((m + i) * (G * V) + at), o, mask=i < n, eviction_policy=KEEP)
    gl.store(u_ptr + ((candidates + i) * (G * V) + at), w, mask=i < n)
    tma.store_wait(0)
    return then


@gluon.jit(
    do_not_specialize=[
        "num_units", "num_columns", "num_path", "num_entries", "log_capacity", "threshold",
    ]
)  # fmt: skip
def _fused_kernel(  # noqa: C901 - one kernel, one pass
    S_blocks, S_ptr, y_ptr, taps_ptr, A_ptr, dt_bias_ptr, tail_ptr, inputs_ptr,
    k_ptr, u_ptr, g_ptr, o_ptr, ancestors_ptr, places_ptr,
    slot_ptr, num_nodes_ptr, parents_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr,
    num_units, num_columns, num_path, num_entries, log_capacity, threshold, beta_scale,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
    STRIDE: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, WHOLE: gl.constexpr,
    KEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program i of P: units (row, key head) i / P to (i + 1) / P of all, in order."""
    C: gl.constexpr = 2 * H * K + G * V
    TILES: gl.constexpr = 2 * V // _ROWS  # of a unit
    PIECES: gl.constexpr = K // _COLUMNS
    WIDE: gl.constexpr = 2 * _N
    bf16: gl.constexpr = gl.bfloat16
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDE, _COLUMNS], gl.bfloat16)
    e_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_N, _COLUMNS], gl.bfloat16)
    s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDE, _N], gl.bfloat16)
    first = gl.program_id(0) * num_units // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * num_units // gl.num_programs(0)
    ss = gl.allocate_shared_memory(gl.float32, [STAGES, _ROWS, _COLUMNS], S_blocks.layout)
    xs = gl.allocate_shared_memory(bf16, [2 * PIECES, WIDE, _COLUMNS], x_layout)
    es = gl.allocate_shared_memory(bf16, [2 * PIECES, _N, _COLUMNS], e_layout)
    solution = gl.allocate_shared_memory(bf16, [4, WIDE, _N], s_layout)
    reads = gl.allocate_shared_memory(bf16, [4, WIDE, _N], s_layout)
    vs = gl.allocate_shared_memory(
        bf16, [TILES, _N, _COLUMNS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    decays = gl.allocate_shared_memory(gl.float32, [2, WIDE], row_layout)
    fades = gl.allocate_shared_memory(gl.float32, [2, _N], row_layout)
    ends = gl.allocate_shared_memory(gl.float32, [2, 1], row_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    ring = (S_blocks, ss, full)
    tiles = (first * TILES, last * TILES, slot_ptr)
    for s in gl.static_range(STAGES if WHOLE else STAGES - 1):
        ask(ring, s, place_of(tiles, s, G, K, V))
    # Log and state are older than this round.
    _ask_state(first, last, S_ptr, slot_ptr, H, G, K, V, AHEAD)
    _ask_log(
        first, last, k_ptr, u_ptr, places_ptr, slot_ptr, ring_len_ptr, path_len_ptr, num_entries,
        H, G, K, V,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    for unit in range(first, last):
        q = (unit - first) * (TILES * PIECES)
        b = unit // H
        key_head = unit % H
        n = gl.load(num_nodes_ptr + b)
        slot = gl.load(slot_ptr + b).to(gl.int64)
        bank = gl.load(bank_ptr + b)
        ring_len = gl.load(ring_len_ptr + b)
        path_len = gl.load(path_len_ptr + b)
        if n > 0:
            log_len = ring_len + path_len
            fold = log_len > threshold
            end = gl.where(fold, 0, log_len)  # only what is not folded moves to the ring
            candidates = log_capacity + (1 - bank) * num_path
            m = b * num_columns
            read, write = slot * 2 + bank, slot * 2 + (1 - bank)
            row = (
                y_ptr, inputs_ptr + read * num_path * C, tail_ptr + read * ((W - 1) * C),
                parents_ptr + m, path_ptr + b * num_path, path_len, m,
            )  # fmt: skip
            gates = (
                y_ptr + m * STRIDE + (STRIDE - 2 * G + 2 * key_head), A_ptr + 2 * key_head,
                dt_bias_ptr + 2 * key_head,
            )  # fmt: skip
            places_at = places_ptr + b * _N
            u_at = u_ptr + slot * num_entries * (G * V)
            if unit > first:
                _ask_state(unit, last, S_ptr, slot_ptr, H, G, K, V, AHEAD)
            barrier()  # nobody reads what the last unit multiplied with any more
            make_operands(
                row, xs, es, vs, solution, reads, decays, fades, ends, gates, taps_ptr,
                inputs_ptr + write * num_path * C, tail_ptr + write * ((W - 1) * C),
                k_ptr + (slot * num_entries * H + key_head) * K, u_at,
                g_ptr + slot * num_entries * G + 2 * key_head, ancestors_ptr + m,
                places_at, candidates, n, ring_len, log_len, end, key_head,
                (unit + 1 < last) & (key_head + 1 < H), beta_scale,
                H, G, K, V, W, STRIDE, KEEP,
            )  # fmt: skip
            j = gl.arange(0, _N, layout=gl.SliceLayout(0, left_layout(WIDE)))
            places = gl.load(places_at + j, mask=j < log_len, other=0)
            u = _log_values(
                u_at + key_head * (2 * V), places, log_len, log_len > 0, G * V, left_layout(WIDE)
            )  # fmt: skip
            for t in range(TILES):
                u = _tile(
                    ring, tiles, q + t * PIECES, xs, es, vs, solution, reads,
                    (decays, fades, ends), t, u, u_at, o_ptr, places, slot, m, n, key_head,
                    ring_len, log_len, end, fold, candidates, G, K, V, WHOLE, KEEP,
                )  # fmt: skip
        else:
            for t in range(TILES):
                if WHOLE:
                    _ask_tile(ring, tiles, q + t * PIECES, G, K, V)
                for c in gl.static_range(PIECES):
                    piece = q + (t * PIECES + c)
                    wait_for(full, piece)
                    if not WHOLE:
                        after = piece + (STAGES - 1)
                        barrier()
                        ask(ring, after, place_of(tiles, after, G, K, V))
