# SPDX-License-Identifier: Apache-2.0
"""The batch: throughput by the sequences decoded together, with the budget on and off."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from specla.bench.headline import AR, Ratio
from specla.bench.loops import has_loop
from specla.bench.measure import Prompt, Sample
from specla.bench.studies import plots
from specla.bench.studies.study import (
    ALL,
    Figure,
    Lab,
    Measurement,
    Setting,
    Subject,
    Value,
    require_whole,
)
from specla.request import Completion, SamplingParams

AUTO, OFF = "auto", "off"
COLOURS = {AR: "black", AUTO: "C0", OFF: "C1"}
LEAST_PROMPTS = 8
"""Answered at every size, so many at a time."""
REPEATS = 3


class Batch:
    """See `study.Study`."""

    name = "batch"
    about = """\
Throughput, prefill included, of so many prompts decoded together (of 8 prompts, one after another,
where a batch is smaller): plain decoding, drafting with `--budget auto` and with `--budget off`,
in turns, three times if there is time after one that is not timed; the median counts, and
intervals are the least and the largest of the repeats. waiting: so many times as many prompts wait
behind them, one of which begins wherever one ends, as in a server that is busy. over_off: the
budget's speed over that of drafting always. request_ratio: how many times sooner a request is
done, counted from its first round to its last, on average over requests. Where nothing waits
behind a batch, its throughput is that of its slowest row: requests can be done sooner while the
batch as a whole is not. drafting: rounds in which the budget let drafts through. Prices are
`measured` only where `specla profile` has been run for this model here."""
    factors: Mapping[str, tuple[Value, ...]] = {"batch": (1, 2, 4, 8, 16, 32, 64), "waiting": (0,)}
    centre: Mapping[str, Value] = {}
    drafters = (1, 1)
    prompts = None
    recorded = ("ratio", "over_off", "request_ratio")
    max_nodes = 16

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """Small batches first; the three ways take turns."""
        sizes = require_whole("batch", lab.values["batch"], 1, 1024)
        waits = require_whole("waiting", lab.values["waiting"], 0, 1024)
        left = len(sizes) * len(waits)
        for wait in waits:
            # Prompts only wait where there is no slot for them.
            for some in [[size] for size in sizes] if wait else [sizes]:
                subjects = _ways(lab, max(some))
                for size in some:
                    yield from _measure(lab, subjects, size, wait, lab.share(left))
                    left -= 1

    def draw(self, found: Sequence[Measurement]) -> Any:
        """Tokens per second, and speeds over plain decoding, of all and of a request."""
        figure, (speed, ratio, request) = plots.axes(3)
        waits = dict.fromkeys(m.at.get("waiting", 0) for m in found)
        for (way, colour), (i, wait) in product(COLOURS.items(), enumerate(waits)):
            line = [m for m in found if (m.at["way"], m.at.get("waiting", 0)) == (way, wait)]
            style = {"color": colour, "linestyle": ("-", "--", ":", "-.")[i % 4]}
            name = _named(way, wait)
            plots.line(speed, line, "batch", "speed", label=name, **style)
            plots.line(ratio, line, "batch", "ratio", label=name, capsize=2, **style)
            plots.line(request, line, "batch", "request_ratio", label=name, **style)
        titles = {speed: "tokens/s", ratio: "speed over plain decoding",
                  request: "a request's, on average"}  # fmt: skip
        for axis in (ratio, request):
            plots.even(axis)
        for axis, title in titles.items():
            plots.powers(axis, plots.values(found, "batch"))
            plots.label(axis, "sequences decoded together", title)
        plots.doubling(speed)
        return figure


@dataclass(frozen=True, slots=True)
class _Pass:
    """All prompts answered once."""

    answers: list[Completion]
    seconds: float

    @property
    def speed(self) -> float:
        return sum(len(one.token_ids) for one in self.answers) / self.seconds

    @property
    def request_s(self) -> float:
        """Of decoding, summed over requests."""
        return sum(one.timing.decode_s for one in self.answers)


def _ways(lab: Lab, slots: int) -> dict[str, Subject]:
    """The target in each way, loaded."""
    return {
        AR: lab.load(Setting(max_slots=slots)),
        **{
            budget: lab.load(
                Setting(
                    drafter=lab.drafters[0],
                    budget=budget,
                    max_nodes=lab.max_nodes,
                    max_slots=slots,
                )
            )
            for budget in (AUTO, OFF)
        },
    }


def _measure(
    lab: Lab, subjects: Mapping[str, Subject], size: int, wait: int, until: float
) -> Iterator[Measurement]:
    """One size. Repeats after the first one only as long as there is time. What is not timed is a
    whole pass: graphs of a prompt's length are made when it first comes, kernels of some number of
    rows when it is reached."""
    asked = size * (1 + wait)
    if asked > len(lab.prompts):
        why = f"{asked} prompts are needed, {len(lab.prompts)} were given"
        yield Measurement(at={"batch": size, "waiting": wait}, figures={}, missing=why)
        return
    prompts = taken(lab.prompts, asked)
    for subject in subjects.values():
        _pass(subject, prompts, asked, lab.params)
    passes: list[dict[str, _Pass]] = []
    while len(passes) < REPEATS and (not passes or time.monotonic() < until):
        passes.append(
            {way: _pass(one, prompts, asked, lab.params) for way, one in subjects.items()}
        )
        if lab.tick is not None:
            lab.tick(len(passes), REPEATS)
    for way, subject in subjects.items():
        name = f"{_named(way, wait)}, batch of {size}"
        lab.kept.extend(_samples(name, prompts, passes[0][way].answers))
        at: dict[str, str | Value] = {
            "batch": size,
            "waiting": wait,
            "way": way,
            "drafter": subject.engine.drafter.info.name,
            "prices": passes[0][way].answers[0].speculation.costs,
        }
        yield Measurement(at=at, figures=_figures(way, passes), note=subject.note)


def taken(prompts: Sequence[Prompt], size: int) -> list[str]:
    """Whole batches, LEAST_PROMPTS at least if there are as many."""
    enough = -(-max(size, min(LEAST_PROMPTS, len(prompts))) // size) * size
    count = enough if enough <= len(prompts) else enough - size
    return [prompt.text for prompt in prompts[:count]]


def _named(way: str, wait: str | Value) -> str:
    name = way if way == AR else f"budget {way}"
    return f"{name}, {wait} times as many waiting" if wait else name


def _pass(subject: Subject, prompts: Sequence[str], asked: int, params: SamplingParams) -> _Pass:
    """asked: prompts that come at once."""
    began = time.perf_counter()
    answers: list[Completion] = []
    for start in range(0, len(prompts), asked):
        answers += subject.answer(prompts[start : start + asked], params)
    return _Pass(answers, time.perf_counter() - began)


def _figures(way: str, passes: Sequence[Mapping[str, _Pass]]) -> dict[str, Figure]:
    mine = passes[0][way].answers
    rounds = sum(one.speculation.rounds for one in mine)
    tokens = sum(len(one.token_ids) for one in mine)
    plain = passes[0][AR].answers
    figures: dict[str, Figure] = {
        "prompts": len(mine),
        "repeats": len(passes),
        "tokens": tokens,
        "speed": median(one[way].speed for one in passes),
        "ratio": over([one[way].speed / one[AR].speed for one in passes]),
        "over_off": over([one[way].speed / one[OFF].speed for one in passes]),
        "request_ratio": over([one[AR].request_s / one[way].request_s for one in passes]),
        "tau": tokens / max(rounds, 1),
        "drafting": _drafting(mine, rounds),
        "same": sum(a.token_ids == b.token_ids for a, b in zip(mine, plain, strict=True)),
        "loops": sum(has_loop(one.token_ids) for one in mine),
        "cut": sum(one.finish_reason == "length" for one in mine),
    }
    left_out = {
        AR: ("ratio", "over_off", "request_ratio", "drafting"), OFF: ("over_off",), AUTO: (),
    }[way]  # fmt: skip
    return {name: value for name, value in figures.items() if name not in left_out}


def over(ratios: Sequence[float]) -> Ratio:
    """The median of repeats, the least and the largest."""
    p10, p90 = np.percentile(ratios, [10, 90])
    return Ratio(
        value=median(ratios), low=min(ratios), high=max(ratios), p10=float(p10), p90=float(p90)
    )


def _drafting(answers: Sequence[Completion], rounds: int) -> float | None:
    """Of all rounds, those with drafts; None where no budget has counted them."""
    budgets = [one.speculation.budget for one in answers]
    without = [one.shapes.get("none", 0) for one in budgets if one is not None]
    return 1 - sum(without) / rounds if without and rounds else None


def _samples(name: str, prompts: Sequence[str], answers: Sequence[Completion]) -> list[Sample]:
    """To keep."""
    return [
        Sample(
            method=name,
            prompt=Prompt(kind=ALL, text=text),
            completion=done,
            decode_s=done.timing.decode_s,
        )
        for text, done in zip(prompts, answers, strict=True)
    ]
