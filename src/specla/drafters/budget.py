# SPDX-License-Identifier: Apache-2.0
"""The budget: how much to draft and to verify in each round, or whether to draft at all.

    ask      before drafting: most drafts per row that are worth asking for; 0 is plain decoding
    choose   after it: the drafts worth verifying, over the whole batch (`drafters.choose`)
    observe  after acceptance: what became of them

Drafting is switched off where it does not pay, and looked at again from time to time. What that
may cost is kept in an account of AR steps, into which every round pays the tokens that it emitted
per row and from which it takes what it cost. A spell of drafting may lose half of what it had at
best; at a fresh prompt, of which nothing is known yet, no more than `STAKE` from there on. A look
must be in the account before it is taken, and rounds without drafts earn `ALLOWANCE` each: in the
long run at most this share of the time can be lost, whatever the text does and however wrong the
estimates are. Gains are kept up to a limit only, so that a long good spell does not pay for a long
bad one. What was learned, account included, is the engine's and outlives requests.

Losslessness: every decision is made from earlier rounds and from this round's proposals, before
the target has seen them. Acceptance draws each token from the target's own law at a position,
with that position's own noise, and only then looks whether the tree has it: any tree gives the
same text. Rules that judge by the drafter's law would not survive a choice of nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specla.drafters.base import DraftRow, Observation
from specla.drafters.choose import (
    Choice,
    RoundCosts,
    best,
    break_even,
    kept,
    least_acceptance,
    most_probable,
)
from specla.drafters.survival import PRIORS, Prior, Survival
from specla.topology.tree import DraftTree

# The account, in AR steps: at the start, and what a fresh prompt may lose of it; at most.
START_CREDIT = STAKE = 1.0
MOST_CREDIT = 8.0
ALLOWANCE = 0.015
# Speed over plain decoding that a look must promise; 1.05 left a fifth of what GSM8K's answers had
# to gain, and saved nothing where drafts do not pay. Where the last rounds are on average expected
# to lose more than the allowance, drafting is switched off.
SWITCH_ON, GAIN_WINDOW = 1.02, 4
# A look is of the fewest nodes with which acceptance as low as this would break even.
LOOK_ODDS = 0.5
# Rounds that a call's price, and the next call's size, follow.
WINDOW = 16
# Asked for at least, and this many times what was last used.
LEAST_ASKED, GROWTH = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided for one round, and why.

    reason: "pays", "declined" (proposals not worth their cost), "nothing" (nothing was proposed),
        "probe" (drafting is off, and looked at), "off", or "fixed".
    detail: in words, with the figures behind it.
    proposed, expected: per row, drafts of the drafter; accepted drafts expected of those chosen.
    nodes, depth: the round's, as its cost was looked up. speed: over plain decoding, expected.
    """

    reason: str
    detail: str
    proposed: tuple[int, ...]
    expected: tuple[float, ...]
    nodes: int
    depth: int
    speed: float


class Account:
    """What may be lost by drafting, in AR steps (see above). on: whether drafting is. look: what
    the next look costs; so much can be saved, however dear it is."""

    def __init__(self) -> None:
        self.on, self.switches = True, 0
        self.credit, self.look = START_CREDIT, 0.0
        # Where a spell of drafting ends.
        self._floor = self.credit / 2

    def book(self, net: float) -> None:
        """A round emitted so much more per row than it cost."""
        earned = net if self.on else net + ALLOWANCE
        self.credit = min(max(MOST_CREDIT, self.look), self.credit + earned)
        self._floor = max(self._floor, self.credit / 2)

    def stake(self, most: float) -> None:
        """Of the spell that there is no more than this is to be lost from here on."""
        self._floor = max(self._floor, self.credit - most)

    @property
    def is_lost(self) -> bool:
        """Whether the spell of drafting must end."""
        return self.credit <= self._floor

    @property
    def may_look(self) -> bool:
        """Whether there is enough for the next look, or to switch drafting on again."""
        return self.credit >= self.look

    def pause(self, rounds: float) -> float:
        """Without drafts until the next look: as many, but no more than have earned it."""
        return max(1.0, min(rounds, self.look / ALLOWANCE))

    def switch(self) -> None:
        """On or off. The first round of a spell, a look, was paid for before."""
        self.on = not self.on
        self.switches += 1
        self._floor = 0.0


