# SPDX-License-Identifier: Apache-2.0
"""The budget of rounds that draft on the device: the shape of their graphs, nodes and depth.

The host is a round behind there and never sees a tree, only how deep it was and how far its path
went. So the choice is one shape for the whole batch, made for a stretch of rounds: between two
shapes the device has to be loaded anew. It goes by how often paths reached each depth, with what
was not drafted counted as not reached; beyond the deepest depth drafted so far the last step's
odds are continued. Wider trees go further, so each number of nodes has counts of its own. They
start from, and fade to, those of all, with `WIDER` for what a width other than theirs is worth.

Switches and losslessness are those of `drafters.budget`; a stretch of one node is plain decoding,
and looking at drafts again is a short stretch of the shape that pays most easily. There are two
accounts. While drafting is on, it goes on as long as there is `credit`; while it is off every
round earns `ALLOWANCE`, and looking spends no more than that. A spell may cost more than on the
host, and gains pay for no looks: loading the device twice costs as much as ten rounds lose, so
that giving up early is dear, and what is hopeless ends with the first stretch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specla.drafters.base import Shape
from specla.drafters.budget import ALLOWANCE, SWITCH_ON
from specla.drafters.choose import RoundCosts, least_acceptance

# The accounts, in AR steps: credit at the start, at most, and to be switched on again with; what
# is saved for looking, at most.
START_CREDIT, MOST_CREDIT, RESUME_CREDIT = 8.0, 16.0, 2.0
MOST_SAVED = 2.0
# Rounds between two choices, of a look, and of the first one; a look need not see more paths.
STRETCH, LOOK, FIRST_LOOK, LOOK_PATHS = 32, 4, 8, 64
# Rounds of rows after which a count weighs 1/e.
WINDOW = 128
# Of a step before anything was seen; in rounds, what the estimate for all weighs at one size.
PRIOR_RATE, PRIOR_WEIGHT, SIZE_WEIGHT = 0.5, 4.0, 16.0
# Loading the device twice, for a look, in AR steps; where rows are the device's own, what they
# have missed is made up for as well.
LOADING, RESIDENT_LOADING = 1.0, 3.0
# Times as many misses per step in a tree twice as wide; the demo model's drafter had 10 % more
# tokens from 16 nodes than from 8.
WIDER = 0.9
# A new shape must promise this much more than the one there is.
BETTER = 1.03
PLAIN = Shape(1, 0)


class Accounts:
    """What may be lost by drafting, in AR steps (see the module). on: whether drafting is. look:
    what the next look costs; so much can be saved, however dear it is."""

    def __init__(self) -> None:
        self.on, self.switches = True, 0
        self.credit, self.saved, self.look = START_CREDIT, 0.0, 0.0

    def book(self, net: float) -> None:
        """A round emitted so much more per row than it cost."""
        if self.on:
            self.credit = min(MOST_CREDIT, self.credit + net)
        elif self.credit < RESUME_CREDIT and net >= 0:
            self.credit += ALLOWANCE + net
        else:
            self.saved = min(max(MOST_SAVED, self.look), self.saved + ALLOWANCE + net)

    @property
    def may_resume(self) -> bool:
        """Whether there is enough to switch drafting on again."""
        return self.credit >= RESUME_CREDIT

    def switch(self) -> None:
        """On or off."""
        self.on = not self.on
        self.switches += 1


class _Paths:
    """Decayed, by depth from 1 on: rounds that drafted so deep, and those that reached it."""

    def __init__(self, deepest: int) -> None:
        self.seen, self.reached = [0.0] * deepest, [0.0] * deepest

    def fade(self, keep: float) -> None:
        """Older by as much."""
        self.seen = [keep * x for x in self.seen]
        self.reached = [keep * x for x in self.reached]

    def add(self, depth: int, paths: Sequence[int], weight: float) -> None:
        """Paths of rounds that drafted to `depth`, each of that weight."""
        for i in range(depth):
            self.seen[i] += weight * len(paths)
            self.reached[i] += weight * sum(path > i for path in paths)

    def survival(self, starts: Sequence[float] | None, weight: float) -> list[float]:
        """Fraction of rounds whose path reaches each depth. starts: rates of each step before
        anything was seen here, which weigh `weight` rounds; None: the rate of the step before."""
        survival, a, rate = [], 1.0, PRIOR_RATE
        for i, (seen, reached) in enumerate(zip(self.seen, self.reached, strict=True)):
            start = a * (rate if starts is None else starts[i])
            here = min(a, (reached + weight * start) / (seen + weight))
            a, rate = here, here / a if a > 0 else 0.0
            survival.append(a)
        return survival


class FreeBudget:
    """Of one engine and one drafter.

    Args:
        shapes: of the graphs there are; plain decoding is always one of them.
        costs: of rounds.
        fixed: this one always; None: what pays.
        loading: the device twice, in AR steps.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        costs: RoundCosts,
        *,
        fixed: Shape | None = None,
        loading: float = LOADING,
    ) -> None:
        self.account = Accounts()
        self._shapes = sorted({shape for shape in shapes if shape.depth})
        self.shape = fixed or self._shapes[-1]
        self.reason, self.detail = ("fixed", f"fixed: {_named(fixed)}") if fixed else ("pays", "")
        self._costs, self._fixed, self._loading = costs, fixed is not None, loading
        self._left = 0
        deepest = max(shape.depth for shape in self._shapes)
        self._all = _Paths(deepest)
        self._own = {shape.nodes: _Paths(deepest) for shape in self._shapes}
        # By number of nodes, and the decayed mean of what was drafted.
        self._doublings = {shape.nodes: _doublings(shape) for shape in self._shapes}
        self._mean_doublings = 0.0
        # Survival by number of nodes, at the last choice.
        self._survival: dict[int, list[float]] = {}

    def width(self, rows: int) -> Shape:
        """Of the next round over so many rows."""
        if not self._fixed and self._left <= 0:
            self._decide(rows)
        return self.shape

    def survival(self, nodes: int) -> list[float]:
        """Estimated fraction of rounds of so many nodes whose path reaches each depth from 1 on,
        if drafted."""
        pooled = self._all.survival(None, PRIOR_WEIGHT)
        rates = [a / b if b > 0 else 0.0 for a, b in zip(pooled, [1.0, *pooled], strict=False)]
        misses = WIDER ** (self._doublings[nodes] - self._mean_doublings)
        wider = [max(0.0, 1 - misses * (1 - rate)) for rate in rates]
        return self._own[nodes].survival(wider, SIZE_WEIGHT)

    def expected(self, depth: int) -> float:
        """Accepted drafts expected of a tree so deep, at the last choice."""
        return sum(self._survival.get(self.shape.nodes, [])[:depth])

    def observe(self, reached: Sequence[int], emitted: Sequence[int], shape: Shape) -> None:
        """A round: how deep each row's path went, tokens it emitted."""
        if not reached:
            return
        rows = len(reached)
        if shape.depth:
            keep = (1 - 1 / WINDOW) ** rows
            other = self._doublings[shape.nodes] - self._mean_doublings
            self._mean_doublings += (1 - keep if self._all.seen[0] else 1.0) * other
            for paths in (self._all, *self._own.values()):
                paths.fade(keep)
            for paths in (self._all, self._own[shape.nodes]):
                paths.add(shape.depth, reached, WINDOW * (1 - keep) / rows)
        self.account.book(sum(emitted) / rows - self._steps(rows, shape))
        # Rounds from before the shape was changed do not count.
        self._left -= shape == self.shape
        if self.account.on and self.account.credit <= 0:
            self.account.switch()
            self._left = 0

    def _steps(self, rows: int, shape: Shape) -> float:
        """What a round costs, drafting included, in AR steps."""
        draft = self._costs.draft_us(rows, shape.nodes, depth=shape.depth) if shape.depth else 0
        us = self._costs.round_us(rows, shape.nodes) + (draft or 0.0)
        return us / self._costs.round_us(rows, 1)

    def _speed(self, rows: int, shape: Shape) -> float:
        accepted = sum(self._survival[shape.nodes][: shape.depth]) if shape.depth else 0.0
        return (1 + accepted) / self._steps(rows, shape)

    def _decide(self, rows: int) -> None:
        self._survival = {nodes: self.survival(nodes) for nodes in self._own}
        speeds = {shape: self._speed(rows, shape) for shape in (PLAIN, *self._shapes)}
        best = max(speeds, key=lambda shape: (speeds[shape], -shape.nodes, -shape.depth))
        if not self._all.seen[0]:
            self._look(rows, FIRST_LOOK, best)
            return
        resumes = speeds[best] >= SWITCH_ON and self.account.may_resume
        if speeds[best] <= 1 if self.account.on else resumes:
            self.account.switch()
        if not self.account.on:
            self._stay_off(rows)
            return
        if speeds[best] > BETTER * speeds[self.shape] or not self.shape.depth:
            self.shape = best
        self.reason, self._left = "pays", STRETCH
        self.detail = f"pays: {_named(self.shape)}, {speeds[self.shape]:.2f} of plain decoding"

    def _stay_off(self, rows: int) -> None:
        p, easiest = min(
            (least_acceptance(self._steps(rows, shape), shape.depth), shape)
            for shape in self._shapes
        )
        price = max(ALLOWANCE, self._steps(rows, easiest) - 1)
        most = int(max(MOST_SAVED - self._loading, self._loading) / price)
        rounds = max(1, min(LOOK, most))
        self.account.look = self._loading + rounds * price
        first = self._survival[easiest.nodes][0]
        if self.account.saved >= self.account.look:
            self.account.book(-self._loading)
            self._look(rows, rounds, easiest)
        else:
            self.shape, self._left, self.reason = PLAIN, LOOK, "off"
        sign = ">" if p > first else "<="
        self.detail = f"{self.reason}: break-even p {p:.2f} {sign} {first:.2f} ({_named(easiest)})"

    def _look(self, rows: int, rounds: int, shape: Shape) -> None:
        """See what drafts are worth, in rounds of some that may well pay."""
        self.shape = shape if shape.depth else self._shapes[0]
        self._left = max(1, min(rounds, LOOK_PATHS // rows))
        self.reason, self.detail = "probe", f"probe: {_named(self.shape)}"


def _doublings(shape: Shape) -> float:
    """How often a chain was doubled, to be so wide. Of shapes with as many nodes the last, and
    deepest, one counts."""
    return math.log2(max(1.0, shape.nodes / (shape.depth + 1)))


def _named(shape: Shape) -> str:
    return f"{shape.nodes} nodes, depth {shape.depth}"
