# SPDX-License-Identifier: Apache-2.0
"""How much of a drafter's guesses a target accepts: tau, acceptance and survival by depth,
first-token match, recall of the top k.

Everything is counted over rounds. tau is tokens per round, the bonus included: a drafter that is
never right has 1. Looping text is easy to guess, so that every figure stands there twice: raw,
and without the answers in which some stretch of text repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specla.bench.loops import has_loop
from specla.bench.measure import Prompt
from specla.bench.table import spread
from specla.drafters.base import Observation
from specla.request import Completion

TOP = (1, 2, 4, 8)
Watched = Sequence[tuple[str, Observation]]
"""Requests' ids and what became of their trees in a round."""


@dataclass(slots=True)
class Tally:
    """Counts of one or more answers.

    offered[d], taken[d]: rounds whose path reached depth d and had drafts below it there, and
    those that went on to depth d + 1. reached[d]: rounds whose path reached depth d + 1. first:
    rounds whose first token was the drafter's likeliest. scored: nodes with drafts below that have
    scores; recalled[k]: those where the drawn token was among the k likeliest.
    """

    rounds: int = 0
    silent: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first: int = 0
    offered: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    scored: int = 0
    recalled: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOP, 0))

    def add(self, one: Observation) -> None:
        """Count one round."""
        self.rounds += 1
        self.silent += one.tree.num_drafts == 0
        self.tokens += len(one.emitted)
        self.drafted += one.tree.num_drafts
        self.accepted += len(one.path) - 1
        for depth in range(len(one.path) - 1):
            _at(self.reached, depth, 1)
        children = one.tree.children()
        # A path that was cut by an end has no token drawn below its last node.
        for depth, (node, token) in enumerate(zip(one.path, one.emitted, strict=False)):
            if children[node]:
                self._judge(one, children[node], depth, token)

    def _judge(self, one: Observation, below: Sequence[int], depth: int, token: int) -> None:
        scores = one.tree.logprobs
        if scores is not None:
            below = sorted(below, key=lambda node: (-scores[node], node))
        guesses = [one.tree.tokens[node] for node in below]
        _at(self.offered, depth, 1)
        _at(self.taken, depth, token in guesses)
        self.first += depth == 0 and token == guesses[0]
        if scores is not None:
            self.scored += 1
            for k in TOP:
                self.recalled[k] += token in guesses[:k]

    def merge(self, other: Tally) -> None:
        """Add another's counts."""
        for name in ("rounds", "silent", "tokens", "drafted", "accepted", "first", "scored"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("offered", "taken", "reached"):
            for depth, count in enumerate(getattr(other, name)):
                _at(getattr(self, name), depth, count)
        for k in TOP:
            self.recalled[k] += other.recalled[k]

    @property
    def tau(self) -> float:
        """Tokens per round, the bonus counted."""
        return self.tokens / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a tally comes to. acceptance: accepted drafts of all. acceptance_by_depth[d]: of the
    rounds that got to depth d and had drafts there, those that went on. survival_by_depth[d]: of
    all rounds, those that got to depth d + 1. first_token: of all rounds. recall: by k, of the
    nodes that have scored drafts below them; None where there are no scores."""

    answers: int
    rounds: int
    tokens: int
    tau: float
    tau_p10: float
    tau_p90: float
    silent: float
    acceptance: float | None
    acceptance_by_depth: tuple[float, ...]
    survival_by_depth: tuple[float, ...]
    first_token: float
    recall: Mapping[int, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt's completion and what its rounds came to."""

    prompt: Prompt
    completion: Completion
    tally: Tally

    @property
    def loops(self) -> bool:
        """Whether some stretch of it repeats."""
        return has_loop(self.completion.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One suite at one temperature. filtered: without the answers that loop; None where all do."""

    suite: str
    drafter: str
    temperature: float
    prompts: int
    failed: int
    looping: int
    raw: Figures
    filtered: Figures | None


def collect(
    prompts: Sequence[Prompt],
    generate: Callable[[Sequence[Prompt], Callable[[Watched], None]], Sequence[Completion]],
) -> list[Answer]:
    """Answer the prompts and keep what their rounds came to.

    Args:
        generate: gives a completion per prompt, in order, and calls its second argument after
            every round.
    """
    tallies: dict[str, Tally] = {}

    def watch(seen: Watched) -> None:
        for name, one in seen:
            tallies.setdefault(name, Tally()).add(one)

    done = generate(prompts, watch)
    return [
        Answer(prompt=p, completion=c, tally=tallies.get(c.request_id, Tally()))
        for p, c in zip(prompts, done, strict=True)
    ]


def result(suite: str, drafter: str, temperature: float, answers: Sequence[Answer]) -> Result:
    """The figures of a suite. Answers that failed are counted and left out."""
    good = [one for one in answers if one.completion.finish_reason != "error"]
    clean = [one for one in good if not one.loops]
    return Result(
        suite=suite,
        drafter=drafter,
        temperature=temperature,
        prompts=len(answers),
        failed=len(answers) - len(good),
        looping=len(good) - len(clean),
        raw=figures(one.tally for one in good),
        filtered=figures(one.tally for one in clean) if clean else None,
    )


def figures(tallies: Iterable[Tally]) -> Figures:
    """Over all rounds of some answers; the spread of tau is over answers."""
    each = list(tallies)
    total = Tally()
    for one in each:
        total.merge(one)
    p10, p90 = spread([one.tau for one in each])
    rounds = max(total.rounds, 1)
    recall = {k: n / total.scored for k, n in total.recalled.items()} if total.scored else None
    return Figures(
        answers=len(each),
        rounds=total.rounds,
        tokens=total.tokens,
        tau=total.tau,
        tau_p10=p10,
        tau_p90=p90,
        silent=total.silent / rounds,
        acceptance=total.accepted / total.drafted if total.drafted else None,
        acceptance_by_depth=tuple(
            t / o for t, o in zip(total.taken, total.offered, strict=True) if o
        ),
        survival_by_depth=tuple(n / rounds for n in total.reached),
        first_token=total.first / rounds,
        recall=recall,
    )


def _at(counts: list[int], place: int, count: int) -> None:
    counts.extend([0] * (place + 1 - len(counts)))
    counts[place] += count
