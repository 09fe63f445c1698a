# SPDX-License-Identifier: Apache-2.0
"""Hopper's product of few rows: the bits of `ops.gemm`, on the device. Without one, its loops run
by hand, that the kernels compile for it and that no ring is larger than a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specla.ops import gemm, rows
from specla.ops.gemm import Kind, PackedLinear, Tiling, tiling_for

triton = pytest.importorskip("triton")
from gluon_machine import Pointer, Tiles, block, run  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops import gemm_stream as stream  # noqa: E402
from specla.ops.gemm_stream import Ring, StreamLinear  # noqa: E402

SHAPES: tuple[tuple[int, int, Kind], ...] = (
    (8208, 2048, "plain"),
    (2048, 2048, "partials"),
    (11264, 2048, "swiglu"),
    (2048, 5632, "partials"),
    (32000, 2048, "plain"),
    (151936, 2048, "plain"),
)
SHARED = 227 * 1024  # bytes that one program may have


def made(weight: Tensor, kind: Kind, ring: Ring, span: int | None = None) -> StreamLinear:
    """Without descriptors, which need real memory."""
    linear = object.__new__(StreamLinear)
    linear.weight, linear.kind, linear.ring = weight, kind, ring
    linear.span = span or tiling_for(*weight.shape, kind).span
    return linear


def on_meta(*size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
def test_rings_fill_a_processor_and_cover_the_span(
    shape: tuple[int, int, Kind], block_m: int
) -> None:
    outputs, inputs, kind = shape
    tiling = tiling_for(outputs, inputs, kind)
    ring = stream.ring_for(outputs, triton.cdiv(inputs, tiling.span), gemm.PROCESSORS)
    meta = made(on_meta(outputs, inputs), kind, ring)._meta(block_m)
    stage = 2 * (meta["BLOCK_O"] + block_m) * meta["BLOCK_K"]
    assert meta["STAGES"] * stage <= stream.RING < SHARED
    if meta["BLOCKS"] > meta["STAGES"]:
        assert meta["STAGES"] * stage > SHARED // 2
    assert meta["BLOCKS"] * meta["BLOCK_K"] == tiling.span
    assert meta["STAGES"] <= meta["BLOCKS"]


def test_fits() -> None:
    ring = Ring(64, 128, 4)
    weight = torch.zeros(64, 512, dtype=torch.bfloat16)
    assert stream.fits(weight, 256, ring)
    assert not stream.fits(weight, 192, ring)
    assert not stream.fits(torch.zeros(64, 516, dtype=torch.bfloat16), 256, ring)


@pytest.mark.parametrize("kind", ["plain", "swiglu", "partials"])
@pytest.mark.parametrize("ring", [Ring(32, 16, 4, 2560), Ring(64, 32, 4, 1 << 20)])
@pytest.mark.parametrize("eager", [True, False])
def test_the_loops(kind: Kind, ring: Ring, eager: bool) -> None:
    """A ring of two slots and one of all blocks, on small integers, whose sums are exact."""
    outputs, inputs, rows, width = 80, 136, 5, 40 if kind == "swiglu" else 80
    span = 64 if kind == "partials" else inputs
    generator = torch.Generator().manual_seed(0)
    weight, x = (
        torch.randint(-3, 4, (count, inputs), generator=generator).to(torch.bfloat16)
        for count in (outputs, rows)
    )
    meta = made(weight, kind, ring, span)._meta(8)
    assert meta["STAGES"] == (2 if ring.bytes == 2560 else meta["BLOCKS"])
    del meta["launch_pdl"]
    parts = triton.cdiv(inputs, span)
    dtype = torch.float32 if kind == "partials" else torch.bfloat16
    out = torch.full((parts, rows, width), float("nan"), dtype=dtype)
    w_tiles = Tiles(weight, ring.block_o, ring.block_k, late=False)
    x_tiles = Tiles(x, 8, ring.block_k, late=True)
    others = (None, None, None, block(rows), 0, 0.0)
    run(
        (stream,),
        stream._stream_kernel,
        (triton.cdiv(outputs, ring.block_o), parts),
        *(w_tiles, x_tiles, Pointer(out.view(-1)), *others),
        eager=eager,
        **meta,
    )
    pairs = zip(x.float().split(span, 1), weight.float().split(span, 1), strict=True)
    want = torch.stack([a @ b.t() for a, b in pairs])
    if kind == "swiglu":
        gate, up = want.to(dtype).float().view(rows, -1, 2, 8).unbind(2)
        want = (gate / (1 + torch.exp(-gate)) * up).reshape(1, rows, width)
    assert torch.equal(out, want.to(dtype))


def test_a_ring_of_one_slot_would_wait_for_ever() -> None:
    linear = made(on_meta(2048, 2048), "partials", Ring(64, 256, 4))
    with pytest.raises(AssertionError, match="more rows"):
        linear._meta(128)


@pytest.mark.parametrize(
    ("kind", "mix"), [("plain", False), ("swiglu", False), ("partials", True)]
)
def test_compiles_for_hopper(kind: Kind, mix: bool) -> None:
    """Gluon changes between versions of Triton. A mix of gates that are ready."""
    ring = Ring(64, 64, 4, bytes=40 * 1024)
    linear = made(on_meta(128, 256), kind, ring, span=128 if mix else 256)
    meta = linear._meta(16, mix, mix)
    warps, _ = meta["num_warps"], meta.pop("launch_pdl")
    kernel = stream._stream_kernel
    types = dict.fromkeys(kernel.arg_names, "constexpr")
    types |= {"w_tiles": tiles(64, 64), "x_tiles": tiles(16, 64), "out_ptr": "*fp32"}
    types |= {"o_ptr": "*fp32", "gate_ptr": "*fp32", "norm_ptr": "*bf16"}
    types |= {"num_rows": "i32", "gate_stride": "i32", "eps": "fp32"}
    source = GluonASTSource(kernel, types, meta, None)
    options = {"num_warps": warps, "launch_pdl": True, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    weights, wait = ptx.index("cp.async.bulk.tensor"), ptx.index("griddepcontrol.wait")
    assert weights < wait < ptx.index("wgmma.mma_async")


def tiles(rows_: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows_, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows_}, {columns}],{layout!r}>"


def normal(seed: int, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


def call(linear: Any, weight: Tensor, kind: Kind, x: Tensor, parts: int, **mix: Any) -> Tensor:
    width = weight.shape[0] // 2 if kind == "swiglu" else weight.shape[0]
    dtype = torch.float32 if kind == "partials" else torch.bfloat16
    out = torch.full((parts, len(x), width), float("nan"), dtype=dtype, device="cuda")
    linear(x, out, **mix)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "swiglu", "partials"])
def test_the_bits_of_the_other_kernel(kind: Kind) -> None:
    """Every ring and row count; rows of NaN beside; ragged outputs."""
    weight = normal(0, 1040, 1024)
    span = 256 if kind == "partials" else 1024
    packed = PackedLinear(weight, kind, tiling=Tiling(64, 64, span))
    parts = packed.max_partials
    for ring in (Ring(64, 128, 4), Ring(128, 64, 4), Ring(256, 64, 8, 80 * 1024)):
        linear = StreamLinear(weight, kind, span, ring)
        for count in (1, 2, 7, 8, 9, 16, 17, 33, 64):
            x = normal(count, count, 1024)
            want = call(packed, weight, kind, x, parts)
            assert torch.equal(call(linear, weight, kind, x, parts), want), (ring, count)
            poisoned = x.clone()
            poisoned[1::2] = float("nan")
            got = call(linear, weight, kind, poisoned, parts)
            assert torch.equal(got[:, ::2], want[:, ::2])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("gated", [True, False])
def test_mix_is_the_gated_norm_and_the_product(width: int, gated: bool) -> None:
    weight, norm = normal(0, 144, 1024), normal(1, width)
    packed = PackedLinear(weight, "partials", tiling=Tiling(64, 64, 512))
    linear = StreamLinear(weight, "partials", 512, Ring(64, width, 4))
    for count in (1, 2, 8, 9, 16):
        o = normal(2, count, 1024 // width, width, dtype=torch.float32)
        gate = normal(3, count, 1100)[:, 40 : 40 + 1024] if gated else None
        x = torch.empty(count, 1024, dtype=torch.bfloat16, device="cuda")
        rows.gated_norm(o, gate, norm, x, 1e-6)
        want = call(packed, weight, "partials", x, 2)
        x.fill_(float("nan"))
        got = call(linear, weight, "partials", x, 2, mix=(o, gate, norm, 1e-6))
        assert torch.equal(got, want)
