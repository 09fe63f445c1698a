# SPDX-License-Identifier: Apache-2.0
"""`GraphRounds` itself on a played CUDA (`played`). Tokens are those of plain decoding. Several
rows that are moved: test_moving.py. Tier: exact."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from behind import Turns
from engine_harness import Run, drive, make_engine, outcome, plain, request
from engine_requests import LONG, LOOP, WALK
from torch import Tensor

from specla import drafters
from specla.drafters.base import Drafter, Shape
from specla.models.base import TargetModel
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from played import SHAPES, by_launch, engine_with, go, play

from specla.ops.rows import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="a GPU has its own tests")
# Greedy: the device's draws round otherwise.
REQUESTS = [
    request("loop", LOOP, seed=2, max_tokens=10),
    request("stop", WALK, seed=1, max_tokens=8, stop=("ab", "d", "x")),
    request("one token", (11,), seed=3, max_tokens=7),
    request("long", LONG, seed=4, max_tokens=4),
    request("host's", WALK, seed=8, top_k=3, temperature=0.5, max_tokens=3),
]


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


def check(run: Run, model: TargetModel) -> None:
    assert run.outcomes() == {n: outcome(c) for n, c in plain(model, REQUESTS).items()}


@pytest.mark.parametrize("budget", ["off", "paying", "1"])
def test_ngram(target: TargetModel, budget: str) -> None:
    engine, rounds = engine_with(target, drafters.build("ngram"), budget)
    engine.capture()
    if budget == "paying":
        engine.spending.free = Turns(SHAPES, 2)  # type: ignore[union-attr, assignment]
    graphs = {key: set(one.graphs) for key, one in rounds._buckets._made.items()}
    check(go(engine, REQUESTS), target)
    if budget != "paying":
        again = {key: set(one.graphs) for key, one in rounds._buckets._made.items()}
        assert again == graphs, "all were captured at the start"
    sizes = {nodes for _, nodes in rounds._buckets._model.verified}  # type: ignore[attr-defined]
    expected = {"off": {4}, "paying": {1, 2, 4}, "1": {1, 2}}[budget]
    assert sizes <= expected
    assert max(sizes) == max(expected)


@pytest.mark.parametrize("captured", [False, True])
def test_an_eagle_drafter_with_a_budget(
    tmp_path: Path, target: TargetModel, captured: bool
) -> None:
    """What it launches is played by its eager form; shapes and rest by turns. With every graph
    there, it stays with a row that is alone; others join and leave meanwhile."""
    import test_eagle_behind as eagle

    drafter = eagle.Played(path=eagle.folder(tmp_path, target), **eagle.OPTIONS)
    engine, _ = engine_with(target, drafter, "paying")
    assert engine.drafter is drafter
    if captured:
        engine.capture()
    rested, catch_up = [], drafter.catch_up
    drafter.catch_up = lambda *x: (rested.append(1), catch_up(*x))  # type: ignore[method-assign]
    turns = engine.spending.free = Turns(SHAPES, 2)  # type: ignore[union-attr, assignment]
    check(go(engine, REQUESTS, every=8 if captured else 3), target)
    assert {shape for shape, _ in turns.seen} >= {Shape(4, 3), Shape(1, 0)}
    assert bool(rested) == captured


def alone(
    target: TargetModel,
    drafter: Drafter,
    shapes: Sequence[Shape],
    goes_on: bool,
    most: int = 30,
    every: int = 2,
) -> tuple[int, list[DraftTree]]:
    """One row in rounds of other shapes, with every graph there. Returns how many drafts were
    accepted, and the trees."""
    engine, turns, loads, trees = by_launch(
        target, drafter, shapes, every=every, moves=goes_on, slots=2
    )
    one = request("loop", LOOP, seed=2, max_tokens=most)
    run = go(engine, [one])
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, [one]).items()}
    assert (len(loads) == 1) == goes_on
    assert {shape for shape, _ in turns.seen} == set(shapes)
    speculation = run.completions["loop"].speculation
    return speculation.accepted, trees


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rests", [False, True])
def test_a_row_alone_goes_on_in_another_shape(
    tmp_path: Path, target: TargetModel, kernels: bool, rests: bool
) -> None:
    """... without being loaded anew, and with the trees that it would have then. Its drafter
    rests and catches up where it is."""
    import test_eagle_behind as eagle

    heads = {"head_dim": 64, "head_v_dim": 64} if kernels else {}
    made = eagle.EagleDrafter if kernels else eagle.Played
    path = eagle.folder(tmp_path, target, **heads)
    shapes = SHAPES if rests else [shape for shape in SHAPES if shape.depth]
    most = 16 if kernels else 30
    runs = [
        alone(target, made(path=path, **eagle.OPTIONS), shapes, on, most) for on in (True, False)
    ]
    assert runs[0] == runs[1]
    if not (kernels and rests):  # a few rounds of wrong drafts
        assert runs[0][0] > 0, "where nothing is accepted nothing has to be taken along"


def test_a_drafter_that_rests_for_long(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It catches up before there is no room, on the device as on the host."""
    import test_eagle_behind as eagle

    path = eagle.folder(tmp_path, target)
    shapes, caught = [*[Shape(4, 3)] * 3, *[Shape(1, 0)] * 4], list[int]()

    class Watched(eagle.Played):
        def catch_up(self, tokens: Sequence[Sequence[int]], features: Tensor) -> None:
            caught.append(len(features))
            super().catch_up(tokens, features)

    runs = []
    for most, on in ((128, True), (5, True), (5, False)):
        monkeypatch.setattr("specla.engine.resting.MOST_ROUNDS", most)
        caught.clear()
        runs.append(alone(target, Watched(path=path, **eagle.OPTIONS), shapes, on, 40))
        assert max(caught) == {128: 7, 5: 3}[most]
    assert runs[0] == runs[1] == runs[2]
    assert sum(tree.num_drafts for tree in runs[0][1]) > 30, "trees tell what it knows"


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_a_row_alone_in_any_order_of_shapes(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rests of one round and of more than there is room for, right after long paths too."""
    import test_eagle_behind as eagle

    rng, path = random.Random(seed), eagle.folder(tmp_path, target)
    monkeypatch.setattr("specla.engine.resting.MOST_ROUNDS", 4)
    shapes = [rng.choice([*SHAPES, Shape(1, 0)]) for _ in range(11)] + [Shape(1, 0)] * seed
    drafter = partial(eagle.Played, path=path, **eagle.OPTIONS)
    runs = [alone(target, drafter(), shapes, on, 40, every=1) for on in (True, False)]
    assert runs[0] == runs[1]
    assert runs[0][0] > 0


def test_ngram_goes_on_in_another_shape(target: TargetModel) -> None:
    """Plain rounds too: it reads no features."""
    shapes = [SHAPES[i] for i in (0, 1, 3)]
    runs = [alone(target, drafters.build("ngram"), shapes, on) for on in (True, False)]
    assert runs[0] == runs[1]
    assert runs[0][0] > 0


@pytest.mark.slow
def test_an_eagle_drafters_kernels(tmp_path: Path, target: TargetModel) -> None:
    """Shapes and rest by turns; a budget that is off drafts the same as the host's drafter where
    that cuts nothing."""
    import test_eagle_behind as eagle

    path = eagle.folder(tmp_path, target, head_dim=64, head_v_dim=64)
    engine, _ = engine_with(target, eagle.EagleDrafter(path=path, **eagle.OPTIONS), "paying")
    assert isinstance(engine.drafter, eagle.DeviceEagle)
    turns = engine.spending.free = Turns(SHAPES, 2)  # type: ignore[union-attr, assignment]
    some = [request("a", LOOP, seed=2, max_tokens=7), request("b", (11,), seed=3, max_tokens=4)]
    run = go(engine, some)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, some).items()}
    assert {shape for shape, _ in turns.seen} >= set(SHAPES[:3])
    engine, _ = engine_with(target, eagle.EagleDrafter(path=path, **eagle.OPTIONS), "off")
    run = go(engine, some)
    whole = eagle.EagleDrafter(path=path, min_survival=0, **eagle.OPTIONS)
    host = drive(make_engine(target, whole, nodes=4), some)
    eagle.check(run, host, target, some, accepted=0)


def test_a_drafter_of_the_host_that_reads_features(tmp_path: Path, target: TargetModel) -> None:
    """It loses its credit soon, and rests."""
    import test_eagle_behind as eagle

    drafter = eagle.EagleDrafter(
        path=eagle.folder(tmp_path, target), on_device=False, **eagle.OPTIONS
    )
    engine, rounds = engine_with(target, drafter, "paying")
    assert engine.spending is not None
    engine.spending.budget.account.credit = 0.5
    assert rounds._resting is not None
    fed, feed = [], rounds._resting.feed
    rounds._resting.feed = lambda *x: (fed.append(x[-1]), feed(*x))  # type: ignore[method-assign]
    check(go(engine, REQUESTS), target)
    assert engine.stats.decisions.reasons["off"] > 5
    assert max(fed) > 1
