# SPDX-License-Identifier: Apache-2.0
"""Plots of the kernel report: times of every method; the log's gain; SpecLA's figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specla.bench import papers
from specla.bench.kernel_cases import LENGTHS
from specla.bench.kernel_metrics import Metric
from specla.bench.kernel_rows import OURS, Row

OURS_COLOUR, OTHERS_COLOUR = "#1f6feb", "#9aa4b2"


def draw(folder: Path, rows: Sequence[Row], found: Sequence[Metric]) -> list[Path]:
    """PNG files of the suites that ran; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    known = {m.name: m.value for m in found if m.value is not None}
    drawn = [_times(rows), _log(known), _specla(known)]
    paths = []
    for name, figure in zip(("times", "log", "specla"), drawn, strict=True):
        if figure is not None:
            paths.append(folder / f"{name}.png")
            save(figure, paths[-1])
    return paths


def _times(rows: Sequence[Row]) -> Any:
    """One bar chart per case of the tree, chain and single suites."""
    shown = [r for r in rows if r.suite in ("tree", "chain", "single") and r.us is not None]
    cases = list(dict.fromkeys(row.case for row in shown))
    if not cases:
        return None
    figure, axes = subplots(len(cases), width=11.0, height=2.8)
    for axis, case in zip(axes, cases, strict=True):
        bars = sorted((r for r in shown if r.case == case), key=lambda r: -(r.us or 0.0))
        colours = [OURS_COLOUR if r.kind == OURS else OTHERS_COLOUR for r in bars]
        values = [r.us or 0.0 for r in bars]
        places = axis.barh([r.method for r in bars], values, color=colours)
        axis.bar_label(places, labels=[f" {value:.1f}" for value in values], fontsize=7)
        axis.set_title(f"{case}, us per layer", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.15)
    figure.tight_layout()
    return figure


def _log(known: dict[str, float]) -> Any:
    """Speedup and cut of bytes written, by log capacity and rows."""
    series = {
        what: {
            b: [
                (c, known[name])
                for c in (4, 8, 16, 32)
                if (name := f"log{c}_ar_b{b}_{what}") in known
            ]
            for b in (1, 4, 16, 64)
        }
        for what in ("speedup", "write_cut")
    }
    if not any(points for lines in series.values() for points in lines.values()):
        return None
    figure, axes = subplots(1, width=9.0, height=3.4, columns=2)
    claims = {"speedup": papers.DELTALOG_KERNEL, "write_cut": papers.DELTALOG_WRITE_CUT}
    for axis, (what, lines) in zip(axes, series.items(), strict=True):
        for b, points in lines.items():
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=f"{b} rows")
        axis.axhline(claims[what], color=OTHERS_COLOUR, linestyle="--", label="DeltaLog, best")
        axis.set_xlabel("log capacity")
        axis.set_title(f"{what.replace('_', ' ')} over folding every token", fontsize=9)
        axis.legend(fontsize=7)
    figure.tight_layout()
    return figure


def _specla(known: dict[str, float]) -> Any:
    """Figures 11a and 11b: recovery and fusing by accepted length."""
    lines = {
        "tokens and projections / factors": "recovery_tokens_projections_over_factors_len{}",
        "tokens / factors": "recovery_tokens_over_factors_len{}",
        "separate / fused, 1 row": "fused_over_separate_len{}",
        "separate / fused, 64 rows": "fused_over_separate_len{}_b64",
    }
    points = {
        title: [(n, known[name]) for n in LENGTHS if (name := pattern.format(n)) in known]
        for title, pattern in lines.items()
    }
    if not any(points.values()):
        return None
    figure, axes = subplots(1, width=9.0, height=3.4, columns=2)
    for title, line in points.items():
        if line:
            axes["fused" in title].plot(*zip(*line, strict=True), marker="o", label=title)
    axes[1].axhspan(*papers.FUSED_RATIO, color=OTHERS_COLOUR, alpha=0.3, label="SpecLA")
    for axis in axes:
        axis.axhline(1.0, color="black", linewidth=0.6)
        axis.set_xlabel("accepted tokens")
        axis.legend(fontsize=7)
    axes[0].set_title("recovery: time over recovery from factors", fontsize=9)
    axes[1].set_title("commit: separate over fused", fontsize=9)
    figure.tight_layout()
    return figure


def subplots(rows: int, *, width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row. height: of a row."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(width, height * rows), squeeze=False)
    return figure, list(axes.flat)


def save(figure: Any, path: Path) -> None:
    """Write a figure, and let it go."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
