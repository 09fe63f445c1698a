# SPDX-License-Identifier: Apache-2.0
"""Hopper's product of many rows: its loops, run by hand on a CPU; that it compiles for Hopper and
fits a multiprocessor; on the device the bits of `ops.gemm`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specla.ops import gemm
from specla.ops.gemm import Kind, PackedLinear, Tiling, tiling_for

triton = pytest.importorskip("triton")
from gluon_machine import Deadlock, Pointer, Tiles, block, run  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops import gemm_stream as stream  # noqa: E402
from specla.ops import gemm_wide as wide  # noqa: E402
from specla.ops.gemm_wide import Tile, WideLinear  # noqa: E402

SHAPES: tuple[tuple[int, int, Kind], ...] = (
    (8208, 2048, "plain"),
    (2048, 2048, "partials"),
    (11264, 2048, "swiglu"),
    (2048, 5632, "partials"),
    (32000, 2048, "plain"),
    (151936, 2048, "plain"),
)
COUNTS = (65, 96, 128, 192, 256, 512, 767, 768, 1024)
KINDS: tuple[Kind, ...] = ("plain", "swiglu", "partials")
SHARED = 227 * 1024  # bytes that one program may have


def on_meta(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", COUNTS)
def test_every_row_count_has_a_tile_that_fits(shape: tuple[int, int, Kind], rows: int) -> None:
    outputs, inputs, kind = shape
    span = tiling_for(*shape).span
    spans = triton.cdiv(inputs, span)
    partials = 1 if rows >= gemm.IN_REGISTERS else spans
    tile = wide.tile_for(outputs, rows, spans, partials)
    meta = WideLinear(on_meta(outputs, inputs), kind, span)._meta(tile, partials)
    stage = 2 * (tile.block_o + tile.block_m) * tile.block_k
    assert meta["STAGES"] >= 3
    assert tile.beside * (meta["STAGES"] * stage + wide.STAGING) <= SHARED
    assert meta["SPANS"] * meta["PARTIALS"] * meta["SPAN"] == spans * span
    sums = wide.accumulators(tile) * (1 + (meta["SPANS"] > 1))
    assert sums <= wide.ACCUMULATORS


def test_tiles_come_in_few_rounds() -> None:
    """No shape of GDN-1.3B has a second round that is nearly empty."""
    for outputs, inputs, kind in SHAPES[:4]:
        spans = triton.cdiv(inputs, tiling_for(outputs, inputs, kind).span)
        for rows in (128, 256):
            tile = wide.tile_for(outputs, rows, spans, spans)
            tiles = wide.count(tile, outputs, rows, spans)
            assert 64 <= tiles <= gemm.PROCESSORS, (outputs, rows, tile)


def test_fits() -> None:
    def fits(inputs: int, span: int) -> bool:
        return wide.fits(torch.zeros(64, inputs, dtype=torch.bfloat16), span)

    assert fits(512, 128)
    assert fits(520, 520)
    assert not fits(512, 160)
    assert not fits(516, 516)
    assert not fits(64, 64)
    assert not fits(128, 64)


TINY = (Tile(32, 16, 16, 4, 4 * 2 * 48 * 16), Tile(64, 32, 32, 4, 3 * 2 * 96 * 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TINY)
@pytest.mark.parametrize("inputs", [136, 48])
@pytest.mark.parametrize("eager", [True, False])
def test_the_loops(kind: Kind, tile: Tile, inputs: int, eager: bool) -> None:
    """Of a program with many tiles and of programs with one, on small integers, whose sums are
    exact; ragged everywhere."""
    outputs, rows = 80, 35
    span = 64 if kind == "partials" else inputs
    weight, x = integers(0, outputs, inputs), integers(1, rows, inputs)
    for partials in sorted({1, triton.cdiv(inputs, span)}):
        want = expected(weight, x, kind, span, partials)
        tiles = wide.count(tile, outputs, rows, partials)
        for programs in (1, 4, tiles):
            got = by_hand(weight, x, kind, span, tile, partials, programs, eager=eager)
            assert torch.equal(got, want), programs


def test_the_machine_finds_what_is_asked_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or never: the checks above can fail."""
    weight, x = integers(0, 32, 160), integers(1, 16, 160)
    tile = TINY[0]
    want = expected(weight, x, "plain", 160, 1)
    assert torch.equal(by_hand(weight, x, "plain", 160, tile, 1, 1, eager=True), want)
    import gluon_machine

    kept = gluon_machine.Machine.wait_for_products

    def lazier(self: Any, left: int, deps: Any) -> Any:
        return kept(self, 2 * left, deps)

    monkeypatch.setattr(gluon_machine.Machine, "wait_for_products", lazier)
    assert not torch.equal(by_hand(weight, x, "plain", 160, tile, 1, 1, eager=True), want)
    monkeypatch.setattr(gluon_machine.Machine, "wait_for_products", kept)
    monkeypatch.setattr(gluon_machine.Machine, "expect", lambda *a, **k: None)
    with pytest.raises(Deadlock):
        by_hand(weight, x, "plain", 160, tile, 1, 1, eager=False)


def integers(seed: int, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, size, generator=generator).to(torch.bfloat16)


