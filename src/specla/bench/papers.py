# SPDX-License-Identifier: Apache-2.0
"""Figures that others report, to stand beside ours. All are their authors' claims, on H100s."""

from __future__ import annotations

from typing import NamedTuple


class TreeRow(NamedTuple):
    """One row of SpecLA's table 1: root-to-leaf milliseconds and the speedups over it."""

    root_to_leaf_ms: float
    serial: float
    parallel: float
    hybrid: float


# SpecLA (arXiv 2607.16673), table 1: (top-k, depth, nodes) -> times.
TABLE_1 = {
    (2, 12, 16): TreeRow(22.5, 1.31, 0.58, 2.20),
    (2, 24, 32): TreeRow(55.0, 1.36, 1.02, 2.55),
    (4, 4, 16): TreeRow(37.8, 3.73, 1.70, 5.14),
    (4, 4, 32): TreeRow(91.2, 4.74, 3.47, 7.11),
    (4, 12, 16): TreeRow(19.0, 1.19, 0.52, 1.80),
    (4, 24, 32): TreeRow(41.0, 1.30, 0.95, 2.19),
}

# SpecLA, figure 11a: milliseconds to recover 1 and 8 tokens.
RECOVERY_TOKENS_MS = (19.70, 35.96)
RECOVERY_FACTORS_MS = (5.15, 13.10)

# SpecLA, figure 11b: of one layer in milliseconds, the ratio's range over accepted lengths.
FUSED_RATIO = (1.15, 1.44)

# SpecLA: bytes per layer and sequence at 8 heads of 256 x 256: one state; factors of 8 tokens.
STATE_BYTES, FACTOR_BYTES_8 = 2 * 2**20, round(128.5 * 2**10)

# DeltaLog (arXiv 2608.15533): best kernel speedup, best cut of bytes written.
DELTALOG_KERNEL, DELTALOG_WRITE_CUT = 1.86, 7.83
