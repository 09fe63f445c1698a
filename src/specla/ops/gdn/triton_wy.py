# SPDX-License-Identifier: Apache-2.0
"""Tree verification in closed form on tensor cores: the fast mode's state kernel.

Same inputs and effects as `ops.gdn.triton.walk`, other roundings (docs/math/tree-verification.md,
"Closed form"). With the log's entries l as ancestors of every node whose u is known, C their total
log decay, c_l its part up to l, and everything over one row and value head:

    A_ij = [j above i] beta_i e^{G_i - G_j} k_i.k_j           T = (I + A)^-1 diag(beta)
    P_ij = [j above or = i] e^{G_i - G_j} q_i.k_j
    E_il = e^{C + G_i - c_l} k_i.k_l                          F_il = e^{C + G_i - c_l} q_i.k_l
    R = V - e^{C + G} K S^T - E U_log                         U = T R
    O = e^{C + G} Q S^T + F U_log + (P T) R
    S after the fold = e^C S + sum_l e^{C - c_l} u_l k_l^T

Two kernels. `solve_kernel` makes what needs no state and no value: T and P T, E and F, e^{C + G},
and q, k and the log's keys in pieces (below), once per row and key head. `_apply_kernel` streams
S, in chunks of K, through one product with x = [q_0 k_0 q_1 k_1 ...]: what a thread gets for a
node's output lies beside the node's correction. The fold takes the same chunks as they pass; S is
read once, and written once where the fold is due. `ops.gdn.triton_wy_stream` is that for Hopper;
`ops.gdn.triton_wy_fused` is convolution, gates, systems and states in one kernel, where it fits.

Numerics. Exponents are path sums that are <= 0, masked before exp, never split. Triangles are
inverted by blocks that double, which is substitution, so nothing grows beyond the entries of T
and P T, which are products of contractions. Products take each float32 as two bfloat16 pieces, and
three of their four products (errors about 1e-5). Sums are added in an order fixed by tile and
padded width: runs repeat, but a row's bits depend on both, and so on the bucket.

Speed. What every program of a head multiplies with is split once, by the solve, and comes as
bfloat16 by the copy engine (TMA): a product of Hopper's needs a fence for whatever threads have
written to shared memory themselves, and fences cost more than the products (docs/log.md).

Source: "Trees from Marginals" (arXiv 2607.06763) and TreeWY (arXiv 2608.20961) for the masked
solve; DeltaLog (arXiv 2608.15533) for the log.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn import triton_wy_fused as fused
from specla.ops.gdn import triton_wy_stream as stream
from specla.ops.gdn.triton import Workspace, prepare
from specla.ops.gdn.triton_wy_form import ClosedForm, padded
from specla.ops.gdn.triton_wy_solve import (
    BLOCK,
    dot,
    mask_kernel,
    pieces,
    row_of_round,
    solve_kernel,
)

MAX_NODES = 64
_BLOCK = tl.constexpr(BLOCK)


class Tile(NamedTuple):
    """How the work is cut: rows of V per program, columns of K per step of its stream, warps,
    stages (steps in flight); of the solve, warps, columns of K per step, and most registers per
    thread, where 0 leaves it to the compiler."""

    rows: int
    columns: int
    warps: int
    stages: int
    solve_warps: int = 1
    solve_columns: int = 16
    solve_registers: int = 0


def tile_for(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Tile:
    """By the round's size: enough programs to fill the device, then tiles that reuse q and k."""
    rows = min(shape.value_dim, 64)
    while rows > 16 and num_rows * shape.num_value_heads * (shape.value_dim // rows) < 128:
        rows //= 2
    columns = min(shape.key_dim, 32 if rows == 64 else 64)
    nodes = padded(num_nodes)
    if nodes > BLOCK:
        return Tile(rows, columns, 4, 3, {32: 4, 64: 8}[nodes], 32)
    return Tile(rows, columns, 4, 3, 1, 16, 128 if shape.key_dim <= 128 else 0)


def pays(num_rows: int, num_nodes: int) -> bool:
    """Whether the closed form is faster than the walk whatever the shape: from 128 nodes in all
    on, in trees (H200; docs/log.md). In one kernel it is from 64 on (docs/adr/0021): a table of
    `specla profile` knows."""
    return num_nodes >= 8 and num_rows * num_nodes >= 128


def compile_masks(rnd: DeviceRound, form: ClosedForm, *, log_capacity: int, max_log: int) -> None:
    """Fill form.ancestors and form.places from the round's trees and logs; once per round.
    max_log: most entries of a log (`State.max_log`)."""
    num_rows, num_nodes = rnd.parents.shape
    log = padded(max_log)
    assert form.ancestors.numel() >= num_rows * num_nodes, "form is for fewer rows or nodes"
    assert form.places.numel() >= num_rows * log, "form is for fewer rows or shorter logs"
    mask_kernel[(num_rows,)](
        *(rnd.parents, rnd.num_nodes, rnd.bank, rnd.ring_len, rnd.path_len, rnd.path),
        *(form.ancestors, form.places, num_nodes, rnd.path.shape[1], log_capacity),
        NODES=padded(num_nodes),
        LOG=log,
        num_warps=1,
    )


def prepare_and_walk(
    layer: LayerState,
    rnd: DeviceRound,
    y: Tensor,
    conv_taps: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    workspace: Workspace,
    form: ClosedForm,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    max_log: int,
    threshold: int,
    beta_scale: float = 1.0,
    gate: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """`prepare`, then `walk_wy`; or one kernel for both, which writes o alone of `workspace`."""
    if gate is None and fused.pays(shape, rnd.parents.shape[1], y, max_log):
        fused.launch(
            layer, rnd, y, conv_taps, A, dt_bias, workspace.o, form, shape=shape,
            log_capacity=log_capacity, max_log=max_log, threshold=threshold,
            beta_scale=beta_scale, pdl=pdl,
        )  # fmt: skip
        return
    prepare(
        layer, rnd, y, conv_taps, A, dt_bias, workspace, shape=shape, log_capacity=log_capacity,
        beta_scale=beta_scale, gate=gate, pdl=pdl,
    )  # fmt: skip
    walk_wy(
        layer, rnd, workspace, form, shape=shape, log_capacity=log_capacity, max_log=max_log,
        threshold=threshold, pdl=pdl,
    )  # fmt: skip


def walk_wy(
    layer: LayerState,
    rnd: DeviceRound,
    workspace: Workspace,
    form: ClosedForm,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    max_log: int,
    threshold: int,
    tile: Tile | stream.StreamTile | None = None,
    pdl: bool = False,
) -> None:
    """Log and tree in closed form, for at most 64 nodes per row.

    `prepare` has written k and g of the candidates to the bank, `compile_masks` the masks to
    `form`. Reads S once, writes it where the fold is due (else moves the path's factors to the
    ring); outputs to workspace.o, u to the write bank.

    Args:
        max_log: most entries of a log (`State.max_log`).
        tile: a `StreamTile` asks for the kernel of `ops.gdn.triton_wy_stream`, which is for
            Hopper. None chooses by device, shape and the round's size.
    """
    num_rows, num_nodes = rnd.parents.shape
    workspace.check(num_rows, num_nodes)
    assert num_nodes <= MAX_NODES, f"the bitsets hold {MAX_NODES} nodes, got {num_nodes}"
    nodes, log = padded(num_nodes), padded(max_log)
    fold = min(log, _fold_width(threshold))
    heads, key_heads = num_rows * shape.num_value_heads, num_rows * shape.num_key_heads
    assert form.solution.numel() >= heads * 4 * nodes * nodes, "form is for fewer rows or nodes"
    assert form.reads.numel() >= heads * 4 * nodes * log, "form is for shorter logs"
    s, factors, launch = shape, layer.factors, {"launch_pdl": True} if pdl else {}
    rows = (rnd.slot, rnd.num_nodes, rnd.bank, rnd.ring_len, rnd.path_len)
    sizes = (num_nodes, rnd.path.shape[1], factors.k.shape[1], log_capacity, threshold)
    constants = {"H": s.num_key_heads, "G": s.num_value_heads, "K": s.key_dim, "PDL": pdl}
    constants |= {"NODES": nodes, "LOG": log, "FOLD": fold}
    if tile is None and stream.pays(s, num_rows, nodes, fold, layer.S.device):
        tile = stream.StreamTile()
    cut = tile if isinstance(tile, Tile) else tile_for(s, num_rows, num_nodes)
    limit = {"maxnreg": cut.solve_registers} if cut.solve_registers else {}
    solve_kernel[(s.num_key_heads, num_rows, 2)](
        *(factors.k, factors.g, workspace.q, workspace.beta, *form, *rows, *sizes),
        CHUNK=min(s.key_dim, cut.solve_columns),
        **constants,
        num_warps=cut.solve_warps,
        num_stages=2,
        **(limit | launch),
    )
    if isinstance(tile, stream.StreamTile):
        values = (factors.u, workspace.v, workspace.o)
        stream.launch(layer.S, values, form, rows, sizes, constants | {"V": s.value_dim}, tile)
        return
    blocks = (
        _blocks(layer.S, layer.S.numel(), s.key_dim, cut.rows, cut.columns),
        _blocks(form.x, key_heads * 4 * nodes * s.key_dim, s.key_dim, 2 * nodes, cut.columns),
        _blocks(form.e, key_heads * 2 * log * s.key_dim, s.key_dim, fold, cut.columns),
    )
    _apply_kernel[(s.value_dim // cut.rows * s.num_value_heads, num_rows)](
        *(*blocks, layer.S, factors.u, workspace.v, workspace.o, form.places),
        *(form.solution, form.reads, form.decay, *rows, *sizes),
        V=s.value_dim,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        STAGES=cut.stages,
        **constants,
        num_warps=cut.warps,
        num_stages=1,  # of the small loops beside the stream
        **launch,
    )


def _blocks(x: Tensor, size: int, width: int, rows: int, columns: int) -> TensorDescriptor:
    """The first `size` elements of x as a matrix [..., width], to be read in blocks."""
    matrix = x.view(-1)[:size].view(-1, width)
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _fold_width(threshold: int) -> int:
    """Entries folded while S passes: more, which is rare, cost another pass over S."""
    return min(64, max(BLOCK, triton.next_power_of_2(threshold + 8)))


@triton.jit
def _log_values(u_at, places_ptr, j, log_len, G: tl.constexpr, V: tl.constexpr):
    """u [ROWS, ..] of these entries of the log, 0 beyond it."""
    place = tl.load(places_ptr + j)
    return tl.load(u_at + place[None, :] * (G * V), mask=(j < log_len)[None, :], other=0.0)


@triton.jit
def _folded(u_high, u_low, e_blocks, first, start, S, LOG: tl.constexpr):
    """S + u e. S stays out of the sum in the tensor core, which cuts where it should round."""
    e_high = e_blocks.load([first, start])
    e_low = e_blocks.load([first + LOG, start])
    new = tl.zeros(S.shape, tl.float32)
    return S + dot(u_high, u_low, e_high, e_low, new)


@triton.jit
def _stream(
    S_blocks, x_blocks, e_blocks, S_at, S_first, x_first, e_first, u_high, u_low, fade,
    K: tl.constexpr, NODES: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """S x^T [ROWS, 2 NODES]; if FOLDS, with S written, decayed and the first entries added."""
    acc = tl.zeros([ROWS, 2 * NODES], tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        S = S_blocks.load([S_first, start])
        x_high = x_blocks.load([x_first, start])
        x_low = x_blocks.load([x_first + 2 * NODES, start])
        S_high, S_low = pieces(S)
        acc = dot(S_high, S_low, tl.trans(x_high), tl.trans(x_low), acc)
        if FOLDS:
            new = _folded(u_high, u_low, e_blocks, e_first, start, S * fade, LOG)
            tl.store(S_at + start, new)
    return acc


@triton.jit
def _fold_rest(
    S_at, u_at, e_blocks, e_first, fade_ptr, places_ptr, log_len,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LOG: tl.constexpr,
    FOLD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entries beyond the first FOLD, in passes over S, which has been decayed and written."""
    for first in range(FOLD, log_len, FOLD):
        tl.debug_barrier()  # S was stored by other threads of this program
        j = first + tl.arange(0, FOLD)
        fade = tl.load(fade_ptr + j, mask=j < log_len, other=0.0)[None, :]
        u_high, u_low = pieces(_log_values(u_at, places_ptr, j, log_len, G, V) * fade)
        for start in range(0, K, COLUMNS):
            S = tl.load(S_at + start)
            new = _folded(u_high, u_low, e_blocks, e_first + first, start, S, LOG)
            tl.store(S_at + start, new)


@triton.jit
def _add_log(
    acc, u_at, reads_at, places_ptr, ring_len, log_len, end,
    G: tl.constexpr, V: tl.constexpr, LOG: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """acc + what the log says; and its u on the way to the ring, below `end`."""
    for first in range(0, log_len, _BLOCK):
        j = first + tl.arange(0, _BLOCK)
        mask = j < log_len
        u = _log_values(u_at, places_ptr, j, log_len, G, V)
        at = reads_at + j[:, None]
        high = tl.load(at, mask=mask[:, None], other=0.0)
        low = tl.load(at + 2 * NODES * LOG, mask=mask[:, None], other=0.0)
        u_high, u_low = pieces(u)
        acc = dot(u_high, u_low, high, low, acc)
        moving = (j >= ring_len) & (j < end)
        tl.store(u_at + j[None, :] * (G * V), u, mask=moving[None, :])
    return acc


@triton.jit(
    do_not_specialize=["num_columns", "num_path", "num_entries", "log_capacity", "threshold"]
)
def _apply_kernel(
    S_blocks, x_blocks, e_blocks, S_ptr, u_ptr, v_ptr, o_ptr,
    places_ptr, solution_ptr, reads_ptr, decay_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr,
    num_columns, num_path, num_entries, log_capacity, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NODES: tl.constexpr,
    LOG: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = V // ROWS
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    n = tl.load(num_nodes_ptr + b)
    if n == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    slot, ring_len, log_len, candidates, places_ptr = row_of_round(
        slot_ptr, bank_ptr, ring_len_ptr, path_len_ptr, places_ptr, b, num_path, log_capacity, LOG
    )
    due = log_len > threshold
    row = tl.arange(0, ROWS)[:, None]
    u_at = u_ptr + (slot * num_entries * G + head) * V + tile * ROWS + row
    S_first = (slot * G + head) * V + tile * ROWS
    S_at = S_ptr + (S_first + row) * K + tl.arange(0, COLUMNS)[None, :]
    key_problem = b * H + head // (G // H)
    x_first, e_first = key_problem * (4 * NODES), key_problem * (2 * LOG)
    S_first = S_first.to(tl.int32)
    decay_ptr += (b * G + head).to(tl.int64) * (NODES + LOG + 1)
    if due:
        j = tl.arange(0, FOLD)
        u = _log_values(u_at, places_ptr, j, log_len, G, V)
        if PDL:
            gdc_wait()
        fade = tl.load(decay_ptr + NODES + j, mask=j < log_len, other=0.0)[None, :]
        u_high, u_low = pieces(u * fade)
        acc = _stream(
            S_blocks, x_blocks, e_blocks, S_at, S_first, x_first, e_first,
            u_high, u_low, tl.load(decay_ptr + NODES + LOG),
            K, NODES, LOG, ROWS, COLUMNS, STAGES, True,
        )  # fmt: skip
        _fold_rest(
            S_at, u_at, e_blocks, e_first, decay_ptr + NODES, places_ptr, log_len,
            G, K, V, LOG, FOLD, COLUMNS,
        )  # fmt: skip
    else:
        if PDL:
            gdc_wait()
        acc = _stream(
            S_blocks, x_blocks, e_blocks, S_at, S_first, x_first, e_first,
            0, 0, 1.0, K, NODES, LOG, ROWS, COLUMNS, STAGES, False,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()

    problem = (b * G + head).to(tl.int64)
    m = b * num_columns
    c = tl.arange(0, 2 * NODES)
    i = tl.arange(0, NODES)
    acc *= tl.load(decay_ptr + c // 2)[None, :]
    acc = _add_log(
        acc, u_at, reads_ptr + (problem * (4 * NODES) + c[None, :]) * LOG, places_ptr,
        ring_len, log_len, tl.where(due, 0, log_len), G, V, LOG, NODES,
    )  # fmt: skip

    # What log and state say of each value, against the value: corrections, once solved.
    used = (i < n)[None, :]
    at = (m + i)[None, :] * (G * V) + head * V + tile * ROWS + row
    v = tl.load(v_ptr + at, mask=used, other=0.0).to(tl.float32)
    o, told = tl.split(tl.reshape(acc, [ROWS, NODES, 2]))
    solution_at = solution_ptr + (problem * (4 * NODES) + c[None, :]) * NODES + i[:, None]
    acc = tl.reshape(tl.join(o, tl.zeros([ROWS, NODES], tl.float32)), [ROWS, 2 * NODES])
    high, low = pieces(v - told)
    solution_low = tl.load(solution_at + 2 * NODES * NODES)
    acc = dot(high, low, tl.load(solution_at), solution_low, acc)
    o, u = tl.split(tl.reshape(acc, [ROWS, NODES, 2]))
    tl.store(o_ptr + at, o, mask=used)
    tl.store(u_at + (candidates + i)[None, :] * (G * V), u, mask=used)
