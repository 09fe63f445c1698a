# SPDX-License-Identifier: Apache-2.0
"""Settings every test runs under: one thread per worker, no network, no uninitialised memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported. On the sizes tests use, a second thread costs more than it brings, and
# two workers with two threads each fight for two cores. OMP_NUM_THREADS=2 tests with more.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Before triton is imported: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import settings  # noqa: E402

# The same examples for everyone in CI; new ones each time for those who look for bugs by hand.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

POISONED = ("ops", "state", "engine", "models", "drafters")


@pytest.fixture(scope="module", autouse=True)
def poison_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """`torch.empty` gives NaN here: reading memory nobody wrote shows at once."""
    folder = Path(str(request.fspath)).relative_to(Path(__file__).parent).parts[0]
    if folder not in POISONED:
        yield
        return
    import torch

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Any:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return empty

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        for name in ("new_empty",):
            patch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many random histories the state machine played."""
    counts: dict[str, int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("histories", "rounds"):
                counts[name] = counts.get(name, 0) + value
    if counts:
        terminalreporter.write_line(f"state machine: {counts}")
