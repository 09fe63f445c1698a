# SPDX-License-Identifier: Apache-2.0
"""The budget of rounds on the device, in a world whose acceptance and costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest
from budget_world import Stairs

from specla.drafters.base import Shape
from specla.drafters.budget import STAKE
from specla.drafters.budget_free import (
    ALONE,
    LOADING,
    MOVING,
    PLAIN,
    RESUME_CREDIT,
    SWITCH_ON,
    Accounts,
    FreeBudget,
)

LIGHT = Stairs(fixed=900, each=10, draft=20)
DEAR = Stairs(fixed=100, each=60, draft=30)
# A drafted level of trees costs something whatever its nodes.
LEVELS = Stairs(fixed=900, each=10, draft=40, level=35)
ROUNDS = {1: 1200, 16: 300, 64: 150}
CHAINS = [Shape(n, n - 1) for n in (1, 2, 4, 8, 16)]
TREES = [Shape(*s) for s in ((2, 1), (4, 2), (4, 3), (8, 4), (8, 6), (16, 4), (16, 6))]


@dataclass
class Run:
    """What it came to; loading the device anew costs half a `LOADING` each time."""

    tokens: float = 0.0
    steps: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    @property
    def nodes(self) -> list[int]:
        return [shape.nodes for shape in self.shapes]

    @property
    def loads(self) -> int:
        return sum(a != b for a, b in zip(self.shapes, self.shapes[1:], strict=False))

    @property
    def speed(self) -> float:
        return self.tokens / (self.steps + self.loads * LOADING / 2)


def steps_of(costs: Stairs, rows: int, shape: Shape) -> float:
    draft = (costs.draft_us(rows, shape.nodes, depth=shape.depth) or 0.0) if shape.depth else 0.0
    return (costs.round_us(rows, shape.nodes) + draft) / costs.round_us(rows, 1)


def played_text(budget: FreeBudget, p: float, rounds: int, seed: int = 0, rows: int = 1) -> Run:
    """Rounds of a text that begins with them, over `LEVELS`; the host is one round behind."""
    rng, run, before = random.Random(seed), Run(), list[tuple[list[int], Shape]]()
    for i in range(rounds):
        shape = budget.width(range(rows), rows if i < 2 else 0)
        if len(before) == 2:
            reached, of = before.pop(0)
            budget.observe(range(rows), reached, [depth + 1 for depth in reached], of)
        reached = [0] * rows
        for b in range(rows):
            while reached[b] < shape.depth and rng.random() < p:
                reached[b] += 1
        before.append((reached, shape))
        run.tokens += 1 + sum(reached) / rows
        run.steps += steps_of(LEVELS, rows, shape)
        run.shapes.append(shape)
    for reached, of in before:
        budget.observe(range(rows), reached, [depth + 1 for depth in reached], of)
    return run


Law = Callable[[Shape], float]
"""Probability that a path of such a round goes a step further."""


def play(
    budget: FreeBudget, costs: Stairs, p: float | Law, rows: int, rounds: int, seed: int = 0
) -> Run:
    rng, run = random.Random(seed), Run()
    for _ in range(rounds):
        shape = budget.width(range(rows))
        odds = p if isinstance(p, float) else p(shape)
        reached = []
        for _ in range(rows):
            depth = 0
            while depth < shape.depth and rng.random() < odds:
                depth += 1
            reached.append(depth)
        budget.observe(range(rows), reached, [depth + 1 for depth in reached], shape)
        run.tokens += 1 + sum(reached) / rows
        run.steps += steps_of(costs, rows, shape)
        run.shapes.append(shape)
    return run


@pytest.mark.parametrize("costs", [LIGHT, DEAR], ids=["light", "dear"])
@pytest.mark.parametrize("rows", ROUNDS)
@pytest.mark.parametrize("p", [0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_close_to_the_best_size(p: float, rows: int, costs: Stairs) -> None:
    run = play(FreeBudget(CHAINS, costs), costs, p, rows, ROUNDS[rows])
    best = max(sum(p**i for i in range(s.nodes)) / steps_of(costs, rows, s) for s in CHAINS)
    assert run.speed >= 0.97
    # A gain as small as the hysteresis may be left alone.
    assert run.speed >= 0.95 * best or best <= SWITCH_ON


def test_a_sudden_change_either_way() -> None:
    budget = FreeBudget(CHAINS, LIGHT)
    assert play(budget, LIGHT, 0.9, 1, 400).nodes[-1] == 16
    worse = play(budget, LIGHT, 0.0, 1, 1500)
    assert worse.speed >= 0.97
    assert worse.nodes[-200:].count(1) > 180
    assert play(budget, LIGHT, 0.9, 1, 1500, seed=2).nodes[-1] == 16


def test_the_device_is_not_loaded_all_the_time() -> None:
    for p in (0.0, 0.3, 0.5, 0.6):
        assert play(FreeBudget(CHAINS, DEAR), DEAR, p, 1, 1000).loads <= 50


def test_drafting_that_costs_many_steps_is_looked_at_too() -> None:
    costs = Stairs(fixed=900, each=10, draft=2000.0)
    budget = FreeBudget(CHAINS, costs)
    assert play(budget, costs, 0.0, 1, 2500).speed >= 0.97
    # Three steps must give three tokens: 1 + p + p^2 + ... over 16 nodes.
    assert "break-even p 0.7" in budget.detail
    assert play(budget, costs, 0.98, 1, 2500, seed=2).nodes[-1] == 16


def test_fixed_is_one_size() -> None:
    budget = FreeBudget(CHAINS, DEAR, fixed=Shape(4, 3))
    assert set(play(budget, DEAR, 0.0, 2, 100).nodes) == {4}
    assert budget.reason == "fixed"


def test_it_says_why() -> None:
    budget = FreeBudget(CHAINS, DEAR)
    play(budget, DEAR, 0.0, 16, 40)
    assert budget.detail.startswith(f"{budget.reason}: break-even p 0.9")
    budget = FreeBudget(CHAINS, LIGHT)
    play(budget, LIGHT, 0.9, 1, 100)
    assert budget.detail.startswith("pays: 16 nodes, depth 15, ")
    assert budget.expected(15) > 5


@pytest.mark.parametrize("easy", [0.0, 0.3, 0.6, 0.75])
@pytest.mark.parametrize("rows", ROUNDS)
def test_close_to_the_best_shape_of_trees(easy: float, rows: int) -> None:
    """More nodes go further at every step, and what one size has seen is not the others' odds."""

    def law(shape: Shape) -> float:
        width = max(1.0, shape.nodes / (shape.depth + 1))
        return 1 - (1 - easy) * 0.85 ** math.log2(width) if easy else 0.0

    def speed(shape: Shape) -> float:
        tokens = sum(law(shape) ** i for i in range(shape.depth + 1))
        return tokens / steps_of(LEVELS, rows, shape)

    run = play(FreeBudget(TREES, LEVELS), LEVELS, law, rows, 3 * ROUNDS[rows])
    best = max(speed(shape) for shape in (PLAIN, *TREES))
    assert run.speed >= 0.97
    assert run.speed >= 0.93 * best or best <= SWITCH_ON


