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
once per row and value head. `_apply_kernel` streams S, in chunks of K, through one product with
[q_0 k_0 q_1 k_1 ...]: what a thread gets for a node's output lies beside the node's correction.
The fold takes the same chunks as they pass; S is read once, and written once where the fold is
due. With programmatic dependent launch the stream runs beside the solve; only its end waits.

Numerics. Exponents are path sums that are <= 0, masked before exp, never split. The solve
substitutes row by row inside blocks of 16 and block by block across, so nothing grows beyond the
entries of T and P T, which are products of contractions. Sums are added in an order fixed by tile
and padded width: runs repeat, but a row's bits depend on both, and so on the bucket. "tf32"
truncates operands to 10 bits; the fold, whose errors stay, and the solve, whose errors multiply,
take three products ("tf32x3", close to float32) all the same.

Source: "Trees from Marginals" (arXiv 2607.06763) and TreeWY (arXiv 2608.20961) for the masked
solve; DeltaLog (arXiv 2608.15533) for the log.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn.triton import Workspace
from specla.ops.gdn.triton_wy_solve import BLOCK, log_decay, mask_kernel, solve_kernel

MAX_NODES = 64
_BLOCK = tl.constexpr(BLOCK)

Precision = Literal["tf32", "tf32x3", "bf16x3"]


class ClosedForm(NamedTuple):
    """What the closed form needs beside `Workspace`; flat, laid out for each round's own sizes.
    Shared by all layers; N is padded to 16, 32 or 64 and the log's width to a power of two.

    ancestors [B, N] int64: bit j of node i's word: j is i or above it. places [B, log] int32:
    where in the slot's store the log's entries lie. Per row and value head, float32: solution
    [2 N, N], whose rows 2i and 2i + 1 are node i's of P T and T; reads [2 N, log], the same of F
    and E; decay [N], e^{C + G}.
    """

    ancestors: Tensor
    places: Tensor
    solution: Tensor
    reads: Tensor
    decay: Tensor

    @classmethod
    def allocate(
        cls,
        shape: RecurrentShape,
        num_rows: int,
        max_nodes: int,
        log_capacity: int,
        device: torch.device | str,
    ) -> ClosedForm:
        """Room for num_rows trees of max_nodes nodes, the width of a bank; smaller rounds use the
        beginning."""
        heads, nodes = num_rows * shape.num_value_heads, _padded(max_nodes)
        log = _log_width(log_capacity, max_nodes)

        def empty(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            ancestors=empty(num_rows * max_nodes, torch.int64),
            places=empty(num_rows * log, torch.int32),
            solution=empty(heads * 2 * nodes * nodes),
            reads=empty(heads * 2 * nodes * log),
            decay=empty(heads * nodes),
        )


class Tile(NamedTuple):
    """How the work is cut: rows of V per program, columns of K per step of its stream, warps,
    stages (steps in flight), whether the tile is called into the L2 cache first, and warps of the
    solve."""

    rows: int
    columns: int
    warps: int
    stages: int
    prefetch: bool = True
    solve_warps: int = 4


