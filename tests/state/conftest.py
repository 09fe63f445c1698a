# SPDX-License-Identifier: Apache-2.0
"""One thread, as the production runs of these sizes have; and how many histories were played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter) -> None:  # type: ignore[no-untyped-def]
    counts: dict[str, int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("histories", "rounds"):
                counts[name] = counts.get(name, 0) + value
    if counts:
        terminalreporter.write_line(f"state machine: {counts}")
