# SPDX-License-Identifier: Apache-2.0
"""From samples to rows: one row per prompt kind and method, with the ratios people ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from specla.bench.loops import has_loop
from specla.bench.measure import Prompt, Sample
from specla.request import Completion

PLAIN, EXACT = "plain AR", "exact AR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one kind of prompt.

    `same` counts completions with exactly the tokens of exact AR; `looping` those in
    which a stretch repeats (`loops`). Speeds are tokens/s over all prompts; p10 and p90 are over
    prompts.
    """

    kind: str
    method: str
    num_prompts: int
    failed: int
    num_tokens: int
    tokens_per_s: float
    p10: float
    p90: float
    vs_plain: float | None
    vs_exact: float | None
    tokens_per_round: float
    acceptance: float | None
    acceptance_by_depth: tuple[float, ...]
    looping: int
    same: int

    @property
    def identical(self) -> bool:
        """Every completion equals exact AR's, token for token."""
        return self.failed == 0 and self.same == self.num_prompts


def rows(samples: Sequence[Sample]) -> list[Row]:
    """One row per kind and method, in the order they first appear."""
    kinds = list(dict.fromkeys(s.prompt.kind for s in samples))
    methods = list(dict.fromkeys(s.method for s in samples))
    exact = {s.prompt: s.completion for s in samples if s.method == EXACT}
    table: list[Row] = []
    for kind in kinds:
        groups = {
            m: [s for s in samples if s.prompt.kind == kind and s.method == m] for m in methods
        }
        speeds = {m: speed(groups[m]) for m in methods}
        table += [_row(kind, m, groups[m], speeds, exact) for m in methods]
    return table


def speed(samples: Iterable[Sample]) -> float:
    """Decoded tokens over decode seconds, all samples together."""
    good = [(s.completion, s.decode_s) for s in samples if s.completion is not None]
    seconds = sum(t for _, t in good)
    return sum(len(c.token_ids) for c, _ in good) / seconds if seconds > 0 else 0.0


def _row(
    kind: str,
    method: str,
    samples: Sequence[Sample],
    speeds: dict[str, float],
    exact: dict[Prompt, Completion | None],
) -> Row:
    done = [s.completion for s in samples if s.completion is not None]
    drafted = sum(c.speculation.drafted for c in done)
    accepted = sum(c.speculation.accepted for c in done)
    p10, p90 = spread([speed([s]) for s in samples if s.completion is not None])
    return Row(
        kind=kind,
        method=method,
        num_prompts=len(samples),
        failed=len(samples) - len(done),
        num_tokens=sum(len(c.token_ids) for c in done),
        tokens_per_s=speeds[method],
        p10=p10,
        p90=p90,
        vs_plain=_ratio(speeds, method, PLAIN),
        vs_exact=_ratio(speeds, method, EXACT),
        tokens_per_round=tokens_per_round(done),
        acceptance=accepted / drafted if drafted else None,
        acceptance_by_depth=by_depth(done),
        looping=sum(has_loop(c.token_ids) for c in done),
        same=sum(_same(s, exact.get(s.prompt)) for s in samples),
    )


def _ratio(speeds: dict[str, float], method: str, base: str) -> float | None:
    return speeds[method] / speeds[base] if speeds.get(base) else None


def _same(sample: Sample, reference: Completion | None) -> bool:
    mine = sample.completion
    return mine is not None and reference is not None and mine.token_ids == reference.token_ids


def spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile; the extremes where there are too few values to cut."""
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def tokens_per_round(completions: Sequence[Completion]) -> float:
    """Of all their rounds together."""
    specs = [c.speculation for c in completions]
    rounds = sum(s.rounds for s in specs)
    return sum(s.rounds * s.tokens_per_round for s in specs) / rounds if rounds else 0.0


def by_depth(completions: Sequence[Completion]) -> tuple[float, ...]:
    """Acceptance at each depth, averaged over completions in proportion to their rounds.

    A completion that never drafted that deep has no say about that depth.
    """
    specs = [c.speculation for c in completions if c.speculation.drafted]
    deepest = max((len(s.acceptance_by_depth) for s in specs), default=0)
    means = []
    for depth in range(deepest):
        seen = [s for s in specs if len(s.acceptance_by_depth) > depth]
        weight = sum(s.rounds for s in seen)
        total = sum(s.rounds * s.acceptance_by_depth[depth] for s in seen)
        means.append(total / weight if weight else 0.0)
    return tuple(means)
