# SPDX-License-Identifier: Apache-2.0
"""What a study is, what it is given (a lab), and what it gives (measurements).

A lab has the target's plain decoding, prompts, and a way to load the same target in any setting.
Whatever is measured takes turns with plain decoding on every prompt, so that both had the same
machine. Nothing here knows the command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from specla.bench.headline import AR, Ratio, Score, scores, take_turns
from specla.bench.measure import Method, Prompt, Sample
from specla.drafters.base import Drafter
from specla.engine.engine import Engine
from specla.errors import ConfigError, GenerationFailed
from specla.models.tokenizer import Tokenizer
from specla.request import Completion, Request, SamplingParams

Value = int | float
Figure = float | Ratio | None
Scores = Mapping[tuple[str, str], Score]
"""By suite and method; there is none where no prompt was answered."""
ALL = "all"
"""The suite that prompts of several are counted under together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the target is to be loaded. drafter: as `--drafter` takes it; options: of its class."""

    drafter: str = "none"
    options: Mapping[str, object] = field(default_factory=dict)
    budget: str = "off"
    max_nodes: int = 16
    max_slots: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of a study.

    at: where, factor by factor. figures: what was found, by the names of `UNITS`; a Ratio has
    its interval over prompts. missing: why there are none. note: what ran otherwise than asked.
    """

    at: Mapping[str, str | Value]
    figures: Mapping[str, Figure]
    missing: str | None = None
    note: str | None = None


UNITS: Mapping[str, str] = {
    "prompts": "prompts",
    "counted": "prompts",
    "repeats": "repeats",
    "tokens": "tokens",
    "parameters": "parameters",
    "speed": "tokens/s",
    "ratio": "x",
    "over_off": "x",
    "request_ratio": "x",
    "over_first": "x",
    "tau": "tokens/round",
    "closed_form": "tokens/round",
    "round_over_ar": "x",
    "draft_us": "us/round",
    "slot_bytes": "bytes",
    "drafting": "fraction",
    "first_token": "fraction",
    "survival": "fraction",
    "same": "prompts",
    "loops": "prompts",
    "cut": "prompts",
}
"""Figures and their units. prompts: those that were timed; counted: those whose rounds were
counted (where there is both, tau is of the latter). ratio is the speed over plain decoding of the
same run, over_off that over drafting without a budget, request_ratio how many times sooner a
request is done on average, over_first a tau over the first drafter's; tau counts the bonus.
drafting: rounds that had drafts; first_token: those whose first token was the likeliest draft;
survival_dN: those whose path got N deep. same: answers equal to plain decoding's, token for
token; loops: those with a stretch that repeats; cut: those ended by the limit."""


def named(figure: str) -> str:
    """A figure's name without its depth: survival has one figure per depth."""
    return figure.partition("_d")[0] if figure.startswith("survival") else figure


def unit(figure: str) -> str:
    """Of a figure."""
    return UNITS[named(figure)]


