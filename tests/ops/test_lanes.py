# SPDX-License-Identifier: Apache-2.0
"""Which launches of side-by-side runs wait for which others, on played streams. That runs leave
the bits they leave alone: tests/models/test_gpu_prefill.py, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest

from specla.ops import lanes


class Stream:
    """Knows what everything launched here from now on waits for."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def wait_event(self, event: Event) -> None:
        self.before |= event.before

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Event:
    def __init__(self) -> None:
        self.before: set[str] = set()

    def record(self) -> None:
        self.before = set(Played.current.before)


class Played:
    """In the place of torch.cuda."""

    Stream, Event = Stream, Event
    current = Stream()
    after: dict[str, set[str]]

    def __init__(self) -> None:
        Played.current, self.after = Stream(), {}

    def current_stream(self) -> Stream:
        return Played.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, Played.current = Played.current, stream
        try:
            yield
        finally:
            Played.current = before

    def launch(self, name: str) -> None:
        """Remembers what this one waits for."""
        self.after[name] = set(Played.current.before)
        Played.current.before.add(name)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()
    monkeypatch.setattr(lanes, "cuda", made)
    monkeypatch.setattr(lanes, "capture_stream", Stream)
    return made


def play(played: Played, count: int, runs: int) -> None:
    made = lanes.Lanes(count)
    for block in "ab":
        played.launch(f"reset {block}")
        made.start()
        for i in range(runs):
            with made.run() as lane:
                assert lane == i % count
                played.launch(f"run {block}{i}")
            played.launch(f"read {block}{i}")
    played.launch("end")


@pytest.mark.parametrize(("count", "runs"), [(1, 3), (2, 5), (4, 11)])
def test_runs_wait_for_no_more_than_they_must(played: Played, count: int, runs: int) -> None:
    play(played, count, runs)
    after = played.after
    for i in range(runs):
        assert "reset a" in after[f"run a{i}"]
        assert f"run a{i}" in after[f"read a{i}"]
        others = {f"run a{j}" for j in range(i - count + 1, i)}
        assert not others & after[f"run a{i}"], "lanes beside each other"
        if i >= count:
            # What the lane's last run left was read before it is written again.
            assert {f"run a{i - count}", f"read a{i - count}"} <= after[f"run a{i}"]
    assert {f"run a{i}" for i in range(runs)} <= after["reset b"]
    assert all(f"read a{i}" in after["run b0"] for i in range(runs))
    assert len(after["end"]) == 2 + 4 * runs


def test_lanes_have_streams_of_their_own(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives out 32 streams, again and again."""
    pool = [Stream() for _ in range(5)]
    turns = cycle(pool)
    monkeypatch.setattr(lanes, "capture_stream", lambda: pool[2])
    monkeypatch.setattr(played, "Stream", lambda: next(turns))
    for first in range(5):
        turns = cycle(pool[first:] + pool[:first] + pool[:1])
        made = lanes.Lanes(4)
        streams = [made.stream(i) for i in range(4)]
        assert {*map(id, streams)} == {*map(id, pool)} - {id(pool[2])}


def test_a_run_that_fails_is_waited_for(played: Played) -> None:
    made = lanes.Lanes(2)
    made.start()

    def fail() -> None:
        with made.run():
            played.launch("half")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    played.launch("next")
    assert "half" in played.after["next"]
