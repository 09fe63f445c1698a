# SPDX-License-Identifier: Apache-2.0
"""A team of threads: what processes say to each other, without processes.

One thread runs at a time and the others wait where the team meets, so that what is global (the
random state, above all) is nobody else's between two meetings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from specla.train.team import Team

T = TypeVar("T")


class Meeting:
    """Where `count` threads exchange things."""

    def __init__(self, count: int) -> None:
        self.barrier, self.turn = threading.Barrier(count, timeout=600), threading.Lock()
        self._brought: list[Any] = [None] * count

    def exchange(self, number: int, x: Any) -> list[Any]:
        """What everybody brought, in order."""
        self._brought[number] = x
        self._meet()
        found = list(self._brought)
        self._meet()
        return found

    def _meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class Member(Team):
    """One of the threads."""

    def __init__(self, number: int, count: int, meeting: Meeting) -> None:
        self.number, self.count, self._meeting = number, count, meeting

    def total(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.number, x)
        return sum(parts[1:], start=parts[0])

    def of_main(self, find: Callable[[], T]) -> T:
        found: T = self._meeting.exchange(self.number, find() if self.main else None)[0]
        return found

    def wait(self) -> None:
        self._meeting.exchange(self.number, None)


def together(count: int, work: Callable[[Team], T]) -> list[T]:
    """What `work` gives in each of so many threads."""
    meeting = Meeting(count)

    def one(number: int) -> T:
        with meeting.turn:
            try:
                return work(Member(number, count, meeting))
            except BaseException:
                meeting.barrier.abort()
                raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(one, number) for number in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # The others only say that somebody did not come.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
