# SPDX-License-Identifier: Apache-2.0
"""Bits of a row do not depend on the rows beside it (rule I4). Tier: exact.

A row is computed alone, at every place of batches of many sizes, reversed, and as a view that
starts anywhere. PyTorch's own functions fail the same test: the last ones here show it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_inputs import SHAPE, TREES, random_inputs, random_parents, random_state
from torch import Tensor

from specla.ops import conv, gdn, norm, pointwise
from specla.ops.contract import Factors
from specla.ops.gdn import reference
from specla.ops.gdn.reference import Inputs
from specla.state import State
from specla.topology.tree import DraftTree

ROWS = 67
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, ROWS)
# Below, at and above the vector widths of float32 and float64.
WIDTHS = (1, 3, 4, 7, 8, 12, 16, 33, 64, 100)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def normal(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of every usual size: softplus and sigmoid have several ranges."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 6).to(dtype)


def places(count: int) -> list[Tensor]:
    """Row numbers of batches of `count`: at the ends, in between, reversed."""
    starts = {0, 1, 2, (ROWS - count) // 2, ROWS - count}
    runs = [torch.arange(s, s + count) for s in sorted(starts) if s + count <= ROWS]
    return [*runs, runs[-1].flip(0)]


def results(function: Function, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = function(*args)
    return out if isinstance(out, tuple) else (out,)


def row_dependence(function: Function, *args: Tensor) -> str | None:
    """Where a row's bits differ from those it has alone, or None. Arguments have rows first."""
    alone = [results(function, tuple(a[i : i + 1] for a in args)) for i in range(ROWS)]
    want = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for count in COUNTS:
        for rows in places(count):
            # A copy, and a view where there is one.
            batches = [tuple(a[rows] for a in args)]
            if count == 1 or rows[0] < rows[1]:
                first = int(rows[0])
                batches.append(tuple(a[first : first + count] for a in args))
            for batch in batches:
                for got, expected in zip(results(function, batch), want, strict=True):
                    if not torch.equal(got, expected[rows]):
                        return f"{count} rows from {int(rows[0])}"
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_pointwise(name: str, width: int, dtype: torch.dtype) -> None:
    assert row_dependence(getattr(pointwise, name), normal(0, ROWS, width, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = normal(1, ROWS, width, dtype=dtype), normal(2, width, dtype=dtype)
    gate = normal(3, ROWS, 2, width, dtype=dtype)
    heads = normal(4, ROWS, 2, width)
    assert row_dependence(lambda a: norm.rms_norm(a, weight, 1e-6), x) is None
    assert row_dependence(norm.l2_norm, heads.to(dtype)) is None
    assert row_dependence(norm.swiglu, normal(5, ROWS, 2 * width, dtype=dtype)) is None

    def gated(a: Tensor, b: Tensor) -> Tensor:
        return norm.gated_rms_norm(a, b, weight, 1e-6)

    assert row_dependence(gated, heads, gate) is None
    assert row_dependence(lambda a: norm.gated_rms_norm(a, None, weight, 1e-6), heads) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_gdn_inputs(dtype: torch.dtype, beta_scale: float) -> None:
    wide = norm.compute_dtype(dtype)
    A, dt_bias = -normal(6, 4, dtype=wide).abs(), normal(7, 4, dtype=wide)

    def inputs(qkv: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return gdn.inputs(qkv, a, b, A=A, dt_bias=dt_bias, shape=SHAPE, beta_scale=beta_scale)

    # As the fused projection hands them out: columns of one matrix, not tensors of their own.
    fused = normal(8, ROWS, SHAPE.conv_channels + 8, dtype=dtype)
    parts = fused.split([SHAPE.conv_channels, 4, 4], dim=-1)
    assert row_dependence(inputs, *parts) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("key_dim", [1, 5, 8, 12, 64, 100])
def test_gdn_recurrence(key_dim: int, dtype: torch.dtype) -> None:
    S = normal(9, ROWS, 2, 3, key_dim, dtype=dtype)
    k, q = (normal(i, ROWS, 2, key_dim, dtype=dtype) for i in (10, 11))
    v, u = (normal(i, ROWS, 2, 3, dtype=dtype) for i in (12, 13))
    g, beta = -normal(14, ROWS, 2, dtype=dtype).abs(), normal(15, ROWS, 2, dtype=dtype).abs()
    assert row_dependence(reference.step, S, k, v, g, beta) is None
    assert row_dependence(reference.read, S, q) is None
    assert row_dependence(reference.token, S, q, k, v, g, beta) is None
    assert row_dependence(reference.replay, S, k, u, g) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [1, 7, 8, 60])
def test_conv(channels: int, width: int, dtype: torch.dtype) -> None:
    weight = normal(16, channels, width, dtype=dtype)
    windows = normal(17, ROWS, width, channels, dtype=dtype)

    def weighted(x: Tensor) -> Tensor:
        return conv._weighted(list(x.unbind(1)), weight, dtype)

    assert row_dependence(weighted, windows) is None


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 66])
def test_conv_prefill_is_a_prefix_of_a_longer_one(length: int) -> None:
    x, weight = normal(18, ROWS, 60), normal(19, 60, 4)
    tail = normal(20, 3, 60)
    whole, _ = conv.prefill(x, weight, tail)
    part, _ = conv.prefill(x[:length], weight, tail)
    assert torch.equal(part, whole[:length])


