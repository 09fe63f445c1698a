# SPDX-License-Identifier: Apache-2.0
"""Survival: how probable it is that a drafted node ends up on the committed path.

Learned from what became of earlier drafts, in decayed counts that start from a prior:

    rate(v) = accepted of those of v's rank and confidence, from a temperature-scaled confidence on
    h(v)    = rate(v) with its odds corrected for v's depth, then for its row
    a(v)    = product of h from node 0 down to v

The confidence is the drafter's own probability q of v given its parent; the temperature is the one
under which past confidences fit past outcomes best. Where a drafter gives none, its prior stands
there. The ratios are of accepted to expected drafts: of a depth, as drafters that feed on their
own guesses get worse on the way down, and of a row, as one text is easier than another.

Children of one node exclude each other, so their h sum to at most 1; a is at most its parent's,
so that the best nodes of any number form a tree.

Source: sequential temperature scaling of DSpark (arXiv 2607.05147); its per-position grid search
becomes a correction per depth, which needs no held-out set.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specla.topology.tree import DraftTree

# Bounds of the confidence bins, and temperatures that are tried.
EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
RANKS = 4
# Observations after which a count weighs 1/e: of a kind of node, a depth, a row.
NODE_WINDOW, DEPTH_WINDOW, ROW_WINDOW = 256, 128, 32
# Observations that stand for "as expected" in a correction.
EXPECTED_WEIGHT = 4.0
REFIT_EVERY = 64
LEAST, MOST = 1e-3, 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What a drafter's guesses are taken for before any was judged.

    rate: of its likeliest child where it gives no confidence; a later sibling is worth a third
        of the one before. temperature: of its confidences. weight: in observations.
    """

    rate: float = 0.5
    temperature: float = 1.0
    weight: float = 4.0


PRIORS: Mapping[str, Prior] = {
    # A vote of one is a confidence of 1: past text says less than it seems to.
    "suffix": Prior(temperature=2.8),
    # The last match is right about half of the time on text that repeats at all.
    "ngram": Prior(rate=0.5),
    # A step of a trained one's chain on texts of the kind that it was trained for: 0.85 and 0.8.
    "eagle": Prior(rate=0.8),
    "block": Prior(rate=0.8),
}


class _Count:
    """Decayed: how many were seen, expected (or their confidences summed), accepted."""

    __slots__ = ("expected", "hits", "keep", "seen")

    def __init__(self, window: int) -> None:
        self.keep = 1 - 1 / window
        self.seen = self.expected = self.hits = 0.0

    def add(self, expected: float, hit: bool) -> None:
        self.seen = self.seen * self.keep + 1
        self.expected = self.expected * self.keep + expected
        self.hits = self.hits * self.keep + hit

    @property
    def odds(self) -> float:
        """Accepted over expected, times missed over expected to be missed, inverted."""
        hits = (self.hits + EXPECTED_WEIGHT) / (self.expected + EXPECTED_WEIGHT)
        missed, expected = self.seen - self.hits, self.seen - self.expected
        return hits * (expected + EXPECTED_WEIGHT) / (missed + EXPECTED_WEIGHT)


