# SPDX-License-Identifier: Apache-2.0
"""Row-invariant products (rule I4). Tier: exact, and a BLAS that breaks the rule is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specla.errors import ExactnessUnavailable
from specla.ops import linear
from specla.ops.linear import MAX_ROWS, Form, Linear

SHAPES = [(1, 7), (5, 3), (17, 12), (33, 31), (64, 64), (96, 20), (301, 57)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# Beyond 64 rows the product is taken in parts, beyond 128 in three.
MOST_ROWS = 130


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Plans are kept per shape: forget them before and after a test that makes false ones."""
    linear._plan_for.cache_clear()
    yield
    linear._plan_for.cache_clear()


def checked(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Linear, Tensor]:
    """A product that has passed its check, and rows to feed it."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    x = torch.randn(MOST_ROWS, shape[1], generator=generator, dtype=torch.float64).to(dtype)
    product = Linear(weight)
    try:
        product.check("weight")
    except ExactnessUnavailable as error:
        # Rows of an odd number of doubles start at changing places of a vector register.
        if dtype == torch.float64 and shape[1] % 2:
            pytest.skip(f"refused on this build: {error}")
        raise
    return product, x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "threads"),
    [*((shape, 1) for shape in SHAPES), ((17, 12), 2), ((96, 20), 2)],
    ids=str,
)
def test_a_row_has_the_same_bits_at_every_count(
    shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    product, x = checked(shape, dtype)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    for count in range(1, MOST_ROWS + 1):
        assert torch.equal(product(x[:count]), alone[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_at_every_place(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Also where rows are views that start in the middle of a cache line, as slices do."""
    product, x = checked(shape, dtype)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    for start, count in [(1, 1), (1, 4), (3, 12), (5, 64), (7, 65), (9, 16), (66, 64)]:
        part = slice(start, start + count)
        assert torch.equal(product(x[part]), alone[part])
        assert torch.equal(product(x[part].flip(0)), alone[part].flip(0))
    wide = torch.cat([x[:, :1], x], dim=1)
    assert torch.equal(product(wide[:40, 1:]), alone[:40]), "rows with a stride"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_may_lie_anywhere(dtype: torch.dtype) -> None:
    """A weight mapped from a file starts at any element, a fused one inside another."""
    product, x = checked((96, 20), dtype)
    storage = torch.zeros(96 * 20 + 3, dtype=dtype)
    moved = storage[3:].view(96, 20).copy_(product.weight)
    elsewhere = Linear(moved)
    elsewhere.check("moved")
    for count in (1, 3, 4, 16, 63, 64, 130):
        assert torch.equal(elsewhere(x[:count]), product(x[:count]))


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("split", [0, 10])
def test_every_form_lays_rows_out_alike(weights_first: bool, split: int) -> None:
    """Else what reads the product next would add in another order (a norm over a part of it)."""
    form = Form(16, weights_first, split)
    x, weight = torch.ones(16, 12), torch.ones(24, 12)
    assert form(x, weight).stride() == (24, 1)


def test_before_the_check_it_is_one_plain_call() -> None:
    weight, x = torch.randn(5, 3), torch.randn(200, 3)
    assert torch.equal(Linear(weight)(x), torch.nn.functional.linear(x, weight))


def test_it_is_the_right_product() -> None:
    product, x = checked((33, 30), torch.float64)
    truth = torch.stack([(product.weight * row).sum(1) for row in x])
    assert (product(x) - truth).abs().max() <= 1e-10 * truth.abs().max()


def test_without_a_usable_form_exact_mode_is_refused(
    no_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_candidates", lambda outputs: iter(()))
    with pytest.raises(ExactnessUnavailable, match=r"layers\.3\.down \[5, 3\]"):
        Linear(torch.randn(5, 3)).check("layers.3.down")


def test_a_product_that_depends_on_the_place_of_a_row_is_detected(
    no_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_row_differs(form: Form, x: Tensor, weight: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, weight)
        y[-1] = torch.nextafter(y[-1], torch.full_like(y[-1], torch.inf))
        return y

    monkeypatch.setattr(Form, "_product", last_row_differs)
    with pytest.raises(ExactnessUnavailable):
        Linear(torch.randn(6, 3)).check("broken")


def test_a_product_that_depends_on_row_count_is_called_at_one_count_only(
    no_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are padded to the 64 of the canonical form, and agree."""
    used: list[int] = []

    def by_count(form: Form, x: Tensor, weight: Tensor) -> Tensor:
        used.append(len(x))
        y = (x.unsqueeze(1) * weight).sum(-1)
        return y if len(x) == MAX_ROWS else y * (1 + 2**-20)

    monkeypatch.setattr(Form, "_product", by_count)
    product, x = checked((6, 3), torch.float32)
    used.clear()
    alone = torch.cat([product(row.unsqueeze(0)) for row in x[:9]])
    assert torch.equal(product(x)[:9], alone)
    assert set(used) == {MAX_ROWS}


def test_another_device_is_refused() -> None:
    with pytest.raises(ExactnessUnavailable, match="meta"):
        Linear(torch.empty(5, 3, device="meta")).check("weight")
