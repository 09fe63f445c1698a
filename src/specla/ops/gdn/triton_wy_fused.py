# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Convolution, gates, systems and states of a tree round in one kernel, for Hopper.

Does what `ops.gdn.triton.prepare` and `ops.gdn.triton_wy.walk_wy` do, letters and products as
there, but q, v, beta, operands in pieces, solutions and decays stay in shared memory: `workspace`
gets o alone. Programs are as many as the device holds at a time; each goes through units (row, key
head, the two value heads that share it) in order, with a ring of two tiles of S in flight past the
ends of units (`ops.gdn.triton_wy_asks`):

  what all its tiles multiply with (`ops.gdn.triton_wy_inputs`, `ops.gdn.triton_wy_heads`)
  its four tiles of 64 rows, as in `ops.gdn.triton_wy_stream`, each with the next one's u of the
  log on its way

Roundings differ from those kernels' by approximated exponentials: k, u, o and S are as close to
the reference, their bits are not the same. A row's bits do not depend on other rows.

Takes two value heads a key head, states of 128 x 128, up to 16 nodes and logs of up to 16 entries
(`fits`): of an engine that folds from 5 on, with paths of up to 12 nodes.

Source: as `ops.gdn.triton_wy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    ask_log,
    ask_next,
    ask_nodes,
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

PROGRAMS = 2
"""Per multiprocessor, which has room for them. H200, 64 trees of 16 nodes at 16/32x128: 114.4 us a
layer; with one 142, with three, which leaves each half a ring and 168 registers, 142 too."""
WARPS = 4
_ROWS, _COLUMNS, _STAGES = gl.constexpr(ROWS), gl.constexpr(COLUMNS), gl.constexpr(STAGES)
_N = gl.constexpr(BLOCK)


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


def pays(shape: RecurrentShape, num_nodes: int, y: Tensor, max_log: int) -> bool:
    """Whether it fits and this is the device that it is for: it was faster than three kernels in
    all rounds of 8 and 16 nodes where both were measured (docs/adr/0021)."""
    if not fits(shape, num_nodes, max_log):
        return False
    return is_hopper(y.device) and not knobs.runtime.interpret and y.dtype == torch.bfloat16


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
    programs: int = PROGRAMS,
    pdl: bool = False,
) -> None:
    """Run the kernel over what `prepare` and `walk_wy` are given.

    o: the workspace's. form: its masks are compiled. max_log: most entries of a log. programs: per
    multiprocessor; speed, never bits.
    """
    s = shape
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
    assert 2 * s.key_dim // COLUMNS == STAGES, "the ring must hold two tiles"
    units = num_rows * s.num_key_heads
    assert form.places.numel() >= num_rows * BLOCK, "form is for fewer rows"
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    S_blocks = TensorDescriptor.from_tensor(layer.S.view(-1, s.key_dim), [ROWS, COLUMNS], layout)
    _fused_kernel[(min(processors(y.device) * programs, units),)](
        *(S_blocks, y, conv_taps, A, dt_bias, layer.tail, layer.inputs),
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
        PDL=pdl,
        num_warps=WARPS,
        **overlap(pdl),
    )


@gluon.jit
def _stream(ring, q, xs, es, S_row, u, fades, ends, K: gl.constexpr, FOLDS: gl.constexpr):
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
    wait_for(full, q)
    for c in gl.static_range(K // _COLUMNS):
        s = (q + c) % ss.shape[0]
        S = ss.index(s).load(state_layout())
        S = S.reshape([_ROWS // 8, 4, 2, _COLUMNS]).permute((0, 2, 1, 3))
        S = gl.convert_layout(S.reshape([_ROWS, _COLUMNS]), operand, assert_trivial=True)
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
            fence_async_shared()
            barrier()
            store_block(S_blocks, [S_row, c * _COLUMNS], ss.index(s))
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.constexpr_function
def value_layout():
    """As `state_layout`, 16 columns."""
    register = [[0, 1], [8, 0], [0, 8]]
    lane = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(register, lane, [[16, 0], [32, 0]], [], [64, 16])


@gluon.jit
def _tile(
    ring, q, xs, es, vs, solution, reads, decays, t, u, u_ptr, o_ptr, found, slot, m, n, key_head,
    ring_len, log_len, end, fold, candidates, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
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
        acc = _stream(ring, q, xs, es, S_row, u, fades, ends, K, True)
    else:
        acc = _stream(ring, q, xs, es, S_row, u, fades, ends, K, False)
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
    gl.store(o_ptr + ((m + i) * (G * V) + at), o, mask=i < n)
    gl.store(u_ptr + ((candidates + i) * (G * V) + at), w, mask=i < n)
    tma.store_wait(0)
    return then


@gluon.jit(
    do_not_specialize=[
        "num_units", "num_columns", "num_path", "num_entries", "log_capacity", "threshold",
    ]
)  # fmt: skip
def _fused_kernel(  # noqa: C901 - one kernel, one pass
    S_blocks, y_ptr, taps_ptr, A_ptr, dt_bias_ptr, tail_ptr, inputs_ptr,
    k_ptr, u_ptr, g_ptr, o_ptr, ancestors_ptr, places_ptr,
    slot_ptr, num_nodes_ptr, parents_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr,
    num_units, num_columns, num_path, num_entries, log_capacity, threshold, beta_scale,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
    STRIDE: gl.constexpr, PDL: gl.constexpr,
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
    ss = gl.allocate_shared_memory(gl.float32, [_STAGES, _ROWS, _COLUMNS], S_blocks.layout)
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
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], bar)
    for s in gl.static_range(_STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    ring = (S_blocks, ss, full)
    tiles = (first * TILES, last * TILES, slot_ptr)
    # State, log and trees are older than this layer.
    for c in gl.static_range(0, _STAGES, PIECES):
        S_row, _, here = place_of(tiles, c, G, K, V)
        ask_tile(ring, c, S_row, here, K)
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
    # A loop of one: without it part is worked out before the wait, and that takes more registers.
    for unit in range(first, first + 1):
        ask_nodes(y_ptr, unit, num_columns, H, K, V, STRIDE)

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
                ring_len, log_len, end, key_head, beta_scale, H, G, K, V, W, STRIDE,
            )  # fmt: skip
            places = found.index(3).load(gl.SliceLayout(0, left_layout(WIDE)))
            u = log_values(
                u_at + key_head * (2 * V), places, log_len, log_len > 0, G * V, left_layout(WIDE)
            )  # fmt: skip
            make_operands(xs, es, solution, reads, decays, fades, ends, over, kept)
            for t in passes(TILES, disable_licm=True):
                ask_next(ring, q, unit, last, t, slot, slot_then, H, G, K, V)
                u = _tile(
                    ring, q + t * PIECES, xs, es, vs, solution, reads, (decays, fades, ends), t,
                    u, u_at, o_ptr, found, slot, m, n, key_head, ring_len, log_len, end, fold,
                    candidates, G, K, V,
                )  # fmt: skip
        else:
            for t in range(TILES):
                ask_next(ring, q, unit, last, t, slot, slot_then, H, G, K, V)
                wait_for(full, q + t * PIECES)
