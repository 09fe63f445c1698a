# SPDX-License-Identifier: Apache-2.0
"""What a run did and what it cost: phase times, rounds, acceptance by depth.

Identities that always hold, per request and in total (tests check them on every run):

    sum(histogram) == rounds      sum(i * histogram[i]) == accepted
    sum(kernels.values()) == rounds
    with a budget, sum(reasons.values()) == sum(shapes.values()) == rounds
    emitted == rounds + accepted - rounds whose path was cut by an end

A stop string is seen after the commit: it shortens the completion, not these counts. A row with
nothing to draw from is counted in the round it fails in if it emitted something there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specla.request import BudgetReport

PHASES = ("prefill", "draft", "verify", "accept", "commit")


@dataclass(slots=True)
class Acceptance:
    """Counts over rounds. histogram[i]: rounds that accepted i drafts. offered[d], taken[d]:
    rounds with a draft at depth d + 1, and those whose path reached it. Drafts past a cut are
    in none of them. kernels: rounds by the state kernel that verified them."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    histogram: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)

    def add(
        self, *, drafted: int, offered_depth: int, accepted: int, emitted: int, kernel: str
    ) -> None:
        """Count one round of one row; one that emitted nothing is none."""
        if not emitted:
            return
        self.rounds += 1
        self.kernels[kernel] = self.kernels.get(kernel, 0) + 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        _grow(self.histogram, accepted + 1)[accepted] += 1
        for depth in range(offered_depth):
            _grow(self.offered, depth + 1)[depth] += 1
            _grow(self.taken, depth + 1)[depth] += depth < accepted

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Fraction of the rounds that offered each depth in which it was accepted."""
        return tuple(t / o for t, o in zip(self.taken, self.offered, strict=True))

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted per round, the bonus included (tau)."""
        return self.emitted / self.rounds if self.rounds else 0.0


def _grow(counts: list[int], length: int) -> list[int]:
    counts.extend([0] * (length - len(counts)))
    return counts


@dataclass(slots=True)
class Decisions:
    """What a budget decided, over rounds of rows. policy: "paying", "off" or a number of drafts.

    proposed, chosen: drafts of the drafter, and those that were verified. expected: of these, how
    many were expected to be accepted. reasons: rounds by `Decision.reason`; shapes: by "none",
    "chain" or "tree". last: the latest decision in words.
    """

    policy: str = "off"
    proposed: int = 0
    chosen: int = 0
    expected: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def add(
        self, reason: str, detail: str, *, proposed: int, chosen: int, depth: int, expected: float
    ) -> None:
        """Count one round of one row. depth: of the deepest draft chosen."""
        shape = "none" if not chosen else "chain" if chosen == depth else "tree"
        self.proposed += proposed
        self.chosen += chosen
        self.expected += expected
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        self.last = detail

    def report(self) -> BudgetReport:
        """As results have it."""
        return BudgetReport(
            policy=self.policy,
            proposed=self.proposed,
            chosen=self.chosen,
            expected=self.expected,
            reasons=dict(self.reasons),
            shapes=dict(self.shapes),
            last=self.last,
        )


class EngineStats:
    """Totals of one engine since it was made."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.decisions = Decisions()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.prefill_tokens = 0
        self.steps = 0
        self.finished: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to one of PHASES."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    @property
    def round_seconds(self) -> float:
        """Of verifying and accepting, so far."""
        return self.seconds["verify"] + self.seconds["accept"]

    def summary(self) -> dict[str, object]:
        """One flat record, plain values."""
        a, d = self.acceptance, self.decisions
        return {
            **{f"{name}_s": seconds for name, seconds in self.seconds.items()},
            "steps": self.steps,
            "rounds": a.rounds,
            "drafted": a.drafted,
            "accepted": a.accepted,
            "emitted": a.emitted,
            "tokens_per_round": a.tokens_per_round,
            "acceptance_by_depth": a.by_depth,
            "acceptance_histogram": tuple(a.histogram),
            "kernels": dict(a.kernels),
            "drafts_proposed": d.proposed,
            "drafts_chosen": d.chosen,
            "accepted_expected": d.expected,
            "budget": d.policy,
            "budget_rounds": dict(d.reasons),
            "budget_shapes": dict(d.shapes),
            "prefill_tokens": self.prefill_tokens,
            "finished": dict(self.finished),
        }
