# SPDX-License-Identifier: Apache-2.0
"""A run of launches as one CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_streams: dict[int, torch.cuda.Stream] = {}


def capture_stream() -> torch.cuda.Stream:
    """Of the current device, for graphs that run one after the other. Always the same one: there
    are 32 streams in all, and a later one may be any of them."""
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is not collected inside: it may hold a graph, as an engine does that was dropped,
    and destroying one breaks any capture under way."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def captured(
    launch: Callable[[], T], *, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of what `launch` launches, and what it returns, whose tensors every replay writes
    anew. It is run once before, on the same stream: kernels compile there.

    stream: to capture on, `capture_stream()` where there is none. Products share their scratch
    memory with others that were captured on the same stream, so graphs that may run at the same
    time need one each. pool: memory to share with graphs that never do, and whose tensors nobody
    keeps.
    """
    stream, here = stream or capture_stream(), torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(here)
    try:
        # Around the capture as well: torch leaves the stream of one that fails the current one.
        with torch.cuda.stream(stream):
            launch()
            with without_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
                found = launch()
    finally:
        # Also for what was launched before something failed.
        here.wait_stream(stream)
    return graph, found
