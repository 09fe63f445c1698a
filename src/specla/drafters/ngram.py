# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: propose what followed the last time the same few tokens were seen.

The longest suffix of 'prompt + output' between `prompt_lookup_max` and `prompt_lookup_min`
tokens that occurred before is matched, its latest occurrence is copied as a chain. The index
maps an n-gram to the position after its latest occurrence and grows by the new tokens only, so a
round costs O(new tokens), whatever the length of the context.

Source: prompt lookup decoding (A. Saxena, 2023); option names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specla.drafters.base import DrafterInfo, DraftRow, Observation
from specla.drafters.options import described, require_int
from specla.drafters.suffix_index import ngrams
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.models.features import Features
    from specla.ops.contract import DeviceRound, RowArrays


class NgramDrafter:
    """A chain copied from the row's own past; nothing when no suffix occurred before.

    Args:
        prompt_lookup_max, prompt_lookup_min: longest and shortest suffix to look up, in tokens.
        num_draft_tokens: longest proposal.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self, *, prompt_lookup_max: int = 4, prompt_lookup_min: int = 2, num_draft_tokens: int = 8
    ) -> None:
        require_int("prompt_lookup_max", prompt_lookup_max, 1, 64)
        require_int("prompt_lookup_min", prompt_lookup_min, 1, prompt_lookup_max)
        require_int("num_draft_tokens", num_draft_tokens, 1, 1023)
        self.info = DrafterInfo(
            name="ngram",
            max_depth=num_draft_tokens,
            may_return_nothing=True,
            variant=described(
                prompt_lookup_max=prompt_lookup_max,
                prompt_lookup_min=prompt_lookup_min,
                num_draft_tokens=num_draft_tokens,
            ),
        )
        self._sizes = tuple(range(prompt_lookup_max, prompt_lookup_min - 1, -1))
        self._slots: dict[int, _Index] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One chain (or one node) per row."""
        return [self._draft_row(row) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to do: the next `draft` reads the new tokens."""

    def reset(self, slot: int) -> None:
        """Drop the slot's index."""
        self._slots.pop(slot, None)

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """A chain's."""
        return (min(self.info.max_depth, num_nodes - 1),)

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """The same chains, drafted on the device (see `DeviceDrafter`)."""
        from specla.drafters.ngram_device import draft_chain

        draft_chain(
            rows.history,
            rows.len_tokens,
            rows.remaining,
            rnd,
            prompt_lookup_max=self._sizes[0],
            prompt_lookup_min=self._sizes[-1],
            num_draft_tokens=depth,
        )

    def _draft_row(self, row: DraftRow) -> DraftTree:
        index = self._slots.setdefault(row.slot, _Index(self._sizes))
        index.extend(row.tokens)
        start = index.find(row.tokens)
        if start is None:
            return DraftTree.root(row.tokens[-1])
        length = min(row.max_drafts, self.info.max_depth)
        return DraftTree.chain(row.tokens[-1], _copy(row.tokens, start, length))


class _Index:
    """n-gram -> position after its latest occurrence, over tokens[:length]."""

    __slots__ = ("_after", "_length", "_sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._after: dict[tuple[int, ...], int] = {}
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the positions that `tokens` has grown by since the last call."""
        assert len(tokens) >= self._length, "a slot's tokens shrank without reset()"
        # The suffix that ends the text has no continuation yet; it is indexed when one comes.
        first = max(0, self._length - self._sizes[0])
        window = list(tokens[first:])
        for size in self._sizes:
            start = max(self._length, size)
            grams = ngrams(window[start - size - first :], size)
            self._after.update(zip(grams, range(start, len(tokens)), strict=False))
        self._length = len(tokens)

    def find(self, tokens: Sequence[int]) -> int | None:
        """Where the continuation of the longest known suffix of `tokens` starts, or None."""
        tail = tuple(tokens[-self._sizes[0] :])
        for size in self._sizes:
            if size <= len(tail) and (start := self._after.get(tail[-size:])) is not None:
                return start
        return None


def _copy(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on; past the end, the copy continues from itself, which
    extends a loop by whole periods."""
    drafts: list[int] = []
    for here in range(start, start + length):
        past_end = here - len(tokens)
        drafts.append(tokens[here] if past_end < 0 else drafts[past_end])
    return drafts
