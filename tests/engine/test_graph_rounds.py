# SPDX-License-Identifier: Apache-2.0
"""`GraphRounds` itself on a played CUDA: a graph is replayed by launching again, in Triton's
interpreter, and the target is a CPU's, over the integers that the device would have. Tokens are
those of plain decoding. Tier: exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from behind import Turns
from engine_harness import (
    Run,
    check_rules,
    check_whole,
    drive,
    make_engine,
    outcome,
    plain,
    request,
)
from engine_requests import LONG, LOOP, WALK
from torch import Tensor

from specla import drafters
from specla.drafters.base import Drafter, Shape
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DevicePlan, RoundPlan
from specla.request import Request
from specla.state import State
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.engine.graphs import GraphRounds
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
SHAPES = Shape(4, 3), Shape(1, 0), Shape(4, 2), Shape(2, 1)


class Stream:
    def synchronize(self) -> None: ...


class Event:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def played(launch: Callable[[], None]) -> tuple[object, None]:
    launch()
    return SimpleNamespace(replay=launch), None


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specla.engine.buckets.captured", played)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)


class Target:
    """A CPU's target, whose verify gets its round from the device's integers."""

    def __init__(self, model: TargetModel) -> None:
        self._model, self.info, self.dtype = model, model.info, model.dtype
        self.device = model.device
        self.verified: list[tuple[int, int]] = []
        self.trees: list[DraftTree] = []

    def reserve(self, max_rows: int) -> None: ...

    def verify(self, plan: DevicePlan, state: State, features: Features | None = None) -> Tensor:
        rnd = plan.round
        rows, nodes = rnd.tokens.shape
        logits = torch.full((rows * nodes, self.info.vocab_size), float("nan"))
        live = [b for b in range(rows) if rnd.num_nodes[b]]
        if not live:
            return logits
        self.verified.append((rows, nodes))
        sizes = rnd.num_nodes.tolist()
        trees = [
            DraftTree(rnd.tokens[b, : sizes[b]].tolist(), rnd.parents[b, : sizes[b]].tolist())
            for b in live
        ]
        self.trees += trees
        host, state.logs = state.logs, list(state.logs)
        for b in live:
            slot, log = int(rnd.slot[b]), copy(host[int(rnd.slot[b])])
            log.bank, log.ring_len = int(rnd.bank[b]), int(rnd.ring_len[b])
            log.path = tuple(rnd.path[b, : int(rnd.path_len[b])].tolist())
            state.logs[slot] = log
        made = state.begin([int(rnd.slot[b]) for b in live], trees)
        assert isinstance(made, RoundPlan)
        read = None if features is None else Features(features.layers)
        found = self._model.verify(made, state, read)
        state.logs = host
        at = [b * nodes + i for b in live for i in range(sizes[b])]
        logits[at] = found.float()
        if features is not None and read is not None:
            for layer, x in zip(
                features.layers, read.rows().chunk(len(read.layers), -1), strict=True
            ):
                padded = torch.full((rows * nodes, x.shape[1]), float("nan"))
                padded[at] = x
                features.take(layer, padded)
        return logits


def engine_with(
    model: TargetModel, drafter: Drafter, budget: str, slots: int = 2
) -> tuple[Engine, GraphRounds]:
    engine = make_engine(model, slots=slots, nodes=4, log=3, budget=budget)
    engine._on_gpu = True
    engine.use(drafter)
    free = engine.spending is not None and engine.spending.free is not None
    engine._graphs = rounds = GraphRounds(
        Target(model), engine.state, engine.drafter, kernel=engine.kernels.of,  # type: ignore[arg-type]
        width=engine._width if free else None,
    )  # fmt: skip
    return engine, rounds


def go(engine: Engine, requests: Sequence[Request], every: int = 3) -> Run:
    """every: steps between two requests; 0: all at once."""
    run, waiting = Run(), list(requests)
    for step in range(400):
        while waiting and (not every or step % every == 0):
            engine.add(waiting.pop(0))
            if every:
                break
        run.take(engine.step())
        if not engine._graphs._flight.rows:  # type: ignore[union-attr]
            check_rules(engine)
        if not (waiting or engine.has_work):
            break
    check_whole(engine)
    return run


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


class ByLaunch(Turns):
    """The shape of a round follows from how many there were."""

    rounds: GraphRounds

    def width(self, rows: int, fresh: int = 0) -> Shape:
        return self._shapes[self.rounds._count // self._every % len(self._shapes)]


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
    engine, rounds = engine_with(target, drafter, "paying")
    engine.capture()
    model = rounds._buckets._model
    model.trees.clear()  # type: ignore[attr-defined]
    engine.spending.free = turns = ByLaunch(shapes, every)  # type: ignore[union-attr, assignment]
    turns.rounds, load, loads = rounds, rounds._load, []
    rounds._load = lambda rows: (loads.append(1), load(rows))[1]  # type: ignore[assignment, func-returns-value]
    if not goes_on:
        rounds._may_move = lambda *_: False  # type: ignore[method-assign]
    one = request("loop", LOOP, seed=2, max_tokens=most)
    run = go(engine, [one])
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, [one]).items()}
    assert (len(loads) == 1) == goes_on
    assert {shape for shape, _ in turns.seen} == set(shapes)
    speculation = run.completions["loop"].speculation
    return speculation.accepted, model.trees  # type: ignore[attr-defined]


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


# Prompts that go on in circles, so that something is accepted of an untrained drafter's.
SEVERAL = [
    request(f"row {i}", LOOP[: 3 + 2 * i], seed=i, max_tokens=most)
    for i, most in enumerate((9, 34, 5, 40, 21))
]


def several(
    target: TargetModel,
    drafter: Drafter,
    shapes: Sequence[Shape],
    moves: bool,
    every: int = 1,
    apart: int = 0,
) -> tuple[int, list[DraftTree], int]:
    """Rows that end one after another, in rounds of other shapes, and come so many steps apart.
    Returns how many drafts were accepted, the trees, and how often the device was loaded."""
    engine, rounds = engine_with(target, drafter, "paying", slots=len(SEVERAL))
    engine.capture()
    model = rounds._buckets._model
    model.trees.clear()  # type: ignore[attr-defined]
    engine.spending.free = turns = ByLaunch(shapes, every)  # type: ignore[union-attr, assignment]
    turns.rounds, load, loads = rounds, rounds._load, []
    rounds._load = lambda rows: (loads.append(1), load(rows))[1]  # type: ignore[assignment, func-returns-value]
    if not moves:
        rounds._may_move = lambda *_: False  # type: ignore[method-assign]
    run = go(engine, SEVERAL, every=apart)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, SEVERAL).items()}
    accepted = sum(one.speculation.accepted for one in run.completions.values())
    return accepted, model.trees, len(loads)  # type: ignore[attr-defined]


def check_moves(
    target: TargetModel, new: Callable[[], Drafter], shapes: Sequence[Shape], every: int = 1
) -> None:
    """What the device does with rows that it moves is what it does with those that it is given."""
    moved, loaded = (several(target, new(), shapes, moves, every) for moves in (True, False))
    assert moved[:2] == loaded[:2]
    assert moved[0] > 0, "where nothing is accepted nothing has to be taken along"
    assert moved[2] == 1
    assert loaded[2] > 3


def watched(played: type) -> type:
    """One that keeps what it was given: tokens and their features, by prompt."""

    class Watched(played):  # type: ignore[misc]
        def bind(self, *args: object, **named: object) -> None:
            super().bind(*args, **named)
            self.given: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
            self.prompts: dict[int, tuple[int, ...]] = {}
            encode = self.model.encode

            def keep(
                slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
            ) -> None:
                flat = [(s, t) for s, row in zip(slots, tokens, strict=True) for t in row]
                for (slot, token), row in zip(flat, features, strict=True):
                    self.given[self.prompts[slot]].append((token, row.clone()))
                encode(slots, tokens, features)

            self.model.encode = keep

        def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
            self.prompts[slot] = tuple(tokens)
            self.given[self.prompts[slot]] = []
            super().prefill(slot, tokens, features)

    return Watched


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rests", [False, True])
def test_several_rows_are_moved(
    tmp_path: Path, target: TargetModel, rests: bool, every: int
) -> None:
    """... to other shapes, and closer together where some have ended."""
    import test_eagle_behind as eagle

    path = eagle.folder(tmp_path, target)
    shapes = SHAPES if rests else [shape for shape in SHAPES if shape.depth]
    check_moves(target, lambda: eagle.Played(path=path, **eagle.OPTIONS), shapes, every)


@pytest.mark.parametrize("seed", range(4))
def test_several_rows_in_any_order_of_shapes(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rests of one round and of more than there is room for, in which rows end. A drafter is given
    every token's own features."""
    import test_eagle_behind as eagle

    rng, path = random.Random(seed), eagle.folder(tmp_path, target)
    monkeypatch.setattr("specla.engine.resting.MOST_ROUNDS", 4)
    rest = [Shape(1, 0)] * (2 * seed)
    shapes = [*rest, *(rng.choice([*SHAPES, Shape(1, 0)]) for _ in range(11))]
    made: list[eagle.Played] = []

    def new() -> eagle.Played:
        made.append(watched(eagle.Played)(path=path, **eagle.OPTIONS))
        return made[-1]

    check_moves(target, new, shapes)
    check_given(made)


