# SPDX-License-Identifier: Apache-2.0
"""The GPU's product: right (budget tier), and the same bits for a row in any batch (exact tier).

Without a GPU the kernel runs in Triton's interpreter, where every row count uses one tile; the
test that compares the tiles themselves needs the device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.errors import UnsupportedModel
from specla.ops import gemm
from specla.ops.gemm import Kind, PackedLinear, Tiling, launch_for, pack_swiglu, tiling_for
from specla.ops.norm import swiglu

DEVICE = "cpu" if gemm.INTERPRET else "cuda"
KINDS: tuple[Kind, ...] = ("plain", "swiglu", "partials")
# Ragged in outputs (not a multiple of the tile) and inputs (not of block or span).
OUTPUTS, INPUTS = 48, 72
SMALL = Tiling(32, 16, 32)
COUNTS = (1, 2, 16, 17)
MANY = 20


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: let MANY rows be enough for sums in registers."""
    monkeypatch.setattr(gemm, "IN_REGISTERS", MANY)


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def linear(kind: Kind, dtype: torch.dtype, tiling: Tiling | None = None) -> PackedLinear:
    weight = normal(0, OUTPUTS, INPUTS, dtype=dtype)
    if kind == "partials":
        tiling = tiling or SMALL
    return PackedLinear(pack_swiglu(weight) if kind == "swiglu" else weight, kind, tiling=tiling)


def apply(product: PackedLinear, x: Tensor) -> Tensor:
    """One call; partial sums are added in order, from zero, as `rows.add_partials_norm` does.
    Behind the output lies memory that must not change."""
    count, kind = x.shape[0], product.kind
    width = OUTPUTS // 2 if kind == "swiglu" else OUTPUTS
    parts = product.num_partials(count)
    dtype = torch.float32 if kind == "partials" else x.dtype
    buffer = torch.full(((parts * count + 3) * width,), 7.5, dtype=dtype, device=DEVICE)
    out, rest = buffer[: parts * count * width], buffer[parts * count * width :]
    out.fill_(float("nan"))
    product(x, out.view(parts * count, width))
    assert (rest == 7.5).all()
    total = out.view(parts, count, width)[0]
    if kind == "partials":
        total = torch.zeros_like(total)
        for part in out.view(parts, count, width):
            total = total + part
    return total


def expected(kind: Kind, x: Tensor) -> Tensor:
    y = x.double() @ normal(0, OUTPUTS, INPUTS, dtype=x.dtype).double().t()
    # As on the CPU: the product is rounded to the activation dtype before the activation.
    return swiglu(y.to(x.dtype)).double() if kind == "swiglu" else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 17, MANY])
@pytest.mark.usefixtures("few_are_many")
def test_is_the_product(count: int, kind: Kind, dtype: torch.dtype) -> None:
    x = normal(1, count, INPUTS, dtype=dtype)
    got, want = apply(linear(kind, dtype), x).double(), expected(kind, x)
    size = want.abs() + 1
    rounded = dtype == torch.bfloat16 and kind != "partials"
    # swiglu multiplies two numbers that may each have been rounded to the other neighbour.
    bound = (2**-6 if kind == "swiglu" else 2**-8) if rounded else 1e-4
    assert ((got - want).abs() / size).max() <= bound


def test_many_rows_are_added_in_registers() -> None:
    product = linear("partials", torch.bfloat16)
    assert product.num_partials(gemm.IN_REGISTERS - 1) == product.max_partials == 3
    assert product.num_partials(gemm.IN_REGISTERS) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("few_are_many")
def test_a_row_does_not_depend_on_the_others(kind: Kind, dtype: torch.dtype) -> None:
    """Alone, at other places, beside NaN, and with partial sums added by the kernel itself."""
    product = linear(kind, dtype)
    x = normal(2, MANY, INPUTS, dtype=dtype)
    want = torch.cat([apply(product, part) for part in x.split(1)])
    for count in COUNTS:
        assert torch.equal(apply(product, x[:count]), want[:count])
        order = torch.arange(count, device=DEVICE).flip(0)
        assert torch.equal(apply(product, x[order]), want[order])
    assert torch.equal(apply(product, x), want)
    poisoned = x[:17].clone()
    poisoned[1::2] = float("nan")
    assert torch.equal(apply(product, poisoned)[::2], want[:17:2])


