# SPDX-License-Identifier: Apache-2.0
"""Counts of rounds, answer by answer, with intervals over answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from specla.bench.accept import Answer, Tally, Watched, collect
from specla.bench.headline import Ratio, bootstrap
from specla.bench.measure import Prompt
from specla.bench.studies.study import Figure, Subject
from specla.request import Completion, SamplingParams


def watched(subject: Subject, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
    """Answers, and what their rounds came to. On a GPU such rounds wait for the host: these are
    counts, not times."""
    if subject.engine.model.device.type == "cuda":
        # Rounds that the host does not see cannot be watched: rows that report run with it.
        params = replace(params, logprobs=0)

    def generate(asked: Sequence[Prompt], watch: Callable[[Watched], None]) -> list[Completion]:
        subject.engine.watch = watch
        try:
            return subject.answer([prompt.text for prompt in asked], params)
        finally:
            subject.engine.watch = None

    return collect(prompts, generate)


def figures(answers: Sequence[Answer], depth: int) -> dict[str, Figure]:
    """counted, tau, first_token and survival_d1 .. of rounds of drafts up to `depth`."""
    tallies = [answer.tally for answer in answers]
    survival = {
        f"survival_d{d + 1}": over_rounds(tallies, lambda t, d=d: _at(t.reached, d))  # type: ignore[misc]
        for d in range(depth)
    }
    return {
        "counted": len(answers),
        "tau": over_rounds(tallies, lambda t: t.tokens),
        "first_token": over_rounds(tallies, lambda t: t.first),
        **survival,
    }


def over_rounds(tallies: Sequence[Tally], count: Callable[[Tally], int]) -> Ratio:
    """A count of rounds over all of them."""
    table = np.array([(count(t), t.rounds) for t in tallies], dtype=float).reshape(-1, 2)

    def ratio(at: np.ndarray) -> np.ndarray:
        total, rounds = np.moveaxis(table[at].sum(-2), -1, 0)
        return np.asarray(total / np.maximum(rounds, 1))

    return bootstrap(ratio, len(table))


def tau_over(mine: Sequence[Answer], base: Sequence[Answer]) -> Ratio:
    """Tokens per round over those of another, on the same prompts."""
    pairs = [(a.tally, b.tally) for a, b in zip(mine, base, strict=True)]
    table = np.array(
        [[(t.tokens, t.rounds) for t in pair] for pair in pairs], dtype=float
    ).reshape(-1, 2, 2)

    def ratio(at: np.ndarray) -> np.ndarray:
        tokens, rounds = np.moveaxis(table[at].sum(-3), -1, 0)
        taus = tokens / np.maximum(rounds, 1)
        return np.asarray(taus[..., 0] / np.maximum(taus[..., 1], 1e-9))

    return bootstrap(ratio, len(table))


def _at(counts: Sequence[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0
