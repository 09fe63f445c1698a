# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a large vocabulary, a slice of rows or a step at a time: the logits of a batch,
their probabilities and their gradients never exist at once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

ROWS = 8192
"""Rows of logits at a time: 1 GiB of float32 probabilities at a vocabulary of 32,000."""


class _CrossEntropy(torch.autograd.Function):
    """Gradients are made on the way forward, where the logits are."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, rows: int
    ) -> Tensor:
        low = head.to(hidden.dtype)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = weights.new_zeros(())
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            x, wanted = hidden[at], targets[at, None]
            p = torch.softmax(x @ low.T, dim=-1, dtype=weights.dtype)
            surprise = -p.gather(-1, wanted).clamp_min(torch.finfo(p.dtype).tiny).log()
            total += (surprise[:, 0] * weights[at]).sum()
            # d loss / d logits = p - onehot(target)
            p.scatter_add_(-1, wanted, p.new_full((), -1.0).expand_as(wanted))
            slope = (p * weights[at, None]).to(x.dtype)
            grad_hidden[at] = slope @ low
            grad_head += slope.T @ x
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None, None


def law_slopes(logits: Tensor, laws: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropies [N] against laws, and their gradients [N, vocab] in the dtype of
    the logits, in whose place they may be: softmax - law, as a law's sum is 1."""
    if logits.is_cuda:
        from specla.train import triton_fused

        return triton_fused.law_slopes(logits, laws, weights), logits
    found = torch.log_softmax(logits, dim=-1, dtype=laws.dtype)
    losses = -(found * laws).sum(-1) * weights
    return losses, found.exp_().sub_(laws).mul_(weights[:, None]).to(logits.dtype)


class _LawEntropy(torch.autograd.Function):
    """Gradients are made on the way forward, one step's at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, laws: Tensor, weights: Tensor) -> Tensor:
        low = head.to(hidden.dtype)
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = weights.new_zeros(())
        for s, x in enumerate(hidden):
            losses, slope = law_slopes(x @ low.T, laws, weights[s])
            total += losses.sum()
            torch.mm(slope, low, out=grad_hidden[s])
            grad_head += slope.T @ x
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None


def law_entropy(hidden: Tensor, head: Tensor, laws: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of cross-entropies against laws, of several steps with the same lessons.

    Args:
        hidden: [steps, N, D], in the dtype of matrix products.
        head: [vocab, D] parameters, at least as wide.
        laws: [N, vocab] probabilities. weights: [steps, N], in their dtype, that of the result.
    """
    return cast(Tensor, _LawEntropy.apply(hidden, head, laws, weights))  # type: ignore[no-untyped-call]


def cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, rows: int = ROWS
) -> Tensor:
    """Weighted sum of -log p(target).

    Args:
        hidden: [N, D], in the dtype of matrix products.
        head: [vocab, D] parameters, at least as wide.
        targets: [N] int64. weights: [N], in the dtype of probabilities and of the result.
        rows: of the logits that exist at once.
    """
    return cast(Tensor, _CrossEntropy.apply(hidden, head, targets, weights, rows))  # type: ignore[no-untyped-call]