class Budget:
    """Of one engine and one drafter.

    Args:
        drafter: its name, for what its guesses are taken for at first.
        max_nodes: of a tree.
        costs: of rounds.
        fixed: this many drafts per row in every round, the most probable ones; None: what pays.
        prior: instead of the drafter's.
    """

    def __init__(
        self,
        drafter: str,
        max_nodes: int,
        costs: RoundCosts,
        *,
        fixed: int | None = None,
        prior: Prior | None = None,
    ) -> None:
        self.fixed, self._max_nodes, self._costs = fixed, max_nodes, costs
        self.survival = Survival(prior or PRIORS.get(drafter, Prior()))
        self.account = Account()
        self._gain = 0.0  # decayed mean of what rounds are expected to bring, in AR steps
        self._pause = self._wait = 1.0  # rounds without drafts between looks; still to come
        self._used: deque[int] = deque([max_nodes], maxlen=WINDOW)
        self._calls: dict[int, float] = {}  # microseconds of a call, by what was asked for
        self._is_warm = self._has_met = False
        self._known: dict[tuple[int, float], tuple[float, int]] = {}
        self._asked = 0
        self._spent = 1.0  # by the round that was chosen last, in AR steps
        self._expected_gain = 0.0

    # ---- before drafting

    def ask(self, rows: Sequence[DraftRow]) -> list[DraftRow]:
        """The rows with the most drafts that are worth asking for; none for any row: do not call
        the drafter."""
        fresh = sum(len(row.tokens) == row.num_prompt_tokens for row in rows)
        self._meet(fresh / len(rows))
        self._asked = self._most(len(rows))
        return [replace(row, max_drafts=min(row.max_drafts, self._asked)) for row in rows]

    def rests(self, rows: int, fresh: int = 0) -> bool:
        """Whether the next round would not ask for anything. fresh: rows that have no output."""
        self._meet(fresh / rows)
        return self.fixed is None and self._most(rows) == 0

    def rested(self) -> None:
        """A round of plain decoding went by."""
        self._has_met = False
        self.account.book(0.0)
        self._wait -= 1

    def _meet(self, share: float) -> None:
        """So much of the batch is prompts of which nothing is known yet: what the last texts
        came to counts for as much less, for good or bad. Once a round, however often it is asked
        about: on a GPU the host also is one behind."""
        if not share or self._has_met:
            return
        self._has_met = True
        if self.account.on:
            self._gain *= 1 - share
            self.account.stake(STAKE / share)
        else:
            self._wait *= 1 - share
            self._pause += (1 - self._pause) * share

    def _most(self, rows: int) -> int:
        if self.fixed is not None:
            return self.fixed
        if self.account.on:
            return min(self._max_nodes - 1, max(LEAST_ASKED, GROWTH * max(self._used)))
        nodes, price = self._look(rows)
        self.account.look = price
        return nodes - 1 if self._wait <= 0 and self.account.may_look else 0

    def _look(self, rows: int) -> tuple[int, float]:
        """Nodes of the next look, and what it costs more than plain decoding, in AR steps."""
        step, nodes = self._costs.round_us(rows, 1), 2
        while nodes < self._max_nodes:
            cost = (self._costs.round_us(rows, nodes) + self._call_us(rows, nodes)) / step
            # Rounded, as every new one is searched for.
            if least_acceptance(round(cost, 2), nodes - 1) <= LOOK_ODDS:
                return nodes, cost - 1
            nodes *= 2
        _, nodes = self._break_even(rows)
        cost = self._costs.round_us(rows, nodes) + self._call_us(rows, nodes)
        return nodes, cost / step - 1

    def _call_us(self, rows: int, nodes: int) -> float:
        """Of a call for so many nodes: as measured here, then as the costs have it."""
        larger = [asked for asked in self._calls if asked >= nodes - 1]
        if larger or self._calls:
            return self._calls[min(larger) if larger else max(self._calls)]
        return self._costs.draft_us(rows, nodes) or 0.0

    def _called(self, us: float) -> None:
        """A call took so long. The first one, which also compiles and captures what later ones
        run, says nothing; one that was interrupted counts as four times the usual."""
        if not self._is_warm:
            self._is_warm = True
            return
        before = self._calls.get(self._asked) or us
        self._calls[self._asked] = before + (min(us, 4 * before) - before) / WINDOW

    def _break_even(self, rows: int) -> tuple[float, int]:
        """As `choose.break_even`; asked in every round, so kept for calls that cost the same to
        a hundredth of a step."""
        step = self._costs.round_us(rows, 1)
        key = rows, round(self._call_us(rows, self._max_nodes) / step, 2)
        if key not in self._known:
            self._known[key] = break_even(
                self._costs, rows, self._max_nodes, draft_us=key[1] * step
            )
        return self._known[key]

    # ---- after drafting

    def choose(
        self, slots: Sequence[int], trees: Sequence[DraftTree], *, draft_us: float | None
    ) -> tuple[list[DraftTree], Decision]:
        """What to verify of the trees of these slots' rows.

        Args:
            draft_us: what the call took; None: the drafter was not called.
        """
        if draft_us is None and not self.account.on and self.fixed is None:
            return list(trees), self._plain(len(trees))
        rows, call = len(trees), 0.0
        if draft_us is not None:
            self._called(draft_us)
            call = self._call_us(rows, self._asked + 1)
        survival = [self.survival.path(t, slot) for t, slot in zip(trees, slots, strict=True)]
        reason, choice = self._choice(trees, survival, call, called=draft_us is not None)
        step = self._costs.round_us(rows, 1)
        # A look also brings up to date who was not asked for long: it is paid for in full.
        paid = call if self.account.on or draft_us is None else draft_us
        self._spent = (choice.us + paid) / step
        self._expected_gain = 1 + choice.expected / rows - self._spent
        chosen = [kept(tree, keep) for tree, keep in zip(trees, choice.keep, strict=True)]
        self._used.append(max(len(keep) for keep in choice.keep))
        return chosen, Decision(
            reason=reason,
            detail=self._why(reason, choice, rows),
            proposed=tuple(tree.num_drafts for tree in trees),
            expected=tuple(
                sum(a[node] for node in keep)
                for a, keep in zip(survival, choice.keep, strict=True)
            ),
            nodes=choice.nodes,
            depth=choice.depth,
            speed=(1 + choice.expected / rows) / self._spent,
        )

    def _plain(self, rows: int) -> Decision:
        """A round in which nobody was asked: what follows of it, without a search for it."""
        self._spent, self._expected_gain = 1.0, 0.0
        self._used.append(0)
        nothing = (0,) * rows
        return Decision(
            reason="off", detail=self.why_off(rows), proposed=nothing,
            expected=tuple(map(float, nothing)), nodes=1, depth=0, speed=1.0,
        )  # fmt: skip

    def _choice(
        self,
        trees: Sequence[DraftTree],
        survival: Sequence[Sequence[float]],
        call: float,
        *,
        called: bool,
    ) -> tuple[str, Choice]:
        if self.fixed is not None:
            found = most_probable(trees, survival, self._costs, drafts=self.fixed)
            return "fixed", found
        found = best(trees, survival, self._costs, draft_us=call)
        if not any(tree.num_drafts for tree in trees):
            return "nothing" if called or self.account.on else "off", found
        step = self._costs.round_us(len(trees), 1)
        speed = (1 + found.expected / len(trees)) * step / (found.us + call)
        if not self.account.on and speed >= SWITCH_ON:
            self._switch()
        if not self.account.on:
            drafts = self._asked
            return "probe", most_probable(trees, survival, self._costs, drafts=drafts)
        return ("pays" if any(found.keep) else "declined"), found

    def _why(self, reason: str, choice: Choice, rows: int) -> str:
        cost = (
            f"{1 + choice.expected / rows:.2f} tokens per row expected of {self._spent:.2f} steps"
        )
        if reason in ("pays", "fixed"):
            return f"{reason}: {choice.nodes} nodes, {cost}"
        if reason == "nothing":
            return "nothing: no drafts were proposed"
        return self.why_off(rows, reason)

    def why_off(self, rows: int, reason: str = "off") -> str:
        """The acceptance that would be needed, and what there was."""
        p, nodes = self._break_even(rows)
        sign = ">" if p > self.survival.first else "<="
        return f"{reason}: break-even p {p:.2f} {sign} {self.survival.first:.2f} ({nodes} nodes)"

    # ---- after acceptance

    def observe(self, seen: Sequence[Observation], reason: str) -> None:
        """What became of the trees that `choose` has let through. reason: its decision's."""
        self._has_met = False
        for one in seen:
            self.survival.observe(one.tree, one.path, len(one.emitted), one.slot)
        if self.fixed is not None or not seen:
            return
        tokens = sum(len(one.emitted) for one in seen) / len(seen)
        self.account.book(tokens - self._spent)
        self._gain += (self._expected_gain - self._gain) / GAIN_WINDOW
        if reason == "probe":
            self._pause = self._wait = self.account.pause(2 * self._pause)
        elif not self.account.on:
            self._wait -= 1
        elif self.account.is_lost or self._gain < -ALLOWANCE:
            self._switch()

    def reset(self, slot: int) -> None:
        """Forget a row (rule I6)."""
        self.survival.reset(slot)

    def _switch(self) -> None:
        self.account.switch()
        self._gain, self._pause, self._wait = 0.0, 1.0, 1.0
        # Whoever is switched on again starts small and grows.
        self._used.append(LEAST_ASKED)
