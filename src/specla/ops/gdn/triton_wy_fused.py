# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Convolution, gates, systems and states of a tree round in one kernel, for Hopper.

Does what `ops.gdn.triton.prepare` and `ops.gdn.triton_wy.walk_wy` do, letters and products as
there, but q, v, beta, operands in pieces, solutions and decays stay in shared memory: `workspace`
gets o alone. Programs are as many as the device holds at a time; each goes through units (row, key
head, the two value heads that share it) in order, with the ring of `ops.gdn.triton_wy_stream` in
flight past the ends of tiles and units:

  what all its tiles multiply with (`ops.gdn.triton_wy_inputs`, `ops.gdn.triton_wy_heads`)
  its four tiles of 64 rows, as in `ops.gdn.triton_wy_stream`, each with the next one's u of the
  log on its way; and before the last of them, what the next unit's will be made of into L2

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
from triton.language import range as passes
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn.triton import is_hopper
from specla.ops.gdn.triton_decode import processors
from specla.ops.gdn.triton_prepare import overlap
from specla.ops.gdn.triton_wy_asks import (
    ask_above,
    ask_log,
    ask_next,
    ask_nodes,
    ask_state,
    ask_tile,
    viewed,
    worked_out,
)
from specla.ops.gdn.triton_wy_heads import make_operands
from specla.ops.gdn.triton_wy_inputs import find_inputs, log_values, make_inputs, plain
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
"""Whether `pays` may say yes. Not yet: this form has not run on a GPU (docs/log.md has what it
should come to), and engines' logs grow to more than 16 entries."""
LEAST_NODES, LEAST_UNITS = 9, 128
"""Of what pays (H200, 16/32x128; us per layer, three kernels against the form before this one): 64
trees of 16 nodes 163.7 / 129.4. Of its first form, which took 144.0 there: 8 trees 34.2 / 28.5
(128 units), but one 18.8 / 20.8 (16 units: no program has another unit to be ahead of), 64 chains
of 8 nodes 99.1 / 106.5 and 64 trees of 8 nodes 139.8 / 144.1 (a head costs the same for half)."""
WARPS = 4
_ROWS, _COLUMNS = gl.constexpr(ROWS), gl.constexpr(COLUMNS)
_N = gl.constexpr(BLOCK)


class FusedTile(NamedTuple):
    """programs: per multiprocessor, which has room for two, or for three with 2 stages, 168
    registers and a flight of 2. ahead: tiles of a program's first unit that are asked into L2
    beside the two in the ring (of every unit's, the form before lost 8 us of 131). whole: S is
    asked for by tiles, not by pieces (2 us there). stages: pieces of the ring. registers: of a
    thread, at most; 0: as many as there are. keep: y and o stay in L2 if they can, past which S
    streams. ask: the tile before which the next unit's inputs and log are asked into L2 (-1:
    never). together: whole tiles are written at once. flight: how many of the convolution's eight
    tiles are on their way at a time. Speed, never bits."""

    programs: int = 2
    ahead: int = 0
    whole: bool = True
    stages: int = STAGES
    registers: int = 0
    keep: bool = False
    ask: int = 3
    together: bool = True
    flight: int = 8


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
        ASK=tile.ask,
        TOGETHER=tile.together and tile.whole,
        FLIGHT=tile.flight,
        KEEP="evict_last" if tile.keep else "",
        PDL=pdl,
        num_warps=WARPS,
        **({"maxnreg": tile.registers} if tile.registers else {}),
        **overlap(pdl),
    )


