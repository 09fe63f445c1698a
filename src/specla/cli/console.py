# SPDX-License-Identifier: Apache-2.0
"""Everything that is not the answer: stderr lines and progress bars.

Bars show only on a terminal and only without --no-progress. rich honours NO_COLOR itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Tick(Protocol):
    """Report that `done` of `total` units of `label` are finished."""

    def __call__(self, label: str, done: int, total: int) -> None: ...


def note(line: str) -> None:
    """One line on stderr."""
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(line)


@contextmanager
def progress_bars(*, wanted: bool) -> Iterator[Tick | None]:
    """Bars that disappear when done; None where nobody would see them."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress)


class _Bars:
    """One bar per label, made when the label is first seen."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)
