# SPDX-License-Identifier: Apache-2.0
"""What a record says about the machine, and what the guide shows of the lines people read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from completions import completion

from specla.cli import records
from specla.request import BudgetReport, SamplingParams

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "cli.md"


def test_a_row_names_the_gpu() -> None:
    run = {"device": "cuda:0", "device_name": "NVIDIA H200", "dtype": "bfloat16", "model": "x"}
    assert records.machine(run) == "NVIDIA H200 bfloat16 x"
    run |= {"device": "cpu", "device_name": "some CPU, 1 thread"}
    assert records.machine(run) == "cpu bfloat16 x"


def test_the_guide_shows_the_three_lines_as_they_are() -> None:
    budget = BudgetReport(
        policy="paying", proposed=50, chosen=45, expected=40.0, reasons={"pays": 8},
        shapes={"tree": 8}, last="",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=256)
    made = completion(
        prompt="x " * 29, ids=(1,) * 49, params=params,
        options={"drafter": "eagle", "mode": "exact"},
    )  # fmt: skip
    report = replace(
        made.speculation, rounds=8, drafted=45, accepted=41, tokens_per_round=49 / 8, budget=budget
    )
    lines = records.summary(replace(made, speculation=report), params)
    shown = "\n".join(f"    {line}" for line in lines)
    assert re.sub(r"[\d.]+ tokens/s", "... tokens/s", shown) in GUIDE.read_text()
