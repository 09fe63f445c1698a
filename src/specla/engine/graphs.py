# SPDX-License-Identifier: Apache-2.0
"""Rounds on a GPU: one CUDA graph per bucket of rows and nodes, replayed.

A *free* round drafts, verifies, draws, accepts and moves the cursors on the device: the host
starts the next one before it has read the last one's tokens (it is one round behind), and touches
the device again only when rows join, or leave for reasons that the host alone knows.

A *driven* round gets its trees from the host: a drafter that runs there, or a row that draws with
filters, penalties or reports, which only the host's acceptance knows. It is the same graph
without the drafting, and the host waits for it.

A row draws its tokens by one of the two acceptances throughout, whatever its neighbours do: which
one follows from its own parameters (rule I4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.drafters.base import DeviceDrafter, Drafter, FeatureDrafter, ResidentDrafter
from specla.engine.flight import Flight, to_verdict
from specla.engine.running import Running
from specla.errors import ConfigError
from specla.models.base import KernelChoice, TargetModel
from specla.models.features import Features
from specla.ops.contract import DevicePlan, DeviceRound, RowArrays
from specla.sampling.accept import Verdict
from specla.sampling.filters import is_unfiltered
from specla.sampling.triton import VERDICT_HEADER, Choices, accept, choose, new_choices
from specla.state import State
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree

MAX_HISTORY = 1 << 16
"""Tokens of a row that a device drafter can look back on."""
MAX_ENDS = 16
# As good as no limit, and what an int32 can hold.
MAX_REMAINING = 2**31 - 1
Tick = Callable[[int, int], None]


@dataclass(slots=True)
class _Round:
    """One bucket: its graphs and what they read and write. host, read, read_path: pinned.
    features: of the round's nodes, where the drafter reads them."""

    rnd: DeviceRound
    rows: RowArrays
    host: RowArrays
    verdicts: Tensor
    read: list[Tensor]
    read_path: Tensor
    graphs: dict[bool, torch.cuda.CUDAGraph]
    logits: Tensor
    features: Features | None


