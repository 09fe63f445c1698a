# SPDX-License-Identifier: Apache-2.0
"""The kernels between a prompt's products, against the CPU's functions, in Triton's interpreter.

Formulas, indices and masks; both sides in float32, so the bounds are a few roundings.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specla.ops import conv, gdn
from specla.ops.contract import RecurrentShape
from specla.ops.norm import swiglu

pytest.importorskip("triton")
from specla.ops.gdn import prefill
from specla.ops.gemm import pack_swiglu
from specla.ops.swiglu import packed_swiglu

WIDE_VALUES = RecurrentShape(
    num_layers=1, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, conv_width=4
)
WIDE_KEYS = replace(WIDE_VALUES, num_value_heads=2, key_dim=32, value_dim=16, conv_width=3)
# Interpreted: what concerns tokens only is shown on one head of each kind.
ONE_HEAD = replace(WIDE_VALUES, num_key_heads=1, num_value_heads=1)


def normal(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tokens(count: int) -> Tensor:
    return torch.tensor([count], dtype=torch.int32)


class Layer:
    """Random weights of one layer's mixer, and both ways through it."""

    def __init__(self, shape: RecurrentShape, beta_scale: float = 1.0, gate: int = 5) -> None:
        heads, channels = shape.num_value_heads, shape.conv_channels
        self.shape, self.beta_scale = shape, beta_scale
        self.width = channels + gate + 2 * heads
        self.weight = normal(1, channels, shape.conv_width)
        self.A, self.dt_bias = -normal(2, heads).abs(), normal(3, heads)
        self.tail = normal(4, shape.conv_width - 1, channels)

    def on_cpu(self, y: Tensor, tail: Tensor) -> tuple[gdn.Inputs, Tensor]:
        heads, channels = self.shape.num_value_heads, self.shape.conv_channels
        qkv, tail = conv.prefill(y[:, :channels], self.weight, tail)
        a, b = y[:, -2 * heads : -heads], y[:, -heads:]
        x = gdn.inputs(
            qkv, a, b, A=self.A, dt_bias=self.dt_bias, shape=self.shape, beta_scale=self.beta_scale
        )
        return x, tail

    def by_kernel(self, y: Tensor, tail: Tensor) -> tuple[gdn.Inputs, Tensor]:
        x, tail = prefill.allocate(self.shape, len(y), torch.float32, y.device), tail.clone()
        prefill.prepare(
            y, self.weight, self.A, self.dt_bias, tail, tokens(len(y)), x, shape=self.shape,
            beta_scale=self.beta_scale,
        )  # fmt: skip
        return x, tail


@pytest.mark.parametrize(
    ("layer", "length"),
    [
        # Shorter than what a convolution sees, as long, one block and more.
        *((Layer(WIDE_VALUES), length) for length in (1, 2, 3, 17)),
        *((Layer(WIDE_KEYS, 2.0, gate=0), length) for length in (1, 2, 34)),
    ],
    ids=[*(f"K < V, {n}" for n in (1, 2, 3, 17)), *(f"K > V, W = 3, {n}" for n in (1, 2, 34))],
)
def test_prepare_is_conv_norms_and_gates(layer: Layer, length: int) -> None:
    y = normal(length, length, layer.width)
    want, want_tail = layer.on_cpu(y, layer.tail)
    got, tail = layer.by_kernel(y, layer.tail)
    assert torch.equal(tail, want_tail)
    for name, a, b in zip(want._fields, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("cut", [1, 2, 16, 20])
def test_a_prompt_in_two_parts_has_the_same_inputs(cut: int) -> None:
    layer, y = Layer(ONE_HEAD), normal(0, 21, Layer(ONE_HEAD).width)
    whole, end = layer.by_kernel(y, layer.tail)
    first, tail = layer.by_kernel(y[:cut], layer.tail)
    second, tail = layer.by_kernel(y[cut:].contiguous(), tail)
    assert torch.equal(tail, end)
    for a, b, c in zip(whole, first, second, strict=True):
        assert torch.equal(a, torch.cat([b, c]))


@pytest.mark.parametrize("count", [1, 2, 16, 18])
def test_rows_past_the_last_token_leave_a_state_as_it_is(count: int) -> None:
    layer, y = Layer(ONE_HEAD), normal(0, 21, Layer(ONE_HEAD).width)
    y[count:] = float("nan")
    want, want_tail = layer.by_kernel(y[:count].contiguous(), layer.tail)
    x, tail = prefill.allocate(layer.shape, len(y), torch.float32, y.device), layer.tail.clone()
    prefill.prepare(
        y, layer.weight, layer.A, layer.dt_bias, tail, tokens(count), x, shape=layer.shape
    )
    assert torch.equal(tail, want_tail)
    for got, alone in zip(x, want, strict=True):
        assert torch.equal(got[:count], alone)
        assert not got[count:].any()


def test_rounding_is_to_the_dtypes_given() -> None:
    """q and k once, v to the activation's dtype even where it is stored wider."""
    layer = Layer(WIDE_VALUES)
    y, tail = normal(0, 3, layer.width).bfloat16(), layer.tail.bfloat16()
    layer.weight = layer.weight.bfloat16()
    exact, _ = layer.by_kernel(y, tail)
    assert torch.equal(exact.v, exact.v.bfloat16().float())
    rounded = prefill.allocate(layer.shape, 3, torch.bfloat16, y.device)
    prefill.prepare(
        y, layer.weight, layer.A, layer.dt_bias, tail, tokens(3), rounded, shape=layer.shape
    )
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(rounded, name), getattr(exact, name).bfloat16()), name


@pytest.mark.parametrize("width", [8, 1024, 1032])
def test_packed_swiglu(width: int) -> None:
    x, gate_up = normal(0, 3, 5), normal(1, 2 * width, 5)
    out = torch.empty(3, width)
    packed_swiglu(x @ pack_swiglu(gate_up).T, out)
    torch.testing.assert_close(out, swiglu(x @ gate_up.T), rtol=1e-5, atol=1e-6)
