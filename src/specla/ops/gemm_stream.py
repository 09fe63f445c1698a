# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The product of `ops.gemm` for few rows on Hopper, written so that its weights are on their way
while the kernels before it still run.

Same sums, same bits as `ops.gemm` (a test on the device compares them): the same tensor-core
instruction in the same order of K. What differs is when memory is asked. A program asks for its
whole ring of weight tiles, about RING bytes, before it waits for the kernel that computes its x;
Triton's pipeliner cannot put a wait between the first loads of two operands, hence Gluon.

One program's ring fills a multiprocessor, on purpose. The next product's programs can then start
only where this one's have ended, so its loads queue up behind this one's instead of beside them
and fill the time in which the last sums, the small kernels in between and the waits leave the
memory idle; and no two of its programs end up on one processor. The small kernels fit beside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Later Tritons renamed these.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

MAX_ROWS = 64
# Up to here o_proj can make its x itself, from the recurrence's output, and up to there it does:
# each of its programs then norms every row. GDN-1.3B's step of one row takes 911 us that way and
# 918 with a kernel for the norm, a round of a tree of 16 nodes 1,108 and 1,086.
MAX_MIX_ROWS, MIX_ROWS = 16, 4
# Bytes of a multiprocessor's 227 KiB that a ring may take: more than half, so that two programs
# never share one, and not all, so that small kernels' programs still fit beside.
RING = 150 * 1024
# Of gate_up's for more than RING_ROWS: the walk of a tree as large needs more room beside it. 32
# nodes of GDN-1.3B took 1,256 us instead of 1,266 that way.
RING_ROWS, WIDE_RING = 16, 128 * 1024


class Ring(NamedTuple):
    """How a weight [O, I] is streamed: tiles and warps. Never changes bits."""

    block_o: int
    block_k: int
    warps: int
    bytes: int = RING


# x as `rows.gated_norm` makes it, for o_proj: o [M, G, V] float32; gate [M, G * V], columns of a
# wider matrix, float32 where it has been through SiLU, or None; weight [V]; eps.
Mix = tuple[Tensor, Tensor | None, Tensor, float]


def ring_for(outputs: int, spans: int, processors: int) -> Ring:
    """The smallest tiles that all run at once."""
    for block_o, block_k, warps in ((64, 128, 4), (128, 64, 4), (256, 64, 8)):
        if triton.cdiv(outputs, block_o) * spans <= processors:
            return Ring(block_o, block_k, warps)
    return Ring(256, 64, 8)


def fits(weight: Tensor, span: int, ring: Ring) -> bool:
    """Whether the kernel can do it; otherwise `ops.gemm` does."""
    inputs = weight.shape[1]
    aligned = inputs % 8 == 0 and weight.data_ptr() % 16 == 0
    return aligned and (span % ring.block_k == 0 or span >= inputs)


