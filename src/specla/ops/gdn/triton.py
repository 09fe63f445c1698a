# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on a GPU: exact kernels, for chains and trees alike.

`prepare` turns raw projections into what the recurrence reads and records each candidate's k and
g; `walk` carries one live state tile per program through the log and the tree and records u.

Exactness (rule I4). A state row's K elements lie in one group of `lanes_for(K)` threads. The two
reductions over K therefore add in one order, in registers and then across those lanes, whatever
the value tile, tree or batch; the update is one explicit fma, in walk and replay
alike. tests/ops/test_gdn_triton.py compares every pair of tilings bitwise on a GPU. Replaying
recorded factors gives the bits that walking gave, so a branch needs no stored state
(docs/adr/0012).

Overlap. With programmatic dependent launch a kernel may start before its predecessors are done,
until it waits. A round starts with a kernel without it (`ops.walk.compile_walks`), so what earlier
rounds wrote and that one may be read before the wait: S, the log, conv inputs and tail, the row's
integers, the walk lists.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3; SpecLA (arXiv
2607.16673), section 4; DeltaLog (arXiv 2608.15533) for the log.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape
from specla.ops.gdn import triton_decode as decode
from specla.ops.gdn import triton_stream as stream
from specla.ops.gdn.triton_prepare import FORWARD, Span, Workspace, overlap, prepare
from specla.ops.walk import NODE_MASK, RESTORE, SAVE, WALK

__all__ = ["Span", "Tile", "Workspace", "lanes_for", "prepare", "stream_for", "tile_for", "walk"]

_WALK, _RESTORE, _SAVE = tl.constexpr(WALK), tl.constexpr(RESTORE), tl.constexpr(SAVE)
_NODE = tl.constexpr(NODE_MASK)


def lanes_for(key_dim: int) -> int:
    """Threads that share a state row; with K it fixes the order of a reduction over K."""
    return 16 if key_dim >= 256 else 8


class Tile(NamedTuple):
    """How `walk` cuts a value head: rows of V per program, and warps. Speed, never bits."""

    rows: int
    warps: int