def tile_for(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Tile:
    """By the round's size: enough programs to fill the device, then tiles that reuse q and k."""
    solve_warps = {16: 1, 32: 4, 64: 8}[_padded(num_nodes)]
    rows = min(shape.value_dim, 64)
    while rows > 16 and num_rows * shape.num_value_heads * (shape.value_dim // rows) < 128:
        rows //= 2
    few = num_rows * shape.num_value_heads * (shape.value_dim // rows) <= 528
    prefetch = few and not knobs.runtime.interpret
    return Tile(rows, min(shape.key_dim, 32 if rows == 64 else 64), 4, 3, prefetch, solve_warps)


def pays(num_rows: int, num_nodes: int) -> bool:
    """Whether the closed form is faster than the walk: from 128 nodes in all on, in trees (H200;
    docs/log.md)."""
    return num_nodes >= 8 and num_rows * num_nodes >= 128


def compile_masks(rnd: DeviceRound, form: ClosedForm, *, log_capacity: int) -> None:
    """Fill form.ancestors and form.places from the round's trees and logs; once per round."""
    num_rows, num_nodes = rnd.parents.shape
    log = _log_width(log_capacity, rnd.path.shape[1])
    assert form.ancestors.numel() >= num_rows * num_nodes, "form is for fewer rows or nodes"
    assert form.places.numel() >= num_rows * log, "form is for fewer rows or a narrower bank"
    mask_kernel[(num_rows,)](
        *(rnd.parents, rnd.num_nodes, rnd.bank, rnd.ring_len, rnd.path_len, rnd.path),
        *(form.ancestors, form.places, num_nodes, rnd.path.shape[1], log_capacity),
        NODES=_padded(num_nodes),
        LOG=log,
        num_warps=1,
    )


def walk_wy(
    layer: LayerState,
    rnd: DeviceRound,
    workspace: Workspace,
    form: ClosedForm,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    threshold: int,
    precision: Precision = "bf16x3",
    fold_precision: Precision = "bf16x3",
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """Log and tree in closed form, for at most 64 nodes per row.

    `prepare` has written k and g of the candidates to the bank, `compile_masks` the masks to
    `form`. Reads S once, writes it where the fold is due (else moves the path's factors to the
    ring); outputs to workspace.o, u to the write bank.

    Args:
        precision: of the products with S, k and q. bf16x3 costs what tf32 does on Hopper, and is
            some 30 times as accurate (docs/log.md).
        fold_precision: of what is added to S for good.
        tile: None chooses by the round's size.
    """
    num_rows, num_nodes = rnd.parents.shape
    assert num_nodes <= MAX_NODES, f"the bitsets hold {MAX_NODES} nodes, got {num_nodes}"
    tile = tile or tile_for(shape, num_rows, num_nodes)
    log = _log_width(log_capacity, rnd.path.shape[1])
    needed = num_rows * shape.num_value_heads * 2 * _padded(num_nodes)
    assert form.solution.numel() >= needed * _padded(num_nodes), "form is for fewer rows or nodes"
    assert form.reads.numel() >= needed * log, "form is for fewer rows or a narrower bank"
    s, factors, launch = shape, layer.factors, {"launch_pdl": True} if pdl else {}
    rows = (rnd.slot, rnd.num_nodes, rnd.bank, rnd.ring_len, rnd.path_len)
    sizes = (num_nodes, rnd.path.shape[1], factors.k.shape[1], log_capacity, threshold)
    constants = {
        "H": s.num_key_heads,
        "G": s.num_value_heads,
        "K": s.key_dim,
        "NODES": _padded(num_nodes),
        "LOG": log,
        "PRECISION": _known(precision),
        "PDL": pdl,
    }
    solve_kernel[(s.num_value_heads, num_rows, 2)](
        *(factors.k, factors.g, workspace.q, workspace.beta, *form, *rows, *sizes),
        CHUNK=min(s.key_dim, 64),
        **constants,
        num_warps=tile.solve_warps,
        num_stages=2,
        **launch,
    )
    _apply_kernel[(s.value_dim // tile.rows * s.num_value_heads, num_rows)](
        *(layer.S, *factors, workspace.q, workspace.v, workspace.o, *form[1:], *rows, *sizes),
        V=s.value_dim,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        FOLD=min(log, _fold_width(threshold)),
        FOLD_PRECISION=_known(fold_precision),
        STAGES=tile.stages,
        PREFETCH=tile.prefetch,
        **constants,
        num_warps=tile.warps,
        num_stages=1,  # of the small loops beside the stream
        **launch,
    )


def _known(precision: str) -> str:
    """Triton's interpreter has no bf16x3."""
    return "ieee" if knobs.runtime.interpret and precision == "bf16x3" else precision


def _padded(num_nodes: int) -> int:
    return max(BLOCK, triton.next_power_of_2(num_nodes))


def _log_width(log_capacity: int, max_path: int) -> int:
    return max(BLOCK, triton.next_power_of_2(log_capacity + max_path))


def _fold_width(threshold: int) -> int:
    """Entries folded while S passes: more, which is rare, cost another pass over S."""
    return min(64, max(BLOCK, triton.next_power_of_2(threshold + 8)))


@triton.jit
def _rounded(x):
    """To the nearest tf32, where a product would cut the lower bits off."""
    x = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return x.to(tl.float32, bitcast=True)


@triton.jit
def _dot(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y. x comes to the product in registers, by way of a rounding or a split: a load
    that others use as well must not be refilled while a product still reads it."""
    if PRECISION == "tf32":
        acc = tl.dot(_rounded(x), y, acc, input_precision="tf32")
    elif PRECISION == "tf32x3":
        x_high, y_high = _rounded(x), _rounded(y)
        acc = tl.dot(x - x_high, y_high, acc, input_precision="tf32")
        acc = tl.dot(x_high, y - y_high, acc, input_precision="tf32")
        acc = tl.dot(x_high, y_high, acc, input_precision="tf32")
    else:
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _prefetch(at):
    """Call the cache lines at these addresses into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fold_rest(
    S_at, u_at, k_at, log_g, places_ptr, log_len,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LOG: tl.constexpr,
    FOLD: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Entries beyond the first FOLD, in passes over S, which has been decayed and written."""
    for first in range(FOLD, log_len, FOLD):
        tl.debug_barrier()  # S was stored by other threads of this program
        j = first + tl.arange(0, FOLD)
        left, _ = log_decay(log_g, places_ptr, j, log_len, G, LOG)
        place = tl.load(places_ptr + j)
        mask = j < log_len
        u = tl.load(u_at + place[None, :] * (G * V), mask=mask[None, :], other=0.0)
        u *= tl.exp(left)[None, :]
        for start in range(0, K, COLUMNS):
            k_there = k_at + place[:, None] * (H * K) + start
            k = tl.load(k_there, mask=mask[:, None], other=0.0)
            S = tl.load(S_at + start)
            tl.store(S_at + start, _dot(u, k, S, PRECISION))


@triton.jit
def _add_log(
    acc, u_at, reads_at, places_ptr, ring_len, log_len, end,
    G: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + what the log says; and its u on the way to the ring, below `end`."""
    for first in range(0, log_len, _BLOCK):
        j = first + tl.arange(0, _BLOCK)
        place = tl.load(places_ptr + j)
        mask = j < log_len
        u = tl.load(u_at + place[None, :] * (G * V), mask=mask[None, :], other=0.0)
        reads = tl.load(reads_at + j[:, None], mask=mask[:, None], other=0.0)
        acc = _dot(u, reads, acc, PRECISION)
        moving = (j >= ring_len) & (j < end)
        tl.store(u_at + j[None, :] * (G * V), u, mask=moving[None, :])
    return acc


@triton.jit(
    do_not_specialize=["num_columns", "num_path", "num_entries", "log_capacity", "threshold"]
)
def _apply_kernel(
    S_ptr, k_ptr, u_ptr, g_ptr, q_ptr, v_ptr, o_ptr,
    places_ptr, solution_ptr, reads_ptr, decay_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr,
    num_columns, num_path, num_entries, log_capacity, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NODES: tl.constexpr,
    LOG: tl.constexpr, FOLD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, FOLD_PRECISION: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = V // ROWS
    head, tile, b = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    key_head = head // (G // H)
    n = tl.load(num_nodes_ptr + b)
    if n == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    due = log_len > threshold
    places_ptr += b * LOG
    candidates = log_capacity + (1 - bank) * num_path
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    log_k = k_ptr + (slot * num_entries * H + key_head) * K
    log_g = g_ptr + slot * num_entries * G + head
    k_at = log_k + column
    u_at = u_ptr + (slot * num_entries * G + head) * V + tile * ROWS + row
    S_row = S_ptr + ((slot * G + head) * V + tile * ROWS + row) * K
    S_at = S_row + column
    m = b * num_columns
    if PREFETCH:
        _prefetch(S_row + tl.arange(0, K // 32)[None, :] * 32)

    # What the fold adds: u weighted with the decay still to come.
    j = tl.arange(0, FOLD)
    left, total = log_decay(log_g, places_ptr, j, log_len, G, LOG)
    fade = tl.exp(total)
    place = tl.load(places_ptr + j)
    folded = j < tl.where(due, log_len, 0)
    u = tl.load(u_at + place[None, :] * (G * V), mask=folded[None, :], other=0.0)
    u *= tl.exp(left)[None, :]
    e_at = k_at + place[:, None] * (H * K)

    # The stream. Column c of the product is q (even) or k (odd) of node c // 2.
    c = tl.arange(0, 2 * NODES)
    node = c // 2
    q_at = q_ptr + ((m + node) * H + key_head) * K
    x_at = tl.where(c % 2 == 0, q_at, log_k + (candidates + node) * (H * K))[:, None] + column
    acc = tl.zeros([ROWS, 2 * NODES], tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        S = tl.load(S_at + start)
        x = tl.load(x_at + start, mask=(node < n)[:, None], other=0.0)
        e = tl.load(e_at + start, mask=folded[:, None], other=0.0)
        acc = _dot(S, tl.trans(x), acc, PRECISION)
        if due:
            tl.store(S_at + start, _dot(u, e, S * fade, FOLD_PRECISION))
    if due:
        _fold_rest(
            S_at, u_at, k_at, log_g, places_ptr, log_len,
            H, G, K, V, LOG, FOLD, COLUMNS,
            FOLD_PRECISION,
        )  # fmt: skip

    i = tl.arange(0, NODES)
    used = (i < n)[None, :]
    at = (m + i)[None, :] * (G * V) + head * V + tile * ROWS + row
    v = tl.load(v_ptr + at, mask=used, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    problem = (b * G + head).to(tl.int64)
    acc *= tl.load(decay_ptr + problem * NODES + node)[None, :]
    acc = _add_log(
        acc, u_at, reads_ptr + (problem * (2 * NODES) + c[None, :]) * LOG, places_ptr,
        ring_len, log_len, tl.where(due, 0, log_len), G, V, PRECISION,
    )  # fmt: skip

    # What log and state say of each value, against the value: corrections, once solved.
    o, told = tl.split(tl.reshape(acc, [ROWS, NODES, 2]))
    solution_at = solution_ptr + (problem * (2 * NODES) + c[None, :]) * NODES + i[:, None]
    acc = tl.reshape(tl.join(o, tl.zeros([ROWS, NODES], tl.float32)), [ROWS, 2 * NODES])
    acc = _dot(v - told, tl.load(solution_at), acc, PRECISION)
    o, u = tl.split(tl.reshape(acc, [ROWS, NODES, 2]))
    tl.store(o_ptr + at, o, mask=used)
    tl.store(u_at + (candidates + i)[None, :] * (G * V), u, mask=used)