class StreamLinear:
    """A weight [O, I] and its launches; as `gemm.PackedLinear` for up to MAX_ROWS rows."""

    def __init__(self, weight: Tensor, kind: str, span: int, ring: Ring) -> None:
        self.weight, self.kind, self.span, self.ring = weight, kind, span, ring
        self._weight_tiles = _tiles(weight, ring.block_o, ring.block_k)
        self._metas: dict[tuple[int, bool, bool], dict[str, Any]] = {}

    def __call__(self, x: Tensor, out: Tensor, mix: Mix | None = None) -> None:
        """As `gemm.PackedLinear.__call__`; every launch is a dependent one.

        With `mix` the values of x are not looked at: the product is that of the mix, whose head
        width must be the ring's block_k.
        """
        outputs, inputs = self.weight.shape
        num_rows = x.shape[0]
        block_m = max(8, triton.next_power_of_2(num_rows))
        key = (block_m, mix is not None, mix is not None and mix[1] is not None)
        if key not in self._metas:
            self._metas[key] = self._meta(*key)
        grid = (triton.cdiv(outputs, self.ring.block_o), triton.cdiv(inputs, self.span))
        o, gate, norm, eps = mix or (out, None, self.weight, 0.0)
        assert not mix or norm.numel() == self.ring.block_k, "a block of K is a head"
        _stream_kernel[grid](
            self._weight_tiles,
            _tiles(x, block_m, self.ring.block_k),
            out,
            o,
            x if gate is None else gate,
            norm,
            num_rows,
            0 if gate is None else gate.stride(0),
            eps,
            **self._metas[key],
        )

    def _meta(self, block_m: int, mix: bool = False, gated: bool = False) -> dict[str, Any]:
        outputs, inputs = self.weight.shape
        r, span = self.ring, min(self.span, inputs)
        stage = (r.block_o + block_m) * r.block_k * 2
        blocks = triton.cdiv(span, r.block_k)
        is_wide = self.kind == "swiglu" and block_m > RING_ROWS
        slots = max(1, (min(r.bytes, WIDE_RING) if is_wide else r.bytes) // stage)
        # A slot is asked for anew while the next one is in use.
        assert blocks <= slots or slots > 1, "more rows than the ring has room for"
        assert not mix or (blocks <= slots and block_m <= MAX_MIX_ROWS)
        return {
            "OUT": outputs,
            "IN": inputs,
            "SPAN": span,
            "BLOCK_O": r.block_o,
            "BLOCK_M": block_m,
            "BLOCK_K": r.block_k,
            "BLOCKS": blocks,
            "STAGES": min(slots, blocks),
            "SWIGLU": self.kind == "swiglu",
            "MIX": mix,
            "GATED": gated,
            "num_warps": r.warps,
            "launch_pdl": True,
        }


def _tiles(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """How the memory system cuts a matrix; what lies outside reads as zero."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@gluon.jit
def _silu(x):
    return x / (1.0 + gl.exp(-x))


@gluon.jit
def _swiglu(total, dtype: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr):
    """As `gemm._swiglu`: rows alternate in groups of 8 gate, 8 up."""
    halves = total.reshape([BLOCK_O // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
    gate, up = halves.split()
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    return (_silu(gate) * up).reshape([BLOCK_O // 2, BLOCK_M])


@gluon.jit
def _store(
    out_ptr, value, num_rows, first, OUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """value [ROWS, COLUMNS] -> out [M, OUT], columns from `first` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    value = gl.convert_layout(value.to(out_ptr.dtype.element_ty), layout)
    o = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = (o < OUT)[:, None] & (m < num_rows)[None, :]
    gl.store(out_ptr + m.to(gl.int64)[None, :] * OUT + o[:, None], value, mask=mask)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _squares(x, LEVELS: gl.constexpr):
    """Per row of x [ROWS, 2^LEVELS]: as `rows.squares`."""
    total = gl.fma(x, x, gl.zeros_like(x))
    for _ in gl.static_range(LEVELS):
        pairs = total.reshape([total.shape[0], total.shape[1] // 2, 2])
        total = gl.reduce(pairs, 2, _add)
    return total.reshape([total.shape[0]])


@gluon.jit
def _mixed(o, gate, weight, eps, dtype: gl.constexpr, GATED: gl.constexpr):
    """x of one head: as `rows.gated_norm`, o [BLOCK_M, V]."""
    V: gl.constexpr = o.shape[1]
    LEVELS: gl.constexpr = 8 if V == 256 else (7 if V == 128 else 6)
    mean = gl.convert_layout(_squares(o, LEVELS), gl.SliceLayout(1, o.type.layout)) / V
    y = o * gl.rsqrt(mean + eps)[:, None] * weight
    if GATED:
        y = y * (gate if gate.dtype == gl.float32 else _silu(gate.to(gl.float32)))
    return y.to(dtype)


@gluon.jit(do_not_specialize=["num_rows"])
def _stream_kernel(  # noqa: C901 - one kernel, one pass
    w_tiles,
    x_tiles,
    out_ptr,
    o_ptr,
    gate_ptr,
    norm_ptr,
    num_rows,
    gate_stride,
    eps,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    SPAN: gl.constexpr,
    BLOCK_O: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    MIX: gl.constexpr,
    GATED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program (weight tile, span)."""
    first = gl.program_id(0) * BLOCK_O
    begin = gl.program_id(1) * SPAN
    BYTES: gl.constexpr = 2 * (BLOCK_O + (0 if MIX else BLOCK_M)) * BLOCK_K
    ws = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, BLOCK_O, BLOCK_K], w_tiles.layout)
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), BYTES)
        _load(w_tiles, [first, begin + s * BLOCK_K], full.index(s), ws.index(s))
    if MIX:
        # A warp has a row of a head.
        rows: gl.constexpr = gl.BlockedLayout([1, BLOCK_K // 32], [1, 32], [num_warps, 1], [1, 0])
        column = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, rows))[None, :]
        m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, rows))[:, None]
        here = (m < num_rows) & (column < BLOCK_K)
        weight = gl.load(norm_ptr + column).to(gl.float32)
        o_ptrs = o_ptr + m * IN + begin + column
        gate_ptrs = gate_ptr + m * gate_stride + begin + column
    gdc_launch_dependents()
    gdc_wait()
    if MIX:
        # All loads first: one trip to L2.
        o, gate = (), ()
        for s in gl.static_range(STAGES):
            o = o + (gl.load(o_ptrs + s * BLOCK_K, mask=here, other=0.0),)  # noqa: RUF005
            if GATED:
                z = gl.load(gate_ptrs + s * BLOCK_K, mask=here, other=0.0)
                gate = gate + (z,)  # noqa: RUF005
        # Always so, but the compiler does not know and moves no load past the branch: without it
        # registers are saved and memory waited for once per head and row of a warp. One branch a
        # head: the fewer elements there are between two, the more of their SiLUs overlap.
        for s in gl.static_range(STAGES):
            if num_rows > -s:
                xs.index(s).store(
                    _mixed(o[s], gate[s] if GATED else o[s], weight, eps, x_tiles.dtype, GATED)
                )
        fence_async_shared()
        _barrier()
    else:
        for s in gl.static_range(STAGES):
            _load(x_tiles, [0, begin + s * BLOCK_K], full.index(s), xs.index(s))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    zeros = gl.zeros([BLOCK_O, BLOCK_M], gl.float32, layout)
    acc = warpgroup_mma_init(zeros)
    slot = 0
    phase = 0
    for i in range(BLOCKS):
        mbarrier.wait(full.index(slot), phase)
        # Block i - 1 is done with its slot, which block i - 1 + STAGES takes.
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma(ws.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True)
        if BLOCKS > STAGES:
            free = gl.where(slot == 0, STAGES - 1, slot - 1)
            k = begin + (i - 1 + STAGES) * BLOCK_K
            more = (i > 0) & (i - 1 + STAGES < BLOCKS)
            _barrier()
            mbarrier.expect(full.index(free), BYTES, pred=more)
            _load(w_tiles, [first, k], full.index(free), ws.index(free), pred=more)
            _load(x_tiles, [0, k], full.index(free), xs.index(free), pred=more)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    # From zero, as a sum of spans: no negative zero.
    total = zeros + warpgroup_mma_wait(0, deps=(acc,))

    if SWIGLU:
        value = _swiglu(total, out_ptr.dtype.element_ty, BLOCK_O, BLOCK_M)
        _store(out_ptr, value, num_rows, first // 2, OUT // 2, BLOCK_O // 2, BLOCK_M, num_warps)
    else:
        out_ptr += gl.program_id(1).to(gl.int64) * num_rows * OUT
        _store(out_ptr, total, num_rows, first, OUT, BLOCK_O, BLOCK_M, num_warps)
