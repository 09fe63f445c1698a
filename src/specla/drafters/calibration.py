# SPDX-License-Identifier: Apache-2.0
"""Sequential Temperature Scaling: confidences whose cumulative product is a probability.

A draft survives if it and all before it are accepted. The confidence head gives a logit per
position; position by position, from the left, one temperature is chosen so that the product so
far is closest to how often drafts did survive that far (least expected calibration error).

Source: DSpark (arXiv 2607.05147), confidence-scheduled verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.ops.pointwise import sigmoid

BINS = 10
GRID = tuple(2.0 ** (i / 8) for i in range(-24, 33))
"""Temperatures tried: 1/8 to 16, in steps of 9 %."""


def survival(logits: Tensor, temperatures: Sequence[float] | None) -> Tensor:
    """logits [..., n] of n positions -> probabilities [..., n] that drafts survive that far.
    temperatures: of at least n positions; None: 1."""
    if temperatures is not None:
        logits = logits / logits.new_tensor(temperatures[: logits.shape[-1]])
    return sigmoid(logits).cumprod(-1)


def calibration_error(predicted: Tensor, happened: Tensor) -> Tensor:
    """Expected calibration error: predicted [N] probabilities, happened [N] in [0, 1]."""
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=predicted.dtype, device=predicted.device)
    gap.index_add_(0, bins, predicted - happened.to(predicted.dtype))
    return gap.abs().sum() / len(predicted)


def calibrate(logits: Tensor, survived: Tensor) -> tuple[float, ...]:
    """Temperatures of a block's positions.

    Args:
        logits: [N, n] of the confidence head, held out from training.
        survived: [N, n] whether (or how likely) each draft and all before it were accepted.
    """
    chosen, so_far = list[float](), torch.ones_like(logits[:, 0])
    for position, happened in zip(logits.unbind(1), survived.unbind(1), strict=True):
        tried = [so_far * sigmoid(position / t) for t in GRID]
        errors = torch.stack([calibration_error(p, happened) for p in tried])
        # Of the best, the one nearest to no change.
        best = min(range(len(GRID)), key=lambda i: (float(errors[i]), abs(GRID[i] - 1)))
        chosen.append(GRID[best])
        so_far = tried[best]
    return tuple(chosen)
