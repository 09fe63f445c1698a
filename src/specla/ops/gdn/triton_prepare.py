# SPDX-License-Identifier: Apache-2.0
"""What stands between a layer's projections and its recurrence on a GPU: one kernel.

A program takes one head of a row's tree, a tile of nodes at a time; taps are loaded once. Where a
node's W inputs are is found before the wait (see `ops.gdn.triton`), by climbing its parents; the
projections come after it, all at once. Ancestors are other nodes' rows: they hit L1.

Exactness (rule I4). A node's channels lie with min(32, width / 4) threads of one warp, four (and
128 further on four more) each, however many nodes are in the tile: no node's sum over K crosses a
warp, and it adds in one order, in registers and then across those lanes. A tile of one node and
one of four are the same layout repeated. Each convolution is W explicit fma, oldest tap first,
wherever an input came from. tests/ops/test_gdn_triton.py compares nodes alone and in trees, and
every span, bitwise on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape

# Of axes that are contiguous in memory alike, Triton's coalescing gives lanes and warps to the
# first ones up to 3.6 and to the last ones in 3.9; kernels name their axes in that order.
FORWARD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
# Cells, at least, in which `walk` counts the parts of trees that have come: for two trees in each
# of 16 layers, which are more launches than a device has under way.
ARRIVALS = 32
# Consecutive channels that a warp's access covers: 32 threads, four elements each.
WIDE = 128


class Workspace(NamedTuple):
    """What `prepare` hands to `walk`, for M = B * N nodes; shared by all layers.

    q [M, H, K] float32, normalised and scaled; v [M, G, V] activation dtype; beta [M, G]
    float32; o [M, G, V] float32, the outputs. arrivals [max(M, ARRIVALS), G V / 2] int32: zero
    between calls.
    """

    q: Tensor
    v: Tensor
    beta: Tensor
    o: Tensor
    arrivals: Tensor

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
            arrivals=torch.zeros(
                max(num_rows, ARRIVALS),
                shape.num_value_heads * shape.value_dim // 2,
                dtype=torch.int32,
                device=device,
            ),
        )

    def of_layer(self, index: int, num_trees: int) -> Workspace:
        """With the layer's own cells for arrivals: where kernels let their successors start before
        they wait, walks of several layers may be under way."""
        count = len(self.arrivals) // num_trees * num_trees
        return self._replace(arrivals=self.arrivals[index * num_trees % count :])

    def check(self, num_rows: int, num_nodes: int) -> None:
        """Assert that it has room for `num_rows` trees of `num_nodes` nodes: a kernel would write
        past its end."""
        need, room = num_rows * num_nodes, min(len(x) for x in self[:-1])
        assert room >= need, f"a workspace must have {need} rows, one per node; it has {room}"
        room = len(self.arrivals)
        assert room >= num_rows, f"arrivals must have {num_rows} rows, one per tree; has {room}"


class Span(NamedTuple):
    """How `prepare` cuts a tree: warps per program (each has a node, or several of less than
    `WIDE` channels) and tiles that it works through. Speed, never bits."""

    warps: int
    tiles: int


def span_for(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Span:
    """One tile per program while all programs run at once anyway; then taps are used again."""
    warps = 1 if num_nodes == 1 else 4
    tiles = triton.cdiv(num_nodes, warps * _nodes_per_warp(shape))
    heads = 2 * shape.num_key_heads + shape.num_value_heads
    return Span(warps, min(tiles, max(1, num_rows * heads * tiles // 1056)))


def _nodes_per_warp(shape: RecurrentShape) -> int:
    return max(1, WIDE // max(shape.key_dim, shape.value_dim))


def prepare(
    layer: LayerState,
    rnd: DeviceRound,
    y: Tensor,
    conv_taps: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    workspace: Workspace,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    beta_scale: float = 1.0,
    span: Span | None = None,
    gate: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Convolution along tree paths, SiLU, norms, gates; a program per head and span of nodes.

    y [M, C_in]: raw projections, columns q | k | v | ... | a | b (the last 2 G are a and b);
    conv_taps [W, C]: the convolution, oldest tap first; A, dt_bias [G] float32. Writes k, g, the
    raw conv inputs and the new tail to the bank that this round writes; q, v, beta to `workspace`.
    span: None chooses by the round's size. gate [M, G, V] float32: gets silu of y's columns C to
    C + G V, which the gated norm multiplies by: its products would each do that again.
    """
    num_rows, num_nodes = rnd.parents.shape
    need = num_rows * num_nodes
    assert len(y) >= need, f"y must have {need} rows, one per node; it has {len(y)}"
    workspace.check(num_rows, num_nodes)
    s = shape
    warps, tiles = span or span_for(s, num_rows, num_nodes)
    nodes = warps * _nodes_per_warp(s)
    each = nodes * tiles
    heads = 2 * s.num_key_heads + s.num_value_heads
    # More warps on a multiprocessor: faster at K = 256, slower at 128 (docs/log.md).
    registers = {"maxnreg": 80 if gate is None else 88} if s.key_dim >= 256 else {}
    assert gate is None or (len(gate) >= need and gate.is_contiguous()), "no room for gates"
    heads += s.num_value_heads if gate is not None else 0
    _prepare_kernel[(heads, triton.cdiv(num_nodes, each), num_rows)](
        y,
        conv_taps,
        A,
        dt_bias,
        layer.tail,
        layer.inputs,
        layer.factors.k,
        layer.factors.g,
        workspace.q,
        workspace.v,
        workspace.beta,
        workspace.beta if gate is None else gate,
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
        each,
        s.key_dim**-0.5,
        beta_scale,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        FORWARD=FORWARD,
        GATED=gate is not None,
        STRIDE=y.stride(0),
        NODES=nodes,
        BLOCK=max(s.key_dim, s.value_dim),
        WIDE=min(WIDE, max(s.key_dim, s.value_dim)),
        PDL=pdl,
        num_warps=warps,
        **registers,
        **overlap(pdl),
    )


