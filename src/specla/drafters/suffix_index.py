# SPDX-License-Identifier: Apache-2.0
"""SuffixIndex: where a context occurred before, and a tree of what followed.

An occurrence is a position that follows a match. Positions of the same n-gram, for a few n, are
linked from the latest to the earliest, so a token costs O(1) to add and a sequence can be evicted
without rebuilding anything; a trie of depth D would cost D nodes per token. Matching walks the
chain of the longest indexed n-gram, extends every occurrence backwards, and keeps those with the
longest match: they vote, and a tree of continuations grows best-first by the ratios of votes.

Invariant: with `max_votes` unbounded, the match is the longest suffix of the context (up to
`max_match`) that occurs followed by a token, and the votes are all its occurrences.

Source: SuffixDecoding (arXiv 2411.04975) for what is computed; the data structure is our own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Lengths of the n-grams whose occurrences are linked, longest first. Between two sizes the
# shorter chain is walked; 1 must be there, or matches of one token would be missed.
SIZES = (4, 2, 1)

# Ends a sequence; token ids are never negative, so no match can cross it.
END = -1


def ngrams(tokens: list[int], size: int) -> Iterator[tuple[int, ...]]:
    """Every run of `size` tokens, in order."""
    return zip(*(tokens[shift:] for shift in range(size)), strict=False)


class Match(NamedTuple):
    """The longest match: its length, and its occurrences from the latest to the earliest, as
    indices of the following token in the store."""

    length: int
    votes: list[int]


@dataclass(slots=True)
class Continuations:
    """A tree below the end of the context: for each node its token, its parent (-1 = below the
    context) and its vote ratio given the parent. `score` sums the path probabilities: the number
    of drafts expected to be accepted, if the ratios were calibrated."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    score: float = 0.0


class SuffixIndex:
    """Past tokens of one or many sequences, searchable by suffix.

    Args:
        max_match: longest match told apart, in tokens.
        max_votes: most occurrences looked at, the latest ones.
    """

    def __init__(self, *, max_match: int, max_votes: int) -> None:
        self._max_match = max_match
        self._max_votes = max_votes
        self._store: list[int] = []
        self._base = 0  # position of store[0]; positions only grow
        self._begin = 0  # position where the current sequence begins
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: dict[int, list[int]] = {size: [] for size in SIZES}
        self._closed: deque[int] = deque()  # lengths of finished sequences, END included

    def __len__(self) -> int:
        """Stored tokens, ends included."""
        return len(self._store)

    @property
    def last(self) -> int:
        """The latest token."""
        return self._store[-1]

    def tokens_from(self, start: int) -> list[int]:
        """Stored tokens from index `start` on."""
        return self._store[start:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the current sequence. O(1) per token."""
        store, latest, new = self._store, self._latest, list(tokens)
        end = self._base + len(store)
        for size, earlier in self._earlier.items():
            past = store[len(store) - min(size, end - self._begin) :]
            # The first tokens of a sequence have no n-gram of this size before them.
            missing = min(size - len(past), len(new))
            earlier += [-1] * missing
            positions = range(end + missing, end + len(new))
            for gram, here in zip(ngrams(past + new, size), positions, strict=False):
                earlier.append(latest.get(gram, -1))
                latest[gram] = here
        store += new

    def close(self, max_tokens: int) -> None:
        """End the current sequence, then evict whole sequences, oldest first, until at most
        `max_tokens` tokens are stored."""
        for earlier in self._earlier.values():
            earlier.append(-1)
        self._store.append(END)
        end = self._base + len(self._store)
        self._closed.append(end - self._begin)
        self._begin = end
        while len(self._store) > max_tokens:
            self._evict(self._closed.popleft())

    def _evict(self, count: int) -> None:
        """Drop the first `count` tokens; links into them end the chains by themselves."""
        for size, earlier in self._earlier.items():
            for i in range(size, count):
                gram = tuple(self._store[i - size : i])
                if self._latest.get(gram) == self._base + i:
                    del self._latest[gram]
            del earlier[:count]
        del self._store[:count]
        self._base += count

    def match(self, context: Sequence[int]) -> Match:
        """The longest suffix of `context` that occurs followed by a token (length 0: none)."""
        tail = tuple(context[-self._max_match :])
        for size, earlier in self._earlier.items():
            if size <= len(tail) and (at := self._latest.get(tail[-size:])) is not None:
                return self._longest(list(tail), size, earlier, at)
        return Match(0, [])

    def _longest(self, tail: list[int], size: int, earlier: list[int], at: int) -> Match:
        """Walk the chain from position `at`, where the last `size` tokens of `tail` match."""
        store, longest, votes = self._store, size, list[int]()
        for _ in range(self._max_votes):
            here = at - self._base
            if here < 0:  # end of the chain, or evicted
                break
            at = earlier[here]
            # One comparison of lists refuses or confirms what is already known to be possible;
            # in a loop, where every occurrence matches all of `tail`, that is the whole cost.
            if here < longest or store[here - longest : here] != tail[-longest:]:
                continue
            length, limit = longest, min(len(tail), here)
            while length < limit and store[here - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, votes = length, []
            votes.append(here)
        return Match(longest, votes)

    def grow(
        self, votes: list[int], *, max_nodes: int, max_depth: int, min_prob: float
    ) -> Continuations:
        """The most probable continuations after `votes`, best first, parents before children.

        Args:
            max_nodes, max_depth: bounds of the tree.
            min_prob: least product of vote ratios from the context down to a node.
        """
        tree = Continuations()
        # (-path probability, depth, order of discovery): ties are settled without randomness.
        heap: list[tuple[float, int, int, int, int, float, list[int]]] = []
        order, node, path, depth = 0, -1, 1.0, 0
        while len(tree.tokens) < max_nodes:
            if depth < max_depth:
                for token, ratio, following in self._split(votes):
                    if path * ratio >= min_prob:
                        entry = (-path * ratio, depth + 1, order, node, token, ratio, following)
                        heapq.heappush(heap, entry)
                        order += 1
            if not heap:
                break
            negative, depth, _, parent, token, ratio, votes = heapq.heappop(heap)
            node, path = len(tree.tokens), -negative
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.ratios.append(ratio)
            tree.score += path
        return tree

    def _split(self, votes: list[int]) -> list[tuple[int, float, list[int]]]:
        """Group votes by the next token, most votes first, then latest first."""
        store, groups = self._store, dict[int, list[int]]()
        total = 0
        for here in votes:
            if here < len(store) and (token := store[here]) != END:
                groups.setdefault(token, []).append(here + 1)
                total += 1
        ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
        return [(token, len(following) / total, following) for token, following in ranked]
