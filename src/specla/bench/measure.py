# SPDX-License-Identifier: Apache-2.0
"""Run several ways of decoding over the same prompts and keep what each one did.

Method: one warm-up per method, then the methods take turns on each prompt, so that a machine
that slows down slows all of them; the median decode time over the repeats counts. Speed is
decode speed: output tokens over decode seconds, prefill left out. Nothing here knows an engine:
a method is a name and a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from specla.errors import SpeclaError
from specla.request import Completion, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to decode: `run(prompt, params)` gives the completion and remembers nothing of
    it, or repeats would measure the memory."""

    name: str
    run: Callable[[str, SamplingParams], Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a named kind; part: what it is within its kind."""

    kind: str
    text: str
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one method did with one prompt. `error` says why there is no completion."""

    method: str
    prompt: Prompt
    completion: Completion | None
    decode_s: float
    error: str | None = None


def interleave(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    repeats: int,
    tick: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Samples of every method on every prompt, methods taking turns."""
    total = len(methods) * (len(prompts) * repeats + 1)
    runs = _counted(_runs(methods, prompts, repeats), total, tick)
    times: dict[tuple[int, int], list[float]] = {}
    last: dict[tuple[int, int], Completion | SpeclaError] = {}
    for m, p in runs:
        key = (m, max(p, 0))
        outcome = _run(methods[m], prompts[max(p, 0)].text, params)
        last[key] = outcome
        # p < 0 is the warm-up: caches fill, clocks rise, nothing is kept.
        if p >= 0 and isinstance(outcome, Completion):
            times.setdefault(key, []).append(outcome.timing.decode_s)
    return [
        _sample(methods[m].name, prompts[p], last[m, p], times.get((m, p), []))
        for p in range(len(prompts))
        for m in range(len(methods))
    ]


def _runs(
    methods: Sequence[Method], prompts: Sequence[Prompt], repeats: int
) -> Iterator[tuple[int, int]]:
    yield from ((m, -1) for m in range(len(methods)))
    for p in range(len(prompts)):
        for _ in range(repeats):
            yield from ((m, p) for m in range(len(methods)))


def _counted(
    runs: Iterator[tuple[int, int]], total: int, tick: Callable[[int, int], None] | None
) -> Iterator[tuple[int, int]]:
    for done, run in enumerate(runs):
        if tick is not None:
            tick(done, total)
        yield run


def _run(method: Method, text: str, params: SamplingParams) -> Completion | SpeclaError:
    try:
        return method.run(text, params)
    except SpeclaError as error:
        return error


def _sample(
    method: str, prompt: Prompt, outcome: Completion | SpeclaError, times: list[float]
) -> Sample:
    if isinstance(outcome, SpeclaError):
        return Sample(
            method=method, prompt=prompt, completion=None, decode_s=0.0, error=str(outcome)
        )
    return Sample(method=method, prompt=prompt, completion=outcome, decode_s=median(times))