@pytest.mark.parametrize("apart", [1, 3, 7])
@pytest.mark.parametrize("rests", [False, True])
def test_rows_join_without_loading(
    tmp_path: Path, target: TargetModel, rests: bool, apart: int
) -> None:
    """Those that are there go on where they were, and the new ones begin."""
    import test_eagle_behind as eagle

    path, made = eagle.folder(tmp_path, target), list[eagle.Played]()
    shapes = [*SHAPES, SHAPES[1], SHAPES[1]] if rests else SHAPES[:1]
    for moves in (True, False):
        made.append(watched(eagle.Played)(path=path, **eagle.OPTIONS))
        accepted, _, loads = several(target, made[-1], shapes, moves, 2, apart)
        assert accepted > 0
        # A row that has ended before the next one comes leaves nothing to go on with.
        assert (loads <= 2) == moves
    check_given(made)


def check_given(made: Sequence[Any]) -> None:
    """Two drafters were given the same tokens with the same features."""
    one, other = (drafter.given for drafter in made)
    assert len(one) == len(other) == len(SEVERAL)
    for prompt in one:
        # What is left where a row ends is nobody's.
        known = list(zip(one[prompt], other[prompt], strict=False))
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in known)
        assert len(known) > 2


@pytest.mark.parametrize("apart", [1, 5])
def test_rows_join_with_ngram(target: TargetModel, apart: int) -> None:
    shapes = [SHAPES[i] for i in (0, 1, 3)]
    runs = [several(target, drafters.build("ngram"), shapes, on, 2, apart) for on in (1, 0)]
    assert runs[0][0] > 0
    assert runs[0][2] <= 2 < runs[1][2]


@pytest.mark.parametrize("every", [1, 4])
def test_several_rows_are_moved_with_ngram(target: TargetModel, every: int) -> None:
    shapes = [SHAPES[i] for i in (0, 1, 3)]
    check_moves(target, lambda: drafters.build("ngram"), shapes, every)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gdn", "attention"])
def test_several_rows_are_moved_by_an_eagle_drafters_kernels(
    tmp_path: Path, target: TargetModel, mixer: str
) -> None:
    import test_eagle_behind as eagle

    sizes = {"mixer": mixer, "head_dim": 64, "head_v_dim": 64}
    if mixer == "attention":
        sizes["num_v_heads"] = 1
    path = eagle.folder(tmp_path, target, **sizes)
    check_moves(target, lambda: eagle.EagleDrafter(path=path, **eagle.OPTIONS), SHAPES, 4)


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
