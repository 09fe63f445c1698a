# SPDX-License-Identifier: Apache-2.0
"""Prices: what rounds of one engine cost, for the budget (`drafters.choose.RoundCosts`).

With a cost table they are the measured ones. Without, they are a guess that is good enough to
switch off what does not pay, and how long a unit of it takes is learned from the rounds
themselves. On a CPU a round costs `FIXED` nodes for reading the weights and one for every node,
as the demo model on one thread does; on a GPU what a model of 1.3B on an H200 does (`ROUNDS`),
and between those sizes what a straight line gives (docs/guide/budget.md).
Drafting on the device is taken to cost what reading its weights does, and its launches.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping
from functools import cache

from specla.config import Mode
from specla.engine.cost import CostTable
from specla.engine.kernels import Kernels
from specla.errors import ConfigError
from specla.state.rounds import bucket

FIXED = 22.0
# Microseconds by rows and nodes, without the drafter: of rounds of 16/6, 8/6, 4/3, 4/2 and 2/1
# (nodes, depth) less what their levels took by `LAUNCHES` and `WIDER_LEVELS`; of 2 and 4 nodes for
# many rows between what they take with equally long logs and with logs of all lengths.
ROUNDS: Mapping[int, Mapping[int, float]] = {
    1: {1: 943.0, 2: 954.0, 8: 1048.0, 16: 1121.0},
    16: {1: 1347.0, 2: 1347.0, 4: 1530.0, 8: 2029.0},
    64: {1: 2434.0, 2: 2550.0, 4: 3540.0, 8: 5907.0},
}
# What launching a level of drafts takes, in plain steps: ten kernels of a chain of three hundred,
# which wait for each other more than for memory. A level of drafts took 39 us of 965.
LAUNCHES = 0.025
# So much more in steps of as many rows takes a level with each doubling of the rows: 16 rows' took
# 100 us of 1,425, 64 rows' 205 of 2,440.
WIDER_LEVELS = 0.17
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
        self._level = level
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
        """Verifying and accepting, in microseconds; in units of the guess until it has seen a
        round."""
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
        each = (self._level + LAUNCHES) * (1 + WIDER_LEVELS * math.log2(bucket(rows)))
        return (depth + 1) * each * self.round_us(rows, 1)

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
            return _round_of(bucket(rows), bucket(nodes))
        return FIXED + rows * nodes


@cache
def _round_of(rows: int, nodes: int) -> float:
    """Microseconds, between the sizes of `ROUNDS` and past them on straight lines."""
    return _on_line({r: _on_line(by_nodes, nodes) for r, by_nodes in ROUNDS.items()}, rows)


def _on_line(values: Mapping[int, float], x: int) -> float:
    xs = sorted(values)
    i = min(max(bisect(xs, x), 1), len(xs) - 1)
    before, after = xs[i - 1], xs[i]
    share = (x - before) / (after - before)
    return values[before] + share * (values[after] - values[before])
