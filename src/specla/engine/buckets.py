# SPDX-License-Identifier: Apache-2.0
"""The CUDA graphs of rounds, by bucket of rows and nodes and by what is drafted, and what they
read and write. Made when first used, or all of them before."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    FeatureDrafter,
    PatientDrafter,
    Shape,
    shapes,
)
from specla.engine.device_rows import BucketRound, new_bucket, new_rows
from specla.engine.resting import Resting
from specla.models.base import KernelChoice, TargetModel
from specla.models.features import Features
from specla.ops.capture import captured
from specla.ops.contract import DevicePlan, RowArrays
from specla.sampling.triton import Choices, accept, choose, new_choices
from specla.state import State
from specla.state.rounds import bucket

MAX_HISTORY = 1 << 16
"""Tokens of a row that a device drafter can look back on."""
PLAIN = Shape(1, 0)
TAKES_IN = -1
"""In place of a depth: a drafter takes in what was accepted, and that is all."""
Key = tuple[int, int]
"""Rows and nodes, powers of two."""
Tick = Callable[[int, int], None]


class Buckets:
    """Of one engine. kernel: what verifies the rounds of each bucket. chooses: shapes of free
    rounds are chosen; else they have as many nodes as a tree may have, as deep as it goes."""

    def __init__(
        self,
        model: TargetModel,
        state: State,
        drafter: Drafter,
        *,
        kernel: KernelChoice,
        chooses: bool,
    ) -> None:
        self._model, self._state, self.drafter = model, state, drafter
        self._max_rows, self.max_nodes = bucket(state.pool.num_slots), bucket(state.max_nodes)
        self._kernel, self._chooses = kernel, chooses
        model.reserve(self._max_rows * self.max_nodes)
        self._choices: Choices = new_choices(
            self._max_rows * self.max_nodes, model.info.vocab_size, state.device
        )
        self._made: dict[Key, BucketRound] = {}
        self._arrays: dict[int, RowArrays] = {}  # by number of rows
        self._room = self._new_room()
        self.resting = None if self._room is None else Resting(self._room, self._max_rows)

    def __getitem__(self, key: Key) -> BucketRound:
        return self._made[key]

    def graphs(self, key: Key) -> Container[int]:
        """What there are graphs for: depths that are drafted to, or TAKES_IN."""
        return self._made[key].graphs if key in self._made else ()

    def drop(self) -> None:
        """Forget the graphs that a drafter is in."""
        for one in self._made.values():
            one.graphs = {d: graph for d, graph in one.graphs.items() if not d}

    def capture(self, tick: Tick | None = None) -> None:
        """Make every graph there can be, so that no round has to."""
        sizes = [1 << i for i in range(self._max_rows.bit_length())]
        wanted = [((b, shape.nodes), shape.depth) for b in sizes for shape in self._shapes()]
        if isinstance(self.drafter, PatientDrafter):
            nodes = sorted({shape.nodes for shape in self._shapes()})
            wanted += dict.fromkeys((taking_in((b, n)), TAKES_IN) for b in sizes for n in nodes)
        for i, one in enumerate(wanted):
            self.make(*one)
            if tick:
                tick(i + 1, len(wanted))

    def make(self, key: Key, depth: int) -> None:
        """A graph, unless there is one. No row may be on the device in a bucket of as many."""
        if key not in self._made:
            self._made[key] = self._new_round(*key)
        one = self._made[key]
        if depth in one.graphs:
            return
        # Idle rows: kernels compile and touch nothing.
        one.rnd.num_nodes.zero_()
        one.graphs[depth], _ = captured(lambda: self._launches(one, depth))

    @property
    def widest(self) -> Shape:
        """As many nodes as a tree may have, and as deep as it goes."""
        assert isinstance(self.drafter, DeviceDrafter)
        depth = self.drafter.depths(self.max_nodes)[-1]
        return Shape(self.max_nodes, depth) if depth else PLAIN

    @property
    def looks_back(self) -> bool:
        """Whether drafting on the device reads the rows' tokens."""
        drafter = self.drafter
        if isinstance(drafter, FeatureDrafter) or not isinstance(drafter, DeviceDrafter):
            return False
        return drafter.info.max_depth > 0

    def _shapes(self) -> list[Shape]:
        """Of all rounds that can come, driven ones too."""
        nodes = [1 << i for i in range(self.max_nodes.bit_length())]
        if not isinstance(self.drafter, DeviceDrafter):
            return [Shape(n, 0) for n in nodes]
        free = list(shapes(self.drafter, self.max_nodes)) if self._chooses else [self.widest]
        return list(dict.fromkeys([*(Shape(shape.nodes, 0) for shape in free), *free]))

    def _launches(self, one: BucketRound, depth: int) -> None:
        if depth:
            assert isinstance(self.drafter, DeviceDrafter)
            self.drafter.launch(one.rows, one.rnd, one.features, depth=max(0, depth))
        if depth == TAKES_IN:
            return
        plan = DevicePlan(one.rnd, (), self._kernel(*one.rnd.tokens.shape))
        one.logits = self._model.verify(plan, self._state, one.features)
        if self.resting is not None and not depth and one.rnd.tokens.shape[1] == 1:
            self.resting.keep(one)
        choose(one.logits, one.rows, one.rnd, self._choices)
        accept(
            self._choices, one.rows, one.rnd, one.verdicts,
            fold_threshold=self._state.fold_threshold,
        )  # fmt: skip

    def _new_round(self, num_rows: int, num_nodes: int) -> BucketRound:
        rnd = self._state.rounds.round(num_rows, num_nodes)
        features = self._new_features(num_rows * num_nodes)
        return new_bucket(rnd, self._rows_of(num_rows), features)

    def _rows_of(self, num_rows: int) -> RowArrays:
        """Every shape's are the same."""
        if num_rows not in self._arrays:
            history = MAX_HISTORY if self.looks_back else 1
            self._arrays[num_rows] = new_rows(num_rows, history, self._state.device)
        return self._arrays[num_rows]

    def _new_room(self) -> Tensor | None:
        """Where features are; one round's at a time."""
        if not isinstance(self.drafter, FeatureDrafter):
            return None
        layers, most = len(self.drafter.feature_layers), self._max_rows * self.max_nodes
        like = torch.zeros((), dtype=self._model.dtype, device=self._model.device)
        return like.new_zeros(layers, most, self._model.info.hidden_size)

    def _new_features(self, num_flat: int) -> Features | None:
        if self._room is None or not isinstance(self.drafter, FeatureDrafter):
            return None
        return Features(self.drafter.feature_layers, self._room[:, :num_flat])


def taking_in(key: Key) -> Key:
    """The bucket whose graph takes in what rounds of `key` have accepted. Where a row is alone,
    all of its nodes' buckets are alike."""
    return (1, 1) if key[0] == 1 else key
