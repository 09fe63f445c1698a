# SPDX-License-Identifier: Apache-2.0
"""Runs of launches side by side on a GPU, each on a stream of its own.

A run waits for what was launched before all of them, not for the run before it; what is launched
after a run waits for it, as ever. Who launches reads what a run has left before the next one
begins: the next run in the same place waits for that, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import cuda

from specla.ops.capture import capture_stream


class Lanes:
    """So many places for runs, taken in turn."""

    def __init__(self, count: int) -> None:
        self._streams = _other_streams(count)
        # By lane: all that has read its last run.
        self._read: list[cuda.Event] = []
        self._last = -1

    def start(self) -> None:
        """Runs wait for what has been launched by now."""
        self._read = [_mark()] * len(self._streams)
        self._last = -1

    @contextmanager
    def run(self) -> Iterator[int]:
        """What is launched inside is a run; gives its lane."""
        here = cuda.current_stream()
        if self._last >= 0:
            self._read[self._last] = _mark()
        self._last = lane = (self._last + 1) % len(self._streams)
        stream = self._streams[lane]
        stream.wait_event(self._read[lane])
        try:
            with cuda.stream(stream):
                yield lane
        finally:
            here.wait_stream(stream)

    def stream(self, lane: int) -> cuda.Stream:
        """A lane's, to capture what it will run: products have room of their own per stream."""
        return self._streams[lane]


def _other_streams(count: int) -> list[cuda.Stream]:
    """So many that are neither each other nor the one that other graphs are captured on."""
    taken = [capture_stream()]
    while len(taken) <= count:
        one = cuda.Stream()
        if one not in taken:
            taken.append(one)
    return taken[1:]


def _mark() -> cuda.Event:
    """All that has been launched by now."""
    event = cuda.Event()
    event.record()
    return event
