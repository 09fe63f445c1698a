# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The product of `ops.gemm` for 65 to 1,024 rows on Hopper.

Same sums, same bits as `ops.gemm` (a test on the device compares them): the same tensor-core
instruction in the same order of K. What differs is how tiles come to a multiprocessor.

At these sizes it is not the weight that takes the time but x, which every weight tile reads anew:
at 128 rows and 64-row tiles two thirds of what enters the multiprocessors. That comes from L2, at
twice the bandwidth of memory, and only where enough of it is under way: a latency of 1 us times
70 bytes a nanosecond and processor. Triton's pipeline holds 72 KB of such tiles; here both
operands come through TMA into a ring of RING bytes. The product of a block is still running while
the next one is started, its slot is asked for anew as soon as that is known to have ended, and a
program that has several tiles asks for the next one's blocks while it ends this one.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.gemm import PROCESSORS
from specla.ops.gemm_stream import _barrier, _load, _swiglu, _tiles

# Bytes of a multiprocessor's 227 KiB for blocks under way; the rest is for storing a tile and for
# the small kernels' programs beside.
RING = 192 * 1024
# Bytes through which a tile goes on its way out, and the tensor cores' accumulators of a thread.
STAGING, ACCUMULATORS = 16 * 1024, 128


class Tile(NamedTuple):
    """How a product is cut, and what is under way. Never changes bits.

    ring: bytes of one program. beside: programs that share a multiprocessor.
    """

    block_o: int
    block_m: int
    block_k: int
    warps: int
    ring: int = RING
    beside: int = 1


class Rates(NamedTuple):
    """What an H200 does in a microsecond: bytes into one multiprocessor, bytes out of L2, products
    of two elements in one multiprocessor. Chooses tiles, and no bit depends on it."""

    processor: float
    memory: float
    products: float


TILES = (Tile(64, 128, 64, 4), Tile(128, 128, 64, 8), Tile(128, 256, 64, 8))
# Those with which, of a grid, the chosen tiles lose least over GDN-1.3B's products of 65 to 1,024
# rows: 89 us over 35 sums of a round's 97.
RATES = Rates(50e3, 5e6, 1.8e6)


def tile_for(
    outputs: int, num_rows: int, spans: int, partials: int, rates: Rates | None = None
) -> Tile:
    """The tile that takes least. spans: of K, in all; partials: sums that come out."""
    # Spans that one program adds need a second set of accumulators.
    room = ACCUMULATORS if spans == partials else ACCUMULATORS // 2
    tiles = [tile for tile in TILES if accumulators(tile) <= room]
    return min(tiles, key=lambda t: _times(t, outputs, num_rows, partials, rates or RATES))


def _times(
    tile: Tile, outputs: int, num_rows: int, partials: int, rates: Rates
) -> tuple[float, float]:
    """Per element of K: the slowest of what goes on at once, and L2, which others use as well."""
    tiles = count(tile, outputs, num_rows, partials)
    rounds = triton.cdiv(tiles, PROCESSORS * tile.beside) * tile.beside
    num_bytes = 2 * (tile.block_o + tile.block_m)
    memory = tiles * num_bytes / rates.memory
    products = tile.block_o * tile.block_m / rates.products
    return max(memory, rounds * max(num_bytes / rates.processor, products)), memory


def fits(weight: Tensor, span: int) -> bool:
    """Whether the kernel can do it; otherwise `ops.gemm` does."""
    inputs, block_k = weight.shape[1], max(tile.block_k for tile in TILES)
    aligned = inputs % 8 == 0 and weight.data_ptr() % 16 == 0
    # A tile has two blocks or more: a slot is asked for anew while the next one is in use.
    return aligned and (span % block_k == 0 or span >= inputs) and min(span, inputs) > block_k


def count(tile: Tile, outputs: int, num_rows: int, partials: int) -> int:
    """Tiles of a product."""
    return triton.cdiv(outputs, tile.block_o) * triton.cdiv(num_rows, tile.block_m) * partials


def accumulators(tile: Tile) -> int:
    """Registers of a thread that hold sums."""
    return tile.block_o * tile.block_m // (32 * tile.warps)


