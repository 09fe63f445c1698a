# SPDX-License-Identifier: Apache-2.0
"""y = x W^T on the GPU for 1 to 1,024 rows, with bits that do not depend on the row count (I4).

Weights are the first operand of the tensor-core product and tokens the second: one row costs what
16 cost, and a row of x is a column of the product that no other row enters. What is added in which
order follows from the weight's shape: K in blocks, ascending, in one accumulator per *span*, then
the spans' partial sums in order, starting from zero. Tile sizes, warps and stages change none of
it; a test on the device compares them all.

Three kinds, by what happens to the sums:

    plain     rounded to the output's dtype, [M, O]
    swiglu    silu(gate) * up with both rounded to the activation dtype first, [M, O / 2]; the
              weight's rows are interleaved by `pack_swiglu`
    partials  float32 [S, M, O], one partial sum per span, which `rows.add_partials_norm` adds;
              from IN_REGISTERS rows on the kernel adds them itself, in the same order: S is 1

A decode step is a chain of dependent kernels that each stream a weight once, so what counts is
that the memory system never waits for the chain. With `pdl` a program may ask for weights before
it waits for the kernel that computes its x, and lets the next kernel start at once. Every kernel
of such a chain has to wait (`gdc_wait`) in every program, or the one after it could overtake the
one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specla.errors import UnsupportedModel
from specla.ops.rows import round_to, silu

if TYPE_CHECKING:
    from specla.ops.gemm_stream import StreamLinear
    from specla.ops.gemm_wide import WideLinear

Kind = Literal["plain", "swiglu", "partials"]

MAX_ROWS = 1024
# Rows from which one program adds all spans of a tile: enough tiles to fill the device without.
IN_REGISTERS = 768
# Multiprocessors of an H200. Chooses tiles, never spans: no bit depends on it.
PROCESSORS = 132
# Rows above which tiles are chosen for arithmetic, not for bytes in flight.
FEW_ROWS = 64
# Rows above that and up to here are `ops.gemm_wide`'s, where a weight has that form; 0: none.
WIDE_ROWS = MAX_ROWS
# Gate and up rows alternate in groups of 8: both halves of a 16-row fragment of the tensor cores'
# result belong to the same thread.
GROUP = 8
_GROUP = tl.constexpr(GROUP)
# Triton's interpreter multiplies tiles through a BLAS, whose bits depend on the tile: there all
# row counts use one. It takes bfloat16 for integers; float32 holds the products exactly.
INTERPRET: bool = triton.knobs.runtime.interpret
_WIDEN = tl.constexpr(INTERPRET)


class Tiling(NamedTuple):
    """How a weight [O, I] is cut. `span` decides bits, everything else only speed.

    block_o, block_k: a weight tile. span: K elements summed in one accumulator, a multiple of
    block_k. warps, stages: of the kernel for few rows.
    prefetch: K elements at a span's start that are asked into L2 before the wait: 0 or a power of
    two, and unused without dependent launch or where a span is shorter.
    """

    block_o: int
    block_k: int
    span: int
    warps: int = 4
    stages: int = 5
    prefetch: int = 0


class Launch(NamedTuple):
    """One call: the grid, how many partial sums come out, and the kernel's keyword arguments."""

    grid: tuple[int, int, int]
    num_partials: int
    meta: dict[str, Any]


def tiling_for(outputs: int, inputs: int, kind: Kind) -> Tiling:
    """The cut of a weight [outputs, inputs]; see `Tiling`."""
    block_k = min(128, max(16, triton.next_power_of_2(inputs)))
    tiles = triton.cdiv(outputs, 64)
    if kind == "partials":
        # About one tile and span per multiprocessor of the largest devices; never of this device,
        # or bits would depend on it.
        spans = max(1, 128 // tiles)
        span = triton.cdiv(triton.cdiv(inputs, spans), block_k) * block_k
        return Tiling(64, block_k, span)
    if 1.1 * PROCESSORS < tiles <= 2 * PROCESSORS:
        # One round of taller tiles, not two of which the second is half empty.
        return Tiling(128, min(64, block_k), inputs, stages=6)
    return Tiling(64, block_k, inputs, prefetch=256)


def launch_for(
    outputs: int, inputs: int, kind: Kind, tiling: Tiling, num_rows: int, *, pdl: bool = False
) -> Launch:
    """How to call the kernel for `num_rows` rows. Raises nothing; asserts on a bad tiling."""
    spans = triton.cdiv(inputs, tiling.span)
    assert spans == 1 or (kind == "partials" and tiling.span % tiling.block_k == 0)
    grid_spans = 1 if num_rows >= IN_REGISTERS else spans
    t, block_m = tiling, 16
    if num_rows > FEW_ROWS and not INTERPRET:
        t, block_m = _for_many_rows(tiling, num_rows, outputs, grid_spans)
    elif not INTERPRET:
        block_m = max(16, triton.next_power_of_2(num_rows))
    # What is asked into L2 starts at a multiple of 16 bytes.
    asks = pdl and inputs % 8 == 0 and t.prefetch <= inputs - (spans - 1) * t.span
    meta = {
        "OUT": outputs,
        "IN": inputs,
        "SPAN": t.span,
        "SPANS": spans // grid_spans,
        "BLOCK_O": t.block_o,
        "BLOCK_M": block_m,
        "BLOCK_K": t.block_k,
        "KIND": kind,
        "PREFETCH": t.prefetch if asks else 0,
        "PDL": pdl,
        "num_warps": t.warps,
        "num_stages": _stages(t, block_m),
        "launch_pdl": pdl,
    }
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(outputs, t.block_o), grid_spans)
    return Launch(grid, grid_spans, meta)


