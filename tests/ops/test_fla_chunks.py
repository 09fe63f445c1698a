# SPDX-License-Identifier: Apache-2.0
"""fla's kernels as launched here: no autotuner in the way, and the reference's results.

Tier: budget for the results: float32 on both sides, 3.1e-6 of the largest value was measured, the
bound is twice that.
"""

from __future__ import annotations

import json
import os
import subprocess
import types
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

from specla.errors import KernelUnavailable
from specla.ops.gdn import fla_chunks
from specla.ops.gdn.fla_chunks import KERNELS, PARAMETERS, configurations

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-fla/bin/python"


@triton.heuristics({"WIDE": lambda args: True})
@triton.autotune(configs=[triton.Config({"BLOCK": n}) for n in (16, 32)], key=["size"])
@triton.jit
def tuned_kernel(x_ptr, size, BLOCK: triton.language.constexpr, WIDE: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


def test_one_configuration_per_kernel_and_head_size() -> None:
    assert KERNELS.keys() == PARAMETERS.keys()
    for key_dim in (64, 128, 256):
        for memory in (99 * 1024, 227 * 1024):
            pinned = configurations(key_dim, memory)
            assert pinned == configurations(key_dim, memory)
            assert pinned.keys() == KERNELS.keys()
            for name, configuration in pinned.items():
                tiles = set(configuration) - {"num_warps", "num_stages"}
                assert tiles == {"BK", "BV"} & set(PARAMETERS[name].split()), name


def modules(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    def import_module(name: str) -> object:
        return types.SimpleNamespace(**{k: kernel for m, k in KERNELS.values() if m == name})

    monkeypatch.setattr(fla_chunks, "import_module", import_module)


def test_functions_come_out_of_their_autotuners(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, tuned_kernel)
    monkeypatch.setattr(fla_chunks, "PARAMETERS", dict.fromkeys(KERNELS, "x_ptr size BLOCK WIDE"))
    for function in fla_chunks.load().values():
        assert function is tuned_kernel.fn.fn
        assert not hasattr(function, "configs")


def test_another_fla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, tuned_kernel)
    with pytest.raises(KernelUnavailable, match=r"must be one of 0\.6, but chunk_local"):
        fla_chunks.load()


@pytest.mark.slow
def test_with_fla_itself(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("needs flash-linear-attention in .venv-fla: run `make venv-fla`")
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("fla_chunks_run.py"), tmp_path / "report.json"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    # Every kernel in the path is one that fla would tune, and none is where we launch it.
    assert report["tuned by fla"] == sorted(KERNELS)
    assert report["launched"].keys() == KERNELS.keys()
    assert report["tuned when launched"] == []
    # What is pinned is one of the configurations that fla itself chooses from.
    assert report["foreign"] == []
    assert max(report["errors"]) < 6e-6
