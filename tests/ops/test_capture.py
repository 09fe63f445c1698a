# SPDX-License-Identifier: Apache-2.0
"""What a capture leaves behind, on played streams: nobody else's stream, and nothing that is not
waited for, whether it succeeds or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specla.ops import capture


class Stream:
    """Knows what everything launched here from now on waits for."""

    def __init__(self) -> None:
        self.before: set[str] = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Played:
    """In the place of torch.cuda. fails: the place of the launch that raises, by number; "end"
    for the end of the capture, after which torch does not put the stream back."""

    def __init__(self, fails: int | str) -> None:
        self.current, self.mine, self.fails = Stream(), Stream(), fails
        self.launched = 0

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> str:
        return "graph"

    @contextmanager
    def graph(self, graph: str, *, pool: object, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            if self.fails == "end":
                raise RuntimeError("capture")
            self.current = before

    def launch(self) -> int:
        """Half of it, where it fails."""
        self.launched += 1
        self.current.before.add(f"launch {self.launched}")
        if self.launched == self.fails:
            raise ValueError
        return self.launched


@pytest.mark.parametrize("fails", [0, 1, 2, "end"], ids=["nothing", "first", "second", "capture"])
@pytest.mark.parametrize("lane", [True, False], ids=["stream given", "the one for all"])
def test_what_was_launched_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, fails: int | str, lane: bool
) -> None:
    played = Played(fails)
    monkeypatch.setattr(torch, "cuda", played)
    monkeypatch.setattr(capture, "capture_stream", lambda: played.mine)
    here = played.current
    here.before.add("before")
    if fails:
        with pytest.raises((ValueError, RuntimeError)):
            capture.captured(played.launch, stream=played.mine if lane else None)
    else:
        assert capture.captured(played.launch) == ("graph", 2)
    assert played.current is here
    assert "before" in played.mine.before, "a run waits for what was there"
    assert "launch 1" in here.before