def rounds(trees: list[tuple[int, ...]], rows: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Verify the trees of `rows` together, with pending logs; each row's (o, y) come back."""
    state = State(SHAPE, num_slots=len(trees), max_nodes=16, log_capacity=8)
    layer, slots = state.layers[0], [state.acquire() for _ in trees]
    weight = normal(21, SHAPE.conv_channels, 4)
    for row, slot in enumerate(slots):
        layer.S[slot] = random_state(row, dtype=torch.float32)
        layer.tail[slot] = normal(row, 3, SHAPE.conv_channels)
    outputs: dict[int, tuple[Tensor, Tensor]] = {}
    for turn in range(3):
        chosen = [DraftTree(tuple(range(len(trees[r]))), trees[r]) for r in rows]
        plan = state.begin([slots[r] for r in rows], chosen)
        xs = [random_inputs(100 * turn + r, len(trees[r]), dtype=torch.float32) for r in rows]
        x = Inputs(*(torch.cat(parts) for parts in zip(*xs, strict=True)))
        raw = [normal(50 * turn + r, len(trees[r]), SHAPE.conv_channels) for r in rows]
        o = reference.verify(layer, plan, x)
        y = conv.verify(layer, plan, torch.cat(raw), weight)
        for b, row in enumerate(rows):
            part = slice(plan.offsets[b], plan.offsets[b + 1])
            outputs[row] = (o[part], y[part])
        # Rows commit paths of different length, so their logs differ from then on.
        paths = [
            tree.path_to((7 * r + turn) % tree.num_nodes)
            for r, tree in zip(rows, chosen, strict=True)
        ]
        state.commit([slots[r] for r in rows], paths)
    return [outputs[r][0] for r in rows], [outputs[r][1] for r in rows]


def test_verify() -> None:
    """A tree alone and beside others, first and last; its log replayed alone and beside others."""
    trees = [*TREES.values(), random_parents(1, 16), random_parents(2, 15, reach=2)]
    alone = [rounds(trees, [row]) for row in range(len(trees))]
    everyone = list(range(len(trees)))
    for rows in (everyone, everyone[::-1], [3, 0], [0, 5, 2], [7, 6, 1, 4]):
        o, y = rounds(trees, rows)
        for b, row in enumerate(rows):
            assert torch.equal(o[b], alone[row][0][0]), f"o of row {row} in {rows}"
            assert torch.equal(y[b], alone[row][1][0]), f"y of row {row} in {rows}"


def test_fold_does_not_depend_on_the_slots_beside() -> None:
    S = random_state(0, dtype=torch.float32)
    x = random_inputs(1, 9, dtype=torch.float32)
    u = x.v * x.beta.unsqueeze(-1)
    one_by_one = S
    for i in range(9):
        one_by_one = reference.fold(
            one_by_one, Factors(x.k[i : i + 1], u[i : i + 1], x.g[i : i + 1])
        )
    assert torch.equal(reference.fold(S, Factors(x.k, u, x.g)), one_by_one)


# The test can fail: these are the functions it is there to keep out.

TORCH_OWN: dict[str, Function] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "linear": lambda x: torch.nn.functional.linear(x, normal(22, 40, x.shape[1])),
    "einsum": lambda S, q: torch.einsum("bvk,bk->bv", S, q),
}


@pytest.mark.parametrize("name", TORCH_OWN)
def test_torch_functions_depend_on_rows(name: str) -> None:
    """Were this to pass for none of them, `row_dependence` would prove nothing here."""
    for width in WIDTHS:
        args = [normal(23, ROWS, width)]
        if name == "einsum":
            args = [normal(24, ROWS, 6, width), *args]
        if row_dependence(TORCH_OWN[name], *args) is not None:
            return
    pytest.skip(f"torch's {name} does not depend on rows in this build")


def test_a_row_dependent_function_is_detected() -> None:
    def last_row_differs(x: Tensor) -> Tensor:
        y = x.clone()
        y[-1] = torch.nextafter(y[-1], torch.full_like(y[-1], torch.inf))
        return y if len(x) > 1 else x

    assert row_dependence(last_row_differs, normal(25, ROWS, 4)) is not None