# ---- texts, one after another

TEXT = 60  # rounds


def trained() -> FreeBudget:
    """Of a drafter that is taken for a good one, until it was seen."""
    return FreeBudget(TREES, LEVELS, prior=0.8, loading=MOVING)


def test_a_first_text_begins_with_what_its_prior_pays_best() -> None:
    """A short answer is over before a look is."""
    runs = [played_text(trained(), 0.9, 15, seed) for seed in range(8)]
    assert {run.shapes[0] for run in runs} == {Shape(16, 6)}
    ideal = sum(0.9**i for i in range(7)) / steps_of(LEVELS, 1, Shape(16, 6))
    assert mean(run.tokens / run.steps for run in runs) >= 0.95 * ideal
    poor = FreeBudget(CHAINS, DEAR, prior=0.6)
    assert poor.width([0], 1) == Shape(2, 1)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_text_that_does_not_pay_loses_its_stake(rows: int) -> None:
    """... and what the two rounds cost that the host learns of too late."""
    budget = trained()
    if rows == 1:
        played_text(budget, 0.9, 200)
    run = played_text(budget, 0.0, TEXT, rows=rows)
    drafted = [shape for shape in run.shapes if shape.depth]
    dearest = max(steps_of(LEVELS, rows, shape) - 1 for shape in drafted)
    assert run.steps - run.tokens <= STAKE + 3 * dearest
    assert not budget.account.on