class WideLinear:
    """A weight [O, I] and its launches; as `gemm.PackedLinear` for any number of rows.

    kind, span: as there; see `fits`. tile: for measurements, the only one to take.
    """

    def __init__(self, weight: Tensor, kind: str, span: int, tile: Tile | None = None) -> None:
        self.weight, self.kind, self.span, self.tile = weight, kind, span, tile
        self._weight_tiles: dict[tuple[int, int], Any] = {}
        self._metas: dict[tuple[Tile, int], dict[str, Any]] = {}

    def __call__(self, x: Tensor, out: Tensor, partials: int) -> None:
        """As `gemm.PackedLinear.__call__`; every launch is a dependent one. partials: sums that
        come out, one or as many as spans."""
        outputs, inputs = self.weight.shape
        num_rows, spans = x.shape[0], triton.cdiv(inputs, self.span)
        assert partials in (1, spans)
        tile = self.tile or tile_for(outputs, num_rows, spans, partials)
        key, size = (tile, partials), (tile.block_o, tile.block_k)
        if key not in self._metas:
            self._metas[key] = self._meta(*key)
        if size not in self._weight_tiles:
            self._weight_tiles[size] = _tiles(self.weight, *size)
        tiles = count(tile, outputs, num_rows, partials)
        _wide_kernel[(min(tiles, PROCESSORS * tile.beside),)](
            self._weight_tiles[size],
            _tiles(x, tile.block_m, tile.block_k),
            out,
            num_rows,
            **self._metas[key],
        )

    def _meta(self, tile: Tile, partials: int) -> dict[str, Any]:
        outputs, inputs = self.weight.shape
        span = min(self.span, inputs)
        spans, blocks = triton.cdiv(inputs, span), triton.cdiv(span, tile.block_k)
        assert spans == 1 or span % tile.block_k == 0
        stage = 2 * (tile.block_o + tile.block_m) * tile.block_k
        stages = min(tile.ring // stage, blocks * (spans // partials))
        assert stages > 1
        return {
            "OUT": outputs,
            "SPAN": span,
            "SPANS": spans // partials,
            "PARTIALS": partials,
            "BLOCK_O": tile.block_o,
            "BLOCK_M": tile.block_m,
            "BLOCK_K": tile.block_k,
            "BLOCKS": blocks,
            "STAGES": stages,
            "SWIGLU": self.kind == "swiglu",
            "STAGING": STAGING,
            "num_warps": tile.warps,
            "launch_pdl": True,
        }


@gluon.jit
def _origin(tile, tiles_m, OUT: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr):
    """Where a tile lies: first row of the weight, first row of x, which partial sum. Tiles that
    share weights follow each other, so that memory is asked for them once."""
    TILES_O: gl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    rest = tile // tiles_m
    return rest % TILES_O * BLOCK_O, tile % tiles_m * BLOCK_M, rest // TILES_O


@gluon.jit
def _halves(parts):
    """Every [R, C] of a tuple as two of [R, C / 2], in order."""
    found = ()
    for i in gl.static_range(len(parts)):
        p = parts[i]
        a, b = p.reshape([p.shape[0], 2, p.shape[1] // 2]).permute((0, 2, 1)).split()
        found = found + (a, b)  # noqa: RUF005
    return found


@gluon.jit
def _store(
    out_ptr, value, num_rows, o_first, m_first, OUT: gl.constexpr, STAGING: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """value [R, C] -> out [M, OUT] from column o_first and row m_first on, STAGING bytes at a
    time."""
    ROWS: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    value = value.to(out_ptr.dtype.element_ty)
    BYTES: gl.constexpr = ROWS * (out_ptr.dtype.element_ty.primitive_bitwidth // 8)
    parts = (value,)
    if BYTES * COLUMNS > STAGING:
        parts = _halves(parts)
    if BYTES * COLUMNS > 2 * STAGING:
        parts = _halves(parts)
    if BYTES * COLUMNS > 4 * STAGING:
        parts = _halves(parts)
    EACH: gl.constexpr = COLUMNS // len(parts)
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 32, 1], [32, 1], [1, num_warps], [0, 1])
    o = o_first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(len(parts)):
        m = m_first + i * EACH + gl.arange(0, EACH, layout=gl.SliceLayout(0, layout))
        mask = (o < OUT)[:, None] & (m < num_rows)[None, :]
        part = gl.convert_layout(parts[i], layout)
        gl.store(out_ptr + m.to(gl.int64)[None, :] * OUT + o[:, None], part, mask=mask)


@gluon.jit(do_not_specialize=["num_rows"])
def _wide_kernel(
    w_tiles,
    x_tiles,
    out_ptr,
    num_rows,
    OUT: gl.constexpr,
    SPAN: gl.constexpr,
    SPANS: gl.constexpr,
    PARTIALS: gl.constexpr,
    BLOCK_O: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    STAGING: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program: tiles (token tile, weight tile, partial sum), SPANS spans of K added in order."""
    BYTES: gl.constexpr = 2 * (BLOCK_O + BLOCK_M) * BLOCK_K
    STEPS: gl.constexpr = SPANS * BLOCKS
    begin = gl.program_id(0)
    stride = gl.num_programs(0)
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    tiles = tiles_m * ((OUT + BLOCK_O - 1) // BLOCK_O) * PARTIALS
    ws = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, BLOCK_O, BLOCK_K], w_tiles.layout)
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    o, m, part = _origin(begin, tiles_m, OUT, BLOCK_O, BLOCK_M)
    k = part * SPANS * SPAN
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), BYTES)
        _load(w_tiles, [o, k + s * BLOCK_K], full.index(s), ws.index(s))
    gdc_launch_dependents()
    gdc_wait()
    for s in gl.static_range(STAGES):
        _load(x_tiles, [m, k + s * BLOCK_K], full.index(s), xs.index(s))

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    # What is asked for next: STAGES blocks after the last one that is done with its slot.
    ask_tile = begin
    ask_o = o
    ask_m = m
    ask_k = k
    ask_step = STAGES - 1
    slot = 0
    phase = 0
    done = False
    for tile in range(begin, tiles, stride):
        o, m, part = _origin(tile, tiles_m, OUT, BLOCK_O, BLOCK_M)
        total = gl.zeros([BLOCK_O, BLOCK_M], gl.float32, layout)
        for _ in range(SPANS):
            acc = gl.zeros([BLOCK_O, BLOCK_M], gl.float32, layout)
            for _ in range(BLOCKS):
                mbarrier.wait(full.index(slot), phase)
                acc = warpgroup_mma(
                    ws.index(slot), xs.index(slot).permute((1, 0)), acc, is_async=True
                )
                # The block before this one is done, if there was one: its slot is free.
                acc = warpgroup_mma_wait(1, deps=(acc,))
                free = gl.where(slot == 0, STAGES - 1, slot - 1)
                more = done & (ask_tile < tiles)
                at = ask_k + ask_step * BLOCK_K
                _barrier()
                mbarrier.expect(full.index(free), BYTES, pred=more)
                _load(w_tiles, [ask_o, at], full.index(free), ws.index(free), pred=more)
                _load(x_tiles, [ask_m, at], full.index(free), xs.index(free), pred=more)
                done = True
                ask_step += 1
                if ask_step == STEPS:
                    ask_step = 0
                    ask_tile += stride
                    ask_o, ask_m, ask_part = _origin(ask_tile, tiles_m, OUT, BLOCK_O, BLOCK_M)
                    ask_k = ask_part * SPANS * SPAN
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
            # From zero, as a sum of spans: no negative zero.
            total += warpgroup_mma_wait(0, deps=(acc,))
        if SWIGLU:
            value = _swiglu(total, out_ptr.dtype.element_ty, BLOCK_O, BLOCK_M)
            _store(out_ptr, value, num_rows, o // 2, m, OUT // 2, STAGING, num_warps)
        else:
            base = out_ptr + part.to(gl.int64) * num_rows * OUT
            _store(base, total, num_rows, o, m, OUT, STAGING, num_warps)
