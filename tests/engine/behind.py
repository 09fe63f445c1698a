# SPDX-License-Identifier: Apache-2.0
"""A device that the host is one round behind, played by the CPU: what the device knows of its
rows is its own, and moves when a round is launched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specla.drafters.base import Drafter, DraftRow, FeatureDrafter, Shape
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.engine.buckets import Buckets
from specla.engine.engine import Engine
from specla.engine.flight import Flight, to_verdict
from specla.engine.graphs import GraphRounds, Launch, is_device_row
from specla.engine.resting import Resting
from specla.engine.running import Running
from specla.models.features import Features
from specla.sampling.accept import RowLaw, Verdict, accept
from specla.sampling.triton import FINISH_INVALID, FINISH_LENGTH, FINISH_STOP
from specla.state.log import Log
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree

CODES = {None: 0, "stop": FINISH_STOP, "length": FINISH_LENGTH, "error": FINISH_INVALID}
Words = list[int]


@dataclass
class Place:
    """One row on the device."""

    slot: int
    log: Log
    law: RowLaw
    live: bool = True


class Behind(GraphRounds):
    """Free rounds whose bookkeeping is the engine's own, over a CPU's model and state."""

    most_rested = 5

    def __init__(self, engine: Engine) -> None:
        self._model, self._state, self._drafter = engine.model, engine.state, engine.drafter
        self._buckets = buckets = object.__new__(Buckets)
        buckets.drafter, buckets.max_nodes = engine.drafter, bucket(engine.state.max_nodes)
        buckets._made = {}
        self._max_nodes = engine.state.max_nodes
        self._flight, self._width, self._key = Flight(), None, (1, 1)
        self._max_rows, self._depth = bucket(engine.state.pool.num_slots), 0
        self._stays = False
        self._launched = Launch(self._key, 0, ())
        self._places: list[Place] = []
        self.resting = False
        self._words: list[list[Words]] = [[], []]
        self._count = 0
        self.size, self.depth = (1, 1), 0
        drafter = self._drafter
        self.features = (
            Features(drafter.feature_layers) if isinstance(drafter, FeatureDrafter) else None
        )
        self._resting = self._new_resting() if self.features else None

    @property
    def launches(self) -> int:
        """Free rounds so far."""
        return self._count

    def _load(self, rows: Sequence[Running]) -> None:
        if self._resting is not None:
            self._resting.count = 0
        self._flight.load(rows)
        logs = self._state.logs
        self._places = [
            Place(row.slot, copy(logs[row.slot]), replace(row.law(), history=list(row.tokens)))
            for row in rows
        ]
        same = isinstance(self._drafter, NgramDrafter)
        self._device_drafter: Drafter = NgramDrafter() if same else self._drafter
        if not self._depth:
            self._device_drafter = NoDrafter()

    def _graphs_of(self, key: tuple[int, int]) -> tuple[int, ...]:
        """None, so that rows are loaded for every other bucket."""
        return ()

    def _start(self) -> None:
        before = [len(place.law.history) for place in self._places]
        self._words[self._count % 2] = self._round()
        if self._resting is not None and not self._depth:
            self._keep(before)

    def _new_resting(self) -> Resting:
        assert self.features is not None
        layers, width = len(self.features.layers), self._model.info.hidden_size
        made = Resting(torch.full((layers, 1, width), float("nan")), self._max_rows)
        made.most = min(made.most, self.most_rested)
        return made

    def _keep(self, lengths: Sequence[int]) -> None:
        """As `ops.rows.keep`. lengths: by place, before the round."""
        assert self.features is not None
        assert self._resting is not None
        rows = self.features.rows().unflatten(-1, (len(self.features.layers), -1))
        for b, row in zip(self._live, rows, strict=False):
            self._resting.kept[(lengths[b] - 1) % self._resting.most, :, b] = row

    def _read(self, launched: Launch) -> list[tuple[Running, Verdict]]:
        self.size, self.depth = launched.key, launched.depth
        return self._flight.read(self._words[(self._count - 1) % 2], launched.rows)

    def _land(self) -> None:
        logs = [place.log for place in self._places]
        self._flight.land(
            self._state.logs, [(x.bank, x.ring_len, len(x.path), [*x.path, 99]) for x in logs]
        )

    def _round(self) -> list[Words]:
        words: list[Words] = [[0] * 5 for _ in self._places]
        self._live = live = [b for b, place in enumerate(self._places) if place.live]
        if not live:
            return words
        places = [self._places[b] for b in live]
        trees = self._draft(live, places)
        with self._cursors(places):
            plan = self._state.begin([place.slot for place in places], trees)
            logits = self._model.verify(plan, self._state, self.features)
        for b, place, tree, at in zip(live, places, trees, plan.offsets, strict=False):
            words[b], path = judge(logits, tree, at, place.law)
            place.log.commit(path)
            count, place.live = words[b][0], words[b][1] == 0
            assert isinstance(place.law.history, list)
            place.law.history.extend(words[b][5 : 5 + count])
            place.law = replace(place.law, remaining=place.law.remaining - count)
        return words

    def _draft(self, live: Sequence[int], places: Sequence[Place]) -> list[DraftTree]:
        return self._device_drafter.draft([self._draft_row(place) for place in places])

    def _draft_row(self, place: Place) -> DraftRow:
        law = place.law
        drafts = min(self._key[1], self._max_nodes) - 1
        if isinstance(self._device_drafter, NgramDrafter):
            drafts = min(drafts, self._depth)
        return DraftRow(
            slot=place.slot,
            tokens=law.history,
            num_prompt_tokens=law.num_prompt_tokens,
            max_drafts=0 if law.remaining == 1 else drafts,
            seed=law.seed,
        )

    @contextmanager
    def _cursors(self, places: Sequence[Place]):  # type: ignore[no-untyped-def]
        """The state sees the device's logs."""
        host = self._state.logs
        self._state.logs = list(host)
        for place in places:
            self._state.logs[place.slot] = place.log
        try:
            yield
        finally:
            self._state.logs = host

    def drive(
        self, rows: Sequence[Running], trees: Sequence[DraftTree]
    ) -> tuple[list[Verdict | None], Tensor, tuple[int, ...]]:
        """As on a GPU."""
        self.size = bucket(len(rows)), bucket(self._max_nodes)
        plan = self._state.begin([row.slot for row in rows], trees)
        logits = self._model.verify(plan, self._state, self.features)
        found = [
            to_verdict(*judge(logits, tree, at, row.law())) if is_device_row(row) else None
            for row, tree, at in zip(rows, trees, plan.offsets, strict=False)
        ]
        return found, logits, plan.offsets


