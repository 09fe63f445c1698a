# SPDX-License-Identifier: Apache-2.0
"""Settings every test runs under: one thread per worker, no network, no uninitialised memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end: to look for garbage among it takes five
    seconds meanwhile, and later half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@cache
def _hasten(interpreter: Any) -> None:
    """Triton's interpreter patches its language at every call of a function below a kernel, from
    all members of its modules: a third of what a kernel takes. Here once per launch and module of
    such functions (nothing is restored before the launch ends), from names listed once. Another
    third: every sum of integers is looked at for overflows, and without `debug` nobody told."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()
    dtype_of, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in done:
            return None
        done.add(id(fn.__globals__))
        return patch(fn)

    def fresh_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    @cache
    def names(package: Any) -> list[str]:
        return [name for name in dir(package) if callable(getattr(package, name, None))]

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(of)
        return dtypes[name]

    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin
    interpreter.GridExecutor.__call__ = fresh_launch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """As soon as a test file has imported it; not all do."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _hasten(interpreter)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many random histories the state machine played."""
    counts: dict[str, int] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name in ("histories", "rounds"):
                counts[name] = counts.get(name, 0) + value
    if counts:
        terminalreporter.write_line(f"state machine: {counts}")
