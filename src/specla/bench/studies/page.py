# SPDX-License-Identifier: Apache-2.0
"""A study's measurements as JSON lines, a table, rows of results.csv, and a page with its plot.

Lines can be read back, so that what was measured on a machine without a checkout, or without
matplotlib, is recorded and drawn on one that has it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from specla.bench.headline import Ratio
from specla.bench.headline_page import PLAIN
from specla.bench.kernel_plots import save
from specla.bench.report import markdown
from specla.bench.studies.study import Figure, Measurement, Study, named, unit
from specla.errors import ConfigError

Run = Mapping[str, Any]
"""What a study ran on: date, commit, device, torch, triton, command, and more that is shown."""
HEAD = ("date", "commit", "device", "torch", "triton", "command")

COUNTED = ("prompts", "repeats", "tokens", "parameters")
NOTE = (
    "An interval stands in parentheses. same: answers equal to plain decoding's, token for token; "
    "loops: those with a stretch that repeats, which is easy to draft; cut: those that the limit "
    "ended."
)


def line(study: str, one: Measurement, run: Run) -> str:
    """One measurement as strict JSON."""
    record = {"study": study, **asdict(one), "run": dict(run)}
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def read(path: Path, study: str) -> tuple[list[Measurement], dict[str, Any]]:
    """Measurements and their run from JSON lines.

    Raises:
        ConfigError: they are not this study's, of one run.
    """
    try:
        records = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        (name,) = {record["study"] for record in records}
        (run,) = {json.dumps(record["run"], sort_keys=True) for record in records}
        if name != study:
            raise ValueError(f"they are of study {name}")
        return [_measurement(record) for record in records], json.loads(run)
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ConfigError(
            f"--from must be the JSON lines of one run of study {study}, got {path}: {failure}"
        ) from failure


def _measurement(record: Mapping[str, Any]) -> Measurement:
    figures = {
        name: Ratio(**value) if isinstance(value, dict) else value
        for name, value in record["figures"].items()
    }
    return Measurement(
        at=record["at"], figures=figures, missing=record["missing"], note=record["note"]
    )


def headers(found: Sequence[Measurement]) -> tuple[list[str], list[str]]:
    """Names of factors and of figures, in the order in which they first appear."""
    at = dict.fromkeys(name for one in found for name in one.at)
    return list(at), list(dict.fromkeys(name for one in found for name in one.figures))


def cells(one: Measurement, factors: Sequence[str], figures: Sequence[str]) -> list[str]:
    """One row as text; why it is missing stands where the first figure would."""
    at = [_text(one.at[name]) if name in one.at else "-" for name in factors]
    if one.missing is not None:
        return [*at, f"missing: {one.missing}", *[""] * (len(figures) - 1)]
    return [*at, *(written(one.figures.get(name)) for name in figures)]


def written(figure: Figure) -> str:
    """With its interval, if it has one; of one prompt there is none."""
    if isinstance(figure, Ratio) and figure.low < figure.high:
        return f"{shortly(figure)} ({figure.low:.2f}-{figure.high:.2f})"
    return shortly(figure)


def shortly(figure: Figure) -> str:
    """Without its interval."""
    if figure is None:
        return "-"
    if isinstance(figure, Ratio):
        return f"{figure.value:.2f}"
    if isinstance(figure, int):
        return f"{figure:,}"
    return f"{figure:.2f}" if abs(figure) < 100 else f"{figure:,.0f}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def render(found: Sequence[Measurement], title: str) -> Table:
    """The table of those that have figures, for a terminal: intervals are on the page."""
    there = [one for one in found if one.missing is None]
    factors, figures = headers(there)
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in (*factors, *figures):
        table.add_column(name, justify="right", no_wrap=True)
    for one in there:
        at = [_text(one.at.get(name, "-")) for name in factors]
        table.add_row(*at, *(shortly(one.figures.get(name)) for name in figures))
    return table


def csv_rows(study: Study, found: Sequence[Measurement], run: Run) -> list[dict[str, object]]:
    """Rows of results.csv: the figures that the study wants there."""
    head = {name: run[name] for name in HEAD}
    return [head | row for one in found for row in _rows(study, one)]


def _rows(study: Study, one: Measurement) -> Iterator[dict[str, object]]:
    where = ",".join(f"{name}={_text(value)}" for name, value in one.at.items())
    counts = [f"{name} {one.figures[name]}" for name in ("prompts", "same", "loops", "cut")
              if one.figures.get(name) is not None]  # fmt: skip
    for name, figure in one.figures.items():
        if figure is None or not name.startswith(study.recorded):
            continue
        interval = figure if isinstance(figure, Ratio) else None
        spread = f"interval {interval.low:.3f} to {interval.high:.3f}" if interval else ""
        yield {
            "metric": f"study/{study.name}/{where}/{name}",
            "value": f"{interval.value if interval else figure:.4f}",
            "unit": unit(name),
            "p10": "" if interval is None else f"{interval.p10:.4f}",
            "p90": "" if interval is None else f"{interval.p90:.4f}",
            "baseline": PLAIN if name == "ratio" else "",
            "notes": "; ".join(filter(None, [spread, *counts])),
        }


def write(folder: Path, study: Study, found: Sequence[Measurement], run: Run) -> list[Path]:
    """README.md and, with matplotlib and something to draw, its plot. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    plot = _draw(folder, study, found)
    page = folder / "README.md"
    page.write_text(_page(study, found, run, plot), encoding="utf-8")
    return [page, *([plot] if plot else [])]


def _draw(folder: Path, study: Study, found: Sequence[Measurement]) -> Path | None:
    there = [one for one in found if one.missing is None]
    if not there or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    path = folder / f"{study.name}.png"
    figure = study.draw(there)
    figure.tight_layout()
    save(figure, path)
    return path


def _page(study: Study, found: Sequence[Measurement], run: Run, plot: Path | None) -> str:
    factors, figures = headers(found)
    rows = [cells(one, factors, figures) for one in found]
    units = {named(name): unit(name) for name in figures if unit(name) not in COUNTED}
    parts = [
        f"# Study: {study.name}",
        f"Written by `{run['command']}`.",
        study.about,
        f"![{study.name}]({plot.name})" if plot else "",
        markdown([*factors, *figures], rows),
        "Units: " + ", ".join(f"{name} in {what}" for name, what in units.items()) + ". " + NOTE,
        _notes(found),
        "## What ran",
        markdown(("what", "value"), [(name, str(value)) for name, value in run.items()]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _notes(found: Sequence[Measurement]) -> str:
    """What ran otherwise than asked, and how often."""
    counted = Counter(one.note for one in found if one.note)
    return "\n".join(f"- {count} of {len(found)} rows: {note}" for note, count in counted.items())