@gluon.jit
def _stream(  # noqa: C901 - one tile, two ways to ask for it
    ring, tiles, q, xs, es, S_row, u, fades, ends, G: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, WHOLE: gl.constexpr, TOGETHER: gl.constexpr, FOLDS: gl.constexpr,
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
        if not WHOLE or c == 0:
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
        if FOLDS:
            new = gl.zeros([_ROWS, _COLUMNS], gl.float32, wide)
            new = product(u_high, u_low, es.index(2 * c), es.index(2 * c + 1), new)
        acc = product(high, low, x_high, x_low, acc)
        if FOLDS:
            new = warpgroup_mma_wait(3, deps=(new,))  # acc's three go on
            # S stays out of the sum in the tensor core, which cuts where it should round.
            new = gl.convert_layout(S, wide, assert_trivial=True) * fade + new
            new = new.reshape([_ROWS // 8, 2, 4, _COLUMNS]).permute((0, 2, 1, 3))
            new = new.reshape([_ROWS, _COLUMNS])
            new = gl.convert_layout(new, state_layout(), assert_trivial=True)
            ss.index(s).store(new)
            if not TOGETHER:
                fence_async_shared()
                if not WHOLE:
                    tma.store_wait(0)  # has read the piece before this one: its place is free
                barrier()
                store_block(S_blocks, [S_row, c * _COLUMNS], ss.index(s))
                if not WHOLE:
                    ask(ring, after, place)
    if FOLDS and TOGETHER:
        fence_async_shared()
        barrier()
        for c in gl.static_range(K // _COLUMNS):
            store_block(S_blocks, [S_row, c * _COLUMNS], ss.index((q + c) % ss.shape[0]))
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.constexpr_function
def value_layout():
    """As `state_layout`, 16 columns."""
    register = [[0, 1], [8, 0], [0, 8]]
    lane = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(register, lane, [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def _tile(
    ring, tiles, q, xs, es, vs, solution, reads, decays, t, u, u_ptr, o_ptr, found, slot,
    m, n, key_head, ring_len, log_len, end, fold, candidates,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WHOLE: gl.constexpr,
    TOGETHER: gl.constexpr, KEEP: gl.constexpr,
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
    if fold:
        acc = _stream(
            ring, tiles, q, xs, es, S_row, u, fades, ends, G, K, V, WHOLE, TOGETHER, True
        )  # fmt: skip
    else:
        acc = _stream(
            ring, tiles, q, xs, es, S_row, u, fades, ends, G, K, V, WHOLE, False, False
        )  # fmt: skip
    j = gl.arange(0, _N, layout=gl.SliceLayout(0, operand))
    if end > 0:
        j = worked_out(j)
        moving = ((j >= ring_len) & (j < end))[None, :]
        gl.store(u_at + (j[None, :] * (G * V) + rows_of(operand)), u, mask=moving)
    places = found.index(3).load(gl.SliceLayout(0, operand))
    then = log_values(u_at + _ROWS, places, log_len, t + 1 < 2 * TILES, G * V, operand)
    high, low = pieces(u)
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
    ASK: gl.constexpr, TOGETHER: gl.constexpr, FLIGHT: gl.constexpr, KEEP: gl.constexpr,
    PDL: gl.constexpr,
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
    found = gl.allocate_shared_memory(gl.int32, [5, _N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    ring = (S_blocks, ss, full)
    tiles = (first * TILES, last * TILES, slot_ptr)
    if WHOLE:
        for c in gl.static_range(0, STAGES, PIECES):
            S_row, _, here = place_of(tiles, c, G, K, V)
            ask_tile(ring, c, S_row, here, K)
    else:
        for c in gl.static_range(STAGES - 1):
            ask(ring, c, place_of(tiles, c, G, K, V))
    # Log, state, and trees are older than this layer.
    ask_state(first, last, S_ptr, slot_ptr, H, G, K, V, AHEAD)
    ask_log(
        first, last, k_ptr, u_ptr, places_ptr, slot_ptr, ring_len_ptr, path_len_ptr, num_entries,
        H, G, K, V,
    )  # fmt: skip
    b = first // H
    n = gl.load(num_nodes_ptr + b)
    slot = gl.load(slot_ptr + b).to(gl.int64)
    bank = gl.load(bank_ptr + b)
    ring_len = gl.load(ring_len_ptr + b)
    path_len = gl.load(path_len_ptr + b)
    if n > 0:
        find_inputs(
            found, parents_ptr + b * num_columns, path_ptr + b * num_path, path_len, ring_len,
            log_capacity + bank * num_path, n, W,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    STAYS: gl.constexpr = KEEP != ""
    for unit in range(first, last if STAYS else first + 1):
        ask_nodes(y_ptr, unit, num_columns, H, K, V, STRIDE, STAYS)

    # What does not change is worked out again: kept, it would fill a quarter of the registers.
    for unit in passes(first, last, disable_licm=True):
        q = (unit - first) * (TILES * PIECES)
        b = unit // H
        key_head = unit % H
        m = b * num_columns
        begins = (key_head == 0) & (unit > first)
        if begins:
            n = gl.load(num_nodes_ptr + b)
            slot = gl.load(slot_ptr + b).to(gl.int64)
            bank = gl.load(bank_ptr + b)
            ring_len = gl.load(ring_len_ptr + b)
            path_len = gl.load(path_len_ptr + b)
        slot_then = slot
        if (key_head + 1 == H) & (unit + 1 < last):
            slot_then = gl.load(slot_ptr + b + 1).to(gl.int64)
        log_len = ring_len + path_len
        if n > 0:
            fold = log_len > threshold
            end = gl.where(fold, 0, log_len)  # only what is not folded moves to the ring
            candidates = log_capacity + (1 - bank) * num_path
            read, write = slot * 2 + bank, slot * 2 + (1 - bank)
            row = (
                y_ptr, inputs_ptr + read * num_path * C, tail_ptr + read * ((W - 1) * C), m,
            )  # fmt: skip
            gates = (
                y_ptr + m * STRIDE + (STRIDE - 2 * G + 2 * key_head), A_ptr + 2 * key_head,
                dt_bias_ptr + 2 * key_head,
            )  # fmt: skip
            log_k = k_ptr + (slot * num_entries * H + key_head) * K
            u_at = u_ptr + slot * num_entries * (G * V)
            kept = gl.allocate_shared_memory(gl.float32, [8, _N], plain())
            barrier()  # nobody reads what the last unit multiplied with any more
            if begins:
                find_inputs(
                    found, parents_ptr + m, path_ptr + b * num_path, path_len, ring_len,
                    log_capacity + bank * num_path, n, W,
                )  # fmt: skip
            over = make_inputs(
                row, found, xs, es, vs, reads, kept, gates, taps_ptr,
                inputs_ptr + write * num_path * C, tail_ptr + write * ((W - 1) * C), log_k,
                g_ptr + slot * num_entries * G + 2 * key_head, ancestors_ptr + m, candidates, n,
                ring_len, log_len, end, key_head, beta_scale, H, G, K, V, W, STRIDE, FLIGHT, KEEP,
            )  # fmt: skip
            places = found.index(3).load(gl.SliceLayout(0, left_layout(WIDE)))
            u = log_values(
                u_at + key_head * (2 * V), places, log_len, log_len > 0, G * V, left_layout(WIDE)
            )  # fmt: skip
            make_operands(xs, es, solution, reads, decays, fades, ends, over, kept)
            for t in passes(TILES, disable_licm=True):
                if WHOLE:
                    ask_next(ring, q, unit, last, t, slot, slot_then, H, G, K, V)
                if (t == ASK) & (unit + 1 < last):
                    if not STAYS:
                        ask_nodes(y_ptr, unit + 1, num_columns, H, K, V, STRIDE, False)
                    if key_head + 1 < H:
                        ask_above(
                            row, found, log_k, u_at, log_len, key_head + 1, H, G, K, V, W, STRIDE
                        )  # fmt: skip
                u = _tile(
                    ring, tiles, q + t * PIECES, xs, es, vs, solution, reads,
                    (decays, fades, ends), t, u, u_at, o_ptr, found, slot, m, n, key_head,
                    ring_len, log_len, end, fold, candidates, G, K, V, WHOLE, TOGETHER, KEEP,
                )  # fmt: skip
        else:
            for t in range(TILES):
                if WHOLE:
                    ask_next(ring, q, unit, last, t, slot, slot_then, H, G, K, V)
                    wait_for(full, q + t * PIECES)
                else:
                    for c in gl.static_range(PIECES):
                        piece = q + (t * PIECES + c)
                        wait_for(full, piece)
                        after = piece + (STAGES - 1)
                        barrier()
                        ask(ring, after, place_of(tiles, after, G, K, V))
