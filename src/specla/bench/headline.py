# SPDX-License-Identifier: Apache-2.0
"""The headline: plain decoding against every way of drafting, end to end, on held-out prompts.

All methods answer a prompt before the next one comes, suites in turn, until the prompts or the
seconds are used up: where time is short, every method has answered the same, fewer, prompts.
Ratios are of decode speeds, both over the same prompts, against exact AR in the same run; their
intervals are bootstrapped over prompts. Looping text is easy to draft and is counted, as are
answers that did not end by themselves; beside every ratio stands the one without looping answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from specla.bench.loops import has_loop
from specla.bench.measure import Method, Prompt, Sample
from specla.errors import what_may_fail
from specla.request import Completion, SamplingParams

AR, CHAIN, TREE, PRUNED = "AR", "chain", "tree", "tree + pruning"
BUDGET, BLOCK_MORE, READER = "tree, budget", "block, trained on", "block + reader"
GSM8K, HUMANEVAL, MIXED = "gsm8k", "humaneval", "mixed"
SUITES = (GSM8K, HUMANEVAL, MIXED)
RESAMPLES, WARM_UP = 2000, 64
GOES = 3
"""Of a batch, timed."""
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio with its 95 % interval and 80 % interval over prompts."""

    value: float
    low: float
    high: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One method on one suite. speed: tokens/s; tau: tokens per round; ratio: of speeds, to AR's;
    ratio_clean: that without answers that loop, None where all do; round_over_ar: seconds per
    round over those of AR. looping, unended: answers with a stretch that repeats, and answers cut
    by the limit. same: token for token as AR."""

    suite: str
    method: str
    prompts: int
    failed: int
    tokens: int
    speed: float
    tau: float
    ratio: Ratio
    ratio_clean: Ratio | None
    round_over_ar: float
    looping: int
    unended: int
    same: int


def in_turn(suites: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    """The first of every suite, then the second, and so on. A prompt's kind is its suite."""
    rows = zip_longest(*suites.values())
    return [prompt for row in rows for prompt in row if prompt is not None]


