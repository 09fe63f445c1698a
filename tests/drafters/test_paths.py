# SPDX-License-Identifier: Apache-2.0
"""Paths of rows beside each other, and what a budget makes of rows whose drafts fail."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean

import pytest
from budget_world import Stairs

from specla.drafters.base import Shape
from specla.drafters.budget_free import ALONE, MOVING, FreeBudget
from specla.drafters.paths import ROW_WEIGHT, Paths, RowPaths

SHAPES = [Shape(*s) for s in ((2, 1), (4, 2), (4, 3), (8, 4), (8, 6), (16, 4), (16, 6))]
COSTS = Stairs(fixed=900, each=3, draft=40, level=35)
"""Of rounds over 8 and 16 rows, about as GDN-1.3B has them on an H200."""


def test_rows_alike_have_the_tokens_of_all() -> None:
    rows = RowPaths()
    assert rows.tokens([3, 5], 2.0, 4) == pytest.approx(3.0)
    for _ in range(50):
        rows.add([3, 5], [2, 2])
    assert rows.tokens([3, 5], 2.0, 4) == pytest.approx(3.0)
    rows.add([3], [0])
    assert rows.tokens([3], 2.0, 4) == pytest.approx(3.0), "alone, there is nothing beside it"


def test_rows_apart_have_the_harmonic_mean() -> None:
    rows = RowPaths()
    for _ in range(1000):
        rows.add([1, 2], [0, 4])
    # Decayed over 64 rounds 128 drafts are due from each: row 1 had none, row 2 each twice.
    low, high = ROW_WEIGHT / (128 + ROW_WEIGHT), (256 + ROW_WEIGHT) / (128 + ROW_WEIGHT)
    expected = 2 / (1 / (1 + 2 * low) + 1 / (1 + 2 * high))
    assert rows.tokens([1, 2], 2.0, 4) == pytest.approx(expected, rel=1e-3)
    assert rows.tokens([2], 3.0, 4) == pytest.approx(5.0), "no path is deeper than its tree"
    rows.forget(1)
    assert rows.tokens([1], 2.0, 4) == pytest.approx(3.0)
    rows.forget(7)


def test_odds_of_steps_nobody_came_to_are_those_of_the_step_before() -> None:
    paths = Paths(3)
    paths.add([8, 4], 1.0)
    first = (4 + 2 * 0.5) / (8 + 2)
    assert paths.rates(0.5, 2.0) == pytest.approx([first, first, first])
    assert paths.rates([0.5, 0.1, 0.2], 2.0) == pytest.approx([first, 0.1, 0.2])
    paths.fade(0.5)
    assert (paths.seen[0], paths.reached[0]) == (4.0, 2.0)


def _alike(slots: Sequence[int], accepted: float, depth: int) -> float:
    return 1 + accepted


def _speed(odds: Sequence[float], tokens: int, seed: int, *, apart: bool) -> tuple[float, float]:
    """Texts of so many tokens that come at once, over plain decoding until the last has ended and
    on average until each has. apart: the budget sees one row from another."""
    rng = random.Random(seed)
    budget = FreeBudget(SHAPES, COSTS, prior=0.8, loading=MOVING, alone=ALONE)
    if not apart:
        budget._rows.tokens = _alike  # type: ignore[method-assign]
    left, clock, ended = [tokens] * len(odds), 0.0, list[float]()
    before: list[tuple[list[int], list[int], Shape]] = []
    while any(left):
        slots = [slot for slot, n in enumerate(left) if n]
        shape = budget.width(slots, len(slots) if clock == 0 else 0)
        if len(before) == 2:
            of, reached, was = before.pop(0)
            budget.observe(of, reached, [depth + 1 for depth in reached], was)
        reached = [_gone(rng, odds[slot], shape, left[slot]) for slot in slots]
        before.append((slots, reached, shape))
        drafting = (COSTS.draft_us(1, 1, depth=shape.depth) or 0.0) if shape.depth else 0.0
        clock += COSTS.round_us(len(slots), shape.nodes) + drafting
        for slot, depth in zip(slots, reached, strict=True):
            left[slot] -= depth + 1
            ended += [] if left[slot] else [clock]
    plain = tokens * COSTS.round_us(len(odds), 1)
    return plain / clock, mean(plain / end for end in ended)


def _gone(rng: random.Random, p: float, shape: Shape, left: int) -> int:
    depth = 0
    while depth < min(shape.depth, left - 1) and rng.random() < p:
        depth += 1
    return depth


@pytest.mark.parametrize("rows", [8, 16])
def test_rows_whose_drafts_fail_wait_less_for_the_others(rows: int) -> None:
    odds = [0.05] * (rows // 2) + [0.8] * (rows // 2)
    apart = [_speed(odds, 200, seed, apart=True) for seed in range(8)]
    alike = [_speed(odds, 200, seed, apart=False) for seed in range(8)]
    assert mean(last for last, _ in apart) >= mean(last for last, _ in alike) + 0.02
    assert mean(each for _, each in apart) >= 0.98 * mean(each for _, each in alike)


def test_rows_alike_lose_nothing_by_it() -> None:
    odds = [0.8] * 8
    apart = mean(_speed(odds, 200, seed, apart=True)[0] for seed in range(8))
    assert apart >= 0.99 * mean(_speed(odds, 200, seed, apart=False)[0] for seed in range(8))


def test_a_choice_for_few_rows_does_not_outlast_them() -> None:
    """A stretch of rounds ends where more rows come, whose rounds have other prices."""
    budget = FreeBudget(SHAPES, COSTS, prior=0.8, loading=MOVING, alone=ALONE)
    for i in range(60):
        shape = budget.width([0], int(i == 0))
        budget.observe([0], [shape.depth], [shape.depth + 1], shape)
    assert budget.width([0]) == Shape(16, 6)
    many = budget.width(range(64), 63)
    assert 1 < many.nodes < 16
    assert budget.width(range(63)) == many
