# SPDX-License-Identifier: Apache-2.0
"""The loss in slices against torch's, and in low precision."""

import pytest
import torch
import torch.nn.functional as F

from specla.train.cross_entropy import cross_entropy


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, head = torch.randn(37, 12), 0.5 * torch.randn(53, 12)
    targets, weights = torch.randint(0, 53, (37,)), torch.rand(37) * (torch.rand(37) > 0.2)
    return hidden.to(dtype), head.to(dtype), targets, weights.to(dtype)


def theirs(hidden, head, targets, weights):
    losses = F.cross_entropy(hidden @ head.T, targets, reduction="none")
    return (losses * weights).sum()


@pytest.mark.parametrize("rows", [1, 16, 37, 100])
def test_value_and_gradients_equal_torchs(rows):
    hidden, head, targets, weights = problem(torch.float64)
    hidden.requires_grad_()
    head.requires_grad_()
    ours = cross_entropy(hidden, head, targets, weights, rows) * 3
    want = theirs(hidden, head, targets, weights) * 3
    torch.testing.assert_close(ours, want, atol=1e-12, rtol=1e-12)
    for a, b in zip(torch.autograd.grad(ours, (hidden, head)),
                    torch.autograd.grad(want, (hidden, head)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_low_precision_products_under_wide_parameters():
    hidden, head, targets, weights = problem(torch.float32)
    low = hidden.bfloat16().requires_grad_()
    wide = head.requires_grad_()
    loss = cross_entropy(low, wide, targets, weights, 16)
    loss.backward()
    assert loss.dtype == wide.grad.dtype == torch.float32
    assert low.grad.dtype == torch.bfloat16
    want = theirs(low.detach().float(), head, targets, weights)
    assert abs(loss.item() / want.item() - 1) < 0.01
