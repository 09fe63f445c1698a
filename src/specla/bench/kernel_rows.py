# SPDX-License-Identifier: Apache-2.0
"""Records of the kernel and round benchmarks: plain data, so that a run can be read and drawn
anywhere."""

from __future__ import annotations

from dataclasses import dataclass

OURS, BASELINE = "ours", "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one case. us, p10, p90: microseconds per layer; None with `missing`, the
    reason. read, written: bytes the method must move. bandwidth: of what was measured to be
    readable, the fraction that those bytes need. error: of its outputs, relative."""

    suite: str
    case: str
    shape: str
    rows: int
    nodes: int
    depth: int
    pending: int
    fold: bool
    method: str
    kind: str
    scope: str
    baseline: str
    us: float | None = None
    p10: float | None = None
    p90: float | None = None
    read: float | None = None
    written: float | None = None
    bandwidth: float | None = None
    error: float | None = None
    layers: int = 0
    missing: str | None = None
    wrong: bool = False
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """One size of a whole model's round: rows, nodes of each row's tree; microseconds."""

    rows: int
    nodes: int
    us: float
    p10: float
    p90: float
