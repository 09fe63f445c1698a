# SPDX-License-Identifier: Apache-2.0
"""Sequential temperature scaling: what it minimises, and that it does."""

from __future__ import annotations

import torch

from specla.drafters.calibration import GRID, calibrate, calibration_error, survival


def sample(temperatures: list[float], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that would be calibrated if divided by these, and who survived."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(count, len(temperatures), generator=generator).double() + 1
    accepted = torch.sigmoid(logits / torch.tensor(temperatures)) > torch.rand(
        logits.shape, generator=generator, dtype=torch.float64
    )
    return logits, accepted.cumprod(1)


def test_the_error_is_the_mean_gap_per_bin() -> None:
    predicted = torch.tensor([0.05, 0.05, 0.95, 1.0])
    happened = torch.tensor([1.0, 0.0, 1.0, 0.0])
    # Bins [0, 0.1) and [0.9, 1]: |0.1 - 1| / 4 + |1.95 - 1| / 4.
    assert abs(float(calibration_error(predicted, happened)) - (0.9 + 0.95) / 4) < 1e-6
    assert calibration_error(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])) == 0


def test_survival_is_the_product_so_far() -> None:
    logits = torch.tensor([[0.0, 2.0], [1.0, -1.0]])
    p = torch.sigmoid(logits / torch.tensor([2.0, 4.0]))
    found = survival(logits, (2.0, 4.0, 9.0))
    assert torch.allclose(found, torch.stack([p[:, 0], p[:, 0] * p[:, 1]], dim=1))
    assert torch.allclose(survival(logits, None), torch.sigmoid(logits).cumprod(1))


def test_true_temperatures_are_found() -> None:
    true = [GRID[20], GRID[34], GRID[28], GRID[40]]
    logits, survived = sample(true, 40_000)
    found = calibrate(logits, survived)
    for t, want in zip(found, true, strict=True):
        assert 0.7 < t / want < 1.4
    before = calibration_error(survival(logits, None)[:, -1], survived[:, -1])
    after = calibration_error(survival(logits, found)[:, -1], survived[:, -1])
    assert after < 0.015 < before


def test_what_is_calibrated_stays_as_it_is() -> None:
    logits, survived = sample([1.0, 1.0], 20_000)
    assert all(0.8 < t < 1.25 for t in calibrate(logits, survived))
