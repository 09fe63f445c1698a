# SPDX-License-Identifier: Apache-2.0
"""The budget of rounds that draft on the device: the shape of their graphs, nodes and depth.

The host is a round behind there and never sees a tree, only how deep it was and how far its path
went. So the choice is one shape for the whole batch, made for a stretch of rounds: going to
another one costs something, loading the device anew where rows cannot be moved. It goes by how
often paths went a step further, with what was not drafted counted as not gone; where none came so
far yet the odds of the step before are continued. Wider trees go further, so each number of nodes
has counts of its own. They start from, and fade to, those of all, with `WIDER` for what a width
other than theirs is worth.

What pays is what leaves the rows less time for a token, on average over them, and not what makes
most tokens in all: a row whose drafts fail waits in every round for those whose drafts do not
(`RowPaths`). Played with an H200's prices, eight texts at once of which four are hopeless: 0.93 of
plain decoding until the last has ended, where most tokens in all come to 0.88, and 1.30 for 1.26
on average until each has; sixteen 0.95 for 0.92. Where all rows are alike nothing changes.

The first shape is what pays best if the drafter is as good as its prior says, since a wide tree
also shows most of what others would come to; stretches begin with two rounds and double.

Switches and losslessness are those of `drafters.budget`; a stretch of one node is plain decoding,
and looking at drafts again is a short stretch of the shape that pays most easily. There are three
accounts. While drafting is on, it goes on as long as there is `credit`, which outlives texts, and
as long as the texts that there are have not lost more than `STAKE` altogether; while it is off
every round earns `ALLOWANCE`, and looking spends no more than that. Where drafting has lost its
stake, it is for a look to say when it pays again, or for a fresh text, which begins with what the
ones before it came to. A spell may cost more than on the host, and gains pay for no looks: loading
the device costs as much as ten rounds lose, so that giving up early is dear.

A row that is alone goes from shape to shape where it is, which costs next to nothing. There a
shape is drafted for only while the account can pay for `REACH` rounds of it that bring nothing,
besides the one under way: the less is left, the cheaper are the shapes that a text is tried with.
Two wide trees and ten chains of one draft lose as much as four wide trees, and tell a text that
pays a little from one that does not. A fresh text is looked at even if that was not earned yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specla.drafters.base import Shape
from specla.drafters.budget import ALLOWANCE, STAKE
from specla.drafters.choose import RoundCosts, least_acceptance
from specla.drafters.paths import Paths, RowPaths
from specla.state.rounds import bucket

# The accounts, in AR steps: credit at the start, at most, and to be switched on again with; what
# a text may have gained, at most; what is saved for looking, at most.
START_CREDIT, MOST_CREDIT, RESUME_CREDIT = 8.0, 16.0, 2.0
MOST_GAINED, MOST_SAVED = 8.0, 2.0
# Rounds between two choices, at most and at first; of a look, and of the first one where nothing
# is expected to pay. A look need not see more paths.
STRETCH, FIRST_STRETCH = 32, 2
STRETCH_ALONE = 4
LOOK, FIRST_LOOK, LOOK_PATHS = 4, 8, 64
# Rounds of rows after which a count weighs 1/e; what counts weigh where they misled, at most.
WINDOW, DOUBTED = 128, 8.0
# Of a step before anything was seen; in rounds, what that weighs, and at one size the estimate
# for all.
PRIOR_RATE, PRIOR_WEIGHT, SIZE_WEIGHT = 0.5, 4.0, 16.0
# What is saved for a look besides its rounds, in AR steps: loading the device twice, without and
# with rows that a drafter keeps there; and where it moves them instead (ADR 0022), moving them
# twice and what they have missed. That is 0.6 of 16 or 64 rows; played, 1.0 makes batches lose
# 0.975 instead of 0.98 that drafts never pay for, and 4.0 finds out late that they do again.
LOADING, RESIDENT_LOADING, MOVING = 1.0, 4.0, 1.5
# The same where a row is alone and stays where it is: a drafter takes in what was accepted last,
# and catches up; rounds of a look there.
ALONE, LOOK_ALONE = 0.15, 3
# What a fresh text that is alone may lose; rounds of a shape that must be affordable; what a look
# at a fresh text may go into debt for.
STAKE_ALONE, REACH, MOST_DEBT = 1.5, 2.0, 0.6
# Times as many misses per step in a tree twice as wide: an EAGLE drafter's of 16 nodes had 0.65
# times those of its chain, the demo model's 10 % more tokens from 16 nodes than from 8.
WIDER = 0.75
# Speed over plain decoding that a shape must promise for drafting to be switched on again, and the
# least with which it stays on.
SWITCH_ON, STAY_ON = 1.05, 0.97
# A new shape must promise this much more than the one there is.
BETTER, BETTER_ALONE = 1.03, 1.01
PLAIN = Shape(1, 0)


class Accounts:
    """What may be lost by drafting, in AR steps (see the module). on: whether drafting is. look:
    what the next look costs; so much can be saved, however dear it is. doubted: drafting has lost
    its stake, and nothing has spoken for it since."""

    def __init__(self) -> None:
        self.on, self.doubted, self.switches = True, False, 0
        self.credit, self.saved, self.look = START_CREDIT, 0.0, 0.0
        self._gained = MOST_GAINED

    def stake(self, share: float, most: float = STAKE) -> None:
        """So much of the batch is fresh texts: nothing was gained from them yet, and they may lose
        so much."""
        self._gained += (most - self._gained) * share

    def book(self, net: float) -> None:
        """A round emitted so much more per row than it cost."""
        if self.on:
            self.credit = min(MOST_CREDIT, self.credit + net)
            self._gained = min(MOST_GAINED, self._gained + net)
        elif self.credit < RESUME_CREDIT and net >= 0:
            self.credit += ALLOWANCE + net
        else:
            # A look's round that paid.
            self.doubted &= net <= 0
            self.saved = min(max(MOST_SAVED, self.look), self.saved + ALLOWANCE + net)

    @property
    def left(self) -> float:
        """What drafting may still lose."""
        return min(self.credit, self._gained)

    @property
    def is_lost(self) -> bool:
        """Whether drafting must end."""
        return self.left <= 0

    @property
    def may_resume(self) -> bool:
        """Whether there is enough to switch drafting on again."""
        return self.credit >= RESUME_CREDIT and not self.doubted

    def switch(self, *, lost: bool = False, most: float = STAKE) -> None:
        """On or off. lost: what there was to lose. most: that the next spell may lose."""
        self.doubted = lost
        self.on = not self.on
        self.switches += 1
        self._gained = most


class FreeBudget:
    """Of one engine and one drafter.

    Args:
        shapes: of the graphs there are; plain decoding is always one of them.
        costs: of rounds.
        fixed: this one always; None: what pays.
        loading: the device twice, in AR steps. alone: the same for one row whose drafter stays
            with it; None: that is no different.
        prior: rate of a step before anything was seen.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        costs: RoundCosts,
        *,
        fixed: Shape | None = None,
        loading: float = LOADING,
        alone: float | None = None,
        prior: float = PRIOR_RATE,
    ) -> None:
        self.account = Accounts()
        self._shapes = sorted({shape for shape in shapes if shape.depth})
        self.shape = fixed or self._shapes[-1]
        self.reason, self.detail = ("fixed", f"fixed: {_named(fixed)}") if fixed else ("pays", "")
        self._costs, self._fixed = costs, fixed is not None
        self._loading, self._alone = loading, alone
        self._prior, self._has_met = prior, False
        self._left, self._stretch, self._debt = 0, FIRST_STRETCH, 0.0
        deepest = max(shape.depth for shape in self._shapes)
        self._all = Paths(deepest)
        self._own = {shape.nodes: Paths(deepest) for shape in self._shapes}
        # By number of nodes, and the decayed mean of what was drafted.
        self._doublings = {shape.nodes: _doublings(shape) for shape in self._shapes}
        self._mean_doublings = 0.0
        self._rows = RowPaths()
        self._bucket = 0
        # Survival by number of nodes, at the last choice.
        self._survival: dict[int, list[float]] = {}

    def width(self, rows: Sequence[int], fresh: int = 0) -> Shape:
        """Of the next round over the rows of these slots, of which `fresh` have no output yet."""
        self._meet(fresh, len(rows))
        dear = self.account.on and self.shape.depth and not self._affords(len(rows), self.shape)
        # Other prices: what was chosen for a few rows may be far too much for many.
        before, self._bucket = self._bucket, bucket(len(rows))
        moved = self.account.on and before != self._bucket
        if not self._fixed and (self._left <= 0 or dear or moved):
            self._decide(rows)
        return self.shape

    def _moves(self, rows: int) -> bool:
        """Whether other shapes cost next to nothing."""
        return rows == 1 and self._alone is not None

    def _stake(self, rows: int) -> float:
        """What a fresh text may lose; alone, enough to be tried with some shape in any case."""
        if not self._moves(rows):
            return STAKE
        easiest = self._easiest(rows)[1]
        return max(STAKE_ALONE, (1 + REACH) * (self._steps(rows, easiest) - 1))

    def _affords(self, rows: int, shape: Shape) -> bool:
        """Whether the account can pay for some rounds of it, besides the one under way; which
        counts for no more than one of these: a dear one is no reason to give up cheap ones."""
        if not self._moves(rows):
            return not self.account.is_lost
        each = self._steps(rows, shape) - 1
        flying = min(each, self._steps(rows, self.shape) - 1) if self.shape.depth else each
        return self.account.left - flying >= REACH * each

    def _meet(self, fresh: int, rows: int) -> None:
        """So many of these rows are texts of which nothing is known yet. Once a round, however
        often it is asked about."""
        if not fresh or self._has_met:
            return
        self._has_met = True
        self.account.stake(fresh / rows, self._stake(rows))
        if fresh == rows and not self.account.on:
            # The device has to be loaded anyway.
            self.account.doubted, self._left, self._debt = False, 0, MOST_DEBT

    def survival(self, nodes: int) -> list[float]:
        """Estimated fraction of rounds of so many nodes whose path reaches each depth from 1 on,
        if drafted."""
        misses = WIDER ** (self._doublings[nodes] - self._mean_doublings)
        pooled = self._all.rates(self._prior, PRIOR_WEIGHT)
        wider = [max(0.0, 1 - misses * (1 - rate)) for rate in pooled]
        return list(accumulate(self._own[nodes].rates(wider, SIZE_WEIGHT), mul))

    def expected(self, depth: int) -> float:
        """Accepted drafts expected of a tree so deep, at the last choice."""
        return sum(self._survival.get(self.shape.nodes, [])[:depth])

    def observe(
        self, slots: Sequence[int], reached: Sequence[int], emitted: Sequence[int], shape: Shape
    ) -> None:
        """A round: how deep each row's path went, tokens it emitted."""
        self._has_met = False
        if not reached:
            return
        rows = len(reached)
        if shape.depth:
            self._rows.add(slots, reached)
            keep = (1 - 1 / WINDOW) ** rows
            other = self._doublings[shape.nodes] - self._mean_doublings
            self._mean_doublings += (1 - keep if self._all.seen[0] else 1.0) * other
            for paths in (self._all, *self._own.values()):
                paths.fade(keep)
            came = [sum(path >= depth for path in reached) for depth in range(shape.depth + 1)]
            for paths in (self._all, self._own[shape.nodes]):
                paths.add(came, WINDOW * (1 - keep) / rows)
        self.account.book(sum(emitted) / rows - self._steps(rows, shape))
        # Rounds from before the shape was changed do not count.
        self._left -= shape == self.shape
        if self.account.on and not any(self._affords(rows, shape) for shape in self._shapes):
            self.account.switch(lost=True, most=self._stake(rows))
            self._doubt()
            self._left = 0

    def reset(self, slot: int) -> None:
        """Forget a row."""
        self._rows.forget(slot)

    def _doubt(self) -> None:
        """What is seen from now on is to count for more."""
        keep = min(1.0, DOUBTED / max(self._all.seen[0], DOUBTED))
        for paths in (self._all, *self._own.values()):
            paths.fade(keep)

    def _steps(self, rows: int, shape: Shape) -> float:
        """What a round costs, drafting included, in AR steps."""
        draft = self._costs.draft_us(rows, shape.nodes, depth=shape.depth) if shape.depth else 0
        us = self._costs.round_us(rows, shape.nodes) + (draft or 0.0)
        return us / self._costs.round_us(rows, 1)

    def _speed(self, slots: Sequence[int], shape: Shape) -> float:
        accepted = sum(self._survival[shape.nodes][: shape.depth])
        return self._rows.tokens(slots, accepted, shape.depth) / self._steps(len(slots), shape)

    def _decide(self, slots: Sequence[int]) -> None:
        rows = len(slots)
        self._survival = {nodes: self.survival(nodes) for nodes in self._own}
        speeds = {shape: self._speed(slots, shape) for shape in self._shapes}
        if self.account.on:
            speeds = self._affordable(rows, speeds) or {self._easiest(rows)[1]: 0.0}
        # What is off is looked at whatever that may lose.
        best = _fastest(speeds)
        if speeds[best] <= 1 and not self._all.seen[0]:
            self._look(rows, FIRST_LOOK, best)
            return
        resumes = speeds[best] >= SWITCH_ON and self.account.may_resume
        if speeds[best] <= STAY_ON if self.account.on else resumes:
            self.account.switch(most=self._stake(rows))
            self._stretch = FIRST_STRETCH
        if not self.account.on:
            self._stay_off(rows)
            return
        # Drafting that has just been switched on may not be with what pays best.
        speeds = self._affordable(rows, speeds) or speeds
        best = _fastest(speeds)
        better, stretch = (BETTER_ALONE, STRETCH_ALONE) if self._moves(rows) else (BETTER, STRETCH)
        if speeds[best] > better * speeds.get(self.shape, 0.0):
            self.shape = best
        self.reason, self._left = "pays", self._stretch
        self._stretch = min(stretch, 2 * self._stretch)
        self.detail = f"pays: {_named(self.shape)}, {speeds[self.shape]:.2f} of plain decoding"

    def _affordable(self, rows: int, speeds: dict[Shape, float]) -> dict[Shape, float]:
        return {shape: speed for shape, speed in speeds.items() if self._affords(rows, shape)}

    def _easiest(self, rows: int) -> tuple[float, Shape]:
        """The least acceptance at which a shape pays, and that shape."""
        return min(
            (least_acceptance(self._steps(rows, shape), shape.depth), shape)
            for shape in self._shapes
        )

    def _stay_off(self, rows: int) -> None:
        p, easiest = self._easiest(rows)
        moves = self._moves(rows)
        loading = self._alone if moves and self._alone is not None else self._loading
        price = max(ALLOWANCE, self._steps(rows, easiest) - 1)
        most = int(max(MOST_SAVED - loading, loading) / price)
        rounds = max(1, min(LOOK_ALONE if moves else LOOK, most))
        self.account.look = loading + rounds * price
        first = self._survival[easiest.nodes][0]
        debt, self._debt = self._debt if moves else 0.0, 0.0
        if self.account.saved + debt >= self.account.look:
            self.account.book(-loading)
            self._look(rows, rounds, easiest)
        else:
            self.shape, self._left, self.reason = PLAIN, LOOK, "off"
        sign = ">" if p > first else "<="
        self.detail = f"{self.reason}: break-even p {p:.2f} {sign} {first:.2f} ({_named(easiest)})"

    def _look(self, rows: int, rounds: int, shape: Shape) -> None:
        """See what drafts are worth, in rounds of some that may well pay."""
        self.shape = shape
        self._left = max(1, min(rounds, LOOK_PATHS // rows))
        self.reason, self.detail = "probe", f"probe: {_named(self.shape)}"


def _fastest(speeds: dict[Shape, float]) -> Shape:
    return max(speeds, key=lambda shape: (speeds[shape], -shape.nodes, -shape.depth))


def _doublings(shape: Shape) -> float:
    """How often a chain was doubled, to be so wide. Of shapes with as many nodes the last, and
    deepest, one counts."""
    return math.log2(max(1.0, shape.nodes / (shape.depth + 1)))


def _named(shape: Shape) -> str:
    return f"{shape.nodes} nodes, depth {shape.depth}"
