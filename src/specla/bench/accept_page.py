# SPDX-License-Identifier: Apache-2.0
"""Acceptance as a table, as JSON lines, as rows of results.csv and as kept texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from specla.bench.accept import Answer, Figures, Result

DEPTHS_SHOWN = 5
NOTE = (
    "tau: tokens per round, the bonus counted. In parentheses: without answers that loop. first: "
    "rounds whose first token was the likeliest guess; recall: of nodes with scored drafts."
)


def render(results: Sequence[Result], title: str) -> Table:
    """The one table of a report."""
    table = Table(title=title, title_justify="left", pad_edge=False, caption=NOTE)
    table.add_column("suite", no_wrap=True)
    table.add_column("drafter", no_wrap=True)
    for name in ("T", "tau", "accept", "first"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("accepted by depth", "survival", "recall 1/2/4/8"):
        table.add_column(name)
    table.add_column("loops", justify="right", no_wrap=True)
    for one in results:
        table.add_row(*_cells(one))
    return table


def _cells(one: Result) -> list[str]:
    raw, clean = one.raw, one.filtered
    recall = "-" if raw.recall is None else "/".join(f"{100 * r:.0f}" for r in raw.recall.values())
    failed = f" ({one.failed} failed)" if one.failed else ""
    return [
        one.suite,
        one.drafter,
        f"{one.temperature:g}",
        f"{raw.tau:.2f} ({'-' if clean is None else f'{clean.tau:.2f}'})",
        "-" if raw.acceptance is None else f"{raw.acceptance:.0%}",
        f"{raw.first_token:.0%}",
        _percent(raw.acceptance_by_depth),
        _percent(raw.survival_by_depth),
        recall,
        f"{one.looping}/{one.prompts}{failed}",
    ]


def _percent(values: Sequence[float]) -> str:
    more = " .." if len(values) > DEPTHS_SHOWN else ""
    return " ".join(f"{100 * x:.0f}" for x in values[:DEPTHS_SHOWN]) + more or "-"


def record(one: Result) -> dict[str, object]:
    """One line of JSON."""
    return asdict(one) | {"tau_counts": "emitted tokens per round, the bonus included"}


def text_record(one: Answer, temperature: float) -> dict[str, object]:
    """An answer, to look at."""
    return {
        "suite": one.prompt.kind,
        "temperature": temperature,
        "prompt": one.prompt.text,
        "text": one.completion.text,
        "tau": one.tally.tau,
        "rounds": one.tally.rounds,
        "loops": one.loops,
        "finish_reason": one.completion.finish_reason,
    }


def csv_rows(results: Iterable[Result], first: Mapping[str, object]) -> list[dict[str, object]]:
    """Rows of results.csv. The baseline of a tau is plain decoding, which has 1. first: the
    columns that they share."""
    return [dict(first) | line for one in results for line in _lines(one)]


def _lines(one: Result) -> Iterable[dict[str, object]]:
    name = f"accept/{one.suite}/t{one.temperature:g}/{one.drafter}"
    notes = f"{one.prompts} prompts; looping {one.looping}; failed {one.failed}"
    for suffix, found in (("", one.raw), ("_filtered", one.filtered)):
        if found is not None:
            yield from _metrics(name, suffix, found, notes)


def _metrics(name: str, suffix: str, found: Figures, notes: str) -> Iterable[dict[str, object]]:
    blank: dict[str, object] = {"p10": "", "p90": "", "baseline": "", "notes": notes}
    yield blank | {
        "metric": f"{name}/tau{suffix}",
        "value": f"{found.tau:.3f}",
        "unit": "tokens/round",
        "p10": f"{found.tau_p10:.3f}",
        "p90": f"{found.tau_p90:.3f}",
        "baseline": "plain AR, 1 token/round",
    }
    fractions = {"first_token": found.first_token}
    if found.acceptance is not None:
        fractions["acceptance"] = found.acceptance
    fractions |= {f"acceptance_d{d}": x for d, x in enumerate(found.acceptance_by_depth, 1)}
    fractions |= {f"survival_d{d}": x for d, x in enumerate(found.survival_by_depth, 1)}
    fractions |= {f"recall_top{k}": x for k, x in (found.recall or {}).items()}
    for metric, value in fractions.items():
        yield blank | {
            "metric": f"{name}/{metric}{suffix}", "value": f"{value:.4f}", "unit": "fraction",
        }  # fmt: skip
