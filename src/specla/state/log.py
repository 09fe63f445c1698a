# SPDX-License-Identifier: Apache-2.0
"""Log: one slot's cursors, integers only.

The log is the ring plus the committed path through the candidate bank that the last verify
wrote. Committing replaces the path and flips the bank; rejecting is doing nothing.

    durable_len + log_len == committed_len      (rule I1)
    log_len == ring_len + len(path)

Entries are numbered 0 .. R-1 (ring), then bank 0 (N), then bank 1 (N).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Log:
    """Cursors of one slot.

    capacity is R; num_nodes is N, the size of one candidate bank. threshold (<= R): a fold is
    due when the log is longer; 0 folds every round (SpecLA's delayed commit), R folds as
    rarely as the ring allows (DeltaLog).
    """

    capacity: int
    num_nodes: int
    threshold: int
    durable_len: int = 0
    ring_len: int = 0
    bank: int = 0
    path: tuple[int, ...] = field(default=())

    @property
    def log_len(self) -> int:
        """Accepted tokens that are not in S yet."""
        return self.ring_len + len(self.path)

    @property
    def committed_len(self) -> int:
        """Tokens the slot's state stands for: prompt + output - 1 while running."""
        return self.durable_len + self.log_len

    @property
    def fold_due(self) -> bool:
        """Whether the next verify must write S."""
        return self.log_len > self.threshold

    def bank_entry(self, bank: int, node: int) -> int:
        """Entry number of a node's record in a candidate bank."""
        return self.capacity + bank * self.num_nodes + node

    def entries(self) -> tuple[int, ...]:
        """The log in order, as entry numbers."""
        path = tuple(self.bank_entry(self.bank, node) for node in self.path)
        return (*range(self.ring_len), *path)

    def commit(self, path: tuple[int, ...]) -> None:
        """End a round: account for what its verify did, then make `path` the log's new tail.

        The verify either folded the whole log or moved the old path into the ring.
        """
        if self.fold_due:
            self.durable_len += self.log_len
            self.ring_len = 0
        else:
            self.ring_len += len(self.path)
        self.path = path
        self.bank = 1 - self.bank

    def follow(self, committed: int, *, bank: int, ring_len: int, path: Sequence[int]) -> None:
        """Take over the cursors from a device that has ended a round by itself, over `committed`
        tokens before it: what is not in the ring of those is in S."""
        self.durable_len = committed - ring_len
        self.bank, self.ring_len, self.path = bank, ring_len, tuple(path)

    def folded(self) -> None:
        """Account for a fold outside a round (materialise): the log is empty, S has it all."""
        self.durable_len += self.log_len
        self.ring_len = 0
        self.path = ()