def take_turns(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    deadline: float,
    tick: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Samples of every method on as many prompts as fit before the deadline (of
    time.monotonic), one at least, after a first go of each that is not kept."""
    for method in methods:
        _sample(method, prompts[0], replace(params, max_tokens=min(params.max_tokens, WARM_UP)))
    samples: list[Sample] = []
    longest, now = 0.0, time.monotonic()
    for done, prompt in enumerate(prompts):
        # One that takes as long as any before has to fit: fla's loop needs half a minute for one.
        if done and now + longest > deadline:
            break
        samples += [_sample(method, prompt, params) for method in methods]
        began, now = now, time.monotonic()
        longest = max(longest, now - began)
        if tick is not None:
            tick(done + 1, len(prompts))
    return samples


def _sample(method: Method, prompt: Prompt, params: SamplingParams) -> Sample:
    try:
        done = method.run(prompt.text, params)
    except what_may_fail() as error:
        return Sample(
            method=method.name, prompt=prompt, completion=None, decode_s=0.0, error=str(error)
        )
    return Sample(
        method=method.name, prompt=prompt, completion=done, decode_s=done.timing.decode_s
    )


def scores(samples: Sequence[Sample]) -> list[Score]:
    """One per suite and method, in the order they first appear. Those without a prompt that AR
    has answered too have none: see `unanswered`."""
    return [
        _score(suite, method, *both) for suite, method, both in _by_suite(samples) if _pairs(*both)
    ]


def part_ratios(samples: Sequence[Sample], method: str) -> dict[str, float]:
    """Speed over AR's by "suite, part", of suites that have parts."""
    found: dict[str, float] = {}
    for suite, name, (mine, plain) in _by_suite(samples):
        parts = dict.fromkeys(one.prompt.part for one in mine if one.prompt.part)
        for part in parts if name == method else ():
            if pairs := _pairs([one for one in mine if one.prompt.part == part], plain):
                own, base = (_work(done) for done in zip(*pairs, strict=True))
                found[f"{suite}, {part}"] = float(_speed(own) / _speed(base))
    return found


def prices(samples: Sequence[Sample]) -> str:
    """What the budget reckoned with, as its results say."""
    done = [one.completion for one in samples if one.method == BUDGET and one.completion]
    return ", ".join(dict.fromkeys(one.speculation.costs for one in done)) or "none"


def unanswered(samples: Sequence[Sample]) -> dict[str, str]:
    """Why a method has no score on a suite, by "method, suite"."""
    return {
        f"{method}, {suite}": _why_none(*both)
        for suite, method, both in _by_suite(samples)
        if not _pairs(*both)
    }


def _by_suite(
    samples: Sequence[Sample],
) -> Iterator[tuple[str, str, tuple[list[Sample], list[Sample]]]]:
    """Suite, method, and the method's samples and AR's of that suite."""
    suites = dict.fromkeys(s.prompt.kind for s in samples)
    methods = dict.fromkeys(s.method for s in samples)
    for suite in suites:
        here = [one for one in samples if one.prompt.kind == suite]
        plain = [one for one in here if one.method == AR]
        for method in methods:
            if mine := [one for one in here if one.method == method]:
                yield suite, method, (mine, plain)


def _why_none(mine: Sequence[Sample], plain: Sequence[Sample]) -> str:
    errors = [one.error for one in (*mine, *plain) if one.error is not None]
    why = errors[0].split("\n")[0] if errors else "AR was not asked the same ones"
    return f"none of {len(mine)} prompts was answered by it and by AR: {why}"


def _score(suite: str, method: str, mine: Sequence[Sample], plain: Sequence[Sample]) -> Score:
    asked = {one.prompt for one in plain}
    mine, pairs = [one for one in mine if one.prompt in asked], _pairs(mine, plain)
    done = [one for one, _ in pairs]
    own, base = _work(done), _work([one for _, one in pairs])
    loops = [has_loop(c.token_ids) for c, _ in done]
    rounds = sum(c.speculation.rounds for c, _ in done)
    per_round = own[:, 1].sum() / max(rounds, 1)
    return Score(
        suite=suite,
        method=method,
        prompts=len(mine),
        failed=len(mine) - len(pairs),
        tokens=int(own[:, 0].sum()),
        speed=float(_speed(own)),
        tau=own[:, 0].sum() / max(rounds, 1),
        ratio=_over(own, base),
        ratio_clean=None if all(loops) else _over(own[~np.array(loops)], base[~np.array(loops)]),
        round_over_ar=float(per_round * _speed(base)),
        looping=sum(loops),
        unended=sum(c.finish_reason == "length" for c, _ in done),
        same=sum(a[0].token_ids == b[0].token_ids for a, b in pairs),
    )


Done = tuple[Completion, float]
"""A completion and its decode seconds."""


def _pairs(mine: Sequence[Sample], plain: Sequence[Sample]) -> list[tuple[Done, Done]]:
    """Prompts that both have answered."""
    base = {one.prompt: one for one in plain}
    both = [(one, base[one.prompt]) for one in mine if one.prompt in base]
    return [
        ((a.completion, a.decode_s), (b.completion, b.decode_s))
        for a, b in both
        if a.completion is not None and b.completion is not None
    ]


def _work(done: Sequence[Done]) -> np.ndarray:
    """[n, 2] tokens and seconds."""
    return np.array([(len(c.token_ids), s) for c, s in done], dtype=float).reshape(-1, 2)


def _over(own: np.ndarray, base: np.ndarray) -> Ratio:
    """Speeds of the same prompts, see `_work`."""
    return bootstrap(lambda at: _speed(own[at]) / _speed(base[at]), len(own))


def _speed(work: np.ndarray) -> np.ndarray:
    """[..., n, 2] -> tokens per second [...]."""
    tokens, seconds = np.moveaxis(work.sum(-2), -1, 0)
    speed: np.ndarray = np.divide(tokens, seconds, out=np.zeros_like(tokens), where=seconds > 0)
    return speed


def bootstrap(ratio: Callable[[np.ndarray], np.ndarray], count: int, seed: int = 0) -> Ratio:
    """A ratio over `count` prompts, one at least, and its spread over resampled ones: `ratio` gets
    their numbers [..., count] and gives one for each row [...]."""
    assert count > 0, "a ratio over no prompts"
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    low, p10, p90, high = np.percentile(ratio(drawn), [INTERVAL[0], 10, 90, INTERVAL[1]])
    value = float(ratio(np.arange(count)))
    return Ratio(value=value, low=float(low), high=float(high), p10=float(p10), p90=float(p90))


def tau_ratio(samples: Sequence[Sample], suite: str, method: str, base: str) -> Ratio | None:
    """Tokens per round of one method over another's, over prompts that both have answered."""
    mine, other = ([s for s in samples if s.method == m and s.prompt.kind == suite]
                   for m in (method, base))  # fmt: skip
    if not mine or not other:
        return None
    pairs = _pairs(mine, other)
    counts = np.array(
        [[len(c.token_ids), c.speculation.rounds] for pair in pairs for c, _ in pair], dtype=float
    ).reshape(-1, 2, 2)

    def ratio(at: np.ndarray) -> np.ndarray:
        tokens, rounds = np.moveaxis(counts[at].sum(-3), -1, 0)
        taus = tokens / np.maximum(rounds, 1)
        return np.asarray(taus[..., 0] / taus[..., 1])

    return bootstrap(ratio, len(pairs)) if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A suite answered in one batch.

    seconds, plain_seconds: the method's and AR's, prompts included, and decode_s, plain_decode_s
    without them: medians over the same number of goes. rounds: of the row that had most. tau,
    drafts, drafted: tokens and verified drafts per round of a row, and the share of these rounds
    that had any draft, where a budget says so. same: answers that are AR's in every go; looping:
    of the method's answers, those with a stretch that repeats.
    """

    suite: str
    size: int
    method: str
    tokens: int
    seconds: float
    plain_seconds: float
    decode_s: float
    plain_decode_s: float
    rounds: int
    tau: float
    drafts: float
    drafted: float | None
    same: int
    looping: int

    @property
    def ratio(self) -> float:
        """Speed over AR's."""
        return self.plain_seconds / self.seconds

    @property
    def decode_ratio(self) -> float:
        """Speed of decoding alone over AR's."""
        return self.plain_decode_s / self.decode_s


def batch_cases(size: int) -> list[tuple[str, int]]:
    """Suites and batch sizes: every suite in the largest, GSM8K first, then GSM8K in smaller
    ones."""
    return [(suite, size) for suite in SUITES] + [(GSM8K, n) for n in (16, 4) if n < size]


def in_batch(
    suite: str,
    method: str,
    prompts: Sequence[str],
    plain: Callable[[Sequence[str]], Sequence[Completion]],
    run: Callable[[Sequence[str]], Sequence[Completion]],
) -> tuple[Batch, list[Sample]]:
    """All prompts at once, AR and the method by turns, after a first go of both that is not timed.

    Also gives the method's answers, to keep.
    """
    plain(prompts), run(prompts)
    goes = [(_timed(plain, prompts), _timed(run, prompts)) for _ in range(GOES)]
    got = [mine.answers for _, mine in goes]
    truth = goes[0][0].answers
    batch = Batch(
        suite=suite,
        size=len(prompts),
        method=method,
        tokens=sum(len(c.token_ids) for c in got[-1]),
        seconds=median(mine.seconds for _, mine in goes),
        plain_seconds=median(base.seconds for base, _ in goes),
        decode_s=median(mine.decode_s for _, mine in goes),
        plain_decode_s=median(base.decode_s for base, _ in goes),
        same=sum(all(c.token_ids == a.token_ids for c in row)
                 for a, *row in zip(truth, *got, strict=True)),
        looping=sum(has_loop(c.token_ids) for c in got[-1]),
        **_rounds(got[-1]),
    )  # fmt: skip
    return batch, [_in_batch(batch, *pair) for pair in zip(prompts, got[-1], strict=True)]


def _rounds(answers: Sequence[Completion]) -> dict[str, Any]:
    """What a batch's rounds were: the fields of `Batch`."""
    spoken = [c.speculation for c in answers]
    total = max(1, sum(s.rounds for s in spoken))
    shapes = [s.budget.shapes for s in spoken if s.budget is not None]
    idle = sum(shape.get("none", 0) for shape in shapes)
    return {
        "rounds": max(s.rounds for s in spoken),
        "tau": sum(len(c.token_ids) for c in answers) / total,
        "drafts": sum(s.drafted for s in spoken) / total,
        "drafted": 1 - idle / total if shapes else None,
    }


def _in_batch(batch: Batch, text: str, done: Completion) -> Sample:
    return Sample(
        method=f"{batch.method}, batch of {batch.size}",
        prompt=Prompt(kind=batch.suite, text=text),
        completion=done,
        decode_s=done.timing.decode_s,
    )


class Go(NamedTuple):
    """A batch once. decode_s: from the first round of any row to the last."""

    answers: Sequence[Completion]
    seconds: float

    @property
    def decode_s(self) -> float:
        return max(c.timing.decode_s for c in self.answers)


def _timed(run: Callable[[Sequence[str]], Sequence[Completion]], prompts: Sequence[str]) -> Go:
    began = time.perf_counter()
    done = run(prompts)
    return Go(done, time.perf_counter() - began)