@pytest.mark.parametrize("kind", KINDS)
def test_reads_nothing_outside(kind: Kind) -> None:
    """The last rows of x and of the weight are followed by NaN."""
    product = linear(kind, torch.float32)
    x = normal(3, 5, INPUTS)
    want = apply(product, x)
    around = torch.full((3, 40 + OUTPUTS, INPUTS), float("nan"), device=DEVICE)
    around[1, :5], around[2, :OUTPUTS] = x, product.weight
    padded = PackedLinear(around[2, :OUTPUTS], kind, tiling=product.tiling)
    assert torch.equal(apply(padded, around[1, :5]), want)


def test_pack_swiglu_alternates_groups() -> None:
    gate_up = torch.arange(32).view(32, 1).repeat(1, 3)
    rows = pack_swiglu(gate_up)[:, 0].tolist()
    assert rows == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]
    with pytest.raises(UnsupportedModel, match="multiple of 8"):
        pack_swiglu(torch.zeros(24, 3))


@pytest.mark.parametrize("shape", [(8208, 2048), (2048, 2048), (2048, 5632), (40, 24), (96, 640)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_additions_is_the_weights(
    kind: Kind, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are the same for every row count, with and without dependent launch, and cover K."""
    monkeypatch.setattr(gemm, "INTERPRET", False)
    outputs, inputs = shape
    tiling = tiling_for(outputs, inputs, kind)
    for count in (1, 16, 17, 64, 65, 128, 511, 512, 767, 768, 1024):
        for pdl in (False, True):
            launch = launch_for(outputs, inputs, kind, tiling, count, pdl=pdl)
            spans = launch.num_partials * launch.meta["SPANS"]
            assert launch.meta["SPAN"] == tiling.span
            assert (spans - 1) * tiling.span < inputs <= spans * tiling.span
            assert launch.grid[2] == launch.num_partials
            assert launch.grid[0] * launch.meta["BLOCK_M"] >= count
            assert launch.grid[1] * launch.meta["BLOCK_O"] >= outputs


@pytest.mark.parametrize(("inputs", "asked"), [(256, 256), (264, 256), (260, 0), (128, 0)])
def test_what_is_asked_for_ahead_is_aligned(inputs: int, asked: int) -> None:
    """Rows of the weight start at multiples of 16 bytes, or nothing is."""
    tiling = tiling_for(32000, inputs, "plain")
    for pdl in (False, True):
        launch = launch_for(32000, inputs, "plain", tiling, 65, pdl=pdl)
        assert launch.meta["PREFETCH"] == asked * pdl


def test_workspace_holds_every_row_count() -> None:
    product = linear("partials", torch.bfloat16)
    for max_rows in (1, 64, gemm.IN_REGISTERS - 1, gemm.IN_REGISTERS, gemm.MAX_ROWS):
        size = product.workspace_elements(max_rows)
        for count in range(1, max_rows + 1, 7):
            assert product.num_partials(count) * count * OUTPUTS <= size


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_tile_gives_the_same_bits(kind: Kind) -> None:
    """On the device: 16 to 128 token rows a tile, other weight tiles, other warps."""
    weight = normal(4, 1040, 1024, dtype=torch.bfloat16)
    span = 512 if kind == "partials" else 1024
    x = normal(5, gemm.MAX_ROWS, 1024, dtype=torch.bfloat16)

    def whole(product: PackedLinear, rows: Tensor) -> Tensor:
        parts, width = product.num_partials(len(rows)), 520 if kind == "swiglu" else 1040
        dtype = torch.float32 if kind == "partials" else torch.bfloat16
        out = torch.empty(parts, len(rows), width, dtype=dtype, device=DEVICE)
        product(rows, out)
        return sum(out.unbind(), torch.zeros_like(out[0])) if kind == "partials" else out[0]

    base = PackedLinear(weight, kind, tiling=Tiling(64, 128, span))
    want = torch.cat([whole(base, part) for part in x.split(16)])
    for tiling in (
        base.tiling,
        Tiling(128, 64, span, warps=8),
        Tiling(64, 64, span),
        Tiling(64, 128, span, prefetch=256),
    ):
        for pdl in (False, True):
            product = PackedLinear(weight, kind, tiling=tiling, pdl=pdl)
            for count in (1, 17, 64, 128, 256, 512, 767, 768, 1024):
                assert torch.equal(whole(product, x[:count]), want[:count]), (tiling, count)
