# SPDX-License-Identifier: Apache-2.0
"""No drafting: every tree is one node, so plain decoding runs the same loop as everything else
(rule I3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specla.drafters.base import DrafterInfo, DraftRow, Observation
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.models.features import Features
    from specla.ops.contract import DeviceRound, RowArrays


class NoDrafter:
    """Proposes nothing. Takes no options and keeps no state."""

    def __init__(self) -> None:
        self.info = DrafterInfo(name="none", max_depth=0, may_return_nothing=True)

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree of one node per row."""
        return [DraftTree.root(row.tokens[-1]) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """None at all."""
        return (0,)

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """Nothing to launch: every live row's tree is its node 0 already."""
