# SPDX-License-Identifier: Apache-2.0
"""How a time is taken: samples long enough, as many as the budget allows, divided by layers."""

from __future__ import annotations

import pytest
import torch

from specla.bench import graphs
from specla.bench.graphs import Timing, read_bandwidth, time_graph


class FakeGraph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Samples asked for, as (replays in one, how many); one replay takes 100 us."""
    found: list[tuple[int, int]] = []

    def sample(graph: FakeGraph, inner: int, count: int) -> list[float]:
        found.append((inner, count))
        return [90.0, *[100.0] * (count - 2), 150.0]

    monkeypatch.setattr(graphs, "capture", lambda calls: FakeGraph())
    monkeypatch.setattr(graphs, "_sample", sample)
    return found


def test_short_graphs_are_replayed_several_times_in_a_sample(asked: list[tuple[int, int]]) -> None:
    timing = time_graph([lambda: None], parts=2, budget_s=0.02)
    assert timing == Timing(us=50.0, p10=50.0, p90=50.0)
    # 400 us a sample; 20 ms are 50 of them, after a tenth of that to warm up.
    assert asked == [(1, 3), (4, 5), (4, 50)]


@pytest.mark.parametrize(("budget", "count"), [(0.0, 20), (60.0, 200)])
def test_never_too_few_samples_or_too_many(
    asked: list[tuple[int, int]], budget: float, count: int
) -> None:
    time_graph([], parts=1, budget_s=budget)
    assert asked[-1] == (4, count)


@pytest.mark.gpu
def test_a_device_reads_faster_than_nothing_and_slower_than_magic() -> None:
    assert 1e11 < read_bandwidth(torch.device("cuda"), 2**30) < 2e13


@pytest.mark.gpu
def test_a_graph_of_two_is_twice_a_graph_of_one() -> None:
    x = torch.ones(2**26, device="cuda")
    one = time_graph([lambda: x.mul_(1.0)], parts=1).us
    two = time_graph([lambda: x.mul_(1.0)] * 2, parts=1).us
    assert two == pytest.approx(2 * one, rel=0.2)
