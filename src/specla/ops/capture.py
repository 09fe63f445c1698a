# SPDX-License-Identifier: Apache-2.0
"""A run of launches as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(launch: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of what `launch` launches, and what it returns, whose tensors every replay writes
    anew. It is run once before, on a stream of its own: kernels compile there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch()
    return graph, found
