# SPDX-License-Identifier: Apache-2.0
"""Spending: an engine's budget at work. Asks the drafter for what is worth asking for, lets the
drafts through that are worth verifying, and writes down what was decided for each request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specla.config import PAYING
from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    DraftRow,
    FeatureDrafter,
    Observation,
    PatientDrafter,
    ResidentDrafter,
    Shape,
    shapes,
)
from specla.drafters.budget import Budget, Decision
from specla.drafters.budget_free import ALONE, LOADING, MOVING, RESIDENT_LOADING, FreeBudget
from specla.drafters.survival import PRIORS, Prior
from specla.engine.prices import Prices
from specla.engine.running import Running
from specla.engine.stats import Decisions
from specla.errors import ConfigError
from specla.sampling.accept import Verdict
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree


class _Why(NamedTuple):
    """Behind a round on the device. forecast: accepted drafts expected of a tree, by its depth."""

    reason: str = ""
    detail: str = ""
    forecast: tuple[float, ...] = ()


class Spending:
    """Of one engine and one drafter.

    Args:
        policy: "paying", or a number of drafts per row.
        totals: of the engine.
        on_device: the drafter also drafts there, in rounds that the host does not see.

    Raises:
        ConfigError: a number of drafts that rounds on the device cannot have.
    """

    def __init__(
        self,
        policy: str,
        drafter: Drafter,
        max_nodes: int,
        prices: Prices,
        totals: Decisions,
        *,
        on_device: bool = False,
    ) -> None:
        self.policy = policy
        fixed = None if policy == PAYING else int(policy)
        self.budget = Budget(drafter.info.name, max_nodes, prices, fixed=fixed)
        self._drafter, self._prices, self._totals = drafter, prices, totals
        self._draft_us: float | None = None
        self._decision: Decision | None = None
        self._places: dict[int, int] = {}
        self.free = _free(fixed, drafter, max_nodes, prices) if on_device else None
        # Of the round that `landed` reads next, and of the one that is launched after it.
        self._flying = self._next = _Why()

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
            place = self._places[one.slot]
            self._count(
                rows[one.slot],
                decision.reason,
                decision.detail,
                proposed=decision.proposed[place],
                chosen=one.tree.num_drafts,
                depth=one.tree.depth,
                expected=decision.expected[place],
            )

    def reset(self, slot: int) -> None:
        """Forget a row (rule I6)."""
        self.budget.reset(slot)
        if self.free is not None:
            self.free.reset(slot)

    # ---- rounds that draft on the device

    def width(self, rows: Sequence[Running]) -> Shape:
        """Of the next such round over these rows."""
        assert self.free is not None
        fresh = sum(row.is_fresh for row in rows)
        shape = self.free.width([row.slot for row in rows], fresh)
        forecast = tuple(self.free.expected(depth) for depth in range(shape.nodes))
        self._next = _Why(self.free.reason, self.free.detail, forecast)
        return shape

    def landed(self, ended: Sequence[tuple[Running, Verdict]], shape: Shape) -> None:
        """What one of that shape came to. Called after every `width`: the host is one
        round behind, and the round that was asked for there is not the one that has ended."""
        why, self._flying = self._flying, self._next
        good = [(row, verdict) for row, verdict in ended if verdict.emitted]
        if not good:
            return
        if self.free is None:
            self._rested(good)
            return
        emitted = [len(verdict.emitted) for _, verdict in good]
        reached = [verdict.num_accepted for _, verdict in good]
        self.free.observe([row.slot for row, _ in good], reached, emitted, shape)
        for row, verdict in good:
            drafted, depth = verdict.num_drafted, verdict.offered_depth
            self._count(
                row, why.reason, why.detail, proposed=drafted, chosen=drafted, depth=depth,
                expected=why.forecast[depth],
            )  # fmt: skip

    def rests(self, rows: Sequence[Running]) -> bool:
        """Whether a drafter of the host is not asked next, so that the device needs no host."""
        fresh = sum(row.is_fresh for row in rows)
        return self.free is None and self.budget.rests(len(rows), fresh)

    def _rested(self, ended: Sequence[tuple[Running, Verdict]]) -> None:
        """Such a round went by; the drafter sees a round without drafts."""
        self.budget.rested()
        detail = self.budget.why_off(len(ended))
        for row, _ in ended:
            self._count(row, "off", detail, proposed=0, chosen=0, depth=0, expected=0.0)
        self._drafter.observe(
            [
                Observation(
                    slot=row.slot,
                    tree=DraftTree.root(row.tokens[-1]),
                    path=verdict.path,
                    emitted=verdict.emitted,
                )
                for row, verdict in ended
            ]
        )

    def _count(
        self, row: Running, reason: str, detail: str, *, proposed: int, chosen: int, depth: int,
        expected: float,
    ) -> None:  # fmt: skip
        if row.decisions is None:
            row.decisions = Decisions(self.policy)
        for counts in (row.decisions, self._totals):
            counts.add(
                reason, detail, proposed=proposed, chosen=chosen, depth=depth, expected=expected
            )


def _free(fixed: int | None, drafter: Drafter, max_nodes: int, prices: Prices) -> FreeBudget:
    patient, resident = isinstance(drafter, PatientDrafter), isinstance(drafter, ResidentDrafter)
    stays = patient or not isinstance(drafter, FeatureDrafter)
    assert isinstance(drafter, DeviceDrafter)
    if fixed is not None and bucket(fixed + 1) != fixed + 1:
        raise ConfigError(
            f"a budget for drafts made on the GPU must be one below a power of two, got {fixed}; "
            f"use {bucket(fixed + 1) - 1}, or auto"
        )
    return FreeBudget(
        shapes(drafter, bucket(max_nodes)),
        prices,
        fixed=None if fixed is None else Shape(fixed + 1, drafter.depths(fixed + 1)[-1]),
        loading=MOVING if patient else RESIDENT_LOADING if resident else LOADING,
        alone=ALONE if stays else None,
        prior=PRIORS.get(drafter.info.name, Prior()).rate,
    )