def test_texts_that_pay_and_that_do_not_in_turns() -> None:
    """Every text is drafted for from its first round on, as the others before it say."""
    budget, good, bad = trained(), list[Run](), list[Run]()
    for i in range(12):
        good.append(played_text(budget, 0.9, TEXT, seed=i))
        bad.append(played_text(budget, 0.0, TEXT, seed=i))
    assert all(run.shapes[0].depth for run in good)
    assert sum(run.nodes.count(1) for run in good) < 0.1 * 12 * TEXT
    assert sum(run.nodes.count(1) for run in bad) > 0.85 * 12 * TEXT
    assert sum(run.tokens for run in bad) >= 0.95 * sum(run.steps for run in bad)


def test_texts_that_never_pay_are_not_drafted_for() -> None:
    """No good ones speak for them: they share what looks may cost."""
    budget = trained()
    runs = [played_text(budget, 0.0, TEXT, seed=i) for i in range(40)]
    late = runs[20:]
    assert sum(run.tokens for run in late) >= 0.98 * sum(run.steps for run in late)


def test_what_lost_its_stake_is_not_believed_in_before_it_pays() -> None:
    account = Accounts()
    account.stake(1.0)
    account.book(-STAKE)
    assert account.is_lost
    account.switch(lost=True)
    assert account.credit > RESUME_CREDIT
    assert not account.may_resume
    account.book(0.0)
    account.book(-0.2)
    assert not account.may_resume
    account.book(0.5)
    assert account.may_resume


def test_one_fresh_row_of_many_has_its_share_of_the_stake() -> None:
    account = Accounts()
    account.stake(1 / 64)
    account.book(-STAKE)
    assert not account.is_lost
    account.stake(1.0)
    account.book(-STAKE)
    assert account.is_lost


def test_odds_are_of_paths_that_came_so_far() -> None:
    """Rounds that ended early say nothing of the steps after."""
    budget = FreeBudget(CHAINS, LIGHT)
    for _ in range(8):
        reached = [0] * 32 + [15] * 32
        budget.observe(range(64), reached, [depth + 1 for depth in reached], Shape(16, 15))
    survival = budget.survival(16)
    assert survival[0] == pytest.approx(0.5, abs=0.02)
    assert survival[14] == pytest.approx(0.5, abs=0.05)


# ---- a row that is alone, over what an H200 takes (GDN-1.3B, an EAGLE drafter)

STEP = 965.0
MICROSECONDS = {
    PLAIN: 973, Shape(2, 1): 1030, Shape(4, 2): 1108, Shape(4, 3): 1148, Shape(8, 4): 1262,
    Shape(8, 6): 1340, Shape(16, 4): 1352, Shape(16, 6): 1430,
}  # fmt: skip
FIXED_SHAPES = [Shape(16, 6), Shape(16, 4), Shape(8, 6), Shape(2, 1)]
TURN = 70.0
"""Of a drafter that begins or ceases to rest where it is."""
Chance = Callable[[int], float]
"""Probability that a step is right, by tokens so far."""


class H200:
    padded = True

    def round_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float:
        return {1: STEP, 2: 966.0, 4: 1000.0, 8: 1067.0, 16: 1158.0}[nodes]

    def draft_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float | None:
        return None if depth is None else 0.04 * STEP * (depth + 1)


def steps_gone(rng: random.Random, p: float, shape: Shape, wider: float, most: int) -> int:
    """wider: times as many misses in a tree twice as wide."""
    width, reached = max(1.0, shape.nodes / (shape.depth + 1)), 0
    p = 1 - (1 - p) * wider ** math.log2(width) if p else 0.0
    while reached < shape.depth and rng.random() < p:
        reached += 1
    return min(reached, most)


def alone(budget: FreeBudget, p: Chance, tokens: int, seed: int, wider: float) -> Run:
    """Its `steps` are all there is; the host is one round behind."""
    rng, run, before = random.Random(seed), Run(), list[tuple[int, Shape]]()
    while run.tokens < tokens:
        shape = budget.width([0], int(len(run.shapes) < 2))
        reached = steps_gone(rng, p(int(run.tokens)), shape, wider, int(tokens - run.tokens) - 1)
        turns = bool(run.shapes) and (not shape.depth) != (not run.shapes[-1].depth)
        run.steps += (MICROSECONDS[shape] + TURN * turns) / STEP
        run.tokens += 1 + reached
        run.shapes.append(shape)
        before.append((reached, shape))
        if len(before) == 2:
            reached, shape = before.pop(0)
            budget.observe([0], [reached], [reached + 1], shape)
    for reached, shape in before:
        budget.observe([0], [reached], [reached + 1], shape)
    return run


