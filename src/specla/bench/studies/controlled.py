# SPDX-License-Identifier: Apache-2.0
"""Controlled acceptance: what rounds of some length are worth when drafts are right with
probability p.

Source: SpecLA (arXiv 2607.16673), figure 12.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specla.bench.headline import AR
from specla.bench.measure import Method
from specla.bench.studies import plots
from specla.bench.studies.guesses import Guesses
from specla.bench.studies.study import (
    ALL,
    Lab,
    Measurement,
    Subject,
    Value,
    measured,
    require_whole,
)
from specla.errors import ConfigError, GenerationFailed
from specla.request import Completion, SamplingParams

MOST_DRAFTS = 63


class Controlled:
    """See `study.Study`."""

    name = "controlled"
    about = """\
A drafter that is right with probability p, draft by draft, proposes chains of a given length (p =
1 is the oracle). Speed is over plain decoding on the same prompts in the same run; drafting
itself costs next to nothing, so that this is what verifying, accepting and committing leave of an
acceptance. Tokens per round stand beside what independent drafts give, (1 - p^(n+1)) / (1 - p);
rounds that an end cuts short make them a little fewer. A round of n drafts has n + 1 nodes, and a
GPU pads nodes to a power of two: 4 drafts cost there what 7 do. After SpecLA, figure 12, where a
p of 0.6 and less never pays, 0.7 with short drafts only, and the oracle reaches 3.71 with 12
drafts."""
    factors: Mapping[str, tuple[Value, ...]] = {
        "p": (0.5, 0.6, 0.7, 0.8, 1),
        "length": (1, 2, 3, 4, 7, 8, 12, 15, 16),
    }
    centre: Mapping[str, Value] = {}
    drafters = (0, 0)
    prompts = 8
    recorded = ("ratio", "tau")
    max_nodes = None

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """All p at a length take turns."""
        rates = _rates(lab.values["p"])
        lengths = require_whole("length", lab.values["length"], 1, MOST_DRAFTS)
        prompts = [replace(prompt, kind=ALL) for prompt in lab.prompts]
        for done, length in enumerate(lengths):
            turn = _Turn(lab, length)
            names = {p: f"p {p:g}, {length} drafts" for p in rates}
            methods = [Method(name=names[p], run=partial(turn.guess, p)) for p in rates]
            plain = Method(name=AR, run=turn.plain)
            scores = lab.scores(methods, plain, prompts, lab.share(len(lengths) - done))
            for p in rates:
                at, score = {"p": p, "length": length}, scores.get((ALL, names[p]))
                yield measured(at, score, {"closed_form": closed_form(p, length)})

    def draw(self, found: Sequence[Measurement]) -> Any:
        """Speed and tokens per round by length, a line per p."""
        lines = {_label(p): [m for m in found if m.at["p"] == p] for p in plots.values(found, "p")}
        figure, (speed, tau) = plots.axes(2)
        for colour, (label, line) in zip(plots.colours(len(lines)), lines.items(), strict=True):
            plots.line(speed, line, "length", "ratio", label=label, color=colour)
            plots.line(tau, line, "length", "tau", label=label, color=colour)
            plots.line(tau, line, "length", "closed_form", color=colour, linestyle=":", marker="")
        plots.even(speed)
        plots.whole(speed)
        plots.whole(tau)
        plots.label(speed, "drafts per round", "speed over plain decoding")
        plots.label(tau, "drafts per round", "tokens per round (dotted: closed form)")
        return figure


class _Turn:
    """One length: plain decoding says what is right, and its guesser is asked next."""

    def __init__(self, lab: Lab, length: int) -> None:
        engine = lab.plain.engine
        self._drafter = Guesses(
            length, vocab_size=engine.model.info.vocab_size, device=engine.model.device
        )
        self._plain = lab.plain
        self._subject: Subject = lab.own(self._drafter, length + 1)
        self._truth: dict[str, Completion] = {}

    def plain(self, text: str, params: SamplingParams) -> Completion:
        """Plain decoding; its answer is remembered until the next one."""
        done = self._plain.one(text, params)
        self._truth = {text: done}
        return done

    def guess(self, p: float, text: str, params: SamplingParams) -> Completion:
        """The same text with guesses that are right with probability p."""
        truth = self._truth.get(text)
        if truth is None:
            raise GenerationFailed("plain decoding must say what is right, and has failed")
        self._drafter.expect(truth.prompt_token_ids, truth.token_ids, p)
        return self._subject.one(text, params)


def _rates(given: Sequence[Value]) -> Sequence[Value]:
    for p in given:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be in [0, 1], got {p:g}; change --vary p=...")
    return given


def closed_form(p: float, length: int) -> float:
    """Tokens per round of `length` independent drafts: 1 + p + ... + p^length."""
    return sum(float(p) ** i for i in range(length + 1))


def _label(p: Value | str) -> str:
    return "oracle" if p == 1 else f"p = {p:g}"
