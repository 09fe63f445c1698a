# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: a tree of what followed the longest recurring suffix, weighted by how often.

Two indexes are asked: the row's own prompt and output, and a global one over the outputs of
finished requests. The one whose tree has the larger expected number of accepted drafts wins.
Long matches earn deep trees: depth <= max_spec_factor * match length + max_spec_offset.

The global index shares statistics between requests. It can never change an output, only how
fast it appears (a wrong guess is rejected, a right one is what the target says anyway), but the
speed of a reply can hint that a similar text was produced before. `global_tokens=0` turns the
sharing off.

Source: SuffixDecoding (arXiv 2411.04975) and ArcticInference's public description of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specla.drafters.base import DrafterInfo, DraftRow, Observation
from specla.drafters.options import described, require_int, require_number
from specla.drafters.suffix_index import Continuations, SuffixIndex
from specla.topology.tree import DraftTree


@dataclass(slots=True)
class _Local:
    """One slot: its tokens, and how many of them are the prompt."""

    index: SuffixIndex
    num_prompt_tokens: int


class SuffixDrafter:
    """A tree from suffix statistics; nothing where the text does not repeat.

    Args:
        max_match: longest suffix told apart, in tokens.
        min_match: shortest suffix that may draft, in tokens.
        max_spec_factor, max_spec_offset: depth allowed per matched token, and beside.
        min_token_prob: drop nodes whose path probability is lower.
        max_votes: most occurrences counted, the latest ones.
        global_tokens: size of the memory of finished outputs, shared between requests; the
            oldest outputs leave first. 0 shares nothing.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        *,
        max_match: int = 24,
        min_match: int = 1,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        max_votes: int = 32,
        global_tokens: int = 65536,
    ) -> None:
        require_int("max_match", max_match, 1, 256)
        require_int("min_match", min_match, 1, max_match)
        require_number("max_spec_factor", max_spec_factor, 0, 16)
        require_number("max_spec_offset", max_spec_offset, -256, 256)
        require_number("min_token_prob", min_token_prob, 0, 1)
        require_int("max_votes", max_votes, 1, 2**20)
        require_int("global_tokens", global_tokens, 0, 2**24)
        self._factor, self._offset = max_spec_factor, max_spec_offset
        self._max_match, self._min_match, self._max_votes = max_match, min_match, max_votes
        self._min_prob, self._global_tokens = min_token_prob, global_tokens
        self._global = self._new_index()
        self._slots: dict[int, _Local] = {}
        self.info = DrafterInfo(
            name="suffix",
            max_depth=self._depth(max_match),
            may_return_nothing=True,
            remembers=global_tokens > 0,
            variant=described(
                max_match=max_match,
                min_match=min_match,
                max_spec_factor=max_spec_factor,
                max_spec_offset=max_spec_offset,
                min_token_prob=min_token_prob,
                max_votes=max_votes,
                global_tokens=global_tokens,
            ),
        )

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, with log-probabilities from vote ratios."""
        return [self._draft_row(row) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Append what was emitted, so that `reset` knows the whole output."""
        for row in seen:
            if (local := self._slots.get(row.slot)) is not None:
                local.index.extend(row.emitted)

    def reset(self, slot: int) -> None:
        """Drop the slot's index; its output enters the global one."""
        local = self._slots.pop(slot, None)
        if local is None or self._global_tokens == 0:
            return
        output = local.index.tokens_from(local.num_prompt_tokens)
        # Room for the end mark; of an output larger than the memory the end is kept.
        output = output[-(self._global_tokens - 1) :] if self._global_tokens > 1 else []
        if output:
            self._global.extend(output)
            self._global.close(self._global_tokens)

    def _draft_row(self, row: DraftRow) -> DraftTree:
        local = self._sync(row)
        context = row.tokens[-self._max_match :]
        best = self._continue(local.index, context, row.max_drafts)
        if len(self._global):
            shared = self._continue(self._global, context, row.max_drafts)
            best = shared if shared.score > best.score else best
        return _tree(row.tokens[-1], best)

    def _sync(self, row: DraftRow) -> _Local:
        """Bring the slot's index up to the row's tokens."""
        local = self._slots.get(row.slot)
        if local is None:
            local = self._slots[row.slot] = _Local(self._new_index(), row.num_prompt_tokens)
        known = len(local.index)
        assert known <= len(row.tokens), "a slot's tokens shrank without reset()"
        assert known == 0 or local.index.last == row.tokens[known - 1], (
            "a slot's tokens changed without reset()"
        )
        local.index.extend(row.tokens[known:])
        return local

    def _continue(
        self, index: SuffixIndex, context: Sequence[int], max_drafts: int
    ) -> Continuations:
        match = index.match(context)
        if match.length < self._min_match:
            return Continuations()
        return index.grow(
            match.votes,
            max_nodes=max_drafts,
            max_depth=self._depth(match.length),
            min_prob=self._min_prob,
        )

    def _depth(self, match_length: int) -> int:
        return max(0, math.floor(self._factor * match_length + self._offset))

    def _new_index(self) -> SuffixIndex:
        return SuffixIndex(max_match=self._max_match, max_votes=self._max_votes)


def _tree(root: int, below: Continuations) -> DraftTree:
    """Put node 0 on top: every index moves by one."""
    tokens = (root, *below.tokens)
    parents = (-1, *(parent + 1 for parent in below.parents))
    logprobs = (0.0, *(math.log(ratio) for ratio in below.ratios))
    return DraftTree(tokens, parents, logprobs)
