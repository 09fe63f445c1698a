# SPDX-License-Identifier: Apache-2.0
"""The kernels of a training step against the operations they stand for, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.ops import rows
from specla.train import triton_fused
from specla.train.cross_entropy import law_slopes
from specla.train.gdn import pack_masks
from specla.train.unroll import _Convolution, _Descent, convolution, descend

DEVICE = "cuda" if not rows.INTERPRET else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [37, 5000])
def test_entropies_and_slopes(dtype: torch.dtype, vocab: int) -> None:
    """One block of columns and two, the last not full; a lesson that does not count."""
    logits, laws = (4 * normal(1, 5, vocab)).to(dtype), torch.softmax(3 * normal(2, 5, vocab), -1)
    weights = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.1], device=DEVICE)
    wide = logits.double().requires_grad_()
    want = -(torch.log_softmax(wide, -1) * laws).sum(-1) * weights
    want.sum().backward()
    assert wide.grad is not None
    losses = triton_fused.law_slopes(logits, laws, weights)
    torch.testing.assert_close(losses, want.float(), rtol=1e-5, atol=1e-6)
    fine = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 1e-7}
    torch.testing.assert_close(logits.float(), wide.grad.float(), **fine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [13, 33])
def test_a_convolution_and_its_gradients(dtype: torch.dtype, length: int) -> None:
    """Sources of a wider projection, two of them the same; documents that begin anywhere, and one
    of a single token."""
    segments = torch.tensor([0] * 5 + [1] + [2] * (length - 8) + [-1] * 2).to(DEVICE)
    taps = pack_masks(torch.stack([segments, segments.flip(0)]), 4, 16).taps
    weight = normal(0, 150, 4).requires_grad_()
    raws = [normal(i, 2, length, 170).to(dtype).requires_grad_() for i in (1, 2, 3)]
    sources = [raws[i][..., 7:157] for i in (0, 0, 1, 2)]
    grad = normal(9, 2, length, 150)

    want = convolution([x.double() for x in sources], taps, weight.double())
    wanted = torch.autograd.grad(want, [weight, *raws], grad.double())
    got = _Convolution.apply(taps, weight, *sources)  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(got, [weight, *raws], grad)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(found[1:], wanted[1:], strict=True):
        # Two sources that are the same have their gradients rounded before they are added.
        limit = (
            {"rtol": 1e-4, "atol": 1e-5}
            if dtype == torch.float32
            else {"rtol": 2e-2, "atol": 2e-2}
        )
        torch.testing.assert_close(one.float(), other.float(), **limit)


def test_the_operations_are_what_the_kernel_stands_for() -> None:
    logits, laws = normal(1, 4, 9), torch.softmax(normal(2, 4, 9), -1)
    weights = torch.tensor([0.5, 1.0, 0.0, 2.0], device=DEVICE)
    losses, slopes = law_slopes(logits.clone(), laws, weights)
    torch.testing.assert_close(triton_fused.law_slopes(logits, laws, weights), losses)
    torch.testing.assert_close(logits, slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("s", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_descent_and_its_gradients(s: int) -> None:
    """Key and value dims that are no powers of two, decays from slow to fast, rows of 6 pairs: at
    step 5 most have ancestors before the row's start."""
    size, width, values = (2, 6, 3), 12, 20
    sizes = [values, values, width, width, values, 0, 0, *[width, values, 0] * (s - 1)]
    inputs = [normal(i, *size, *([n] if n else [])) for i, n in enumerate(sizes)]
    for i in (5, *range(9, len(inputs), 3)):
        inputs[i] = -inputs[i].exp()
    inputs = [x.requires_grad_() for x in inputs]
    grads = [normal(90 + i, *size, values) for i in range(2)]

    wide = [x.double() for x in inputs]
    want = descend(wide[:2], wide[2:7], wide[7:])
    wanted = torch.autograd.grad(want, inputs, [g.double() for g in grads])
    got = _Descent.apply(*inputs)  # type: ignore[no-untyped-call]
    found = torch.autograd.grad(got, inputs, grads)
    for one, other in zip((*got, *found), (*want, *wanted), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)
