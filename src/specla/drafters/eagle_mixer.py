# SPDX-License-Identifier: Apache-2.0
"""What the layer of an EAGLE drafter asks of its token mixer: gated delta rule or attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from specla.ops.linear import Linear

Memory = tuple[Tensor, ...]
"""What n paths have read, each tensor's first axis n; the mixer's own, nothing it is a view of."""


class Mixer(Protocol):
    """x is [T, target + D], normed embedding and normed feature side by side; outputs [T, D].

    max_tokens: most tokens per row of one `encode`. linears: its products, by name.
    """

    max_tokens: int
    linears: dict[str, Linear]

    def reset(self, slot: int) -> None:
        """Back to the empty sequence (rule I6)."""
        ...

    def copy(self, slot: int, to: int) -> None:
        """`to` goes on from where `slot` is."""
        ...

    def slot_bytes(self, slot: int) -> int:
        """What the slot takes up now."""
        ...

    def prefill(self, slot: int, x: Tensor) -> Tensor:
        """A run of tokens of one slot."""
        ...

    def encode(self, slots: Sequence[int], lengths: Sequence[int], x: Tensor) -> Tensor:
        """lengths[b] tokens of each row, end to end; they become part of the slot."""
        ...

    def roots(self, slots: Sequence[int]) -> Memory:
        """A path per slot that ends where the slot does."""
        ...

    def step(self, memory: Memory, source: Sequence[int], x: Tensor) -> tuple[Tensor, Memory]:
        """One token below each of some paths: x[i] below path source[i]. No slot changes."""
        ...


class Cursor(NamedTuple):
    """Where a slot is, as a device is told: `triton_eagle.Cursors`."""

    bank: int
    path_len: int
    length: int


@runtime_checkable
class DeviceMixer(Mixer, Protocol):
    """One whose slots the kernels of `eagle_layer` also write. Their host's side."""

    def cursor(self, slot: int) -> Cursor:
        """Of what is encoded."""
        ...

    def follow(self, slot: int, cursor: Cursor) -> None:
        """Rounds on the device have brought the slot there."""
        ...

    def commit(self, slot: int, count: int) -> None:
        """`take_in` was launched over so many more tokens."""
        ...
