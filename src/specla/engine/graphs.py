# SPDX-License-Identifier: Apache-2.0
"""Rounds on a GPU: one CUDA graph per bucket of rows and nodes, replayed.

A *free* round drafts, verifies, draws, accepts and moves the cursors on the device: the host
starts the next one before it has read the last one's tokens (it is one round behind). Where rows
join or end, or rounds change their shape, the device rearranges what it has (`engine.moving`); the
host loads it anew only when rows leave for reasons that it alone knows.

A free round that does not draft leaves out the drafter: one that reads features is fed with many
of them at once (`engine.resting`). Its rows stay where they are meanwhile, if it can catch up with
them there.

A *driven* round gets its trees from the host: a drafter that runs there, or a row that draws with
filters, penalties or reports, which only the host's acceptance knows. It is the same graph
without the drafting, and the host waits for it.

A row draws its tokens by one of the two acceptances throughout, whatever its neighbours do: which
one follows from its own parameters (rule I4).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    FeatureDrafter,
    PatientDrafter,
    ResidentDrafter,
    Shape,
)
from specla.engine.buckets import MAX_HISTORY, PLAIN, TAKES_IN, Buckets, Key, Tick, taking_in
from specla.engine.device_rows import fill_rows, is_device_row
from specla.engine.flight import Flight, to_verdict
from specla.engine.moving import clear, join, move
from specla.engine.resting import Resting
from specla.engine.running import Running
from specla.errors import ConfigError
from specla.models.base import KernelChoice, TargetModel
from specla.models.features import Features
from specla.ops.contract import DeviceRound
from specla.sampling.accept import Verdict
from specla.state import State
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree


class Launch(NamedTuple):
    """A free round. rows: by place, as they were then."""

    key: Key
    depth: int
    rows: Sequence[Running]


class GraphRounds:
    """What an engine on a GPU calls instead of draft, verify, accept and commit. kernel: what
    verifies the rounds of each bucket. width: the shape of the next free round over these rows;
    None: as many nodes as a tree may have, as deep as it goes."""

    def __init__(
        self,
        model: TargetModel,
        state: State,
        drafter: Drafter,
        *,
        kernel: KernelChoice,
        width: Callable[[Sequence[Running]], Shape] | None = None,
    ) -> None:
        self._width, self._state, self._drafter = width, state, drafter
        self._buckets = Buckets(model, state, drafter, kernel=kernel, chooses=width is not None)
        self._resting: Resting | None = self._buckets.resting
        self._max_nodes = bucket(state.max_nodes)
        # Whether the drafter stays with the rows that the device has while it rests.
        self._stays = False
        self._flight = Flight()
        self.resting = False
        """A drafter of the host is not asked for now: rounds of one node need no host."""
        self.features: Features | None = None
        """Of the last driven round's nodes, until the next one."""
        # Of the next launch; and the last.
        self._key, self._depth = (1, 1), 0
        self._launched = Launch(self._key, 0, ())
        self.size, self.depth = (1, 1), 0
        """Rows and nodes, as padded, of the round that was read last; what it drafted to."""
        self._count = 0
        self._events = [torch.cuda.Event(), torch.cuda.Event()]

    def use(self, drafter: Drafter) -> None:
        """Draft with this one from now on: built as the one before was. What its launches do is
        in the graphs, so one that only launches stays, and one that keeps rows gets new graphs.

        Raises:
            ConfigError: it is of another kind, or reads other features.
        """
        before = self._drafter
        layers = [getattr(one, "feature_layers", ()) for one in (before, drafter)]
        if type(drafter) is not type(before) or layers[0] != layers[1]:
            raise ConfigError(
                f"an engine on a GPU must stay with drafters of one kind, {before.info.name}, for "
                f"which its graphs were made; got {drafter.info.name}; make another engine"
            )
        if isinstance(drafter, ResidentDrafter):
            self._buckets.drop()
        if isinstance(drafter, ResidentDrafter) or not isinstance(drafter, DeviceDrafter):
            self._drafter = self._buckets.drafter = drafter

    def capture(self, tick: Tick | None = None) -> None:
        """Make every graph there can be, so that no round has to."""
        self._buckets.capture(tick)

    def is_free(self, rows: Sequence[Running]) -> bool:
        """Whether these rows' rounds need no host. The device may be a round ahead of it."""
        if not (isinstance(self._drafter, DeviceDrafter) or self.resting):
            return False
        longest = max((len(row.tokens) for row in rows), default=0) + self._max_nodes
        fits = longest <= MAX_HISTORY or not self._buckets.looks_back
        return fits and all(map(is_device_row, rows))

    @property
    def is_idle(self) -> bool:
        """Whether the device has no rows."""
        return not self._flight.rows

    # ---- free rounds

    def advance(self, rows: Sequence[Running]) -> list[tuple[Running, Verdict]]:
        """Start a free round over `rows` and return what the one before it came to. Where the
        device must be loaded for that, first only the latter."""
        shape = self._next_shape(rows)
        if not self._goes_on(rows, shape):
            ended = self.settle()
            if ended or not rows:
                return ended
            self._key, self._depth = (bucket(len(rows)), shape.nodes), shape.depth
            self._load(rows)
            if resident := self._resident:
                resident.enter([row.slot for row in rows])
        return self._launch()

    def _goes_on(self, rows: Sequence[Running], shape: Shape) -> bool:
        """Take these rows and this shape, if the device has them and can go on so."""
        found = self._flight.places(rows)
        if found is None:
            return False
        places, joining = found
        key = bucket(len(rows)), shape.nodes
        if joining or (key, shape.depth) != (self._key, self._depth):
            if shape.depth not in self._graphs_of(key):
                return False
            if joining or key != self._key:  # else everything is where it is for another depth
                if not self._may_move(key, shape.depth, joining):
                    return False
                self._move(places, joining, key, shape.depth)
            self._key, self._depth = key, shape.depth
        return True

    def _may_move(self, key: Key, depth: int, joining: Sequence[Running]) -> bool:
        """Whether the drafter can go along. One that reads features has its rows' last ones in
        places that follow from the bucket, and must stay with its rows while it rests."""
        if not isinstance(self._drafter, FeatureDrafter) or self._stays:
            return True
        drafts, alone = (bool(self._depth), bool(depth)), self._key[0] == key[0] == 1
        return not joining and (not any(drafts) or (all(drafts) and alone))

    def _move(
        self, places: Sequence[int], joining: Sequence[Running], key: Key, depth: int
    ) -> None:
        """The rows at these places are to go on in another bucket, or to another depth, and others
        with them. Whatever was accepted last is taken in before other features are where its are;
        where a row is alone they are always in one place."""
        alone = self._key[0] == key[0] == 1
        rests = not (self._depth or depth)
        if self._stays:
            assert isinstance(self._drafter, PatientDrafter)
            if not rests and not (alone and depth):
                self._take_in()
            elif not self._depth and depth:
                self._catch_up()
            if not alone:
                self._drafter.move(places, [row.slot for row in joining])
        if self._resting is not None:
            if not rests:
                self._resting.begin()
            elif not alone:
                self._resting.move(places, len(joining))
        if not alone:
            move(self._buckets[self._key], self._buckets[key], places)
            if joining:
                join(self._buckets[key], joining, self._state.logs, first=len(places))
        self._flight.move(places, joining)

    def _take_in(self) -> None:
        """Everything there is, by a launch of its own."""
        if not self._depth:
            self._catch_up()
        self._buckets[taking_in(self._key)].graphs[TAKES_IN].replay()

    def _catch_up(self) -> None:
        """All that was missed but the last round, which is under way: the next launch takes it
        in."""
        assert self._resting is not None
        self._feed([], self._resting.count - 1)

    def _next_shape(self, rows: Sequence[Running]) -> Shape:
        if self.resting or not rows:
            return PLAIN
        return self._width(rows) if self._width else self._buckets.widest

    @property
    def _resident(self) -> ResidentDrafter | None:
        """The drafter, if the device has what it knows of these rows."""
        drafter = self._drafter
        there = self._depth or self._stays
        return drafter if there and isinstance(drafter, ResidentDrafter) else None

    def settle(self) -> list[tuple[Running, Verdict]]:
        """Read the round under way, if there is one, and bring the host's cursors up to date."""
        ended = self._read(self._launched) if self._flight.unread else []
        if self._flight.rows:
            if self._resting is not None and self._resting.count:
                # What stays on the device leaves with the last one.
                self._feed(ended, self._resting.count - self._stays)
            if resident := self._resident:
                slots = [None if row.finish_reason else row.slot for row in self._flight.rows]
                resident.leave(slots, *self._last_round())
            self._land()
        return ended

    def _feed(self, ended: Sequence[tuple[Running, Verdict]], count: int) -> None:
        """The drafter with the first `count` rounds that it was not asked in. ended: what the
        last of them came to, where the rows do not have it yet."""
        drafter, rows, resting = self._drafter, self._flight.rows, self._resting
        assert resting is not None
        if self._stays:
            assert isinstance(drafter, PatientDrafter)
            resting.catch_up(drafter, rows, count)
        else:
            assert isinstance(drafter, FeatureDrafter)
            resting.feed(drafter, rows, ended, count)

    def _load(self, rows: Sequence[Running]) -> None:
        if self._resting is not None:
            self._resting.begin()
        self._stays = TAKES_IN in self._graphs_of((1, 1))
        self._buckets.make(self._key, self._depth)
        self._flight.load(rows)
        clear(self._buckets[self._key])
        join(self._buckets[self._key], rows, self._state.logs, first=0)

    def _launch(self) -> list[tuple[Running, Verdict]]:
        last = self._launched
        self._launched = Launch(self._key, self._depth, self._flight.rows)
        self._start()
        if self._resting is not None and not self._depth:
            self._resting.count += 1
            if self._resting.is_full:
                # Of this round and the one before nobody has read the tokens yet.
                self._feed([], self._resting.count - 2)
        before = self._read(last) if self._flight.unread else []
        self._flight.unread = True
        self._count += 1
        return before

    def _start(self) -> None:
        """The next round, and its way back."""
        one, place = self._buckets[self._key], self._count % 2
        one.graphs[self._depth].replay()
        one.read[place].copy_(one.verdicts, non_blocking=True)
        self._events[place].record()

    def _read(self, launched: Launch) -> list[tuple[Running, Verdict]]:
        """The round before the one that is counted next."""
        place = (self._count - 1) % 2
        self._events[place].synchronize()
        self.size, self.depth = launched.key, launched.depth
        words = self._buckets[launched.key].read[place].tolist()
        return self._flight.read(words, launched.rows)

    def _land(self) -> None:
        """The device moved the cursors: the host's copies follow."""
        rnd = self._buckets[self._key].rnd
        cursors = torch.stack((rnd.bank, rnd.ring_len, rnd.path_len), dim=1).tolist()
        rows = [(*row, path) for row, path in zip(cursors, rnd.path.tolist(), strict=True)]
        self._flight.land(self._state.logs, rows)

    def _last_round(self) -> tuple[DeviceRound, Features]:
        """Of the rows under way, for a drafter that reads features."""
        one = self._buckets[self._key]
        assert one.features is not None
        return one.rnd, one.features

    def _graphs_of(self, key: Key) -> Container[int]:
        return self._buckets.graphs(key)

    def replay(self) -> Callable[[], None]:
        """The graph of the last free round, for measuring."""
        return self._buckets[self._key].graphs[self._depth].replay

    # ---- driven rounds

    def drive(
        self, rows: Sequence[Running], trees: Sequence[DraftTree]
    ) -> tuple[list[Verdict | None], Tensor, tuple[int, ...]]:
        """One round over the host's trees. Returns the device's verdict for rows that it can
        judge and None for others, the logits [M, vocab], and where each row's nodes start in
        them.

        Raises:
            CapacityExceeded: a tree has more nodes than the state has room for.
        """
        self._state.check_round([row.slot for row in rows], trees)
        nodes = bucket(max(tree.num_nodes for tree in trees))
        if isinstance(self._drafter, DeviceDrafter) and not self._width:
            nodes = self._buckets.widest.nodes  # the only size that `capture` has made
        self.size = bucket(len(rows)), nodes
        self._buckets.make(self.size, 0)
        one = self._buckets[self.size]
        slots = [row.slot for row in rows]
        logs = [self._state.logs[slot] for slot in slots]
        plan = self._state.rounds.plan(slots, logs, trees, num_nodes=nodes)
        fill_rows(one.rows, rows, history=False)
        one.graphs[0].replay()
        self.features = one.features
        one.read[0].copy_(one.verdicts, non_blocking=True)
        one.read_path.copy_(one.rnd.path, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        words, paths = one.read[0].tolist(), one.read_path.tolist()
        verdicts = [
            to_verdict(line, path) if is_device_row(row) else None
            for row, line, path in zip(rows, words, paths, strict=False)
        ]
        return verdicts, one.logits, plan.offsets
