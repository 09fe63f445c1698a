# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The walk of `ops.gdn.triton` for many rows of one or a few nodes, with memory and arithmetic at
the same time.

Same sums, same bits as `ops.gdn.triton._walk_kernel` (a test on the device compares them), the
same inputs and outputs. There programs that a multiprocessor shares keep step: all wait for their
states, then all compute. Here programs are as many as the device holds at a time, and each goes
through units (row, value head, TILE rows of V) in order. A ring of tiles of S is always in flight
by the copy engine, past the ends of units: a tile leaves the ring for registers at once, and its
place is asked for again before the unit is computed. What else the next unit reads (the log's k
and u, the nodes' k, q and v) is copied meanwhile into the other half of double buffers; k and q
only where the key head changes.

A unit, all warps together:
  wait for S, S to registers; the log's decays to shared memory; wait for the copies; barrier
  ask for the tile STAGES units on; copy this unit's entries past LOG, then what the next one reads
  the log; moves to the ring, or S folded; the nodes, by `ops.gdn.triton_decode_parts`
An idle row's units are asked for and waited for too, which keeps the order.

S, the log and the row's integers are read before the wait of programmatic dependent launch, as in
`ops.gdn.triton`.

Source: as `ops.gdn.triton`; DeltaLog (arXiv 2608.15533) for decoding with a log; docs/adr/0017.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.triton_decode_parts import (
    _WIDTH,
    WIDTH,
    _ask,
    _copy_entries,
    _copy_nodes,
    _copy_words,
    _entries,
    _move_entries,
    _number_of_each,
    _operand,
    _replay,
    _state_layout,
    _state_matrix,
    _step,
    _unit,
    _walk_bush,
    _walk_chain,
    _walk_tree,
)
from specla.ops.gdn.triton_prepare import overlap
from specla.ops.gdn.triton_stream import _barrier, _copied, _rows
from specla.ops.walk import capacity

MOST_NODES = 4
"""Of a row, for `pays` to say yes. Whole rounds of GDN-1.3B, 64 rows (H200; us, walk / this): of 2
nodes 2,728 / 2,394, of 4 3,989 / 3,338, of 8 6,020 / 5,832, where unequal logs would cost more."""
CHUNK = 4
"""`DecodeTile.chunk`, for several nodes. Logs of 4 / of 1 to 16 entries, us per layer of 64 rows:
2 nodes 47 / 79 without, 50 / 67 with (walk: 58 / 65); 4 nodes 69 / 100 and 72 / 89 (92 / 99)."""


class DecodeTile(NamedTuple):
    """How the work is cut. Speed, never bits.

    rows: of V per unit; warps: share them; each has 32 / lanes times 1, 2 or 4 rows.
    registers: most per thread; 0 leaves it to the compiler. programs: per multiprocessor. stages:
    tiles of the ring. log: entries that travel ahead of their unit; rest: of those past it that
    travel at a time. chunk: units that a program takes at a time, which divide those of a key
    head; 0: its share at once, with the fewest copies of k, but long logs side by side.
    """

    rows: int
    warps: int = 4
    registers: int = 0
    programs: int = 2
    stages: int = 2
    log: int = 16
    rest: int = 4
    chunk: int = 0


def tile_for(shape: RecurrentShape, num_nodes: int, *, lanes: int, pdl: bool) -> DecodeTile:
    """Four rows a lane, if the head has so many. As measured on an H200 for one node a row: three
    programs alone are the fastest, but leave no shared memory for the kernels that dependent
    launch starts beside them, which then have to wait. More nodes' k and q take the place of a
    tile of the ring: units take longer, so one is early enough."""
    rows = min(16 * (32 // lanes), shape.value_dim)
    if num_nodes > 1:
        units = shape.num_value_heads // shape.num_key_heads * (shape.value_dim // rows)
        return DecodeTile(rows, stages=1, chunk=gcd(CHUNK, units))
    if pdl:
        return DecodeTile(rows)
    return DecodeTile(rows, registers=168, programs=3, stages=1, rest=1)


def pays(
    shape: RecurrentShape,
    num_rows: int,
    num_nodes: int,
    tile: DecodeTile,
    device: torch.device,
) -> bool:
    """Whether programs have units to be ahead of; for Hopper, which the caller asks about."""
    if num_nodes > MOST_NODES or shape.value_dim % tile.rows or knobs.runtime.interpret:
        return False
    units = num_rows * shape.num_value_heads * (shape.value_dim // tile.rows)
    return units >= 3 * tile.programs * processors(device)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_programs(units: int, tile: DecodeTile, device: torch.device) -> int:
    """As many as the device holds at a time, but each has units: the first one's integers are read
    whatever comes after."""
    return min(processors(device) * tile.programs, units // (tile.chunk or 1))


def launch(
    num_rows: int, arguments: tuple[Any, ...], meta: dict[str, Any], tile: DecodeTile
) -> None:
    """Run the kernel over what `ops.gdn.triton.walk` gives its own, of rounds in one part.

    meta: H, G, K, V, LANES, BRANCHING, PDL (and PARTS, which it is without).
    """
    H, G, K, V, lanes, pdl = (meta[name] for name in ("H", "G", "K", "V", "LANES", "PDL"))
    assert tile.rows * lanes // (32 * tile.warps) in (1, 2, 4), tile
    assert meta["PARTS"] == 1, meta
    S, *tensors = arguments[:16]
    del tensors[7]  # arrivals
    num_columns, *sizes = arguments[16:]
    nodes = triton.next_power_of_2(num_columns)
    branching = meta["BRANCHING"] and nodes > 2
    assert not branching or nodes <= lanes, f"at most {lanes} nodes, got {num_columns}"
    turn = V // tile.rows * (G // H)
    assert tile.chunk == 0 or turn % tile.chunk == 0, (tile, turn)
    units = num_rows * turn * H
    registers = {"maxnreg": tile.registers} if tile.registers else {}
    _decode_kernel[(num_programs(units, tile, S.device),)](
        _blocks(S, tile.rows * K // WIDTH),
        *(S, *tensors, units, num_columns, *sizes),
        **{"H": H, "G": G, "K": K, "V": V, "LANES": lanes, "PDL": pdl},
        **constants(tile, nodes, branching=branching),
        num_warps=tile.warps,
        **registers,
        **overlap(pdl),
    )


def constants(tile: DecodeTile, nodes: int, *, branching: bool) -> dict[str, Any]:
    """What a tile and the bucket of nodes make constant. WORDS: room for a row's walk list."""
    words = triton.next_power_of_2(2 + capacity(nodes)) if branching else 1
    return {
        "LOG": tile.log, "REST": tile.rest, "TILE": tile.rows, "STAGES": tile.stages,
        "NODES": nodes, "BRANCHING": branching, "WORDS": words, "CHUNK": tile.chunk,
    }  # fmt: skip


def _blocks(S: torch.Tensor, rows: int) -> TensorDescriptor:
    """S as a matrix [.., WIDTH], `rows` rows at a time."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, WIDTH], gl.float32)
    return TensorDescriptor.from_tensor(S.view(-1, WIDTH), [rows, WIDTH], layout)


@gluon.jit(
    do_not_specialize=[
        "num_units", "num_columns", "num_path", "num_entries", "log_capacity", "walk_stride",
        "threshold",
    ]
)  # fmt: skip
def _decode_kernel(  # noqa: C901 - one kernel, one pass
    S_blocks, S_ptr, k_ptr, u_ptr, g_ptr, q_ptr, v_ptr, beta_ptr, o_ptr,
    slot_ptr, num_nodes_ptr, bank_ptr, ring_len_ptr, path_len_ptr, path_ptr, walk_ptr,
    num_units, num_columns, num_path, num_entries, log_capacity, walk_stride, threshold,
    H: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    LOG: gl.constexpr, REST: gl.constexpr, TILE: gl.constexpr, LANES: gl.constexpr,
    STAGES: gl.constexpr, NODES: gl.constexpr, BRANCHING: gl.constexpr, WORDS: gl.constexpr,
    CHUNK: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program i of P: units i / P to (i + 1) / P of all, by row, value head, rows of V; or of
    every P chunks the i-th."""
    TILES: gl.constexpr = V // TILE
    UNITS: gl.constexpr = G * TILES  # of a row
    TURN: gl.constexpr = UNITS // H  # of a key head
    DEEP: gl.constexpr = K // (4 * LANES)
    HIGH: gl.constexpr = TILE // (32 // LANES * num_warps)
    state: gl.constexpr = _state_layout(DEEP, LANES, HIGH, num_warps)
    along_k: gl.constexpr = gl.SliceLayout(0, state)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(1, state)))
    copied_k: gl.constexpr = _copied(K, 4, num_warps)
    copied_u: gl.constexpr = _copied(TILE, 4, num_warps)
    VECTOR: gl.constexpr = min(TILE, 128 // v_ptr.dtype.element_ty.primitive_bitwidth)
    copied_v: gl.constexpr = _copied(TILE, VECTOR, num_warps)
    single: gl.constexpr = _copied(1, 1, num_warps)
    listed: gl.constexpr = gl.SliceLayout(1, single)
    copied_words: gl.constexpr = _copied(WORDS, 1, num_warps)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    # A program's q-th unit is first + q, and where it takes CHUNK at a time, `apart` more for
    # each of these.
    TURN_OF_ROW: gl.constexpr = CHUNK if CHUNK else UNITS
    TURN_OF_K: gl.constexpr = CHUNK if CHUNK else TURN
    if CHUNK:
        first = gl.program_id(0) * CHUNK
        apart = (gl.num_programs(0) - 1) * CHUNK
        left = num_units // CHUNK - gl.program_id(0)
        count = (left + gl.num_programs(0) - 1) // gl.num_programs(0) * CHUNK
    else:
        first = gl.program_id(0) * num_units // gl.num_programs(0)
        apart = 0
        count = (gl.program_id(0) + 1) * num_units // gl.num_programs(0) - first
    if PDL:
        gdc_launch_dependents()
    ss = gl.allocate_shared_memory(
        gl.float32, [STAGES, TILE * K // _WIDTH, _WIDTH], S_blocks.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    log_k = gl.allocate_shared_memory(gl.float32, [2, LOG, K], flat)
    log_u = gl.allocate_shared_memory(gl.float32, [2, LOG, TILE], flat)
    log_decay = gl.allocate_shared_memory(gl.float32, [2, LOG, 1], flat)
    rest_k = gl.allocate_shared_memory(gl.float32, [REST, K], flat)
    rest_u = gl.allocate_shared_memory(gl.float32, [REST, TILE], flat)
    rest_decay = gl.allocate_shared_memory(gl.float32, [REST, 1], flat)
    node_k = gl.allocate_shared_memory(gl.float32, [2, NODES, K], flat)
    node_q = gl.allocate_shared_memory(gl.float32, [2, NODES, K], flat)
    node_v = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [2, NODES, TILE], flat)
    if NODES > 1:
        node_decay = gl.allocate_shared_memory(gl.float32, [2, NODES, 1], flat)
        node_beta = gl.allocate_shared_memory(gl.float32, [2, NODES, 1], flat)
        node_decays = _rows(node_decay, [2 * NODES, 1])
        node_betas = _rows(node_beta, [2 * NODES, 1])
    if BRANCHING:
        walks = gl.allocate_shared_memory(gl.int32, [2, 1, WORDS], flat)
        words = _rows(walks, [2 * WORDS, 1])
    log_ks = _rows(log_k, [2 * LOG, DEEP, LANES, 4])
    log = (log_ks, _rows(log_u, [2 * LOG, TILE]), _rows(log_decay, [2 * LOG, 1]))
    rest_ks = _rows(rest_k, [REST, DEEP, LANES, 4])
    rest = (rest_ks, _rows(rest_u, [REST, TILE]), _rows(rest_decay, [REST, 1]))
    node_ks = _rows(node_k, [2 * NODES, DEEP, LANES, 4])
    node_qs = _rows(node_q, [2 * NODES, DEEP, LANES, 4])
    node_vs = _rows(node_v, [2 * NODES, TILE])
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    _barrier()
    ring = (S_blocks, ss, full)
    b = first // UNITS
    ask_slot = gl.load(slot_ptr + b)
    slot = ask_slot.to(gl.int64)
    n = gl.load(num_nodes_ptr + b)
    bank = gl.load(bank_ptr + b)
    ring_len = gl.load(ring_len_ptr + b)
    path_len = gl.load(path_len_ptr + b)
    for s in gl.static_range(STAGES):
        unit = _unit(s, first, apart, CHUNK)
        if s > 0 and (s < count) & (unit % TURN_OF_ROW == 0):
            ask_slot = gl.load(slot_ptr + unit // UNITS)
        _ask(ring, s, ask_slot, unit, s < count, UNITS)

    # The first unit's part of the log, and its nodes.
    log_len = gl.where(n > 0, ring_len + path_len, 0)
    path_at = path_ptr + (b * num_path - ring_len)
    old = log_capacity + bank * num_path
    entry_k = _entries(0, LOG, copied_k, ring_len, log_len, path_at, old)
    entry_u = _entries(0, LOG, copied_u, ring_len, log_len, path_at, old)
    entry_g = _entries(0, LOG, single, ring_len, log_len, path_at, old)
    more_k = _entries(LOG, REST, copied_k, ring_len, log_len, path_at, old)
    more_u = _entries(LOG, REST, copied_u, ring_len, log_len, path_at, old)
    more_g = _entries(LOG, REST, single, ring_len, log_len, path_at, old)
    j_g = gl.arange(0, LOG, listed)
    j_more = LOG + gl.arange(0, REST, listed)
    row = first % UNITS * TILE
    key_head = first % UNITS // TURN
    head = row // V
    k_at = k_ptr + (slot * num_entries * H + key_head) * K
    u_at = u_ptr + (slot * num_entries * (G * V) + row)
    g_at = g_ptr + (slot * num_entries * G + head)
    _copy_entries(log_k.index(0), k_at, entry_k, 0, log_len, H * K, copied_k)
    _copy_entries(log_u.index(0), u_at, entry_u, 0, log_len, G * V, copied_u)
    g = gl.load(g_at + entry_g * G, mask=j_g < log_len, other=0.0)
    if PDL:
        gdc_wait()
    new = log_capacity + (1 - bank) * num_path
    m = b * num_columns if NODES > 1 else b
    _copy_nodes(node_k.index(0), k_at + new * (H * K), n, H * K, copied_k)
    _copy_nodes(node_q.index(0), q_ptr + (m * H + key_head) * K, n, H * K, copied_k)
    _copy_nodes(node_v.index(0), v_ptr + (m * (G * V) + row), n, G * V, copied_v)
    if BRANCHING:
        _copy_words(walks.index(0), walk_ptr + b * walk_stride, walk_stride, copied_words)
    async_copy.commit_group()
    node_g = _number_of_each(g_at + new * G, n, G, NODES, listed)
    beta = _number_of_each(beta_ptr + (m * G + head), n, G, NODES, listed)

    half = 0  # of the buffers that change with k
    t = first
    for turn_q in range(count):
        side = turn_q & 1  # of the buffers that change with every unit
        mbarrier.wait(full.index(turn_q % STAGES), (turn_q // STAGES) & 1)
        S = ss.index(turn_q % STAGES).load(_state_matrix(TILE, DEEP, LANES, HIGH, num_warps))
        S = gl.convert_layout(S.reshape([TILE, DEEP, LANES, 4]), state, assert_trivial=True)
        log_decay.index(side).store(gl.exp(g)[:, None])
        if NODES > 1:
            node_decay.index(side).store(gl.exp(node_g)[:, None])
            node_beta.index(side).store(beta[:, None])
        async_copy.wait_group(0)
        _barrier()  # everything of this unit is there, and nobody reads the unit before
        unit = _unit(turn_q + STAGES, first, apart, CHUNK)
        here = turn_q + STAGES < count
        if here & (unit % TURN_OF_ROW == 0):
            ask_slot = gl.load(slot_ptr + unit // UNITS)
        _ask(ring, turn_q + STAGES, ask_slot, unit, here, UNITS)

        # What is past LOG, in front of what the next unit reads.
        _copy_entries(rest_k, k_at, more_k, LOG, log_len, H * K, copied_k)
        _copy_entries(rest_u, u_at, more_u, LOG, log_len, G * V, copied_u)
        async_copy.commit_group()
        g_more = gl.load(g_at + more_g * G, mask=j_more < log_len, other=0.0)
        then = _unit(turn_q + 1, first, apart, CHUNK)
        there = turn_q + 1 < count
        then_n, then_slot, then_ring_len, then_log_len, then_new = n, slot, ring_len, log_len, new
        then_k, then_u, then_g, then_path = entry_k, entry_u, entry_g, path_at
        then_more_k, then_more_u, then_more_g = more_k, more_u, more_g
        then_b, then_m = b, m
        if there & (then % TURN_OF_ROW == 0):
            then_b = then // UNITS if CHUNK else b + 1
            then_m = then_b * num_columns if NODES > 1 else then_b
            then_n = gl.load(num_nodes_ptr + then_b)
            then_slot = gl.load(slot_ptr + then_b).to(gl.int64)
            bank = gl.load(bank_ptr + then_b)
            then_ring_len = gl.load(ring_len_ptr + then_b)
            then_log_len = gl.where(then_n > 0, then_ring_len + gl.load(path_len_ptr + then_b), 0)
            then_path = path_ptr + (then_b * num_path - then_ring_len)
            old = log_capacity + bank * num_path
            then_new = log_capacity + (1 - bank) * num_path
            then_k = _entries(0, LOG, copied_k, then_ring_len, then_log_len, then_path, old)
            then_u = _entries(0, LOG, copied_u, then_ring_len, then_log_len, then_path, old)
            then_g = _entries(0, LOG, single, then_ring_len, then_log_len, then_path, old)
            then_more_k = _entries(
                LOG, REST, copied_k, then_ring_len, then_log_len, then_path, old
            )
            then_more_u = _entries(
                LOG, REST, copied_u, then_ring_len, then_log_len, then_path, old
            )
            then_more_g = _entries(LOG, REST, single, then_ring_len, then_log_len, then_path, old)
        then_row = then % UNITS * TILE
        then_key_head = then % UNITS // TURN
        then_head = then_row // V
        then_u_at = u_ptr + (then_slot * num_entries * (G * V) + then_row)
        then_g_at = g_ptr + (then_slot * num_entries * G + then_head)
        then_k_at, then_half = k_at, half
        expected = gl.where(there, then_n, 0)
        entries = gl.where(there, then_log_len, 0)
        if there & (then % TURN_OF_K == 0):
            then_half = 1 - half
            then_k_at = k_ptr + (then_slot * num_entries * H + then_key_head) * K
            _copy_entries(log_k.index(then_half), then_k_at, then_k, 0, entries, H * K, copied_k)
            node_at = then_k_at + then_new * (H * K)
            _copy_nodes(node_k.index(then_half), node_at, expected, H * K, copied_k)
            q_at = q_ptr + (then_m * H + then_key_head) * K
            _copy_nodes(node_q.index(then_half), q_at, expected, H * K, copied_k)
            if BRANCHING:
                walk_at = walk_ptr + then_b * walk_stride
                _copy_words(walks.index(then_half), walk_at, walk_stride, copied_words)
        _copy_entries(log_u.index(1 - side), then_u_at, then_u, 0, entries, G * V, copied_u)
        v_at = v_ptr + (then_m * (G * V) + then_row)
        _copy_nodes(node_v.index(1 - side), v_at, expected, G * V, copied_v)
        async_copy.commit_group()
        next_g = gl.load(then_g_at + then_g * G, mask=j_g < entries, other=0.0)
        next_node_g = _number_of_each(then_g_at + then_new * G, expected, G, NODES, listed)
        beta_at = beta_ptr + (then_m * G + then_head)
        next_beta = _number_of_each(beta_at, expected, G, NODES, listed)

        # What was written above is not read below; without this the compiler, which cannot see
        # that, puts a barrier into every pass of the loop.
        _barrier()
        if n > 0:
            fold = log_len > threshold
            owns_k = t % TURN == 0
            first_k, first_u = half * LOG, side * LOG
            S = _replay(S, log, first_k, first_u, min(LOG, log_len), along_k, rows, num_warps)
            if (fold == 0) & (log_len > ring_len):
                _move_entries(u_at, log_u.index(side), 0, ring_len, log_len, G * V, copied_u)
                if t % TILES == 0:
                    gl.store(g_at + j_g * G, g, mask=(j_g >= ring_len) & (j_g < log_len))
                if owns_k:
                    _move_entries(k_at, log_k.index(half), 0, ring_len, log_len, H * K, copied_k)
            for start in range(LOG, log_len, REST):
                j = start + gl.arange(0, REST, listed)
                if start > LOG:
                    _barrier()  # nobody reads the entries before these
                    old = 2 * log_capacity + num_path - new  # where this row's path is
                    at_k = _entries(start, REST, copied_k, ring_len, log_len, path_at, old)
                    at_u = _entries(start, REST, copied_u, ring_len, log_len, path_at, old)
                    at_g = _entries(start, REST, single, ring_len, log_len, path_at, old)
                    _copy_entries(rest_k, k_at, at_k, start, log_len, H * K, copied_k)
                    _copy_entries(rest_u, u_at, at_u, start, log_len, G * V, copied_u)
                    async_copy.commit_group()
                    g_more = gl.load(g_at + at_g * G, mask=j < log_len, other=0.0)
                    async_copy.wait_group(0)
                else:
                    async_copy.wait_group(1)
                rest_decay.store(gl.exp(g_more)[:, None])
                _barrier()
                S = _replay(S, rest, 0, 0, min(REST, log_len - start), along_k, rows, num_warps)
                if fold == 0:
                    _move_entries(u_at, rest_u, start, ring_len, log_len, G * V, copied_u)
                    if t % TILES == 0:
                        gl.store(g_at + j * G, g_more, mask=(j >= ring_len) & (j < log_len))
                    if owns_k:
                        _move_entries(k_at, rest_k, start, ring_len, log_len, H * K, copied_k)
            if fold:
                v_row = gl.arange(0, TILE, rows).expand_dims(1).expand_dims(2).expand_dims(1)
                deep = gl.arange(
                    0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, state)))
                )
                lane = gl.arange(
                    0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, state)))
                )
                four = gl.arange(
                    0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, state)))
                )
                wide = deep[None, :, None, None] * (4 * LANES) + lane[None, None, :, None] * 4
                S_at = S_ptr + (slot * (G * V) + t % UNITS * TILE) * K
                gl.store(S_at + (v_row * K + wide + four[None, None, None, :]), S)

            # The nodes.
            new_at = u_at + new * (G * V)
            o_at = o_ptr + (m * (G * V) + t % UNITS * TILE)
            if NODES == 1:
                S = S * gl.exp(node_g)
                k, q = _operand(node_ks, half, S), _operand(node_qs, half, S)
                _step(S, k, q, node_vs.index(side), beta, new_at, o_at, num_warps)
            else:
                nodes = (node_ks, node_qs, half * NODES)
                nodes += (node_vs, node_decays, node_betas, side * NODES)
                out = (new_at, o_at, G * V)
                first_word = half * WORDS
                if BRANCHING:
                    if NODES <= 4:
                        _walk_bush(S, words, first_word, nodes, out, NODES, num_warps)
                    else:
                        _walk_tree(S, words, first_word, nodes, out, NODES, num_warps)
                else:
                    _walk_chain(S, n, nodes, out, num_warps)

        n, slot, ring_len, log_len, new = then_n, then_slot, then_ring_len, then_log_len, then_new
        b, m, t = then_b, then_m, then
        entry_k, entry_u, entry_g, path_at = then_k, then_u, then_g, then_path
        more_k, more_u, more_g = then_more_k, then_more_u, then_more_g
        k_at, u_at, g_at, half = then_k_at, then_u_at, then_g_at, then_half
        g, node_g, beta = next_g, next_node_g, next_beta
