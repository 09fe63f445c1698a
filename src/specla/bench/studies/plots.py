# SPDX-License-Identifier: Apache-2.0
"""What the studies' plots share. A figure with an interval gets bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specla.bench.headline import Ratio
from specla.bench.kernel_plots import subplots
from specla.bench.studies.study import Figure, Measurement, Value

Axis = Any


def axes(columns: int, rows: int = 1) -> tuple[Any, list[Axis]]:
    """A figure and its axes, row by row."""
    return subplots(rows, width=4.6 * columns, height=3.6, columns=columns)


def values(found: Sequence[Measurement], factor: str) -> list[str | Value]:
    """Of a factor, as measured, in order."""
    return list(dict.fromkeys(m.at[factor] for m in found))


def line(axis: Axis, found: Sequence[Measurement], factor: str, figure: str, **style: Any) -> None:
    """A figure over a factor; measurements without it are left out."""
    there = [(m.at[factor], m.figures.get(figure)) for m in found]
    points(axis, [(x, y) for x, y in there if y is not None], **style)


def points(axis: Axis, given: Sequence[tuple[str | Value, Figure]], **style: Any) -> None:
    """The same of any x and y."""
    if not given:
        return
    x = [place for place, _ in given]
    y = [number(value) for _, value in given]
    bars = [_reach(value) for _, value in given]
    axis.errorbar(x, y, list(zip(*bars, strict=True)), **{"marker": "o", "ms": 4, **style})


def number(value: Figure) -> float:
    """Without its interval."""
    return float(value.value if isinstance(value, Ratio) else value or 0.0)


def _reach(value: Figure) -> tuple[float, float]:
    """Below and above."""
    if not isinstance(value, Ratio):
        return 0.0, 0.0
    return max(0.0, value.value - value.low), max(0.0, value.high - value.value)


def colours(count: int) -> list[Any]:
    """As many that can be told apart, dark to light."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]


def even(axis: Axis) -> None:
    """Where a speed is plain decoding's."""
    axis.axhline(1.0, color="black", linewidth=0.8)


def label(axis: Axis, x: str, y: str, title: str = "", *, legend: bool = True) -> None:
    """What an axis shows; the legend, if there are names for it."""
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.set_title(title, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    if legend and axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=7)


def powers(axis: Axis, given: Sequence[str | Value]) -> None:
    """An axis of doubling values, each of them named."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(given), [str(x) for x in given])
    axis.minorticks_off()


def doubling(axis: Axis) -> None:
    """A logarithmic axis upwards, in plain numbers."""
    from matplotlib.ticker import ScalarFormatter

    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(ScalarFormatter())


def whole(axis: Axis) -> None:
    """An axis that counts."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def alike(axes: Sequence[Axis]) -> None:
    """The same reach upwards, so that what one factor does compares with another."""
    limits = [axis.get_ylim() for axis in axes]
    for axis in axes:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
