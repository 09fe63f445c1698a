# SPDX-License-Identifier: Apache-2.0
"""Spending: an engine's budget at work. Asks the drafter for what is worth asking for, lets the
drafts through that are worth verifying, and writes down what was decided for each request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from specla.config import PAYING
from specla.drafters.base import Drafter, DraftRow, Observation
from specla.drafters.budget import Budget, Decision
from specla.engine.prices import Prices
from specla.engine.running import Running
from specla.engine.stats import Decisions
from specla.topology.tree import DraftTree


class Spending:
    """Of one engine and one drafter.

    Args:
        policy: "paying", or a number of drafts per row.
        totals: of the engine.
    """

    def __init__(
        self, policy: str, drafter: Drafter, max_nodes: int, prices: Prices, totals: Decisions
    ) -> None:
        self.policy = policy
        fixed = None if policy == PAYING else int(policy)
        self.budget = Budget(drafter.info.name, max_nodes, prices, fixed=fixed)
        self._drafter, self._prices, self._totals = drafter, prices, totals
        self._draft_us: float | None = None
        self._decision: Decision | None = None
        self._places: dict[int, int] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """The drafter's trees, or node 0 alone for every row without calling it."""
        asked = self.budget.ask(rows)
        self._draft_us = None
        if not any(row.max_drafts for row in asked):
            return [DraftTree.root(row.tokens[-1]) for row in asked]
        start = time.perf_counter()
        trees = self._drafter.draft(asked)
        spent = 1e6 * (time.perf_counter() - start)
        self._draft_us = spent if self._prices.in_microseconds else 0.0
        return trees

    def choose(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Those of their drafts that are verified in this round."""
        chosen, self._decision = self.budget.choose(slots, trees, draft_us=self._draft_us)
        self._places = {slot: i for i, slot in enumerate(slots)}
        return chosen

    def observe(
        self, seen: Sequence[Observation], rows: Mapping[int, Running], round_us: float
    ) -> None:
        """What became of them. rows: by slot. round_us: of verifying and accepting."""
        decision = self._decision
        assert decision is not None, "choose() first"
        self._prices.saw(len(self._places), decision.nodes, round_us)
        self.budget.observe(seen, decision.reason)
        for one in seen:
            row, place = rows[one.slot], self._places[one.slot]
            if row.decisions is None:
                row.decisions = Decisions(self.policy)
            for counts in (row.decisions, self._totals):
                counts.add(decision, place, one.tree)

    def reset(self, slot: int) -> None:
        """Forget a row (rule I6)."""
        self.budget.reset(slot)
