# SPDX-License-Identifier: Apache-2.0
"""Growing: a draft tree under construction, level by level, from a drafter's log-probabilities.

A node's score q is the sum of log-probabilities down to it, so that it never exceeds its
parent's: the best nodes of any number, and all that are within tau of the best, form a tree.
Which nodes stay is settled in one order: the spine first (if asked for), then by (score, depth,
index); pruning by tau comes before the budget.

Source: EAGLE-2 (arXiv 2406.16858) for growing and reranking; SpecLA (arXiv 2607.16673) for tau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specla.topology.tree import DraftTree


class Growing:
    """One row's tree.

    Args:
        root: node 0's token.
        top_k: nodes expanded per level, the spine's among them.
        max_depth, max_drafts: bounds of the tree below node 0.
        tau: keep a node iff q* - q <= tau, q* the best score of depth 1.
        spine: the likeliest chain is kept before anything else.
        min_survival: expand a node only if the probability of its path is at least this.
    """

    def __init__(
        self,
        root: int,
        *,
        top_k: int,
        max_depth: int,
        max_drafts: int,
        tau: float,
        spine: bool,
        min_survival: float = 0.0,
    ) -> None:
        self._top_k, self._max_depth, self._max_drafts = top_k, max_depth, max_drafts
        self._tau, self._with_spine = tau, spine
        self._least = math.log(min_survival) if min_survival else -math.inf
        self.tokens, self.parents = [root], [-1]
        self._logprobs, self._scores, self._depths = [0.0], [0.0], [0]
        self._spine = {0}

    def add(self, parent: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Children of `parent`, likeliest first; call for a level's nodes in order."""
        if self._with_spine and parent in self._spine and tokens:
            self._spine.add(len(self.tokens))
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self._logprobs += logprobs
        self._scores += [self._scores[parent] + logprob for logprob in logprobs]
        self._depths += [self._depths[parent] + 1] * len(tokens)

    def frontier(self) -> list[int]:
        """The nodes of the deepest level that are worth expanding, in order: those that would
        be in the tree if it ended here, as nothing below another can be. Empty: it is grown."""
        depth = self._depths[-1]
        if depth >= self._max_depth or not self._max_drafts:
            return []
        deepest = (node for node in self._best() if self._depths[node] == depth)
        best = [node for node in deepest if self._scores[node] >= self._least]
        # The spine comes first in `_best` and takes one of the places.
        return sorted(best[: self._top_k])

    def tree(self) -> DraftTree:
        """What stays, nodes in order of appearance."""
        kept = [0, *sorted(self._best())]
        place = {node: i for i, node in enumerate(kept)}
        return DraftTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place.get(self.parents[node], -1) for node in kept),
            tuple(self._logprobs[node] for node in kept),
        )

    def _best(self) -> list[int]:
        """Drafts that stay, best first."""
        if len(self.tokens) == 1:
            return []
        q, depths = self._scores, self._depths
        best = max(score for score, depth in zip(q, depths, strict=True) if depth == 1)
        kept = [node for node in range(1, len(q)) if best - q[node] <= self._tau]
        kept.sort(key=lambda node: (node not in self._spine, -q[node], depths[node], node))
        return kept[: self._max_drafts]
