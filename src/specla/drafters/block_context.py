# SPDX-License-Identifier: Apache-2.0
"""What a block drafter remembers: keys and values of committed tokens, per slot and layer.

Nothing else enters: a draft's own keys are dropped with its block. A layer with a window keeps
what the window can still reach; the others grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.drafters.block_config import BlockConfig
from specla.drafters.block_model import Attend, KeysValues, attention, visible

_LEAST = 64  # tokens of the first buffer


def windows(config: BlockConfig, window: int | None) -> list[int | None]:
    """How far each layer's positions see; None: all the way. window: in every layer at most."""
    return [min((w for w in (own, window) if w), default=None) for own in config.windows]


class _Kept:
    """One layer's tokens of one slot, the last `limit` of them (None: all)."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self._count = limit, 0
        self._buffers: list[Tensor] = []

    def view(self) -> KeysValues | None:
        """The tokens in order, oldest first; None where there are none."""
        if not self._buffers:
            return None
        return KeysValues(*(x[self._first() : self._count] for x in self._buffers))

    def append(self, new: KeysValues) -> None:
        """New tokens behind the others."""
        count = len(new.k)
        if not self._buffers or self._count + count > len(self._buffers[0]):
            self._make_room(new)
        for buffer, rows in zip(self._buffers, new, strict=True):
            buffer[self._count : self._count + count] = rows
        self._count += count

    def copy(self) -> _Kept:
        """The same tokens in memory of their own."""
        other = _Kept(self._limit)
        if kept := self.view():
            other.append(kept)
        return other

    def _first(self) -> int:
        return 0 if self._limit is None else max(0, self._count - self._limit)

    def _make_room(self, new: KeysValues) -> None:
        """Room for twice as much, so that a token is moved once on average."""
        old, kept = self.view() or tuple(x[:0] for x in new), self._count - self._first()
        size = max(_LEAST, 2 * (kept + len(new.k)))
        self._buffers = [x.new_empty(size, *x.shape[1:]) for x in new]
        for buffer, rows in zip(self._buffers, old, strict=True):
            buffer[:kept] = rows
        self._count = kept


class BlockContext:
    """The slots of one engine.

    Args:
        window: how far a position sees, in every layer; None leaves it to the config.
    """

    def __init__(self, config: BlockConfig, *, window: int | None) -> None:
        self._config = config
        self._windows = windows(config, window)
        self._slots: dict[int, list[_Kept]] = {}
        self._lengths: dict[int, int] = {}

    def length(self, slot: int) -> int:
        """Committed tokens: the position of the slot's next anchor."""
        return self._lengths.get(slot, 0)

    def positions(self, slots: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Positions of each slot's next tokens, end to end [sum(counts)] int64 (on the CPU)."""
        starts = [self.length(slot) for slot in slots]
        spans = [torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        return torch.cat(spans)

    def append(
        self, slots: Sequence[int], counts: Sequence[int], layers: Sequence[KeysValues]
    ) -> None:
        """counts[b] tokens for slots[b]; layers: per layer all of them end to end."""
        for slot, count in zip(slots, counts, strict=True):
            if slot not in self._slots:
                # A query sees itself and window - 1 tokens before it.
                self._slots[slot] = [_Kept(w and w - 1) for w in self._windows]
            self._lengths[slot] = self.length(slot) + count
        for i, layer in enumerate(layers):
            parts = (x.split(list(counts)) for x in layer)
            for slot, k, v in zip(slots, *parts, strict=True):
                self._slots[slot][i].append(KeysValues(k, v))

    def reset(self, slot: int) -> None:
        """Forget a slot (rule I6)."""
        self._slots.pop(slot, None)
        self._lengths.pop(slot, None)

    def copy(self, slot: int, to: int) -> None:
        """`to` goes on from where `slot` is."""
        self.reset(to)
        if slot in self._slots:
            self._slots[to] = [kept.copy() for kept in self._slots[slot]]
            self._lengths[to] = self._lengths[slot]

    def attend(self, slots: Sequence[int]) -> Attend:
        """Attention of one block per slot. Rows are attended one by one: nothing about one
        depends on another."""
        n = self._config.block_size

        def attend(layer: int, q: Tensor, own: KeysValues) -> Tensor:
            parts = (x.split(n) for x in (q, *own))
            rows = zip(slots, *parts, strict=True)
            return torch.cat(
                [self._row(layer, slot, x, KeysValues(k, v)) for slot, x, k, v in rows]
            )

        return attend

    def _row(self, layer: int, slot: int, q: Tensor, own: KeysValues) -> Tensor:
        kept = self._slots[slot][layer].view() if slot in self._slots else None
        kv = own if kept is None else KeysValues(*map(torch.cat, zip(kept, own, strict=True)))
        end = self.length(slot) + len(q)
        where = torch.arange(end - len(kv.k), end, device=q.device)
        causal = self._config.causal(layer)
        seen = visible(where[-len(q) :], where, window=self._windows[layer], causal=causal)
        return attention(q, kv, seen)
