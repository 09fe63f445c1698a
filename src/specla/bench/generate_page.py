# SPDX-License-Identifier: Apache-2.0
"""Decode speeds by kind and method as JSON lines, and as a page with its plot.

Lines can be read back, so that what was measured on a machine without a checkout, or without
matplotlib, is recorded and drawn on one that has it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from specla.bench.report import cells, markdown
from specla.bench.table import EXACT, PLAIN, Row
from specla.errors import ConfigError

Run = Mapping[str, str]
"""What ran: the columns that all rows of results.csv share, and more that the page shows."""
Total = dict[str, object]
"""A row of results.csv over all prompts, without those columns."""

COLUMNS = ("kind", "method", "tok/s", "vs plain", "vs exact", "tok/round", "accept", "by depth, %",
           "same", "loops")  # fmt: skip
METHOD = """\
One text at a time. All methods answer a prompt in turn, then the next, after a warm-up of each.
Speed is decode speed: output tokens over seconds of decoding, prompts left out, all texts of a
kind together. *Exact AR* is plain decoding in the mode whose bits drafting keeps; *plain AR* is
the fastest that promises nothing about bits. *tok/round* counts accepted drafts and the target's
own token; *by depth*: of the rounds that had a draft so deep, those in which it was accepted.
*same*: texts equal to exact AR's, token for token; *loops*: texts with a stretch that repeats,
which is easy to draft."""
# What a run and a total must have to be shown and recorded.
RUN = {"date", "commit", "device", "torch", "triton", "command", "machine", "prompts"}
TOTAL = {"metric", "value", "unit", "p10", "p90", "baseline", "notes"}
NUMBERS = ("tokens_per_s", "p10", "p90", "tokens_per_round", "num_prompts", "failed", "same")


def lines(run: Run, rows: Sequence[Row], totals: Sequence[Total]) -> list[str]:
    """One JSON line per row and total, each with its run."""
    shared = {"run": dict(run)}
    records = [{"record": "row"} | asdict(row) | shared for row in rows]
    records += [{"record": "total"} | dict(total) | shared for total in totals]
    return [json.dumps(one, allow_nan=False) for one in records]


def read(path: Path) -> tuple[dict[str, str], list[Row], list[Total]]:
    """A run from its JSON lines.

    Raises:
        ConfigError: the file is not one of ours.
    """
    try:
        found = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        runs = [one.pop("run") for one in found]
        if not runs or any(run != runs[0] for run in runs):
            raise ValueError("there must be lines, all of one run")
        kinds = [(one.pop("record"), one) for one in found]
        rows = [_row(one) for kind, one in kinds if kind == "row"]
        totals = [one for kind, one in kinds if kind == "total"]
        _check(runs[0], rows, totals)
        return runs[0], rows, totals
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ConfigError(
            f"--from must be the JSON lines of one run of bench generate, got {path}: {failure}"
        ) from failure


def _row(record: Mapping[str, Any]) -> Row:
    given = {field.name: record[field.name] for field in fields(Row)}
    if not all(isinstance(given[name], (int, float)) for name in NUMBERS):
        raise ValueError(f"{', '.join(NUMBERS)} must be numbers")
    return Row(**given | {"acceptance_by_depth": tuple(record["acceptance_by_depth"])})


def _check(run: Mapping[str, Any], rows: Sequence[Row], totals: Sequence[Total]) -> None:
    """One row for each kind and method, and what is read of run and totals."""
    seen = [(row.kind, row.method) for row in rows]
    kinds, methods = ({pair[i] for pair in seen} for i in (0, 1))
    if not rows or len(set(seen)) < len(seen) or len(seen) < len(kinds) * len(methods):
        raise ValueError("every kind must have one row of every method")
    missing = RUN - set(run), *(TOTAL - set(total) for total in totals)
    if any(missing):
        raise ValueError(f"{', '.join(sorted(set().union(*missing)))} must be there")


def write(folder: Path, run: Run, rows: Sequence[Row], totals: Sequence[Total]) -> list[Path]:
    """rows.jsonl, README.md and, with matplotlib, its plot. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "rows.jsonl"
    kept.write_text("".join(f"{text}\n" for text in lines(run, rows, totals)), encoding="utf-8")
    plot = _draw(folder, rows)
    page = folder / "README.md"
    page.write_text("\n\n".join(_page(run, rows, totals, plot)) + "\n", encoding="utf-8")
    return [kept, page, *([plot] if plot else [])]


def _page(
    run: Run, rows: Sequence[Row], totals: Sequence[Total], plot: Path | None
) -> Iterator[str]:
    yield "# Decoding, method by method"
    yield f"Written by `{run['command']}`."
    yield METHOD
    if plot is not None:
        yield f"![{plot.stem}]({plot.name})"
    if totals:
        header = ("over all prompts", "", "p10 - p90", "against", "of")
        yield markdown(header, [_total(one) for one in totals])
    yield markdown(COLUMNS, [[row.kind, *cells(row)] for row in rows])
    yield "## What ran"
    yield markdown(("what", "value"), list(run.items()))


def _total(one: Total) -> list[str]:
    spread = f"{one['p10']} - {one['p90']}"
    return [f"`{one['metric']}`", f"{one['value']}x", spread, str(one["baseline"]),
            str(one["notes"])]  # fmt: skip


def _draw(folder: Path, rows: Sequence[Row]) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None:
        return None
    # Torch comes with these, which no other command may load.
    import matplotlib

    from specla.bench.kernel_plots import save
    from specla.bench.studies import plots

    matplotlib.use("Agg")
    drafters = list(dict.fromkeys(row.method for row in rows if row.acceptance_by_depth))
    kinds = list(dict.fromkeys(row.kind for row in rows))
    figure, (speeds, *depths) = plots.axes(1 + len(drafters))
    _speeds(speeds, rows, kinds)
    right = {(row.kind, row.method): row.acceptance_by_depth for row in rows}
    for axis, drafter in zip(depths, drafters, strict=True):
        for colour, kind in zip(plots.colours(len(kinds)), kinds, strict=True):
            plots.points(axis, list(enumerate(right[kind, drafter], 1)), label=kind, color=colour)
        axis.set_ylim(0, 1.03)
        plots.whole(axis)
        plots.label(axis, "depth", "accepted, of rounds with a draft so deep", drafter)
    figure.tight_layout()
    path = folder / "generate.png"
    save(figure, path)
    return path


def _speeds(axis: Any, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    """Bars by kind, over exact AR."""
    from specla.bench.studies import plots

    methods = list(dict.fromkeys(row.method for row in rows if row.method != EXACT))
    width = 0.8 / max(len(methods), 1)
    for i, (method, colour) in enumerate(zip(methods, plots.colours(len(methods)), strict=True)):
        there = [(kinds.index(r.kind), r.vs_exact) for r in rows if r.method == method]
        places = [at + (i - (len(methods) - 1) / 2) * width for at, ratio in there if ratio]
        heights = [ratio for _, ratio in there if ratio]
        shade = "lightgrey" if method == PLAIN else colour
        axis.bar(places, heights, width, label=method, color=shade)
    tilt = {"rotation": 30, "ha": "right"} if len(kinds) > 3 else {}
    axis.set_xticks(range(len(kinds)), kinds, **tilt)
    axis.margins(y=0.3)  # the legend's room
    plots.even(axis)
    plots.label(axis, "", "decode speed over exact AR's")
