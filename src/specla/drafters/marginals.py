# SPDX-License-Identifier: Apache-2.0
"""A draft tree from one law per depth, best nodes first.

Where a position's law does not depend on the tokens before it, a node is the tuple of its ranks
down from the root and its score the sum of their log-probabilities. A heap yields nodes in order
of (score, depth, ranks) without looking at more than it yields: after a node come its next
sibling and its first child. An ancestor always comes first.

Source: DDTree (liranringel/ddtree) for the heap, Lucebox for the spine, SpecLA (arXiv 2607.16673)
for tau; the order of settling is that of `grow`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from specla.topology.tree import DraftTree

Law = Sequence[tuple[int, float]]
"""(token, log-probability <= 0) of one depth, likeliest first."""
Ranks = tuple[int, ...]


def best_first(
    root: int, laws: Sequence[Law], *, max_drafts: int, tau: float, spine: bool
) -> DraftTree:
    """The best nodes below `root`.

    Args:
        laws: of depth 1, 2, ...; nothing is below a depth that has none.
        max_drafts: nodes below the root, at most.
        tau: keep a node iff q* - q <= tau, q* the best score of depth 1.
        spine: the likeliest chain is kept before anything else.
    """
    laws = list(takewhile(len, laws))
    if not laws or not max_drafts:
        return DraftTree.root(root)
    least = laws[0][0][1] - tau
    chain = list(_chain(laws, least))[:max_drafts] if spine else []
    others = (ranks for ranks in _in_order(laws, least) if any(ranks) or not spine)
    kept = [*chain, *islice(others, max_drafts - len(chain))]
    place = {(): 0, **{ranks: i for i, ranks in enumerate(kept, 1)}}
    entries = [laws[len(ranks) - 1][ranks[-1]] for ranks in kept]
    return DraftTree(
        (root, *(token for token, _ in entries)),
        (-1, *(place[ranks[:-1]] for ranks in kept)),
        (0.0, *(logprob for _, logprob in entries)),
    )


def _chain(laws: Sequence[Law], least: float) -> Iterator[Ranks]:
    score = 0.0
    for depth, law in enumerate(laws, 1):
        score += law[0][1]
        if score < least:
            return
        yield (0,) * depth


def _in_order(laws: Sequence[Law], least: float) -> Iterator[Ranks]:
    """All nodes with a score of at least `least`, best first."""
    # (-score, depth, ranks, the parent's score): the first three order nodes fully.
    heap: list[tuple[float, int, Ranks, float]] = [(-laws[0][0][1], 1, (0,), 0.0)]
    while heap:
        cost, depth, ranks, above = heapq.heappop(heap)
        if -cost < least:
            return
        yield ranks
        sibling = ranks[-1] + 1
        if sibling < len(laws[depth - 1]):
            score = above + laws[depth - 1][sibling][1]
            heapq.heappush(heap, (-score, depth, (*ranks[:-1], sibling), above))
        if depth < len(laws):
            score = -cost + laws[depth][0][1]
            heapq.heappush(heap, (-score, depth + 1, (*ranks, 0), -cost))
