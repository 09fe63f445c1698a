# SPDX-License-Identifier: Apache-2.0
"""Resting: what a drafter that reads features has missed while nobody asked it.

Rounds without drafts need neither the drafter nor the host, but a drafter must know every token
before it drafts again. Each of these rounds commits one token per row, so one row of features per
round and place is all there is; it is copied aside behind the round, by a launch and without a
word from the device, and the drafter is fed many rounds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters.base import FeatureDrafter, Observation
from specla.topology.tree import DraftTree

MOST_ROUNDS, MOST_BYTES = 128, 1 << 25
"""Kept before the drafter is fed: these rounds, or fewer where they take more memory than that."""


class Rested(NamedTuple):
    """A row whose drafter rests. tokens: prompt and output up to the last round to be fed."""

    place: int
    slot: int
    tokens: Sequence[int]


class Resting:
    """Of one engine. like: a round's features [layers, M, D], of whose first `num_rows` rows each
    is a sequence's."""

    def __init__(self, like: Tensor, num_rows: int) -> None:
        layers, _, width = like.shape
        each = num_rows * layers * width * like.element_size()
        self.most = max(4, min(MOST_ROUNDS, MOST_BYTES // each))
        self._kept = like.new_empty(self.most, layers, num_rows, width)
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another round."""
        return self.count == self.most

    def keep(self, features: Tensor) -> None:
        """Of the round just launched; more rows than places are padding."""
        rows = min(features.shape[1], self._kept.shape[2])
        self._kept[self.count, :, :rows].copy_(features[:, :rows])
        self.count += 1

    def feed(self, drafter: FeatureDrafter, rows: Sequence[Rested], count: int) -> None:
        """The first `count` rounds, which are forgotten; the rows' last tokens are theirs."""
        if count and rows:
            # A round of one node after another is a chain that was accepted.
            seen = [_chain(row, count) for row in rows]
            parts = [self._kept[:count, :, row.place].flatten(1) for row in rows]
            drafter.feed(seen, torch.cat(parts))
        left = self._kept[count : self.count].clone()
        self._kept[: len(left)] = left
        self.count = len(left)


def _chain(row: Rested, count: int) -> Observation:
    emitted = tuple(row.tokens[-count:])
    tree = DraftTree.chain(row.tokens[-count - 1], emitted[:-1])
    return Observation(slot=row.slot, tree=tree, path=tuple(range(count)), emitted=emitted)