def overlap(pdl: bool) -> dict[str, bool]:
    """The launch option of programmatic dependent launch."""
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
def softplus(x):
    """Linear above 20, as in fla."""
    return tl.where(x > 20, x, _log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _along(x, FORWARD: tl.constexpr):
    """One number per node -> the axes of a tile."""
    return x[:, None, None] if FORWARD else x[None, :, None]


@triton.jit
def _climb(parents_ptr, node, steps: tl.constexpr):
    """(the nodes `steps` above, or -1; how far above the root that is, at least 1)."""
    beyond = tl.zeros_like(node)
    for _ in tl.static_range(steps):
        beyond = tl.where(node < 0, beyond + 1, beyond)
        node = tl.load(parents_ptr + node, mask=node >= 0, other=-1)
    return node, beyond + 1


@triton.jit
def _row_above(inputs_ptr, tail_ptr, path_ptr, entry, C, W: tl.constexpr):
    """Where raw inputs above the root are: the committed path's `entry`, or if < 0 the tail's."""
    place = tl.load(path_ptr + entry, mask=entry >= 0, other=0)
    return tl.where(entry >= 0, inputs_ptr + place * C, tail_ptr + (W - 1 + entry) * C)


@triton.jit(
    do_not_specialize=["num_columns", "num_path", "num_entries", "log_capacity", "num_each"]
)
def _prepare_kernel(  # noqa: C901
    y_ptr, taps_ptr, A_ptr, dt_bias_ptr, tail_ptr, inputs_ptr, k_ptr, g_ptr,
    q_out, v_out, beta_out, gate_out,
    slot_ptr, num_nodes_ptr, parents_ptr, bank_ptr, path_len_ptr, path_ptr,
    num_columns, num_path, num_entries, log_capacity, num_each, scale, beta_scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    STRIDE: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    FORWARD: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + G * V
    part, first, b = tl.program_id(0), tl.program_id(1) * num_each, tl.program_id(2)
    num_nodes = tl.load(num_nodes_ptr + b)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    path_len = tl.load(path_len_ptr + b)
    if PDL:
        gdc_launch_dependents()
    if first >= num_nodes:
        if PDL:
            gdc_wait()
        return
    parents_ptr += b * num_columns
    path_ptr += b * num_path
    inputs_ptr += (slot * 2 + bank) * num_path * C
    tail_ptr += (slot * 2 + bank) * (W - 1) * C
    write = 1 - 2 * bank  # from the read bank to the other
    entries = slot * num_entries + log_capacity + (1 - bank) * num_path

    row = tl.arange(0, NODES)
    # [nodes, BLOCK / WIDE, WIDE], or with the first two axes swapped: a warp is spread over the
    # last axis, four elements a thread whatever they are, and warps over nodes.
    wide, deep = tl.arange(0, WIDE)[None, None, :], tl.arange(0, BLOCK // WIDE) * WIDE
    column = (deep[None, :, None] if FORWARD else deep[:, None, None]) + wide
    column = tl.max_contiguous(column, [1, 1, 4])
    every = _along(row, FORWARD) * 0
    if GATED and part >= 2 * H + G:
        if PDL:
            gdc_wait()
        head = part - (2 * H + G)
        for lowest in range(first, tl.minimum(first + num_each, num_nodes), NODES):
            node = lowest + row
            mask = (column < V) & _along(node < num_nodes, FORWARD)
            m = b * num_columns + node
            z_at = y_ptr + _along(m, FORWARD) * STRIDE + (C + head * V + column)
            z = _silu(tl.load(z_at, mask=mask, other=0).to(tl.float32))
            tl.store(gate_out + _along(m * G + head, FORWARD) * V + column, z, mask=mask)
        return

    # Programs 0 .. H-1 are q's heads, the next H are k's, then v's, then the gate's.
    is_value = part >= 2 * H
    head = tl.where(is_value, part - 2 * H, part % H)
    start = tl.where(is_value, 2 * H * K + head * V, part * K)
    used = column < tl.where(is_value, V, K)
    A, dt_bias = tl.load(A_ptr + head), tl.load(dt_bias_ptr + head)

    taps = ()  # oldest first
    for i in tl.static_range(W):
        tap_at = taps_ptr + i * C + start + column + every
        taps += (tl.load(tap_at, mask=used & (every == 0), other=0),)
    # The newest inputs above the root: for every program, as it brings them into L1.
    newest = ()
    once = used & _along(row == 0, FORWARD)
    for i in tl.static_range(W - 1):
        entry = tl.zeros_like(row) + (path_len - (W - 1) + i)
        above = _row_above(inputs_ptr, tail_ptr, path_ptr, entry, C, W)
        newest += (tl.load(_along(above, FORWARD) + (start + column), mask=once, other=0),)

    for lowest in range(first, tl.minimum(first + num_each, num_nodes), NODES):
        node = lowest + row
        live = node < num_nodes
        mask = used & _along(live, FORWARD)
        places = ()  # of the raw inputs, oldest first
        for back in tl.static_range(W - 1, -1, -1):
            at, beyond = _climb(parents_ptr, tl.where(live, node, -1), back)
            place = y_ptr + (b * num_columns + at) * STRIDE
            if back > 0:
                beyond_root = _row_above(inputs_ptr, tail_ptr, path_ptr, path_len - beyond, C, W)
                place = tl.where(at < 0, beyond_root, place)
            places += (place,)
        m = b * num_columns + node
        if PDL:
            gdc_wait()
        gates = y_ptr + m * STRIDE + (STRIDE - 2 * G) + head
        gated = tl.where(is_value, node, num_nodes) < num_nodes
        a = tl.load(gates, mask=gated, other=0).to(tl.float32)
        logit = tl.load(gates + G, mask=gated, other=0).to(tl.float32)
        xs = ()
        for i in tl.static_range(W):
            xs += (tl.load(_along(places[i], FORWARD) + (start + column), mask=mask, other=0),)
        # Always so, but the compiler does not know: it moves no load past the branch, so that all
        # are on their way before the first is waited for.
        if path_len >= 0:
            acc = tl.zeros(mask.shape, tl.float32)
            for i in tl.static_range(W):
                acc = tl.fma(xs[i].to(tl.float32), taps[i].to(tl.float32), acc)
            x_at = inputs_ptr + _along(write * num_path + node, FORWARD) * C + (start + column)
            tl.store(x_at, xs[W - 1], mask=mask)
            y = _silu(acc).to(y_ptr.dtype.element_ty).to(tl.float32)
            if is_value:
                v_at = v_out + _along(m * G + head, FORWARD) * V + column
                tl.store(v_at, y.to(v_out.dtype.element_ty), mask=mask)
                tl.store(g_ptr + (entries + node) * G + head, A * softplus(a + dt_bias), mask=live)
                beta = beta_scale / (1 + tl.exp(-logit))
                tl.store(beta_out + m * G + head, beta, mask=live)
            else:
                square = tl.sum(tl.sum(y * y, axis=1 if FORWARD else 0), axis=1)
                y = y / _along(tl.sqrt(square + 1e-6), FORWARD)
                if part < H:
                    q_at = q_out + _along(m * H + head, FORWARD) * K + column
                    tl.store(q_at, y * scale, mask=mask)
                else:
                    k_at = k_ptr + _along((entries + node) * H + head, FORWARD) * K + column
                    tl.store(k_at, y, mask=mask)
    if first == 0:  # last, so that nothing waits for them: they are the new tail
        for i in tl.static_range(W - 1):
            tail_at = tail_ptr + (write * (W - 1) + i) * C + start + column + every
            tl.store(tail_at, newest[i], mask=once)
