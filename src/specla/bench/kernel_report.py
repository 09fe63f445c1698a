# SPDX-License-Identifier: Apache-2.0
"""A run of the kernel or round benchmark as JSON lines, rows of results.csv and tables.

A run can be read back from its JSON lines, so that what was measured on a machine without a
checkout is recorded and drawn on one that has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from specla.bench.kernel_metrics import Metric
from specla.bench.kernel_rows import RoundTime, Row
from specla.errors import ConfigError

Record = Row | RoundTime | Metric
NAMES: Mapping[type[Record], str] = {Row: "row", RoundTime: "round", Metric: "metric"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where and how rows were measured. bandwidth: bytes per second that only reading reaches."""

    date: str
    commit: str
    device: str
    torch: str
    triton: str
    command: str
    bandwidth: float

    @classmethod
    def now(cls, **facts: object) -> Run:
        """A run of today (UTC)."""
        return cls(date=datetime.now(UTC).strftime("%Y-%m-%d"), **facts)  # type: ignore[arg-type]


def line(run: Run, record: Record) -> str:
    """One JSON line: the record, and what it was measured on."""
    kind = {"record": NAMES[type(record)]}
    return json.dumps(kind | _finite(asdict(record)) | {"run": asdict(run)})


def read(path: Path) -> tuple[Run, list[Row]]:
    """A run of kernels from its JSON lines; figures are worked out again from the rows.

    Raises:
        ConfigError: the file is not one of ours.
    """
    run, found = _read(path, "kernel", (Row, Metric))
    return run, [one for one in found if isinstance(one, Row)]


def read_rounds(path: Path) -> tuple[Run, list[RoundTime], list[Metric]]:
    """A run of rounds from its JSON lines: sizes, and the figures that it got to.

    Raises:
        ConfigError: the file is not one of ours.
    """
    run, found = _read(path, "round", (RoundTime, Metric))
    return (
        run,
        [one for one in found if isinstance(one, RoundTime)],
        [one for one in found if isinstance(one, Metric)],
    )


def _read(path: Path, what: str, kinds: Sequence[type[Record]]) -> tuple[Run, list[Record]]:
    made = {NAMES[kind]: kind for kind in kinds}
    try:
        found = [json.loads(text) for text in path.read_text().splitlines() if text]
        (run,) = {json.dumps(entry["run"], sort_keys=True) for entry in found}
        return Run(**json.loads(run)), [_record(made[entry["record"]], entry) for entry in found]
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ConfigError(
            f"--from must be the JSON lines of one {what} run, got {path}: {failure}"
        ) from failure


def _record(kind: type[Record], entry: Mapping[str, Any]) -> Record:
    """Of a line; what else stands there is left out."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in entry.items() if name in names})


def csv_rows(run: Run, found: Sequence[Metric]) -> list[dict[str, object]]:
    """results.csv rows of the metrics that were measured."""
    head = {k: v for k, v in asdict(run).items() if k != "bandwidth"}
    return [
        head
        | {
            "metric": metric.name,
            "value": _figure(metric.value),
            "unit": metric.unit,
            "p10": _figure(metric.p10),
            "p90": _figure(metric.p90),
            "baseline": metric.baseline,
            "notes": f"{metric.notes}; reads {run.bandwidth / 1e12:.2f} TB/s",
        }
        for metric in found
        if metric.value is not None
    ]


def table(rows: Sequence[Row], title: str) -> Table:
    """Every row, for the terminal."""
    shown = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("case", "method"):
        shown.add_column(name, no_wrap=True)
    for name in ("us", "p10-p90", "MB", "of BW", "vs base", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1].case != row.case
        last = i + 1 < len(rows) and rows[i + 1].case != row.case
        shown.add_row(row.case if first else "", *cells(row, rows), end_section=last)
    return shown


def metric_table(found: Sequence[Metric]) -> Table:
    """Every named figure."""
    shown = Table(title="figures", title_justify="left", pad_edge=False)
    shown.add_column("metric", no_wrap=True)
    shown.add_column("value", justify="right", no_wrap=True)
    shown.add_column("against")
    for metric in found:
        shown.add_row(metric.name, written(metric), metric.baseline or metric.notes)
    return shown


def written(metric: Metric) -> str:
    """A figure with its unit."""
    if metric.value is None:
        return "missing"
    return f"{metric.value:.2f} {metric.unit}" if metric.unit != "x" else f"{metric.value:.2f}x"


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    """One row as text, the case left out."""
    if row.us is None:
        return [row.method, "-", row.missing or "", "", "", "", ""]
    moved = (row.read or 0.0) + (row.written or 0.0)
    base = baseline_of(row, rows)
    return [
        row.method,
        f"{row.us:.2f}",
        f"{row.p10:.2f}-{row.p90:.2f}",
        f"{moved / 1e6:.1f}",
        f"{row.bandwidth:.0%}",
        "-" if base is None or base.us is None else f"{base.us / row.us:.2f}x",
        f"{row.error:.0e}",
    ]


def baseline_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The fastest row of the same case whose method is the baseline's."""
    if not row.baseline:
        return None
    same = [
        other
        for other in rows
        if other.case == row.case
        and other.us is not None
        and other.method.startswith(row.baseline)
        and other is not row
    ]
    return min(same, key=lambda other: other.us or 0.0, default=None)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _finite(record: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: an error that is not finite becomes a string."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in record.items()
    }
