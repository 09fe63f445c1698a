# SPDX-License-Identifier: Apache-2.0
"""Three ways to say the same: a table for people, a JSON document, rows of results.csv."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from specla.bench.loops import has_loop
from specla.bench.measure import Prompt, Sample
from specla.bench.table import EXACT, PLAIN, Row, speed, spread, tokens_per_round

COLUMNS = (
    "date", "commit", "device", "torch", "triton", "command", "metric", "value", "unit",
    "p10", "p90", "baseline", "notes",
)  # fmt: skip
DEPTHS_SHOWN = 5


def render(rows: Sequence[Row], title: str) -> Table:
    """The one table of a report."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("tok/s", "vs plain", "vs exact", "tok/round", "accept"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("by depth", no_wrap=True)
    table.add_column("same", justify="right", no_wrap=True)
    table.add_column("loops", justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1].kind != row.kind
        last = i + 1 < len(rows) and rows[i + 1].kind != row.kind
        table.add_row(row.kind if first else "", *cells(row), end_section=last)
    return table


def cells(row: Row) -> list[str]:
    """One row as text, the kind left out."""
    depths = " ".join(f"{100 * a:.0f}" for a in row.acceptance_by_depth[:DEPTHS_SHOWN])
    more = " .." if len(row.acceptance_by_depth) > DEPTHS_SHOWN else ""
    failed = f" ({row.failed} failed)" if row.failed else ""
    return [
        row.method,
        f"{row.tokens_per_s:.1f}",
        _times(row.vs_plain),
        _times(row.vs_exact),
        f"{row.tokens_per_round:.2f}",
        "-" if row.acceptance is None else f"{row.acceptance:.0%}",
        depths + more or "-",
        f"{row.same}/{row.num_prompts}{failed}",
        str(row.looping) if row.looping else "-",
    ]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows as JSON objects."""
    return [asdict(row) | {"identical": row.identical} for row in rows]


def head(
    *, device: str, versions: Mapping[str, str | None], command: str, measured: str | None = None
) -> dict[str, str]:
    """The columns that all rows of a run share. measured: the commit; None: this checkout's."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": measured or commit(),
        "device": device,
        "torch": versions.get("torch") or "",
        "triton": versions.get("triton") or "",
        "command": command,
    }


def csv_rows(rows: Sequence[Row], first: Mapping[str, object]) -> list[dict[str, object]]:
    """Rows of results.csv: speed, ratio to plain AR and acceptance of each method and kind. first:
    the columns that they share."""
    return [dict(first) | line for row in rows for line in _metrics(row)]


def _metrics(row: Row) -> Iterable[dict[str, object]]:
    name = f"{row.kind}/{row.method}"
    notes = f"{row.num_prompts} prompts; same as exact AR {row.same}; looping {row.looping}"
    if row.failed:
        notes += f"; failed {row.failed}"
    blank: dict[str, object] = {"p10": "", "p90": "", "baseline": "", "notes": notes}
    yield blank | {
        "metric": f"{name}/decode",
        "value": f"{row.tokens_per_s:.2f}",
        "unit": "tokens/s",
        "p10": f"{row.p10:.2f}",
        "p90": f"{row.p90:.2f}",
    }
    if row.vs_plain is not None and row.method != PLAIN:
        value = f"{row.vs_plain:.3f}"
        yield blank | {
            "metric": f"{name}/ratio", "value": value, "unit": "x", "baseline": PLAIN,
        }  # fmt: skip
    if row.acceptance is not None:
        value = f"{row.tokens_per_round:.3f}"
        yield blank | {"metric": f"{name}/tokens_per_round", "value": value, "unit": "tokens"}
        value = f"{row.acceptance:.4f}"
        yield blank | {"metric": f"{name}/acceptance", "value": value, "unit": "fraction"}


def totals(samples: Sequence[Sample], method: str, name: str) -> Iterator[dict[str, object]]:
    """Rows of results.csv, but for what all rows of a run share: a method's decode speed over
    the prompts that everybody answered, against exact AR as `name` and against plain AR as
    `name`_over_plain."""
    by_prompt: dict[Prompt, dict[str, Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, {})[sample.method] = sample
    answered = [x for x in by_prompt.values() if all(s.completion for s in x.values())]
    mine = [x[method] for x in answered]
    done = [s.completion for s in mine if s.completion is not None]
    if not done:
        return
    tokens = tokens_per_round(done)
    loops = sum(has_loop(c.token_ids) for c in done)
    kinds = ", ".join(dict.fromkeys(s.prompt.kind for s in mine))
    for base, metric in ((EXACT, name), (PLAIN, f"{name}_over_plain")):
        p10, p90 = spread([speed([x[method]]) / speed([x[base]]) for x in answered])
        yield {
            "metric": metric,
            "value": f"{speed(mine) / speed(x[base] for x in answered):.3f}",
            "unit": "x",
            "p10": f"{p10:.3f}",
            "p90": f"{p90:.3f}",
            "baseline": base,
            "notes": f"{method}; {len(done)} of {len(by_prompt)} prompts of {kinds}; "
            f"{tokens:.2f} tokens per round; looping {loops}",
        }


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines)


def append(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Add rows at the end. What is in the file already is never rewritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(lines)


def commit() -> str:
    """Short hash of the checkout, '+' if it has changes; 'none' outside a checkout."""
    here = Path(__file__).parent
    # An installed copy inside somebody else's checkout is not ours to name.
    ours = _git(here, "ls-files", Path(__file__).name)
    head = _git(here, "rev-parse", "--short", "HEAD") if ours else ""
    if not head:
        return "none"
    return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