class GraphRounds:
    """What an engine on a GPU calls instead of draft, verify, accept and commit. kernel: what
    verifies the rounds of each bucket. width: nodes, a power of two, of the next free round over
    so many rows; None: as many as a tree may have."""

    def __init__(
        self,
        model: TargetModel,
        state: State,
        drafter: Drafter,
        *,
        kernel: KernelChoice,
        width: Callable[[int], int] | None = None,
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
        self._buckets: dict[tuple[int, int], _Round] = {}
        self._room = self._new_room()
        self._flight = Flight()
        self.resting = False
        """A drafter of the host is not asked for now: rounds of one node need no host."""
        self.features: Features | None = None
        """Of the last driven round's nodes, until the next one."""
        self._key = (1, 1)
        self.size = (1, 1)
        """Rows and nodes, as padded, of the round that was read last."""
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
                one.graphs.pop(True, None)
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
    def _drafts(self) -> bool:
        """Whether free rounds draft; a resting drafter has no part in them."""
        return isinstance(self._drafter, DeviceDrafter)

    @property
    def _looks_back(self) -> bool:
        """Whether drafting on the device reads the rows' tokens."""
        return isinstance(self._drafter, DeviceDrafter) and self._drafter.info.max_depth > 0

    def capture(self, tick: Tick | None = None) -> None:
        """Make every graph there can be, so that no round has to."""
        sizes = [1 << i for i in range(self._max_rows.bit_length())]
        nodes = [1 << i for i in range(self._max_nodes.bit_length())]
        free = isinstance(self._drafter, DeviceDrafter)
        widths = nodes if self._width else nodes[-1:]
        wanted = [(b, n, False) for b in sizes for n in (widths if free else nodes)]
        wanted += [(b, n, True) for b in sizes for n in widths if free]
        for i, (b, n, drafts) in enumerate(wanted):
            self._graph(b, n, drafts)
            if tick:
                tick(i + 1, len(wanted))

    # ---- free rounds

    def advance(self, rows: Sequence[Running]) -> list[tuple[Running, Verdict]]:
        """Start a free round over `rows` and return what the one before it came to. Where the
        rows or the number of nodes have changed, first only the latter."""
        nodes = self._width(len(rows)) if self._width and rows else self._max_nodes
        nodes = 1 if self.resting else nodes
        if not self._flight.goes_on(rows) or nodes != self._key[1]:
            ended = self.settle()
            if ended or not rows:
                return ended
            self._key = bucket(len(rows)), nodes
            self._load(rows)
            if isinstance(self._drafter, ResidentDrafter):
                self._drafter.enter([row.slot for row in rows])
        return self._launch()

    def settle(self) -> list[tuple[Running, Verdict]]:
        """Read the round under way, if there is one, and bring the host's cursors up to date."""
        ended = self._read() if self._flight.unread else []
        if self._flight.rows:
            if isinstance(self._drafter, ResidentDrafter):
                rows = self._flight.rows
                slots = [None if row.finish_reason else row.slot for row in rows]
                self._drafter.leave(slots, *self._last_round())
            self._land()
        return ended

    def _load(self, rows: Sequence[Running]) -> None:
        self._graph(*self._key, self._drafts)
        self._flight.load(rows)
        trees = [DraftTree.root(row.tokens[-1]) for row in rows]
        self._plan(rows, trees, self._key[1])
        _fill_rows(self._buckets[self._key], rows, history=True)

    def _launch(self) -> list[tuple[Running, Verdict]]:
        one = self._buckets[self._key]
        one.graphs[self._drafts].replay()
        place = self._count % 2
        one.read[place].copy_(one.verdicts, non_blocking=True)
        self._events[place].record()
        before = self._read() if self._flight.unread else []
        self._flight.unread = True
        self._count += 1
        return before

    def _read(self) -> list[tuple[Running, Verdict]]:
        place = (self._count - 1) % 2
        self._events[place].synchronize()
        self.size = self._key
        return self._flight.read(self._buckets[self._key].read[place].tolist())

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
        return self._buckets[self._key].graphs[self._drafts].replay

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
            nodes = self._max_nodes  # the only size that `capture` has made
        self.size = bucket(len(rows)), nodes
        self._graph(*self.size, False)
        one = self._buckets[self.size]
        plan = self._plan(rows, trees, nodes)
        _fill_rows(one, rows, history=False)
        one.graphs[False].replay()
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

    def _graph(self, num_rows: int, num_nodes: int, drafts: bool) -> None:
        key = (num_rows, num_nodes)
        if key not in self._buckets:
            self._buckets[key] = self._new_round(num_rows, num_nodes)
        one = self._buckets[key]
        if drafts in one.graphs:
            return
        # Idle rows: kernels compile and touch nothing.
        one.rnd.num_nodes.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._launches(one, drafts)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launches(one, drafts)
        one.graphs[drafts] = graph

    def _launches(self, one: _Round, drafts: bool) -> None:
        if drafts:
            assert isinstance(self._drafter, DeviceDrafter)
            self._drafter.launch(one.rows, one.rnd, one.features)
        plan = DevicePlan(one.rnd, (), self._kernel(*one.rnd.tokens.shape))
        one.logits = self._model.verify(plan, self._state, one.features)
        choose(one.logits, one.rows, one.rnd, self._choices)
        accept(
            self._choices, one.rows, one.rnd, one.verdicts,
            fold_threshold=self._state.fold_threshold,
        )  # fmt: skip

    def _new_round(self, num_rows: int, num_nodes: int) -> _Round:
        device = self._state.device
        rnd = self._state.rounds.round(num_rows, num_nodes)
        words = VERDICT_HEADER + num_nodes + 1
        wide = self._widest(num_rows, num_nodes)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows = RowArrays(
            seed=zeros(num_rows, dtype=torch.int64),
            len_tokens=zeros(num_rows),
            remaining=zeros(num_rows),
            temperature=zeros(num_rows, dtype=torch.float64),
            ends=zeros(num_rows, MAX_ENDS),
            history=wide.rows.history if wide else zeros(num_rows, self._history(num_nodes)),
        )
        host = [torch.zeros_like(x, device="cpu").pin_memory() for x in rows[:-1]]
        host.append(
            wide.host.history
            if wide
            else torch.zeros_like(rows.history, device="cpu").pin_memory()
        )
        return _Round(
            rnd=rnd,
            rows=rows,
            host=RowArrays(*host),
            verdicts=zeros(num_rows, words),
            read=[torch.zeros(num_rows, words, dtype=torch.int32).pin_memory() for _ in "ab"],
            read_path=torch.zeros(rnd.path.shape, dtype=torch.int32).pin_memory(),
            graphs={},
            logits=zeros(0),
            features=self._new_features(num_rows * num_nodes),
        )

    def _history(self, num_nodes: int) -> int:
        """Tokens that rounds of so many nodes can look back on."""
        return MAX_HISTORY if self._looks_back and num_nodes == self._max_nodes else 1

    def _widest(self, num_rows: int, num_nodes: int) -> _Round | None:
        """The bucket whose history narrower free rounds share."""
        if not (self._looks_back and self._width) or num_nodes == self._max_nodes:
            return None
        key = num_rows, self._max_nodes
        if key not in self._buckets:
            self._buckets[key] = self._new_round(*key)
        return self._buckets[key]

    def _new_room(self) -> Tensor | None:
        """Where features are; one round's at a time."""
        if not isinstance(self._drafter, FeatureDrafter):
            return None
        layers, most = len(self._drafter.feature_layers), self._max_rows * self._max_nodes
        width, model = self._model.info.hidden_size, self._model
        return torch.zeros(layers, most, width, dtype=model.dtype, device=model.device)

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


def is_device_row(row: Running) -> bool:
    """Whether the device's acceptance knows this row's law and ends."""
    return is_unfiltered(row.request.params) and len(row.end_token_ids) <= MAX_ENDS


def _fill_rows(one: _Round, rows: Sequence[Running], *, history: bool) -> None:
    """Through pinned memory, so that nothing waits for the device."""
    ends = [sorted(row.end_token_ids)[:MAX_ENDS] for row in rows]
    values = {
        "seed": [(row.request.seed + 2**63) % 2**64 - 2**63 for row in rows],
        "len_tokens": [len(row.tokens) for row in rows],
        "remaining": [min(row.remaining, MAX_REMAINING) for row in rows],
        "temperature": [float(row.request.params.temperature) for row in rows],
        "ends": [[*e, *[-1] * (MAX_ENDS - len(e))] for e in ends],
    }
    for name, column in values.items():
        staged: Tensor = getattr(one.host, name)
        staged[: len(rows)] = torch.tensor(column, dtype=staged.dtype)
        getattr(one.rows, name).copy_(staged, non_blocking=True)
    if history:
        for row, device, staged in zip(rows, one.rows.history, one.host.history, strict=False):
            tokens = torch.tensor(row.tokens[: staged.shape[0]], dtype=torch.int32)
            # Row by row: a copy of part of a matrix would not stay in pinned memory.
            staged[: len(tokens)] = tokens
            device[: len(tokens)].copy_(staged[: len(tokens)], non_blocking=True)