def fixed_speed(shape: Shape, p: Chance, tokens: int, wider: float) -> float:
    spent, rng = 0.0, random.Random(1)
    for _ in range(40):
        done = 0
        while done < tokens:
            done += 1 + steps_gone(rng, p(done), shape, wider, tokens - done - 1)
            spent += MICROSECONDS[shape] / STEP
    return 40 * tokens / spent


def fresh() -> FreeBudget:
    return FreeBudget(TREES, H200(), prior=0.8, loading=MOVING, alone=ALONE)


def speed_of(p: Chance, tokens: int, wider: float = 0.75) -> float:
    """Of fresh engines' first texts, together."""
    runs = [alone(fresh(), p, tokens, seed, wider) for seed in range(40)]
    return sum(run.tokens for run in runs) / sum(run.steps for run in runs)


@pytest.mark.parametrize("tokens", [93, 256])
def test_a_hopeless_text_alone(tokens: int) -> None:
    """Of an engine that knows nothing yet, and of one that has seen such before."""
    budget = fresh()
    first = alone(budget, lambda _: 0.0, tokens, 0, 1.0)
    assert first.tokens >= 0.965 * first.steps
    later = [alone(budget, lambda _: 0.0, tokens, 0, 1.0) for _ in range(6)]
    assert sum(run.tokens for run in later) >= 0.975 * sum(run.steps for run in later)


@pytest.mark.parametrize("wider", [0.75, 1.0])
@pytest.mark.parametrize("p", [0.2, 0.4, 0.5, 0.6, 0.75, 0.9])
def test_a_text_alone_is_close_to_the_best_shape(p: float, wider: float) -> None:
    """Whether width helps as it is taken to, or not at all."""
    best = max(fixed_speed(shape, lambda _: p, 93, wider) for shape in FIXED_SHAPES)
    assert speed_of(lambda _: p, 93, wider) >= max(1.0, (0.86 if p < 0.5 else 0.9) * best)


@pytest.mark.parametrize("good", [0.6, 0.9])
@pytest.mark.parametrize("tokens", [93, 256])
def test_a_text_alone_that_changes(good: float, tokens: int) -> None:
    half = tokens // 2
    assert speed_of(lambda n: 0.0 if n < half else good, tokens) >= 1.02
    shapes = [*FIXED_SHAPES, PLAIN]
    best = max(fixed_speed(x, lambda n: good * (n < half), tokens, 0.75) for x in shapes)
    assert speed_of(lambda n: good * (n < half), tokens) >= 0.97 * best


def test_a_text_alone_is_not_given_up_for_long() -> None:
    """A few misses at first: cheaper shapes, and looks."""
    runs = [alone(fresh(), lambda _: 0.6, 93, seed, 1.0) for seed in range(100, 112)]
    assert max(run.nodes.count(1) for run in runs) < 30
    assert all(run.tokens > 1.2 * run.steps for run in runs)


def test_a_text_alone_goes_on_in_cheaper_shapes() -> None:
    """Never one whose next rounds it could not pay for."""
    run = alone(fresh(), lambda _: 0.0, 40, 0, 1.0)
    spent = [MICROSECONDS[shape] for shape in run.shapes[: run.nodes.index(1)]]
    assert spent == sorted(spent, reverse=True)
    assert run.nodes.index(1) >= 5


@pytest.mark.parametrize(
    ("level", "odds", "least"), [(145, 0.9, 2.1), (210, 0.9, 1.77), (210, 0.75, 1.27)]
)
def test_texts_alone_with_a_dear_drafter(level: float, odds: float, least: float) -> None:
    """A round under way that costs more than a fresh text may lose is no reason to give up
    drafting, again and again."""
    costs = Stairs(fixed=900, each=10, draft=level, level=level)
    tokens = steps = switches = 0.0
    for seed in range(6):
        budget = FreeBudget(TREES, costs, prior=0.8, loading=MOVING, alone=ALONE)
        for text in range(4):
            budget.observe([], [], [], PLAIN)
            budget.width([0], 1)
            run = play(budget, costs, odds, 1, 60, seed=10 * seed + text)
            tokens, steps = tokens + run.tokens, steps + run.steps
        switches += budget.account.switches
    assert tokens >= least * steps
    assert switches <= 24
