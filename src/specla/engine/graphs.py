# SPDX-License-Identifier: Apache-2.0
"""Rounds on a GPU: one CUDA graph per bucket of rows and nodes, replayed.

A *free* round drafts, verifies, draws, accepts and moves the cursors on the device: the host
starts the next one before it has read the last one's tokens (it is one round behind), and touches
the device again only when rows join, or leave for reasons that the host alone knows.

A free round that does not draft leaves out the drafter: one that reads features is fed with many
of them at once (`engine.resting`). A row that is alone stays where it is meanwhile, if its drafter
can catch up with it there.

A *driven* round gets its trees from the host: a drafter that runs there, or a row that draws with
filters, penalties or reports, which only the host's acceptance knows. It is the same graph
without the drafting, and the host waits for it.

A row draws its tokens by one of the two acceptances throughout, whatever its neighbours do: which
one follows from its own parameters (rule I4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    FeatureDrafter,
    PatientDrafter,
    ResidentDrafter,
    Shape,
    shapes,
)
from specla.engine.device_rows import BucketRound, fill_rows, is_device_row, new_bucket, new_pair
from specla.engine.flight import Flight, to_verdict
from specla.engine.resting import Resting
from specla.engine.running import Running
from specla.errors import ConfigError
from specla.models.base import KernelChoice, TargetModel
from specla.models.features import Features
from specla.ops.capture import captured
from specla.ops.contract import DevicePlan, DeviceRound, RowArrays
from specla.sampling.accept import Verdict
from specla.sampling.triton import Choices, accept, choose, new_choices
from specla.state import State
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree

MAX_HISTORY = 1 << 16
"""Tokens of a row that a device drafter can look back on."""
PLAIN = Shape(1, 0)
TAKES_IN = -1
"""In place of a depth: a drafter takes in what was accepted, and that is all."""
Tick = Callable[[int, int], None]


class GraphRounds:
    """What an engine on a GPU calls instead of draft, verify, accept and commit. kernel: what
    verifies the rounds of each bucket. width: the shape of the next free round over so many rows,
    so many of them without output; None: as many nodes as a tree may have, as deep as it goes."""

    def __init__(
        self,
        model: TargetModel,
        state: State,
        drafter: Drafter,
        *,
        kernel: KernelChoice,
        width: Callable[[int, int], Shape] | None = None,
    ) -> None:
        self._width = width
        self._model, self._state, self._drafter = model, state, drafter
        self._max_rows = bucket(state.pool.num_slots)
        self._max_nodes = bucket(state.max_nodes)
        self._kernel = kernel
        model.reserve(self._max_rows * self._max_nodes)
        self._choices: Choices = new_choices(
            self._max_rows * self._max_nodes, model.info.vocab_size, state.device
        )
        self._buckets: dict[tuple[int, int], BucketRound] = {}
        # By number of rows: on the device, and as the host fills them.
        self._arrays: dict[int, tuple[RowArrays, RowArrays]] = {}
        self._room = self._new_room()
        self._resting = None if self._room is None else Resting(self._room, self._max_rows)
        self._stays = False
        self._flight = Flight()
        self.resting = False
        """A drafter of the host is not asked for now: rounds of one node need no host."""
        self.features: Features | None = None
        """Of the last driven round's nodes, until the next one."""
        # Of the next launch, and of the last.
        self._key, self._depth = (1, 1), 0
        self._launched = self._key, self._depth
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
            for one in self._buckets.values():
                one.graphs = {d: graph for d, graph in one.graphs.items() if not d}
        if isinstance(drafter, ResidentDrafter) or not isinstance(drafter, DeviceDrafter):
            self._drafter = drafter

    # ---- choosing between the two

    def is_free(self, rows: Sequence[Running]) -> bool:
        """Whether these rows' rounds need no host. The device may be a round ahead of it."""
        if not (isinstance(self._drafter, DeviceDrafter) or self.resting):
            return False
        longest = max((len(row.tokens) for row in rows), default=0) + self._max_nodes
        fits = longest <= MAX_HISTORY or not self._looks_back
        return fits and all(map(is_device_row, rows))

    @property
    def _looks_back(self) -> bool:
        """Whether drafting on the device reads the rows' tokens."""
        drafter = self._drafter
        if isinstance(drafter, FeatureDrafter) or not isinstance(drafter, DeviceDrafter):
            return False
        return drafter.info.max_depth > 0

    def capture(self, tick: Tick | None = None) -> None:
        """Make every graph there can be, so that no round has to."""
        sizes = [1 << i for i in range(self._max_rows.bit_length())]
        wanted = [(b, shape) for b in sizes for shape in self._shapes()]
        if self._width and isinstance(self._drafter, PatientDrafter):
            wanted.append((1, Shape(1, TAKES_IN)))
        for i, (b, shape) in enumerate(wanted):
            self._graph(b, shape)
            if tick:
                tick(i + 1, len(wanted))

    def _shapes(self) -> list[Shape]:
        """Of all rounds that can come, driven ones too."""
        nodes = [1 << i for i in range(self._max_nodes.bit_length())]
        if not isinstance(self._drafter, DeviceDrafter):
            return [Shape(n, 0) for n in nodes]
        free = list(shapes(self._drafter, self._max_nodes)) if self._width else [self._widest]
        return list(dict.fromkeys([*(Shape(shape.nodes, 0) for shape in free), *free]))

    @property
    def _widest(self) -> Shape:
        assert isinstance(self._drafter, DeviceDrafter)
        depth = self._drafter.depths(self._max_nodes)[-1]
        return Shape(self._max_nodes, depth) if depth else PLAIN

    # ---- free rounds

    def advance(self, rows: Sequence[Running]) -> list[tuple[Running, Verdict]]:
        """Start a free round over `rows` and return what the one before it came to. Where the
        rows have changed, or the shape to one that they must be loaded for, first only the
        latter."""
        shape = self._next_shape(rows)
        if not self._flight.goes_on(rows) or not self._goes_on_in(shape):
            ended = self.settle()
            if ended or not rows:
                return ended
            self._key, self._depth = (bucket(len(rows)), shape.nodes), shape.depth
            self._load(rows)
            if resident := self._resident:
                resident.enter([row.slot for row in rows])
        return self._launch()

    def _goes_on_in(self, shape: Shape) -> bool:
        """Take this shape, if the device can go on in it with the rows that it has: graphs over
        one row's nodes have the same memory, those over several rows' only to other depths. A
        drafter that reads features must be one that stays with its row while it rests."""
        before, wanted = Shape(self._key[1], self._depth), (self._key[0], shape.nodes)
        if shape != before:
            alike = self._key[0] == 1 or shape.nodes == before.nodes
            drafts = shape.depth and before.depth
            goes = drafts or self._stays or not isinstance(self._drafter, FeatureDrafter)
            if not (alike and goes and shape.depth in self._graphs_of(*wanted)):
                return False
            if self._stays and not drafts:
                self._turn(shape)
        self._key, self._depth = wanted, shape.depth
        return True

    def _turn(self, shape: Shape) -> None:
        """A drafter that stays with its row rests from here on, or no longer."""
        assert self._resting is not None
        if shape.depth:
            # The last round is under way: the next launch takes it in.
            self._feed([], self._resting.count - 1)
        else:
            # What was accepted last, before other features are where its are.
            self._buckets[1, 1].graphs[TAKES_IN].replay()
        self._resting.count = 0

    def _next_shape(self, rows: Sequence[Running]) -> Shape:
        if self.resting or not rows:
            return PLAIN
        fresh = sum(row.is_fresh for row in rows)
        return self._width(len(rows), fresh) if self._width else self._widest

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
            self._resting.count = 0
        self._stays = self._key[0] == 1 and TAKES_IN in self._graphs_of(1, 1)
        self._graph(self._key[0], Shape(self._key[1], self._depth))
        self._flight.load(rows)
        trees = [DraftTree.root(row.tokens[-1]) for row in rows]
        self._plan(rows, trees, self._key[1])
        fill_rows(self._buckets[self._key], rows, history=True)

    def _launch(self) -> list[tuple[Running, Verdict]]:
        last = self._launched
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
        self._launched = self._key, self._depth
        one.graphs[self._depth].replay()
        one.read[place].copy_(one.verdicts, non_blocking=True)
        self._events[place].record()

    def _read(self, launched: tuple[tuple[int, int], int]) -> list[tuple[Running, Verdict]]:
        """The round before the one that is counted next, of that size and depth."""
        place = (self._count - 1) % 2
        self._events[place].synchronize()
        self.size, self.depth = launched
        return self._flight.read(self._buckets[self.size].read[place].tolist())

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
            nodes = self._widest.nodes  # the only size that `capture` has made
        self.size = bucket(len(rows)), nodes
        self._graph(self.size[0], Shape(nodes, 0))
        one = self._buckets[self.size]
        plan = self._plan(rows, trees, nodes)
        fill_rows(one, rows, history=False)
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

    # ---- graphs

    def _graphs_of(self, num_rows: int, nodes: int) -> Iterable[int]:
        """The depths of those that there are."""
        return self._buckets[num_rows, nodes].graphs if (num_rows, nodes) in self._buckets else ()

    def _graph(self, num_rows: int, shape: Shape) -> None:
        key, depth = (num_rows, shape.nodes), shape.depth
        if key not in self._buckets:
            self._buckets[key] = self._new_round(*key)
        one = self._buckets[key]
        if depth in one.graphs:
            return
        # Idle rows: kernels compile and touch nothing.
        one.rnd.num_nodes.zero_()
        one.graphs[depth], _ = captured(lambda: self._launches(one, depth))

    def _launches(self, one: BucketRound, depth: int) -> None:
        if depth:
            assert isinstance(self._drafter, DeviceDrafter)
            self._drafter.launch(one.rows, one.rnd, one.features, depth=max(0, depth))
        if depth == TAKES_IN:
            return
        plan = DevicePlan(one.rnd, (), self._kernel(*one.rnd.tokens.shape))
        one.logits = self._model.verify(plan, self._state, one.features)
        if self._resting is not None and not depth and one.rnd.tokens.shape[1] == 1:
            self._resting.keep(one)
        choose(one.logits, one.rows, one.rnd, self._choices)
        accept(
            self._choices, one.rows, one.rnd, one.verdicts,
            fold_threshold=self._state.fold_threshold,
        )  # fmt: skip

    def _new_round(self, num_rows: int, num_nodes: int) -> BucketRound:
        rnd = self._state.rounds.round(num_rows, num_nodes)
        features = self._new_features(num_rows * num_nodes)
        return new_bucket(rnd, self._rows_of(num_rows), features)

    def _rows_of(self, num_rows: int) -> tuple[RowArrays, RowArrays]:
        """On the device, and as the host fills them; every shape's are the same."""
        if num_rows not in self._arrays:
            history = MAX_HISTORY if self._looks_back else 1
            self._arrays[num_rows] = new_pair(num_rows, history, self._state.device)
        return self._arrays[num_rows]

    def _new_room(self) -> Tensor | None:
        """Where features are; one round's at a time."""
        if not isinstance(self._drafter, FeatureDrafter):
            return None
        layers, most = len(self._drafter.feature_layers), self._max_rows * self._max_nodes
        like = torch.zeros((), dtype=self._model.dtype, device=self._model.device)
        return like.new_zeros(layers, most, self._model.info.hidden_size)

    def _new_features(self, num_flat: int) -> Features | None:
        if self._room is None or not isinstance(self._drafter, FeatureDrafter):
            return None
        return Features(self._drafter.feature_layers, self._room[:, :num_flat])

    def _plan(
        self, rows: Sequence[Running], trees: Sequence[DraftTree], num_nodes: int
    ) -> DevicePlan:
        slots = [row.slot for row in rows]
        logs = [self._state.logs[slot] for slot in slots]
        return self._state.rounds.plan(slots, logs, trees, num_nodes=num_nodes)
