# SPDX-License-Identifier: Apache-2.0
"""The budget of rounds that draft on the device: how many nodes their graphs have.

The host is a round behind there and never sees a tree, only how deep it was and how far its path
went. So the choice is one number for the whole batch, made for a stretch of rounds: between two
sizes the device has to be loaded anew. It goes by how often paths reached each depth, with what
was not drafted counted as not reached; beyond the deepest depth drafted so far the last step's
odds are continued.

Accounts, switches and losslessness are those of `drafters.budget`; a stretch of one node is plain
decoding, and looking at drafts again is a short stretch of the size that pays most easily.
"""

from __future__ import annotations

from collections.abc import Sequence

from specla.drafters.budget import ALLOWANCE, MOST_SAVED, SWITCH_ON, Account
from specla.drafters.choose import RoundCosts, break_even

# Rounds between two choices, of a look, and of the first one; a look need not see more paths.
STRETCH, LOOK, FIRST_LOOK, LOOK_PATHS = 32, 4, 8, 64
# Rounds of rows after which a count weighs 1/e.
WINDOW = 128
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 4.0
# Loading the device twice, for a look, in AR steps.
LOADING = 1.0
# A new size must promise this much more than the one there is.
BETTER = 1.03


class FreeBudget:
    """Of one engine and one drafter.

    Args:
        max_nodes: of a tree, rounded up to a power of two.
        costs: of rounds.
        fixed: these many nodes always; None: what pays.
    """

    def __init__(self, max_nodes: int, costs: RoundCosts, *, fixed: int | None = None) -> None:
        self.account = Account()
        self.nodes = fixed or max_nodes
        self.reason, self.detail = ("fixed", f"fixed: {fixed} nodes") if fixed else ("pays", "")
        self._sizes = [1 << i for i in range(max_nodes.bit_length())]
        self._costs, self._fixed = costs, fixed is not None
        self._left = 0
        self._expected: list[float] = []  # survival by depth, at the last choice
        # By depth: decayed, rounds that could reach it and those that did.
        self._seen = [0.0] * max_nodes
        self._reached = [0.0] * max_nodes

    def width(self, rows: int) -> int:
        """Nodes of the next round over so many rows."""
        if not self._fixed and self._left <= 0:
            self._decide(rows)
        return self.nodes

    def survival(self) -> list[float]:
        """Estimated fraction of rounds whose path reaches each depth from 1 on, if drafted."""
        survival, a, rate = [], 1.0, PRIOR_RATE
        for seen, reached in zip(self._seen[1:], self._reached[1:], strict=True):
            start = a * rate
            here = min(a, (reached + PRIOR_WEIGHT * start) / (seen + PRIOR_WEIGHT))
            a, rate = here, here / a if a > 0 else 0.0
            survival.append(a)
        return survival

    def expected(self, depth: int) -> float:
        """Accepted drafts expected of a tree so deep, at the last choice."""
        return sum(self._expected[:depth])

    def observe(self, reached: Sequence[int], emitted: Sequence[int], nodes: int) -> None:
        """A round of `nodes` nodes per row: how deep each row's path went, tokens it emitted."""
        if not reached:
            return
        rows = len(reached)
        keep = (1 - 1 / WINDOW) ** rows
        weight = WINDOW * (1 - keep) / rows
        for depth in range(1, nodes):
            hits = sum(path >= depth for path in reached)
            self._seen[depth] = self._seen[depth] * keep + rows * weight
            self._reached[depth] = self._reached[depth] * keep + hits * weight
        self.account.book(sum(emitted) / rows - self._steps(rows, nodes))
        self._left -= 1
        if self.account.on and self.account.credit <= 0:
            self.account.switch()
            self._left = 0

    def _steps(self, rows: int, nodes: int) -> float:
        """What a round costs, drafting included, in AR steps."""
        draft = (self._costs.draft_us(rows, nodes) or 0.0) if nodes > 1 else 0.0
        return (self._costs.round_us(rows, nodes) + draft) / self._costs.round_us(rows, 1)

    def _speed(self, rows: int, nodes: int) -> float:
        return (1 + self.expected(nodes - 1)) / self._steps(rows, nodes)

    def _decide(self, rows: int) -> None:
        self._expected = self.survival()
        speeds = {nodes: self._speed(rows, nodes) for nodes in self._sizes}
        best = max(self._sizes, key=lambda nodes: (speeds[nodes], -nodes))
        if not self._seen[1]:
            self._look(rows, FIRST_LOOK, at_least=best)
            return
        resumes = speeds[best] >= SWITCH_ON and self.account.may_resume
        if speeds[best] <= 1 if self.account.on else resumes:
            self.account.switch()
        if not self.account.on:
            self._stay_off(rows)
            return
        if speeds[best] > BETTER * speeds[self.nodes] or self.nodes == 1:
            self.nodes = best
        self.reason, self._left = "pays", STRETCH
        self.detail = f"pays: {self.nodes} nodes, {speeds[self.nodes]:.2f} of plain decoding"

    def _stay_off(self, rows: int) -> None:
        draft = self._costs.draft_us(rows, self._sizes[-1]) or 0.0
        p, nodes = break_even(self._costs, rows, self._sizes[-1], draft_us=draft)
        price = max(ALLOWANCE, self._steps(rows, self._size(nodes)) - 1)
        most = int((MOST_SAVED - LOADING) / price)
        rounds = max(1, min(LOOK, most))
        self.account.look = LOADING + rounds * price
        if self.account.saved >= self.account.look:
            self.account.book(-LOADING)
            self._look(rows, rounds, at_least=nodes)
        else:
            self.nodes, self._left, self.reason = 1, LOOK, "off"
        sign = ">" if p > self._expected[0] else "<="
        self.detail = f"{self.reason}: break-even p {p:.2f} {sign} {self._expected[0]:.2f}"

    def _look(self, rows: int, rounds: int, *, at_least: int) -> None:
        """See what drafts are worth, in rounds of some that may well pay."""
        self.nodes = self._size(max(2, at_least))
        self._left = max(1, min(rounds, LOOK_PATHS // rows))
        self.reason, self.detail = "probe", f"probe: {self.nodes} nodes"

    def _size(self, nodes: int) -> int:
        return next(size for size in self._sizes if size >= nodes)