def _for_many_rows(t: Tiling, num_rows: int, outputs: int, spans: int) -> tuple[Tiling, int]:
    """The same sums in tiles for arithmetic, and rows per tile: the least time, were every round
    of tiles full (microseconds at K = 2,048 on an H200; two tiles of the first kind share a
    processor)."""

    def cost(block_o: int, block_m: int, slots: int, time: int) -> int:
        tiles = triton.cdiv(outputs, block_o) * triton.cdiv(num_rows, block_m) * spans
        if slots > PROCESSORS >= tiles:
            return 15
        return int(triton.cdiv(tiles, slots)) * time

    kinds = (64, 128, 2 * PROCESSORS, 20), (128, 128, PROCESSORS, 17), (128, 256, PROCESSORS, 28)
    block_o, block_m = min(kinds, key=lambda k: cost(*k))[:2]
    tile = Tiling(block_o, min(64, t.block_k), t.span, warps=block_o // 16, stages=4)
    return tile, block_m


def _stages(t: Tiling, block_m: int) -> int:
    """For few rows: fewer stages with taller token tiles, so that as many programs fit."""
    if block_m > FEW_ROWS:
        return t.stages
    budget = t.stages * (t.block_o + 16)
    return min(t.stages, max(3, budget // (t.block_o + block_m)))


def pack_swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [2 I, D] (gate rows, then up rows) -> the same rows in groups of 8 gate, 8 up.

    Raises:
        UnsupportedModel: I is not a multiple of 8.
    """
    width = gate_up.shape[0] // 2
    if width % GROUP:
        raise UnsupportedModel(
            f"the MLP's intermediate size must be a multiple of {GROUP} on a GPU, not {width}; "
            "use device cpu"
        )
    halves = gate_up.view(2, width // GROUP, GROUP, -1)
    return halves.transpose(0, 1).reshape(gate_up.shape)


class PackedLinear:
    """A weight [O, I] and the launches that apply it.

    For kind "swiglu" the weight has been through `pack_swiglu`. All linears of one chain of
    kernels agree on `pdl` (see the module's text). stream: what serves few rows instead (see
    `ops.gemm_stream`), with the same bits; wide: up to WIDE_ROWS of them (`ops.gemm_wide`).
    """

    def __init__(
        self, weight: Tensor, kind: Kind, *, tiling: Tiling | None = None, pdl: bool = False
    ) -> None:
        assert weight.is_contiguous()
        self.weight, self.kind = weight, kind
        outputs, inputs = weight.shape
        self.tiling = tiling or tiling_for(outputs, inputs, kind)
        self.stream: StreamLinear | None = None
        self.wide: WideLinear | None = None
        self._pdl = pdl
        self._launches: dict[int, Launch] = {}

    @property
    def max_partials(self) -> int:
        """S for few rows: `rows.add_partials_norm` is compiled for it."""
        return triton.cdiv(self.weight.shape[1], self.tiling.span)

    def num_partials(self, num_rows: int) -> int:
        """S for this many rows; 1 where there is nothing to add."""
        return self._launch(num_rows).num_partials

    def workspace_elements(self, max_rows: int) -> int:
        """float32 elements of an output for any number of rows up to this (kind "partials")."""
        split_rows = min(max_rows, IN_REGISTERS - 1)
        return max(max_rows, self.max_partials * split_rows) * self.weight.shape[0]

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [M, I], contiguous, in the weight's dtype. out: [M, O], [M, O / 2] for "swiglu";
        for "partials" float32 with room for S * M * O, filled as [S, M, O]."""
        num_rows = x.shape[0]
        assert x.dtype == self.weight.dtype
        assert all(tensor.is_contiguous() for tensor in (x, out))
        if self.stream and num_rows <= FEW_ROWS:
            self.stream(x, out)
            return
        launch = self._launch(num_rows)
        if self.wide and num_rows <= WIDE_ROWS:
            self.wide(x, out, launch.num_partials)
            return
        _gemm_kernel[launch.grid](x, self.weight, out, num_rows, **launch.meta)

    def _launch(self, num_rows: int) -> Launch:
        if num_rows not in self._launches:
            outputs, inputs = self.weight.shape
            self._launches[num_rows] = launch_for(
                outputs, inputs, self.kind, self.tiling, num_rows, pdl=self._pdl
            )
        return self._launches[num_rows]


@triton.jit
def _weights(w_ptr, o, k, o_left, IN: tl.constexpr, FULL: tl.constexpr):
    """A weight tile; w_ptr points at its first row, o_left rows are real."""
    ptrs = w_ptr + o[:, None] * IN + k[None, :]
    if FULL:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(o < o_left)[:, None] & (k < IN)[None, :], other=0.0)


@triton.jit
def _tokens(x_ptr, m, k, num_rows, IN: tl.constexpr, FULL: tl.constexpr):
    """A token tile, transposed. Rows that do not exist are zero."""
    ptrs = x_ptr + m.to(tl.int64)[:, None] * IN + k[None, :]
    mask = (m < num_rows)[:, None]
    if not FULL:
        mask = mask & (k < IN)[None, :]
    return tl.trans(tl.load(ptrs, mask=mask, other=0.0))


@triton.jit
def _add_product(acc, w, x):
    """acc + w @ x in float32; operands in bfloat16, or in float32 without rounding them."""
    if _WIDEN:
        w, x = w.to(tl.float32), x.to(tl.float32)
    if w.dtype == tl.float32:
        return tl.dot(w, x, acc, input_precision="ieee")
    return tl.dot(w, x, acc)


@triton.jit
def _request(w_ptr, o, o_left, IN: tl.constexpr, COUNT: tl.constexpr):
    """Ask for the first COUNT elements of each weight row into L2."""
    w_ptr += tl.minimum(o, o_left - 1)[:, None] * IN
    ptrs = w_ptr + tl.arange(0, 2)[None, :] * (COUNT // 2)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [ptrs.to(tl.int64), tl.full([1, 1], COUNT, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store(out_ptr, acc, m, num_rows, first, OUT: tl.constexpr, BLOCK_O: tl.constexpr):
    """acc [BLOCK_O, BLOCK_M] -> out [M, OUT], columns from `first` on."""
    o = first + tl.arange(0, BLOCK_O)
    mask = (m < num_rows)[None, :]
    if OUT % BLOCK_O != 0:
        mask = mask & (o < OUT)[:, None]
    ptrs = out_ptr + m.to(tl.int64)[None, :] * OUT + o[:, None]
    tl.store(ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(acc, dtype: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_O, BLOCK_M] of alternating groups -> [BLOCK_O / 2, BLOCK_M]; as ops.norm.swiglu."""
    halves = tl.reshape(acc, [BLOCK_O // (2 * _GROUP), 2, _GROUP, BLOCK_M])
    gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
    gate = round_to(gate, dtype).to(tl.float32)
    up = round_to(up, dtype).to(tl.float32)
    return tl.reshape(silu(gate) * up, [BLOCK_O // 2, BLOCK_M])


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token tile, weight tile, span): SPANS spans of K, added in order."""
    first = tl.program_id(1) * BLOCK_O
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.arange(0, BLOCK_O)
    w_ptr += first.to(tl.int64) * IN
    o_left = OUT - first
    begin = tl.program_id(2) * SPAN
    FULL_K: tl.constexpr = IN % SPAN == 0 and SPAN % BLOCK_K == 0
    FULL: tl.constexpr = FULL_K and OUT % BLOCK_O == 0

    if PREFETCH > 0:
        _request(w_ptr + begin, o, o_left, IN, PREFETCH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    total = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for s in tl.range(0, SPANS, num_stages=1):
        acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
        start = begin + s * SPAN
        stop = tl.minimum(start + SPAN, IN) if IN % SPAN != 0 else start + SPAN
        for k0 in tl.range(start, stop, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            w = _weights(w_ptr, o, k, o_left, IN, FULL)
            acc = _add_product(acc, w, _tokens(x_ptr, m, k, num_rows, IN, FULL_K))
        total += acc

    if KIND == "swiglu":
        value = _swiglu(total, out_ptr.dtype.element_ty, BLOCK_O, BLOCK_M)
        _store(out_ptr, value, m, num_rows, first // 2, OUT // 2, BLOCK_O // 2)
    else:
        out_ptr += tl.program_id(2).to(tl.int64) * num_rows * OUT
        _store(out_ptr, total, m, num_rows, first, OUT, BLOCK_O)