def judge(
    logits: Tensor, tree: DraftTree, offset: int, law: RowLaw
) -> tuple[Words, tuple[int, ...]]:
    """What `sampling.triton.accept` writes for a row, and its path."""
    (v,) = accept(logits, [tree], [offset], [law])
    counts = len(v.emitted), CODES[v.finish], v.num_accepted, v.num_drafted, v.offered_depth
    return [*counts, *v.emitted, 99, 99], v.path


def behind(engine: Engine) -> Behind:
    """Make the engine believe that it has a GPU."""
    engine._graphs = made = Behind(engine)
    return made


class Turns:
    """A budget of rounds on the device that changes its mind every few rounds."""

    reason, detail = "pays", "pays: so it goes"

    def __init__(self, shapes: Sequence[Shape], every: int) -> None:
        self._shapes, self._every, self.seen = shapes, every, list[tuple[Shape, int]]()
        self.ended: list[int] = []

    def width(self, rows: Sequence[int], fresh: int = 0) -> Shape:
        return self._shapes[len(self.seen) // self._every % len(self._shapes)]

    def observe(
        self, slots: Sequence[int], reached: Sequence[int], emitted: Sequence[int], shape: Shape
    ) -> None:
        self.seen.append((shape, max(reached)))

    def expected(self, depth: int) -> float:
        return 0.5 * depth

    def reset(self, slot: int) -> None:
        self.ended.append(slot)
