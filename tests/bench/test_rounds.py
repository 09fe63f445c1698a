# SPDX-License-Identifier: Apache-2.0
"""Logs as they come in rounds that are timed, against logs that rounds have gone by."""

from __future__ import annotations

from collections import Counter

import pytest

from specla.bench.rounds import arrangements, phases
from specla.state.log import Log


@pytest.mark.parametrize("capacity", [0, 2, 4, 16])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_phases_are_those_of_a_log(capacity: int, step: int) -> None:
    log, seen = Log(capacity, 8, capacity), []
    for _ in range(40):
        log.commit(tuple(range(step)))
        seen.append((log.ring_len, len(log.path)))
    cycle = phases(capacity, step)
    assert seen[: 2 * len(cycle)] == 2 * cycle


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_every_phase_comes_as_often(rows: int) -> None:
    cycle = phases(4, 1)
    found = Counter(log for logs in arrangements(4, rows, 1) for log in logs)
    assert set(found) == set(cycle)
    assert max(found.values()) - min(found.values()) <= 1