class Survival:
    """Of one drafter, on one engine. prior: where it starts from."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self.temperature = prior.temperature
        kinds = range(len(EDGES) + 2)  # the last kind: no confidence given
        self._nodes = [[_Count(NODE_WINDOW) for _ in kinds] for _ in range(RANKS)]
        self._depths: list[_Count] = []
        self._rows: dict[int, _Count] = {}
        self._first = _Count(ROW_WINDOW)
        self._until_refit = REFIT_EVERY

    @property
    def first(self) -> float:
        """Estimated probability that the likeliest draft of depth 1 is accepted."""
        return (self._first.hits + self.prior.rate) / (self._first.seen + 1)

    def path(self, tree: DraftTree, slot: int) -> list[float]:
        """a(v) of every node of a tree that this slot's row proposes; node 0 has 1."""
        odds = self._row(slot).odds
        given = [_corrected(h, odds) for h in self._at_depths(tree, self._rates(tree))]
        sums = [0.0] * tree.num_nodes
        for node, parent in enumerate(tree.parents[1:], 1):
            sums[parent] += given[node]
        survival = [1.0]
        for node, parent in enumerate(tree.parents[1:], 1):
            survival.append(survival[parent] * given[node] / max(1.0, sums[parent]))
        return survival

    def observe(self, tree: DraftTree, path: Sequence[int], drawn: int, slot: int) -> None:
        """Learn from a judged tree. drawn: path nodes below which a token was drawn; where an end
        cut the path, nobody knows what would have followed its last node."""
        if tree.num_nodes == 1:
            return
        at, on, row = set(path[:drawn]), set(path), self._row(slot)
        rates, depths, ranks = self._rates(tree), tree.depths(), _ranks(tree)
        given = self._at_depths(tree, rates)
        for node, parent in enumerate(tree.parents[1:], 1):
            if parent in at:
                hit, confidence = node in on, _confidence(tree, node)
                self._nodes[ranks[node]][_kind(confidence)].add(confidence or 0.0, hit)
                self._depth(depths[node]).add(rates[node], hit)
                row.add(given[node], hit)
                if depths[node] == 1 and ranks[node] == 0:
                    self._first.add(0.0, hit)
        self._until_refit -= 1
        if self._until_refit <= 0:
            self._until_refit = REFIT_EVERY
            self.temperature = self._fit()

    def reset(self, slot: int) -> None:
        """Forget a row."""
        self._rows.pop(slot, None)

    def _rates(self, tree: DraftTree) -> list[float]:
        """Of every node, by rank and confidence; node 0 has 1."""
        ranks = _ranks(tree)
        return [1.0] + [
            min(MOST, self._rate(ranks[node], _confidence(tree, node)))
            for node in range(1, tree.num_nodes)
        ]

    def _at_depths(self, tree: DraftTree, rates: Sequence[float]) -> list[float]:
        depths = tree.depths()
        odds = [1.0] + [self._depth(depth).odds for depth in range(1, max(depths) + 1)]
        return [_corrected(h, odds[depth]) for h, depth in zip(rates, depths, strict=True)]

    def _rate(self, rank: int, confidence: float | None) -> float:
        count, weight = self._nodes[rank][_kind(confidence)], self.prior.weight
        if confidence is None:
            start = self.prior.rate * math.pow(3, -rank)
        else:
            start = _scaled(confidence, self.temperature)
        return (count.hits + weight * start) / (count.seen + weight)

    def _depth(self, depth: int) -> _Count:
        while len(self._depths) < depth:
            self._depths.append(_Count(DEPTH_WINDOW))
        return self._depths[depth - 1]

    def _row(self, slot: int) -> _Count:
        return self._rows.setdefault(slot, _Count(ROW_WINDOW))

    def _fit(self) -> float:
        """The temperature under which the confidences seen fit their outcomes best."""
        seen = [c for rank in self._nodes for c in rank[:-1] if c.seen >= 1]
        return min(TEMPERATURES, key=lambda t: (self._loss(seen, t), t))

    def _loss(self, seen: Sequence[_Count], temperature: float) -> float:
        loss = self.prior.weight * abs(math.log(temperature / self.prior.temperature))
        for count in seen:
            h = min(MOST, max(LEAST, _scaled(count.expected / count.seen, temperature)))
            loss -= count.hits * math.log(h) + (count.seen - count.hits) * math.log(1 - h)
        return loss


def _ranks(tree: DraftTree) -> list[int]:
    """Place among its siblings, which come likeliest first; the last rank holds all others."""
    children, ranks = [0] * tree.num_nodes, [0]
    for parent in tree.parents[1:]:
        ranks.append(min(children[parent], RANKS - 1))
        children[parent] += 1
    return ranks


def _corrected(h: float, odds: float) -> float:
    return min(MOST, h * odds / (1 - h + h * odds))


def _confidence(tree: DraftTree, node: int) -> float | None:
    return None if tree.logprobs is None else math.exp(tree.logprobs[node])


def _kind(confidence: float | None) -> int:
    return len(EDGES) + 1 if confidence is None else bisect_right(EDGES, confidence)


def _scaled(confidence: float, temperature: float) -> float:
    """The confidence with its log-odds divided by the temperature."""
    q = min(1 - LEAST, max(LEAST, confidence))
    return 1 / (1 + math.pow((1 - q) / q, 1 / temperature))
