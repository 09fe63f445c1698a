# SPDX-License-Identifier: Apache-2.0
"""What a cost table says about drafting: rounds in plain steps, and how often drafts must be
right for a round to pay.

A round of C plain steps pays if it emits more than C tokens. If each level of the tree holds the
right token with probability p, and levels do not know of each other, it emits
1 + p + p^2 + ... + p^depth. Where even p = 1 is not enough, no drafter helps (the criterion of
vllm#47277).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from specla.engine.cost import CostTable

NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One size. us: the whole round, drafting included where a drafter was measured; steps: the
    same in plain steps of as many rows; break_even: None where even a perfect drafter loses."""

    rows: int
    nodes: int
    depth: int
    us: float
    steps: float
    break_even: float | None
    kernel: str

    @property
    def shape(self) -> str:
        if self.nodes == 1:
            return "plain"
        return "chain" if self.depth == self.nodes - 1 else "tree"


def rounds(table: CostTable, mode: str, drafter: str | None = None) -> list[Round]:
    """Every measured size with the kernel that an engine would run, by rows, nodes and depth."""
    sizes = {(c.rows, c.nodes, c.depth) for c in table.costs if _is_round(c.part, c.mode, mode)}
    return [_round(table, mode, drafter, *size) for size in sorted(sizes)]


def _is_round(part: str, theirs: str, mode: str) -> bool:
    return part == "verify" and theirs == mode


def _round(
    table: CostTable, mode: str, drafter: str | None, rows: int, nodes: int, depth: int
) -> Round:
    us = table.round_us(rows, nodes, depth=depth, mode=mode)
    if drafter is not None and nodes > 1:
        us += table.draft_us(rows, nodes, drafter, depth=depth, mode=mode)
    steps = us / table.ar_us(rows, mode=mode)
    return Round(
        rows=rows, nodes=nodes, depth=depth, us=us, steps=steps,
        break_even=break_even(steps, depth), kernel=table.best_kernel(rows, nodes, mode),
    )  # fmt: skip


def break_even(steps: float, depth: int) -> float | None:
    """The p in [0, 1] at which 1 + p + ... + p^depth equals `steps`; 0 where a round costs no
    more than a plain step, None where it costs as much as it can emit."""
    if steps <= 1:
        return 0.0
    if steps >= depth + 1:
        return None
    low, high = 0.0, 1.0
    # The sum grows with p, so halving finds it, to far less than anything measured.
    for _ in range(40):
        middle = (low + high) / 2
        emitted = sum(middle**i for i in range(depth + 1))
        low, high = (middle, high) if emitted < steps else (low, middle)
    return high


def render(found: Sequence[Round], title: str) -> Table:
    """For a terminal."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("rows", "nodes", "shape", "depth", "round us", "plain steps", "break-even p"):
        grid.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    grid.add_column("kernel", no_wrap=True)
    for one in found:
        p = NEVER if one.break_even is None else f"{one.break_even:.2f}"
        grid.add_row(
            *(str(one.rows), str(one.nodes), one.shape, str(one.depth)),
            *(f"{one.us:.1f}", f"{one.steps:.2f}", "-" if one.nodes == 1 else p, one.kernel),
        )
    return grid


def hopeless(found: Sequence[Round]) -> str:
    """The rounds that no drafter can make pay, in words; empty if there are none."""
    sizes = [f"{r.rows}x{r.nodes} {r.shape}" for r in found if r.break_even is None]
    return f"even a perfect drafter loses with: {', '.join(sizes)}" if sizes else ""
