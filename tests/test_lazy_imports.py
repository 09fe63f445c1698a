# SPDX-License-Identifier: Apache-2.0
"""What is quick must stay quick: imports are checked in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "numpy", "safetensors", "huggingface_hub")


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import specla",
        "from specla import SamplingParams, Completion, SpeclaError, DraftTree",
        "import specla.cli",
        "import specla.bench.workloads",
        "import specla.drafters",
    ],
)
def test_loads_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == set()


def test_the_engine_loads_no_compiler() -> None:
    assert not loaded_after("from specla import LLM") & {"triton"}