def by_hand(
    weight: Tensor,
    x: Tensor,
    kind: Kind,
    span: int,
    tile: Tile,
    partials: int,
    programs: int,
    *,
    eager: bool,
) -> Tensor:
    meta = WideLinear(weight, kind, span)._meta(tile, partials)
    del meta["launch_pdl"]
    meta["STAGING"] = 256
    width = weight.shape[0] // 2 if kind == "swiglu" else weight.shape[0]
    dtype = torch.float32 if kind == "partials" else torch.bfloat16
    out = torch.full((partials, len(x), width), float("nan"), dtype=dtype)
    run(
        (stream, wide),
        wide._wide_kernel,
        (programs, 1),
        Tiles(weight, tile.block_o, tile.block_k, late=False),
        Tiles(x, tile.block_m, tile.block_k, late=True),
        Pointer(out.view(-1)),
        block(len(x)),
        eager=eager,
        **meta,
    )
    return out


def expected(weight: Tensor, x: Tensor, kind: Kind, span: int, partials: int) -> Tensor:
    if kind == "partials" and partials > 1:
        pairs = zip(x.float().split(span, 1), weight.float().split(span, 1), strict=True)
        return torch.stack([a @ b.t() for a, b in pairs])
    y = x.float() @ weight.float().t()
    if kind == "swiglu":
        gate, up = y.to(torch.bfloat16).float().view(len(x), -1, 2, 8).unbind(2)
        y = (gate / (1 + torch.exp(-gate)) * up).reshape(len(x), -1)
    return (y if kind == "partials" else y.to(torch.bfloat16))[None]


def test_compiles_for_hopper() -> None:
    """A ring of weights is asked for before the wait; the instruction has the tile's tokens."""
    tile = wide.TILES[0]
    linear = WideLinear(on_meta(512, 256), "plain", 256)
    meta = linear._meta(tile, 1)
    warps, _ = meta["num_warps"], meta.pop("launch_pdl")
    kernel = wide._wide_kernel
    types = dict.fromkeys(kernel.arg_names, "constexpr") | {"out_ptr": "*bf16", "num_rows": "i32"}
    types |= {"w_tiles": tiles(tile.block_o, tile.block_k)}
    types |= {"x_tiles": tiles(tile.block_m, tile.block_k)}
    source = GluonASTSource(kernel, types, meta, None)
    options = {"num_warps": warps, "launch_pdl": True, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx, copy = compiled.asm["ptx"], "cp.async.bulk.tensor"
    asked = ptx[ptx.index(copy) :].partition("griddepcontrol.wait")[0]
    assert asked.count(copy) == meta["STAGES"]
    assert f"wgmma.mma_async.sync.aligned.m64n{tile.block_m}k16" in ptx
    assert compiled.metadata.shared <= SHARED


def tiles(rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


def test_packed_linear_takes_it_for_many_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def count(x: Tensor, out: Tensor, partials: int) -> None:
        calls.append((len(x), partials))

    class Other:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **meta: calls.append((len(args[0]), 0))

    monkeypatch.setattr(gemm, "_gemm_kernel", Other())
    packed = PackedLinear(torch.zeros(32, 64), "partials", tiling=Tiling(16, 16, 32))
    packed.wide = count  # type: ignore[assignment]
    packed.stream = lambda x, out: calls.append((len(x), -1))  # type: ignore[assignment]
    for most in (0, 800):
        monkeypatch.setattr(gemm, "WIDE_ROWS", most)
        for rows in (64, 65, 800, 801):
            packed(torch.zeros(rows, 64), torch.zeros(2, rows, 32))
    assert calls == [(64, -1), (65, 0), (800, 0), (801, 0), (64, -1), (65, 2), (800, 1), (801, 0)]


def normal(seed: int, *size: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", wide.TILES)
def test_the_bits_of_the_other_kernel(kind: Kind, tile: Tile) -> None:
    """Every tile and row count, one round of tiles and several; rows of NaN beside; ragged
    outputs."""
    weight = normal(0, 8720, 1024)
    span = 256 if kind == "partials" else 1024
    packed = PackedLinear(weight, kind, tiling=Tiling(64, 64, span))
    linear = WideLinear(weight, kind, span, tile)
    for count in (1, 64, 65, 128, 129, 300, 767, 768, 1024):
        partials = packed.num_partials(count)
        if packed.max_partials > partials and wide.accumulators(tile) > wide.ACCUMULATORS // 2:
            continue
        x = normal(count, count, 1024)
        poisoned = x.clone()
        poisoned[1::2] = float("nan")
        want = on_device(packed, weight, kind, x, partials)
        assert torch.equal(on_device(linear, weight, kind, x, partials, partials), want), count
        got = on_device(linear, weight, kind, poisoned, partials, partials)
        assert torch.equal(got[:, ::2], want[:, ::2]), count


def on_device(
    linear: Any, weight: Tensor, kind: Kind, x: Tensor, partials: int, *args: int
) -> Tensor:
    width = weight.shape[0] // 2 if kind == "swiglu" else weight.shape[0]
    dtype = torch.float32 if kind == "partials" else torch.bfloat16
    out = torch.full((partials, len(x), width), float("nan"), dtype=dtype, device="cuda")
    linear(x, out, *args)
    return out