class Subject:
    """An engine to be measured, and how it is asked.

    Args:
        encode: a prompt's text -> token ids, in the format that the target expects.
        fresh: makes a drafter that remembers nothing, for one that learns from answers: asked the
            same again, it would recite them. None: the engine's own forgets by itself.
    """

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[str], Sequence[int]],
        fresh: Callable[[], Drafter] | None = None,
    ) -> None:
        self.engine, self.encode, self._fresh = engine, encode, fresh

    @property
    def note(self) -> str | None:
        """What runs otherwise than asked, if anything does."""
        return self.engine.drafter.info.fallback

    def answer(self, texts: Sequence[str], params: SamplingParams) -> list[Completion]:
        """Answers to all of them, as many at once as there are slots.

        Raises:
            GenerationFailed: one could not be had.
        """
        if self._fresh is not None:
            self.engine.use(self._fresh())
        names = [str(number) for number in range(len(texts))]
        done: dict[str, Completion] = {}
        with self._requests(dict(zip(names, texts, strict=True)), params):
            while len(done) < len(texts):
                done |= {d.request_id: d.completion for d in self.engine.step() if d.completion}
        return [_checked(done[name]) for name in names]

    def one(self, text: str, params: SamplingParams) -> Completion:
        """The answer to one."""
        return self.answer([text], params)[0]

    @contextmanager
    def under_way(self, text: str, params: SamplingParams) -> Iterator[int]:
        """Its slot, once the prompt is read and a round is done."""
        with self._requests({"held": text}, params):
            while not self.engine.scheduler.ready():
                self.engine.step()
            yield self.engine.scheduler.ready()[0].slot

    @contextmanager
    def _requests(self, texts: Mapping[str, str], params: SamplingParams) -> Iterator[None]:
        try:
            for name, text in texts.items():
                self.engine.add(
                    Request(
                        request_id=name,
                        prompt=text,
                        prompt_token_ids=tuple(self.encode(text)),
                        params=params,
                        seed=params.seed or 0,
                    )
                )
            yield
        finally:
            for name in texts:
                self.engine.abort(name)


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason == "error":
        raise GenerationFailed(str(completion.stop_reason))
    return completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """What a study is given.

    Args:
        plain: exact plain decoding, one slot.
        load: the target in a setting, weights and all; raises SpeclaError where that cannot be.
        own: the plain target's engine with a drafter made here, at most so many nodes and one
            slot.
        tokenizer: None with random weights, which only a study without drafters can have.
        prompts: of all suites, in turn; a prompt's kind is its suite.
        drafters: as they were given, checked for number.
        values: by factor. centre: of every factor, where the others are varied; empty if not.
        deadline: of time.monotonic; when it has passed nothing but one prompt per setting is
            measured any more.
        kept: every answer, to look at.
        tick: progress within a setting.
    """

    plain: Subject
    load: Callable[[Setting], Subject]
    own: Callable[[Drafter, int], Subject]
    tokenizer: Tokenizer | None
    prompts: Sequence[Prompt]
    params: SamplingParams
    drafters: Sequence[str]
    values: Mapping[str, Sequence[Value]]
    centre: Mapping[str, Value]
    max_nodes: int
    deadline: float
    kept: list[Sample] = field(default_factory=list)
    tick: Callable[[int, int], None] | None = None

    def suites(self) -> list[str]:
        """Names, in order."""
        return list(dict.fromkeys(prompt.kind for prompt in self.prompts))

    def share(self, settings_left: int) -> float:
        """Until when the next of so many settings may measure."""
        now = time.monotonic()
        return now + max(0.0, self.deadline - now) / settings_left

    def take_turns(
        self, methods: Mapping[str, Subject], prompts: Sequence[Prompt], until: float
    ) -> Scores:
        """Scores of plain decoding and of some subjects, on each prompt in turn."""
        asked = [Method(name=name, run=subject.one) for name, subject in methods.items()]
        return self.scores(asked, Method(name=AR, run=self.plain.one), prompts, until)

    def scores(
        self, methods: Sequence[Method], plain: Method, prompts: Sequence[Prompt], until: float
    ) -> Scores:
        """The same of any methods."""
        samples = take_turns([plain, *methods], prompts, self.params, until, self.tick)
        self.kept.extend(samples)
        return {(score.suite, score.method): score for score in scores(samples)}


class Study(Protocol):
    """One study.

    name: of its command and folder. about: markdown, what is measured and how to read it.
    factors: values by default. centre: where the others stand while one is varied; empty: all
    combinations. drafters: how many it takes, at least and at most. prompts: of each suite, by
    default; None: all. recorded: figures that go into results.csv. max_nodes: of a tree, by
    default; None: a factor settles it.
    """

    name: str
    about: str
    factors: Mapping[str, tuple[Value, ...]]
    centre: Mapping[str, Value]
    drafters: tuple[int, int]
    prompts: int | None
    recorded: tuple[str, ...]
    max_nodes: int | None

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """Measurements as they are made.

        Raises:
            SpeclaError: what was asked for cannot be measured at all.
        """
        ...

    def draw(self, found: Sequence[Measurement]) -> Any:
        """A matplotlib figure of measurements that have figures, one at least."""
        ...


def measured(
    at: Mapping[str, str | Value],
    score: Score | None,
    more: Mapping[str, Figure] | None = None,
    *,
    note: str | None = None,
) -> Measurement:
    """A score's figures under their names here, and more of them."""
    if score is None:
        why = "no prompt was answered by it and by plain decoding in the time that there was"
        return Measurement(at=at, figures={}, missing=why, note=note)
    figures: dict[str, Figure] = {
        "prompts": score.prompts - score.failed,
        "tokens": score.tokens,
        "speed": score.speed,
        "ratio": score.ratio,
        "tau": score.tau,
        "round_over_ar": score.round_over_ar,
        "same": score.same,
        "loops": score.looping,
        "cut": score.unended,
    }
    return Measurement(at=at, figures={**figures, **(more or {})}, note=note)


def require_whole(factor: str, values: Sequence[Value], least: int, most: int) -> list[int]:
    """The values of a factor that counts something.

    Raises:
        ConfigError: one is not a whole number in the range.
    """
    for value in values:
        if value != int(value) or not least <= value <= most:
            raise ConfigError(
                f"{factor} must be whole numbers in [{least}, {most}], got {value:g}; change "
                f"--vary {factor}=..."
            )
    return [int(value) for value in values]
