# SPDX-License-Identifier: Apache-2.0
"""Rows of a kernel run that never ran."""

from __future__ import annotations

from typing import Any

from specla.bench.kernel_report import Run
from specla.bench.kernel_rows import BASELINE, OURS, Row

RUN = Run(
    date="2026-12-01",
    commit="abc1234",
    device="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    command="specla bench kernels",
    bandwidth=4.4e12,
)


def row(case: str, method: str, us: float | None = 10.0, **changes: Any) -> Row:
    """One timed row; ours where the name says so."""
    mine = method.startswith(("exact", "fast", "log of"))
    facts: dict[str, Any] = {
        "suite": "tree",
        "case": case,
        "shape": "8x256",
        "rows": 64,
        "nodes": 16,
        "depth": 4,
        "pending": 4,
        "fold": True,
        "method": method,
        "kind": OURS if mine else BASELINE,
        "scope": "state",
        "baseline": "SGLang" if mine else "",
    }
    if us is None:
        facts["missing"] = "no such file"
    else:
        facts |= {"us": us, "p10": us * 0.9, "p90": us * 1.2, "read": 3e8, "written": 1e8}
        facts |= {"bandwidth": 0.5, "error": 1e-6, "layers": 2}
    return Row(**(facts | changes))
