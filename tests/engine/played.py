# SPDX-License-Identifier: Apache-2.0
"""A played CUDA for `GraphRounds`: a graph is replayed by launching again, in Triton's
interpreter, and the target is a CPU's, over the integers that the device would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from behind import Turns
from engine_harness import Run, check_rules, check_whole, make_engine
from torch import Tensor

from specla.drafters.base import Drafter, Shape
from specla.engine.engine import Engine
from specla.engine.graphs import GraphRounds
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DevicePlan, RoundPlan
from specla.request import Request
from specla.state import State
from specla.topology.tree import DraftTree

SHAPES = Shape(4, 3), Shape(1, 0), Shape(4, 2), Shape(2, 1)


class Stream:
    def synchronize(self) -> None: ...


class Event:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def played(launch: Callable[[], None]) -> tuple[object, None]:
    launch()
    return SimpleNamespace(replay=launch), None


def play(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a CUDA."""
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


def by_launch(
    model: TargetModel,
    drafter: Drafter,
    shapes: Sequence[Shape],
    *,
    every: int,
    moves: bool,
    slots: int,
) -> tuple[Engine, ByLaunch, list[int], list[DraftTree]]:
    """With every graph there, in rounds of these shapes by turns. moves: rows may be moved; else
    they are loaded. Also its budget, an entry for every load, and the trees to come."""
    engine, rounds = engine_with(model, drafter, "paying", slots)
    engine.capture()
    trees: list[DraftTree] = rounds._buckets._model.trees  # type: ignore[attr-defined]
    trees.clear()
    engine.spending.free = turns = ByLaunch(shapes, every)  # type: ignore[union-attr, assignment]
    turns.rounds, load, loads = rounds, rounds._load, list[int]()
    rounds._load = lambda rows: (loads.append(1), load(rows))[1]  # type: ignore[assignment, func-returns-value]
    if not moves:
        rounds._may_move = lambda *_: False  # type: ignore[method-assign]
    return engine, turns, loads, trees


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


class ByLaunch(Turns):
    """The shape of a round follows from how many there were."""

    rounds: GraphRounds

    def width(self, rows: Sequence[int], fresh: int = 0) -> Shape:
        return self._shapes[self.rounds._count // self._every % len(self._shapes)]
