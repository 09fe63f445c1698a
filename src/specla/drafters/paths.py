# SPDX-License-Identifier: Apache-2.0
"""How far accepted paths went, which is all that the host sees of rounds that draft on the device.

Over all rows, by depth (`Paths`); and of each row, beside the others of its rounds (`RowPaths`):
one text is easier than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Rounds after which what a row accepted weighs 1/e; accepted drafts that stand for "as others".
ROW_WINDOW, ROW_WEIGHT = 64, 3.0


class Paths:
    """Decayed, by depth from 1 on: paths that might have reached it, having reached the one before
    in a round that drafted so deep, and those that did."""

    def __init__(self, deepest: int) -> None:
        self.seen, self.reached = [0.0] * deepest, [0.0] * deepest

    def fade(self, keep: float) -> None:
        """Older by as much."""
        self.seen = [keep * x for x in self.seen]
        self.reached = [keep * x for x in self.reached]

    def add(self, came: Sequence[int], weight: float) -> None:
        """A round's paths, each of that weight: how many came to depth 0, 1, ... as it drafted."""
        for i, (before, after) in enumerate(pairwise(came)):
            self.seen[i] += weight * before
            self.reached[i] += weight * after

    def rates(self, starts: Sequence[float] | float, weight: float) -> list[float]:
        """Odds of each step. starts: those before anything was seen here, which weigh `weight`
        paths; a number: of the first step, and then those of the step before."""
        rates: list[float] = []
        for i, (seen, reached) in enumerate(zip(self.seen, self.reached, strict=True)):
            before = starts if isinstance(starts, float) else starts[i]
            if rates and isinstance(starts, float):
                before = rates[-1]
            rates.append((reached + weight * before) / (seen + weight))
        return rates


class RowPaths:
    """Decayed, by slot: drafts accepted, and those that rows of the same rounds came to."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[float, float]] = {}

    def add(self, slots: Sequence[int], reached: Sequence[int]) -> None:
        """A round: how deep each row's path went."""
        keep, mean = 1 - 1 / ROW_WINDOW, sum(reached) / len(reached)
        for slot, depth in zip(slots, reached, strict=True):
            own, others = self._rows.get(slot, (0.0, 0.0))
            self._rows[slot] = (keep * own + depth, keep * others + mean)

    def forget(self, slot: int) -> None:
        """Its text has ended."""
        self._rows.pop(slot, None)

    def tokens(self, slots: Sequence[int], accepted: float, depth: int) -> float:
        """Tokens a round of trees so deep, of which paths accept so many drafts over all rows. The
        harmonic mean over these rows: its inverse is what a token takes, on average over them."""
        each = (1 / (1 + min(depth, accepted * self._ratio(slot))) for slot in slots)
        return len(slots) / sum(each)

    def _ratio(self, slot: int) -> float:
        own, others = self._rows.get(slot, (0.0, 0.0))
        return (own + ROW_WEIGHT) / (others + ROW_WEIGHT)
