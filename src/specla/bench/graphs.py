# SPDX-License-Identifier: Apache-2.0
"""Device time of a sequence of launches, by replaying one CUDA graph; and what memory can do.

Method: the launches of all layers are captured once, so neither Python nor the driver's launch
path is in the number. Layers own distinct states, larger together than the L2 cache by the
factor COLD, so a layer's state comes from memory each time, as it does in a model. One sample is
at least SAMPLE_US long; the median counts, p10 and p90 are over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from specla.bench.table import spread
from specla.ops.capture import without_collection

COLD = 3.0
SAMPLE_US = 400.0
FEWEST, MOST = 20, 200
DEFAULT_L2 = 60 * 2**20

Call = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds per layer (or whatever the calls were divided by)."""

    us: float
    p10: float
    p90: float

    def __truediv__(self, parts: float) -> Timing:
        return Timing(us=self.us / parts, p10=self.p10 / parts, p90=self.p90 / parts)


def l2_bytes(device: torch.device) -> int:
    """Size of the device's L2 cache."""
    found = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return int(found) or DEFAULT_L2


def cold_layers(layer_bytes: int, l2: int, *, fewest: int = 2) -> int:
    """How many layers of `layer_bytes` it takes to be COLD times the cache."""
    return max(fewest, -(-int(COLD * l2) // layer_bytes))


def time_graph(calls: Sequence[Call], *, parts: int, budget_s: float = 0.25) -> Timing:
    """Capture `calls` in one graph, replay it, and divide by `parts`.

    The calls run three times before anything is measured: to compile, during capture's warm-up
    and as the first replay.
    """
    graph = capture(calls)
    graph.replay()
    once = _sample(graph, 1, 3)
    inner = max(1, round(SAMPLE_US / median(once)))
    wanted = budget_s * 1e6 / (median(once) * inner)
    count = int(min(MOST, max(FEWEST, wanted)))
    _sample(graph, inner, max(1, count // 10))
    samples = _sample(graph, inner, count)
    p10, p90 = spread(samples)
    return Timing(us=median(samples), p10=p10, p90=p90) / parts


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, in order. They must not allocate what outlives them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with without_collection(), torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _sample(graph: torch.cuda.CUDAGraph, inner: int, count: int) -> list[float]:
    """Microseconds per replay, `count` samples of `inner` replays each."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(inner):
            graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) / inner for a, b in pairwise(marks)]


def read_bandwidth(device: torch.device, num_bytes: int = 4 * 2**30) -> float:
    """Bytes per second of a kernel that only reads, over more than any cache holds; the best of
    a few launch shapes counts."""
    from specla.bench.triton_baselines import READ_TILES, read_only

    data = torch.ones(num_bytes // 4, device=device)
    best = 0.0
    for tile in READ_TILES:
        sums = torch.empty(data.numel() // tile.elements, device=device)
        timing = time_graph([lambda s=sums, t=tile: read_only(data, s, t)], parts=1)  # type: ignore[misc]
        best = max(best, data.nbytes / (timing.us * 1e-6))
    return best
