# SPDX-License-Identifier: Apache-2.0
"""A run of launches as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def captured(
    launch: Callable[[], T], *, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of what `launch` launches, and what it returns, whose tensors every replay writes
    anew. It is run once before, on a stream of its own: kernels compile there.

    stream: to capture on. Products share their scratch memory with others that were captured on
    the same stream, so graphs that may run at the same time need one each. pool: memory to share
    with graphs that never do, and whose tensors nobody keeps.
    """
    side = stream or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        found = launch()
    return graph, found
