# SPDX-License-Identifier: Apache-2.0
"""Prices: what rounds of one engine cost, for the budget (`drafters.choose.RoundCosts`).

With a cost table they are the measured ones. Without, they are a guess that is good enough to
switch off what does not pay: a round costs `FIXED` nodes for reading the weights, `PER_ROW` for a
row's state and one for every node, and how long that takes is learned from the rounds themselves.
They are what the demo model on one CPU thread and a model of 1.3 B parameters on an H200, 1 to 64
rows of 1 to 32 nodes, came to (docs/guide/budget.md).
Drafting on the device is taken to cost what reading its weights does, and its launches.
"""

from __future__ import annotations

from specla.config import Mode
from specla.engine.cost import CostTable
from specla.engine.kernels import Kernels
from specla.errors import ConfigError
from specla.state.rounds import bucket

# Of rounds of one node, and of more; and of a row of one node, whose states stream past, and of
# more.
FIXED = {"cpu": (22.0, 22.0), "cuda": (100.0, 105.0)}
PER_ROW = {"cpu": (0.0, 0.0), "cuda": (0.75, 1.3)}
# What launching a level of drafts takes, in plain steps: ten kernels of a chain of three hundred,
# which wait for each other more than for memory. A level of drafts took 37 us of 966.
LAUNCHES = 0.023
# Rounds that the time of a node is averaged over.
WINDOW = 16


class Prices:
    """Args:
    kernels: which kernel verifies, and the table.
    device: "cpu", where rows cost their own nodes, or "cuda", where they are padded.
    drafter: as the table names it (`DrafterInfo.priced_as`).
    level: bytes of weights that a level of drafts on the device reads, over the target's; 0: it
        is next to nothing, or not known.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        mode: Mode | str,
        device: str,
        drafter: str,
        level: float = 0.0,
    ) -> None:
        self.padded = device == "cuda"
        self._table: CostTable | None = kernels.costs
        self._kernels, self._mode, self._drafter = kernels, mode, drafter
        self._fixed, self._per_row, self._level = FIXED[device], PER_ROW[device], level
        self._node_us = 0.0
        # Look-ups, as a budget asks for the same few again and again while the device runs on.
        self._known: dict[tuple[int, int, int | None], float] = {}
        self._drafts: dict[tuple[int, int, int | None], float | None] = {}

    @property
    def source(self) -> str:
        """ "measured" or "default", as results say it."""
        return self._kernels.source

    @property
    def in_microseconds(self) -> bool:
        """Whether it is known yet how long a node takes."""
        return self._table is not None or self._node_us > 0

    def round_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float:
        """Verifying and accepting, in microseconds; in nodes until a guess has seen a round."""
        if self._table is None:
            return self._guess(rows, nodes) * (self._node_us or 1.0)
        key = rows, nodes, depth
        if key not in self._known:
            self._known[key] = self._table.round_us(
                rows, nodes, depth=depth, mode=self._mode, kernel=self._kernels.of(rows, nodes)
            )
        return self._known[key]

    def draft_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float | None:
        """One call of the drafter, if that was measured; to a known depth on the device also what
        it is taken for."""
        measured = self._measured(rows, nodes, depth)
        if measured is not None:
            return measured
        if depth is None or not self._level:
            return None
        # Encoding what was accepted is about one level more.
        return (depth + 1) * (self._level + LAUNCHES) * self.round_us(rows, 1)

    def _measured(self, rows: int, nodes: int, depth: int | None) -> float | None:
        """A call of the drafter, from the table."""
        if self._table is None:
            return None
        key = rows, nodes, depth
        if key not in self._drafts:
            try:
                self._drafts[key] = self._table.draft_us(
                    rows, nodes, self._drafter, depth=depth, mode=self._mode
                )
            except ConfigError:
                self._drafts[key] = None
        return self._drafts[key]

    def saw(self, rows: int, nodes: int, us: float) -> None:
        """A round took so long; measured costs do not need to know. One that was interrupted
        counts as four times the usual."""
        if self._table is not None:
            return
        here = us / self._guess(rows, nodes)
        before = self._node_us or here
        self._node_us = before + (min(here, 4 * before) - before) / WINDOW

    def _guess(self, rows: int, nodes: int) -> float:
        if self.padded:
            rows, nodes = bucket(rows), bucket(nodes)
        return self._fixed[nodes > 1] + rows * (self._per_row[nodes > 1] + nodes)
