# SPDX-License-Identifier: Apache-2.0
"""The row kernels against ops.norm (budget tier), and their independence of the rows beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.ops import rows
from specla.ops.norm import gated_rms_norm, rms_norm

DEVICE = "cuda" if not rows.INTERPRET else "cpu"
EPS = 1e-6
# Not a power of two: a block has columns that do not exist.
WIDTH, HEADS, VALUE = 40, 2, 24
DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def nan(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(size, float("nan"), dtype=dtype, device=DEVICE)


def close(got: Tensor, want: Tensor) -> bool:
    """Equal but for one rounding to the dtype and the last bits of the float32 sums."""
    bound = 1e-5 if got.dtype == torch.float32 else 2**-7
    error = (got.double() - want.double()).abs() / (want.double().abs() + 1e-2)
    return bool(error.max() <= bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_norm(dtype: torch.dtype) -> None:
    """Tokens of nodes that do not exist may be anything; their rows become zero."""
    embeddings, weight = normal(0, 11, WIDTH, dtype=dtype), normal(1, WIDTH, dtype=dtype)
    tokens = torch.tensor([[1, 10, 3], [4, 1 << 30, -7]], dtype=torch.int32, device=DEVICE)
    num_nodes = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    x, h = nan(6, WIDTH, dtype=dtype), nan(6, WIDTH, dtype=dtype)
    rows.embed_norm(tokens, num_nodes, embeddings, weight, x, h, EPS)
    assert torch.equal(x[:4], embeddings[[1, 10, 3, 4]])
    assert close(h[:4], rms_norm(x[:4], weight, EPS))
    assert not x[4:].any()
    assert not h[4:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_add_partials_norm(parts: int, dtype: torch.dtype) -> None:
    """The sum is rounded, then added; what lies behind the partial sums in use is never read."""
    x, weight = normal(2, 5, WIDTH, dtype=dtype), normal(3, WIDTH, dtype=dtype)
    partials = nan(3 * 5 * WIDTH)
    real = normal(4, parts, 5, WIDTH)
    partials[: real.numel()] = real.flatten()
    total = torch.zeros(5, WIDTH, device=DEVICE)
    for part in real:
        total = total + part
    want = x + total.to(dtype)
    h, copy = nan(5, WIDTH, dtype=dtype), nan(6, WIDTH, dtype=dtype)
    rows.add_partials_norm(
        x, partials, weight, h, EPS, num_partials=parts, max_partials=3, copy=copy[:5]
    )
    assert torch.equal(x, want)
    assert torch.equal(copy[:5], want)
    assert copy[5].isnan().all()
    assert close(h, rms_norm(want, weight, EPS))


def test_features_are_kept_at_their_tokens_places() -> None:
    """Of rows that are live, in a ring."""
    features, kept = normal(11, 2, 6, WIDTH), nan(4, 2, 5, WIDTH)
    lengths, live = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([1, 4, 9], [1, 0, 1])
    )
    rows.keep(features[:, :3], lengths, live, kept)
    assert torch.equal(kept[0, :, 0], features[:, 0])
    assert torch.equal(kept[8 % 4, :, 2], features[:, 2])
    assert int(kept.isnan().sum()) == kept.numel() - 4 * WIDTH


def test_added_by_the_product_or_here() -> None:
    """One sum added before gives the bits of its parts: rounds of many rows against few."""
    partials, weight = normal(5, 3, 4, WIDTH), normal(6, WIDTH, dtype=torch.bfloat16)
    whole = torch.zeros(4, WIDTH, device=DEVICE)
    for part in partials:
        whole = whole + part
    results = []
    for given in (partials, whole.unsqueeze(0)):
        x = normal(7, 4, WIDTH, dtype=torch.bfloat16)
        h = torch.empty_like(x)
        rows.add_partials_norm(
            x, given.contiguous(), weight, h, EPS, num_partials=len(given), max_partials=3
        )
        results.append((x, h))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_gated_norm(gated: bool, dtype: torch.dtype) -> None:
    """The gate is a run of columns of a wider matrix."""
    o, weight = normal(8, 5, HEADS, VALUE), normal(9, VALUE, dtype=dtype)
    gate = normal(10, 5, 100, dtype=dtype)[:, 30 : 30 + HEADS * VALUE]
    out = nan(5, HEADS * VALUE, dtype=dtype)
    rows.gated_norm(o, gate if gated else None, weight, out, EPS)
    z = gate.unflatten(-1, (HEADS, VALUE)) if gated else None
    assert close(out, gated_rms_norm(o, z, weight, EPS).to(dtype).flatten(1))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_do_not_depend_on_each_other(count: int) -> None:
    """Each row as it is alone, beside rows of NaN."""
    dtype = torch.bfloat16
    weight, o_weight = normal(11, WIDTH, dtype=dtype), normal(12, VALUE, dtype=dtype)
    x, o = normal(13, 5, WIDTH, dtype=dtype), normal(14, 5, HEADS, VALUE)
    partials = normal(15, 2, 5, WIDTH)

    def run(at: list[int], poison: bool) -> tuple[Tensor, ...]:
        x_, p, o_ = x[at], partials[:, at].contiguous(), o[at]
        if poison:
            x_[1::2], o_[1::2] = float("nan"), float("nan")
        h = torch.empty_like(x_)
        y = torch.empty(len(at), HEADS * VALUE, dtype=dtype, device=DEVICE)
        rows.add_partials_norm(x_, p, weight, h, EPS, num_partials=2, max_partials=2)
        rows.gated_norm(o_, None, o_weight, y, EPS)
        return x_, h, y

    alone = [run([i], False) for i in range(count)]
    for at in (list(range(count)), list(range(count))[::-1]):
        for poison in (False, True):
            for got, i in zip(zip(*run(at, poison), strict=True), at, strict=True):
                if not poison or at.index(i) % 2 == 0:
                    for a, b in zip(got, alone[i], strict=True):
                        assert torch.equal(a, b[0])


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x00000000])
def test_the_interpreter_rounds_to_nearest_even(bits: int) -> None:
    """Triton's own interpreter cuts; the kernels' results would differ from the device's."""
    value = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32).to(DEVICE)
    x = torch.zeros(1, 1, dtype=torch.bfloat16, device=DEVICE)
    weight, h = torch.ones_like(x[0]), torch.empty_like(x)
    rows.add_partials_norm(x, value, weight, h, EPS, num_partials=1, max_partials=1)
    assert torch.equal(x, value.to(torch.bfloat16))
