# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on a GPU: exact kernels, for chains and trees alike.

`prepare` turns raw projections into what the recurrence reads and records each candidate's k and
g; `walk` carries one live state tile per program through the log and the tree and records u.

Exactness (rule I4). A state row's K elements lie in one thread group of LANES threads, K / LANES
to a thread. The two reductions over K therefore add in one order, in registers and then across
those lanes, whatever the value tile, warp count, tree or batch; the update is one explicit fma,
in walk and replay alike. tests/ops/test_gdn_triton.py compares every pair of tilings bitwise on a
GPU. Replaying recorded factors gives the bits that walking gave, so a branch needs no stored
state (docs/adr/0012).

Overlap. With programmatic dependent launch a kernel lets its successor start only after it has
itself waited; so code before a kernel's wait may read what the last kernel but one, and all
before it, wrote: here S, the log and the walk lists, not q, k, v.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3; SpecLA (arXiv
2607.16673), section 4; DeltaLog (arXiv 2608.15533) for the log.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.walk import NODE_MASK, RESTORE, SAVE, WALK

LANES = 8
_WALK, _RESTORE, _SAVE = tl.constexpr(WALK), tl.constexpr(RESTORE), tl.constexpr(SAVE)
_NODE = tl.constexpr(NODE_MASK)
_WIDE = tl.constexpr(4 * LANES)  # consecutive elements of one row that one load of a warp covers
_ROWS = tl.constexpr(32 // LANES)  # state rows side by side in a warp


class Workspace(NamedTuple):
    """What `prepare` hands to `walk`, for M = B * N nodes; shared by all layers.

    q [M, H, K] float32, normalised and scaled; v [M, G, V] activation dtype; beta [M, G]
    float32; o [M, G, V] float32, the outputs.
    """

    q: Tensor
    v: Tensor
    beta: Tensor
    o: Tensor

    @classmethod
    def allocate(
        cls,
        shape: RecurrentShape,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Workspace:
        """Room for num_rows nodes."""

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        values = (num_rows, shape.num_value_heads, shape.value_dim)
        return cls(
            q=empty(num_rows, shape.num_key_heads, shape.key_dim),
            v=empty(*values, dtype=dtype),
            beta=empty(num_rows, shape.num_value_heads),
            o=empty(*values),
        )


class Tile(NamedTuple):
    """How `walk` cuts a value head: rows of V per program, and warps. Never changes bits."""

    rows: int
    warps: int


def tile_for(shape: RecurrentShape, num_rows: int) -> Tile:
    """Small tiles while they all run at once anyway, then tiles that reuse q and k more."""
    tiles = num_rows * shape.num_value_heads * shape.value_dim
    return Tile(4, 1) if tiles <= 4 * 1056 else Tile(8, 1)


def prepare(
    layer: LayerState,
    rnd: DeviceRound,
    y: Tensor,
    conv_weight: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    workspace: Workspace,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    beta_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Convolution along tree paths, SiLU, norms, gates; one program per node and key head.

    y [M, C_in]: raw projections, columns q | k | v | ... | a | b (the last 2 G are a and b);
    conv_weight [C, W]; A, dt_bias [G] float32. Writes k, g, the raw conv inputs and the new tail
    to the bank that this round writes; q, v, beta to `workspace`.
    """
    num_rows, num_nodes = rnd.parents.shape
    s = shape
    _prepare_kernel[(num_rows * num_nodes, s.num_key_heads)](
        y,
        conv_weight,
        A,
        dt_bias,
        layer.tail,
        layer.inputs,
        layer.factors.k,
        layer.factors.g,
        workspace.q,
        workspace.v,
        workspace.beta,
        rnd.slot,
        rnd.num_nodes,
        rnd.parents,
        rnd.bank,
        rnd.path_len,
        rnd.path,
        num_nodes,
        rnd.path.shape[1],
        layer.factors.k.shape[1],
        log_capacity,
        y.stride(0),
        y.shape[1] - 2 * s.num_value_heads,
        s.key_dim**-0.5,
        beta_scale,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        PDL=pdl,
        num_warps=4,
        **_launch(pdl),
    )


def walk(
    layer: LayerState,
    rnd: DeviceRound,
    workspace: Workspace,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    threshold: int,
    tile: Tile | None = None,
    branching: bool = True,
    pdl: bool = False,
) -> None:
    """Log and tree over one live state tile per program.

    Reads S once, replays the log on it, writes S where the fold is due (else moves the path's
    factors to the ring), then walks `rnd.walk`: outputs to workspace.o, u to the write bank.

    Args:
        tile: rows of V per program and warps; None chooses by the round's size.
        branching: False where every tree is a chain: no checkpoint is kept.
    """
    num_rows, num_nodes = rnd.parents.shape
    s = shape
    rows, warps = tile or tile_for(s, num_rows)
    tiles = s.value_dim // rows
    _walk_kernel[(tiles * s.num_value_heads, num_rows)](
        layer.S,
        layer.factors.k,
        layer.factors.u,
        layer.factors.g,
        workspace.q,
        workspace.v,
        workspace.beta,
        workspace.o,
        rnd.slot,
        rnd.num_nodes,
        rnd.bank,
        rnd.ring_len,
        rnd.path_len,
        rnd.path,
        rnd.walk,
        num_nodes,
        rnd.path.shape[1],
        layer.factors.k.shape[1],
        log_capacity,
        rnd.walk.shape[1],
        threshold,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        TILE=rows,
        BRANCHING=branching,
        PDL=pdl,
        num_warps=warps,
        **_launch(pdl),
    )


def _launch(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0 without losing small x (Kahan)."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / (y - 1)))


@triton.jit
def _softplus(x):
    """Linear above 20, as in fla."""
    return tl.where(x > 20, x, _log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _history(
    row_ptr, inputs_ptr, tail_ptr, path_ptr, entry, at, channel, used,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Raw inputs at one place: the node's own row (at >= 0), or above the root the committed
    path's entry, or for entry < 0 the tail."""
    source = tl.where(used, tl.where(at >= 0, 0, tl.where(entry >= 0, 1, 2)), 3)
    place = tl.load(path_ptr + entry, mask=(at < 0) & (entry >= 0), other=0)
    x = tl.load(row_ptr + channel, mask=source == 0, other=0)
    x += tl.load(inputs_ptr + place * C + channel, mask=source == 1, other=0)
    x += tl.load(tail_ptr + (W - 1 + entry) * C + channel, mask=source == 2, other=0)
    return x


@triton.jit
def _conv(
    y_ptr, weight_ptr, inputs_ptr, tail_ptr, path_ptr, parents_ptr,
    node, first_row, path_len, num_path, y_stride, channel, write, used,
    C: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """silu(conv) of one node over `channel` (a block of channel numbers, `used` masks it).

    inputs_ptr, tail_ptr: the slot's read bank; `write` is the distance from there to the write
    bank of (inputs, tail). Oldest tap first; taps above the root come from the committed path,
    then the tail.
    """
    dtype = y_ptr.dtype.element_ty
    acc = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(W - 1, -1, -1):
        at = node
        above = 0
        for _ in tl.static_range(back):
            above = tl.where(at < 0, above + 1, above)
            at = tl.load(parents_ptr + at, mask=at >= 0, other=-1)
        above = tl.where(at < 0, above + 1, 0)
        x = _history(
            y_ptr + (first_row + at) * y_stride, inputs_ptr, tail_ptr, path_ptr, path_len - above,
            at, channel, used, C, W,
        )  # fmt: skip
        w = tl.load(weight_ptr + channel * W + (W - 1 - back), mask=used, other=0)
        acc = tl.fma(x.to(tl.float32), w.to(tl.float32), acc)
        if back == 0:
            tl.store(inputs_ptr + write * num_path * C + node * C + channel, x, mask=used)
    if node == 0:
        for j in tl.static_range(W - 1):
            kept = _history(
                y_ptr, inputs_ptr, tail_ptr, path_ptr, path_len - (W - 1 - j), -1, channel, used,
                C, W,
            )  # fmt: skip
            tl.store(tail_ptr + write * (W - 1) * C + j * C + channel, kept, mask=used)
    return _silu(acc).to(dtype).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "num_columns", "num_path", "num_entries", "log_capacity", "y_stride", "gates_at",
    ]
)  # fmt: skip
def _prepare_kernel(
    y_ptr, weight_ptr, A_ptr, dt_bias_ptr, tail_ptr, inputs_ptr, k_ptr, g_ptr,
    q_out, v_out, beta_out,
    slot_ptr, num_nodes_ptr, parents_ptr, bank_ptr, path_len_ptr, path_ptr,
    num_columns, num_path, num_entries, log_capacity, y_stride, gates_at, scale, beta_scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + G * V
    SHARE: tl.constexpr = G // H
    m, h = tl.program_id(0), tl.program_id(1)
    b, node = m // num_columns, m % num_columns
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if node >= tl.load(num_nodes_ptr + b):
        return
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    path_len = tl.load(path_len_ptr + b)
    parents_ptr += b * num_columns
    path_ptr += b * num_path
    inputs_ptr += (slot * 2 + bank) * num_path * C
    tail_ptr += (slot * 2 + bank) * (W - 1) * C
    write = 1 - 2 * bank
    entry = slot * num_entries + log_capacity + (1 - bank) * num_path + node
    first_row = b * num_columns

    column = tl.arange(0, K)
    used = column < K
    q = _conv(
        y_ptr, weight_ptr, inputs_ptr, tail_ptr, path_ptr, parents_ptr, node, first_row,
        path_len, num_path, y_stride, h * K + column, write, used, C, W,
    )  # fmt: skip
    k = _conv(
        y_ptr, weight_ptr, inputs_ptr, tail_ptr, path_ptr, parents_ptr, node, first_row,
        path_len, num_path, y_stride, (H + h) * K + column, write, used, C, W,
    )  # fmt: skip
    q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
    tl.store(q_out + (m * H + h) * K + column, q)
    tl.store(k_ptr + (entry * H + h) * K + column, k)

    row = tl.arange(0, V)
    for i in tl.static_range(SHARE):
        head = h * SHARE + i
        v = _conv(
            y_ptr, weight_ptr, inputs_ptr, tail_ptr, path_ptr, parents_ptr, node, first_row,
            path_len, num_path, y_stride, 2 * H * K + head * V + row, write, row < V, C, W,
        )  # fmt: skip
        tl.store(v_out + (m * G + head) * V + row, v.to(v_out.dtype.element_ty))
        a = tl.load(y_ptr + m * y_stride + gates_at + head).to(tl.float32)
        logit = tl.load(y_ptr + m * y_stride + gates_at + G + head).to(tl.float32)
        g = tl.load(A_ptr + head) * _softplus(a + tl.load(dt_bias_ptr + head))
        tl.store(g_ptr + entry * G + head, g)
        tl.store(beta_out + m * G + head, beta_scale / (1 + tl.exp(-logit)))


@triton.jit
def _dot(S, x):
    """S x over K: [K / 32, R, 4, 32] and [K / 32, 1, 4, 32] -> [R, 4]. In registers first."""
    return tl.sum(tl.sum(S * x, axis=0), axis=2)


@triton.jit
def _update(S, u, k):
    """S + u k^T, rounded once; u [R, 4]."""
    u = tl.broadcast_to(u[None, :, :, None], S.shape)
    return tl.fma(u, tl.broadcast_to(k, S.shape), S)


@triton.jit(
    do_not_specialize=[
        "num_columns", "num_path", "num_entries", "log_capacity", "walk_stride", "threshold",
    ]
)  # fmt: skip
def _walk_kernel(
    S_ptr, k_ptr, u_ptr, g_ptr, q_ptr, v_ptr, beta_ptr, o_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr, walk_ptr,
    num_columns, num_path, num_entries, log_capacity, walk_stride, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    BRANCHING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = V // TILE
    DEEP: tl.constexpr = K // _WIDE
    HIGH: tl.constexpr = TILE // _ROWS
    b = tl.program_id(1)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    key_head = head // (G // H)
    if tl.load(num_nodes_ptr + b) == 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        return
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    fold = log_len > threshold
    path_ptr += b * num_path - ring_len
    # One layout for everything over K: 32 elements of a row by 8 lanes, 4 rows by 4 lane groups,
    # the rest in registers.
    deep = tl.arange(0, DEEP)[:, None, None, None]
    high = tl.arange(0, HIGH)[None, :, None, None]
    lane_row = tl.arange(0, _ROWS)[None, None, :, None]
    wide = tl.arange(0, _WIDE)[None, None, None, :]
    along_k = deep * _WIDE + wide + lane_row * 0
    row = tl.arange(0, HIGH)[:, None] * _ROWS + tl.arange(0, _ROWS)[None, :]
    S_at = S_ptr + ((slot * G + head) * V + tile * TILE) * K
    S_at = S_at + (high * _ROWS + lane_row) * K + deep * _WIDE + wide
    k_at = k_ptr + (slot * num_entries * H + key_head) * K + along_k
    u_at = u_ptr + (slot * num_entries * G + head) * V + tile * TILE + row
    g_at = g_ptr + slot * num_entries * G + head
    S = tl.load(S_at)

    # The log: ring entries, then the last path's. What is not folded moves to the ring.
    first_in_bank = log_capacity + bank * num_path
    owns_k = (tile == 0) & (head % (G // H) == 0)
    for j in range(log_len):
        place = tl.load(path_ptr + j, mask=j >= ring_len, other=0)
        entry = tl.where(j < ring_len, j, first_in_bank + place)
        k = tl.load(k_at + entry * (H * K))
        u = tl.load(u_at + entry * (G * V))
        g = tl.load(g_at + entry * G)
        S = _update(S * tl.exp(g), u, k)
        if (j >= ring_len) & (fold == 0):
            tl.store(u_at + j * (G * V), u)
            if tile == 0:
                tl.store(g_at + j * G, g)
            if owns_k:
                tl.store(k_at + j * (H * K), k)
    if fold:
        tl.store(S_at, S)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    candidates = log_capacity + (1 - bank) * num_path
    k_at += candidates * (H * K)
    u_at += candidates * (G * V)
    g_at += candidates * G
    m = b * num_columns
    q_at = q_ptr + (m * H + key_head) * K + along_k
    v_at = v_ptr + (m * G + head) * V + tile * TILE + row
    o_at = o_ptr + (m * G + head) * V + tile * TILE + row
    beta_at = beta_ptr + m * G + head
    walk_ptr += b * walk_stride
    num_ops = tl.load(walk_ptr)
    word = tl.load(walk_ptr + 1)
    node = word & _NODE
    k = tl.load(k_at + node * (H * K))
    q = tl.load(q_at + node * (H * K))
    C = S
    for i in range(num_ops):
        # The next operation's operands travel while this one computes.
        following = tl.load(walk_ptr + 2 + i, mask=i + 1 < num_ops, other=0)
        next_node = following & _NODE
        next_k = tl.load(k_at + next_node * (H * K))
        next_q = tl.load(q_at + next_node * (H * K))
        if BRANCHING:
            if (word & _RESTORE) != 0:
                S = C
        S = S * tl.exp(tl.load(g_at + node * G))
        if (word & _WALK) != 0:
            v = tl.load(v_at + node * (G * V)).to(tl.float32)
            u = tl.load(beta_at + node * G) * (v - _dot(S, k))
            tl.store(u_at + node * (G * V), u)
            S = _update(S, u, k)
            tl.store(o_at + node * (G * V), _dot(S, q))
        else:
            tl.debug_barrier()  # u was stored by other lanes of this program
            S = _update(S, tl.load(u_at + node * (G * V)), k)
        if BRANCHING:
            if (word & _SAVE) != 0:
                C = S
        word, node, k, q = following, next_node, next_k, next_q