def tile_for(shape: RecurrentShape, programs: int, *, branching: bool) -> Tile:
    """`programs` share a tile's rows: small tiles while they all run at once anyway, then as
    large as registers hold (with a checkpoint, half), which reuses q and k most."""
    large = min(16, 2048 // shape.key_dim) if branching else 16
    few = programs * shape.num_value_heads * shape.value_dim <= 1056 * large // 2
    return Tile(max(4, large // 2 if few else large), 1)


def stream_for(
    shape: RecurrentShape, programs: int, num_nodes: int, *, branching: bool
) -> stream.StreamTile:
    """The same for the kernel of `ops.gdn.triton_stream`."""
    lanes = lanes_for(shape.key_dim)
    return stream.tile_for(shape, programs, num_nodes, lanes=lanes, branching=branching)


def hopper_tile(
    shape: RecurrentShape,
    num_rows: int,
    num_nodes: int,
    parts: int,
    device: torch.device,
    *,
    branching: bool,
    pdl: bool,
) -> stream.StreamTile | decode.DecodeTile:
    """What `walk` takes on Hopper."""
    tile = decode.tile_for(shape, num_nodes, lanes=lanes_for(shape.key_dim), pdl=pdl)
    if parts == 1 and decode.pays(shape, num_rows, num_nodes, tile, device):
        return tile
    return stream_for(shape, num_rows * parts, num_nodes, branching=branching)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def walk(
    layer: LayerState,
    rnd: DeviceRound,
    workspace: Workspace,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    threshold: int,
    tile: Tile | stream.StreamTile | decode.DecodeTile | None = None,
    branching: bool = True,
    pdl: bool = False,
) -> None:
    """Log and tree over one live state tile per program.

    Reads S once, replays the log on it, writes S where the fold is due (else moves the path's
    factors to the ring), then walks `rnd.walk`: outputs to workspace.o, u to the write bank.

    Args:
        tile: rows of V per program and warps. A `StreamTile` asks for the kernel of
            `ops.gdn.triton_stream`, which is for Hopper, a `DecodeTile` for that of
            `ops.gdn.triton_decode`, for many rows of few nodes there. None chooses the kernel and
            its tile by the device and the round's size.
        branching: False where every tree is a chain: no checkpoint is kept. Up to two nodes
            always are one.
    """
    num_rows, num_nodes = rnd.parents.shape
    workspace.check(num_rows, num_nodes)
    branching = branching and num_nodes > 2
    s = shape
    parts = rnd.walk.shape[1]
    if tile is None and is_hopper(layer.S.device):
        device = layer.S.device
        tile = hopper_tile(s, num_rows, num_nodes, parts, device, branching=branching, pdl=pdl)
    tile = tile or tile_for(s, num_rows * parts, branching=branching)
    assert s.value_dim % tile.rows == 0, (s, tile)
    grid = (s.value_dim // tile.rows * s.num_value_heads, num_rows, parts)
    arguments = (
        layer.S,
        layer.factors.k,
        layer.factors.u,
        layer.factors.g,
        workspace.q,
        workspace.v,
        workspace.beta,
        workspace.o,
        workspace.arrivals,
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
        rnd.walk.shape[2],
        threshold,
    )
    meta = {
        "H": s.num_key_heads,
        "G": s.num_value_heads,
        "K": s.key_dim,
        "V": s.value_dim,
        "LANES": lanes_for(s.key_dim),
        "PARTS": parts,
        "BRANCHING": branching,
        "PDL": pdl,
    }
    if isinstance(tile, decode.DecodeTile):
        decode.launch(num_rows, arguments, meta, tile)
        return
    if isinstance(tile, stream.StreamTile):
        stream.launch(grid, arguments, meta, tile, num_nodes)
        return
    _walk_kernel[grid](
        *arguments,
        **meta,
        TILE=tile.rows,
        WARPS=tile.warps,
        FORWARD=FORWARD,
        num_warps=tile.warps,
        **overlap(pdl),
    )


@triton.jit
def _log_entry(j, ring_len, log_len, path_ptr, first_in_bank):
    """Where the j-th record of the log is (past its end: some record); path_ptr is moved back by
    ring_len."""
    place = tl.load(path_ptr + j, mask=(j >= ring_len) & (j < log_len), other=0)
    return tl.where(j < ring_len, j, first_in_bank + place)


@triton.jit
def _factors(k_at, u_at, g_at, entry, k_step, u_step, g_step):
    k = tl.load(k_at + entry * k_step)
    u = tl.load(u_at + entry * u_step)
    return k, u, tl.load(g_at + entry * g_step)


@triton.jit
def _operands(k_at, v_at, g_at, beta_at, node, k_step, v_step, g_step):
    k = tl.load(k_at + node * k_step)
    v = tl.load(v_at + node * v_step)
    return k, v, tl.load(g_at + node * g_step), tl.load(beta_at + node * g_step)


@triton.jit
def _dot(S, x, FORWARD: tl.constexpr):
    """S x over K, in registers first: S and x without its R axis -> the axes of u."""
    return tl.sum(tl.sum(S * x, axis=3 if FORWARD else 0), axis=3)


@triton.jit
def _update(S, u, k, FORWARD: tl.constexpr):
    """S + u k^T, rounded once."""
    u = u[:, :, :, None, None] if FORWARD else u[None, :, :, :, None]
    u = tl.broadcast_to(u, S.shape)
    return tl.fma(u, tl.broadcast_to(k, S.shape), S)


@triton.jit(
    do_not_specialize=[
        "num_columns", "num_path", "num_entries", "log_capacity", "walk_stride", "threshold",
    ]
)  # fmt: skip
def _walk_kernel(  # noqa: C901 - one kernel, one pass
    S_ptr, k_ptr, u_ptr, g_ptr, q_ptr, v_ptr, beta_ptr, o_ptr, arrivals_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr, walk_ptr,
    num_columns, num_path, num_entries, log_capacity, walk_stride, threshold,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    FORWARD: tl.constexpr,
    BRANCHING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = V // TILE
    WIDE: tl.constexpr = 4 * LANES  # consecutive elements of a row that a warp's load covers
    ROWS: tl.constexpr = 32 // LANES  # state rows side by side in a warp
    DEEP: tl.constexpr = K // WIDE
    HIGH: tl.constexpr = TILE // (ROWS * WARPS)
    b, part = tl.program_id(1), tl.program_id(2)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    key_head = head // (G // H)
    num_nodes = tl.load(num_nodes_ptr + b)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    ring_len = tl.load(ring_len_ptr + b)
    log_len = ring_len + tl.load(path_len_ptr + b)
    if PDL:
        gdc_launch_dependents()
    if num_nodes == 0:
        if PDL:
            gdc_wait()
        return
    fold = log_len > threshold
    path_ptr += b * num_path - ring_len
    # One layout for everything over K, [rows, warps, R, K / WIDE, WIDE] or with the first four
    # axes the other way round: the compiler spreads a warp over the last axis (LANES by 4
    # elements) and over rows, warps over their axis; the other two stay in registers.
    if FORWARD:
        lane_row = tl.arange(0, ROWS)[:, None, None, None, None]
        warp = tl.arange(0, WARPS)[None, :, None, None, None]
        high = tl.arange(0, HIGH)[None, None, :, None, None]
        deep = tl.arange(0, DEEP)[None, None, None, :, None]
        row = tl.arange(0, ROWS)[:, None, None] + tl.arange(0, HIGH)[None, None, :] * ROWS
        row += tl.arange(0, WARPS)[None, :, None] * (ROWS * HIGH)
    else:
        deep = tl.arange(0, DEEP)[:, None, None, None, None]
        high = tl.arange(0, HIGH)[None, :, None, None, None]
        warp = tl.arange(0, WARPS)[None, None, :, None, None]
        lane_row = tl.arange(0, ROWS)[None, None, None, :, None]
        row = tl.arange(0, ROWS)[None, None, :] + tl.arange(0, HIGH)[:, None, None] * ROWS
        row += tl.arange(0, WARPS)[None, :, None] * (ROWS * HIGH)
    wide = tl.arange(0, WIDE)[None, None, None, None, :]
    along_k = deep * WIDE + wide + (lane_row + warp) * 0
    S_at = S_ptr + ((slot * G + head) * V + tile * TILE) * K
    S_at = S_at + ((warp * HIGH + high) * ROWS + lane_row) * K + deep * WIDE + wide
    k_at = k_ptr + (slot * num_entries * H + key_head) * K + along_k
    u_at = u_ptr + (slot * num_entries * G + head) * V + tile * TILE + row
    g_at = g_ptr + slot * num_entries * G + head
    S = tl.load(S_at)

    # The log: ring entries, then the last path's. What is not folded moves to the ring.
    first_in_bank = log_capacity + bank * num_path
    owns_k = (tile == 0) & (head % (G // H) == 0)
    entry = _log_entry(0, ring_len, log_len, path_ptr, first_in_bank)
    k, u, g = _factors(k_at, u_at, g_at, entry, H * K, G * V, G)
    for j in range(log_len):
        entry = _log_entry(j + 1, ring_len, log_len, path_ptr, first_in_bank)
        next_k, next_u, next_g = _factors(k_at, u_at, g_at, entry, H * K, G * V, G)
        S = _update(S * tl.exp(g), u, k, FORWARD)
        if (j >= ring_len) & (fold == 0) & (part == 0):
            tl.store(u_at + j * (G * V), u)
            if tile == 0:
                tl.store(g_at + j * G, g)
            if owns_k:
                tl.store(k_at + j * (H * K), k)
        k, u, g = next_k, next_u, next_g
    if fold:
        is_last = True
        if PARTS > 1:
            # S may be written once every part has read it: the last one to come does.
            arrivals_ptr += (b * G + head) * TILES + tile
            tl.debug_barrier()
            is_last = tl.atomic_add(arrivals_ptr, 1) == PARTS - 1
            if is_last:
                tl.store(arrivals_ptr, 0)
        if is_last:
            tl.store(S_at, S)
    walk_ptr += (b * PARTS + part) * walk_stride
    num_ops = tl.load(walk_ptr)
    word = tl.load(walk_ptr + 1)
    if PDL:
        gdc_wait()

    candidates = log_capacity + (1 - bank) * num_path
    k_at += candidates * (H * K)
    u_at += candidates * (G * V)
    g_at += candidates * G
    m = b * num_columns
    q_at = q_ptr + (m * H + key_head) * K + along_k
    v_at = v_ptr + (m * G + head) * V + tile * TILE + row
    o_at = o_ptr + (m * G + head) * V + tile * TILE + row
    beta_at = beta_ptr + m * G + head
    node = word & _NODE
    following = tl.load(walk_ptr + 2, mask=num_ops > 1, other=0)
    k, v, g, beta = _operands(k_at, v_at, g_at, beta_at, node, H * K, G * V, G)
    q = tl.load(q_at + node * (H * K))
    C = S
    for i in range(num_ops):
        # The next operation's operands travel while this one computes.
        after = tl.load(walk_ptr + 3 + i, mask=i + 2 < num_ops, other=0)
        next_node = following & _NODE
        next_k, next_v, next_g, next_beta = _operands(
            k_at, v_at, g_at, beta_at, next_node, H * K, G * V, G
        )
        next_q = tl.load(q_at + next_node * (H * K))
        if BRANCHING and (word & _RESTORE) != 0:
            tl.debug_barrier()  # keeps the branch: without it every step pays for a select
            S = C
        S = S * tl.exp(g)
        if (word & _WALK) != 0:
            u = beta * (v.to(tl.float32) - _dot(S, k, FORWARD))
            tl.store(u_at + node * (G * V), u)
            S = _update(S, u, k, FORWARD)
            tl.store(o_at + node * (G * V), _dot(S, q, FORWARD))
        else:
            tl.debug_barrier()  # u was stored by other lanes of this program
            S = _update(S, tl.load(u_at + node * (G * V)), k, FORWARD)
        if BRANCHING and (word & _SAVE) != 0:
            tl.debug_barrier()
            C = S
        word, following, node = following, after, next_node
        k, v, g, beta, q = next_k, next_v, next_g, next_beta, next_q
