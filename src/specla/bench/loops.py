# SPDX-License-Identifier: Apache-2.0
"""What counts as looping text. It is trivially easy to draft: it inflates acceptance and speed, so
that every report says how many of its answers loop."""

from __future__ import annotations

from collections.abc import Sequence

# Longest stretch whose repetition is looked for, how often it must stand there, and over how many
# tokens at least.
PERIOD, COPIES, WINDOW = 64, 3, 64


def has_loop(token_ids: Sequence[int]) -> bool:
    """Whether a stretch of at most 64 tokens stands three times in a row or more, over 64 tokens
    at least, wherever that is: a word that does not end, or a sentence said again and again."""
    return any(_longest(token_ids, p) >= max(WINDOW, COPIES * p) for p in range(1, PERIOD + 1))


def _longest(token_ids: Sequence[int], period: int) -> int:
    """Tokens of the longest part in which each one is the one `period` before it."""
    longest = run = 0
    for token, before in zip(token_ids[period:], token_ids, strict=False):
        run = run + 1 if token == before else 0
        longest = max(longest, run)
    return longest + period
