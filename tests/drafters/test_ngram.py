# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup against a scan of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafters import DraftRow
from specla.drafters.ngram import NgramDrafter
from specla.testing import replay


def draft(
    drafter: NgramDrafter, tokens: Sequence[int], max_drafts: int = 16, slot: int = 1
) -> tuple[int, ...]:
    row = DraftRow(slot=slot, tokens=tokens, num_prompt_tokens=1, max_drafts=max_drafts, seed=0)
    (tree,) = drafter.draft([row])
    assert tree.is_chain
    return tree.tokens[1:]


def scan(tokens: Sequence[int], longest: int, shortest: int, length: int) -> tuple[int, ...]:
    """The definition: latest earlier occurrence of the longest suffix, copied over itself."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                period = tokens[start:]
                return tuple(period[i % len(period)] for i in range(length))
    return ()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 9),
    st.lists(st.integers(1, 40), max_size=5),
)
def test_equals_a_scan(
    tokens: list[int], one: int, other: int, length: int, stops: list[int]
) -> None:
    longest, shortest = max(one, other), min(one, other)
    drafter = NgramDrafter(
        prompt_lookup_max=longest, prompt_lookup_min=shortest, num_draft_tokens=6
    )
    for end in sorted({min(stop, len(tokens)) for stop in (*stops, len(tokens))}):
        known = tokens[:end]
        expected = scan(known, longest, shortest, min(length, 6))
        assert draft(drafter, known, length) == expected


def test_nothing_matches() -> None:
    assert draft(NgramDrafter(), [1, 2, 3, 4]) == ()


def test_longer_match_wins_over_later_one() -> None:
    drafter = NgramDrafter(num_draft_tokens=1)
    assert draft(drafter, [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]) == (7,)


def test_loop_is_continued_by_whole_periods() -> None:
    assert draft(NgramDrafter(), [5, 6, 7] * 3) == (5, 6, 7, 5, 6, 7, 5, 6)
    assert replay(NgramDrafter(), [5, 6, 7, 5, 6], [7, 5, 6] * 12).emitted == (9, 9, 9, 9)


def test_slots_do_not_share() -> None:
    drafter = NgramDrafter(num_draft_tokens=1)
    assert draft(drafter, [1, 2, 3, 1, 2], slot=1) == (3,)
    assert draft(drafter, [9, 1, 2], slot=2) == ()


def test_shrinking_tokens_are_our_bug() -> None:
    drafter = NgramDrafter()
    draft(drafter, [1, 2, 3])
    with pytest.raises(AssertionError, match="without reset"):
        draft(drafter, [1, 2])
    drafter.reset(1)
    assert draft(drafter, [1, 2]) == ()
