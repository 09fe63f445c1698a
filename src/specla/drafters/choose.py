# SPDX-License-Identifier: Apache-2.0
"""Choosing: which nodes of a batch's trees are worth what verifying them costs.

A node of survival a is worth a tokens, a round of n nodes per row costs C(rows, n). Of a given
number of nodes the most probable ones are best, and as survival falls on the way down they form
trees; how many is then settled by scanning every number, as C is a staircase. Chosen is what
gives the most tokens per microsecond, the time of drafting included, and of equals the fewest.

Source: `drafters.md`'s marginal rule; DSpark (arXiv 2607.05147), algorithm 1, which stops at the
first drop and would stop on a stair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from specla.topology.tree import DraftTree

# Below this a node is not worth its place, even where the bucket has room for it.
LEAST_SURVIVAL = 0.01


class RoundCosts(Protocol):
    """What rounds cost, in microseconds.

    padded: every row costs as much as the widest; else rows cost their own nodes, and `nodes` is
        the mean, rounded up.
    """

    padded: bool

    def round_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float:
        """Verify and accept."""
        ...

    def draft_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float | None:
        """One call of the drafter for up to `nodes` - 1 drafts per row, none deeper than `depth`
        (None: as deep as it goes); None: not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """keep: per row the drafts that stay, in increasing order. nodes, depth: what the round's
    cost was looked up by. expected: drafts accepted, summed over rows, if survival is right."""

    keep: tuple[tuple[int, ...], ...]
    nodes: int
    depth: int
    expected: float
    us: float


class _Draft(NamedTuple):
    """One candidate. place: among its row's, most probable first."""

    survival: float
    depth: int
    row: int
    node: int
    place: int


def best(
    trees: Sequence[DraftTree],
    survival: Sequence[Sequence[float]],
    costs: RoundCosts,
    *,
    draft_us: float,
) -> Choice:
    """The choice that gives most tokens per microsecond; possibly no drafts at all."""
    rows, order = len(trees), _in_order(trees, survival, padded=costs.padded)
    most, taken, expected, depth = 0, 0, 0.0, 0
    rate = rows / (costs.round_us(rows, 1, depth=0) + draft_us)
    for count, draft in enumerate(order, 1):
        if draft.survival < LEAST_SURVIVAL:
            continue
        taken, expected, depth = taken + 1, expected + draft.survival, max(depth, draft.depth)
        nodes = draft.place + 2 if costs.padded else _mean(rows, taken)
        here = (rows + expected) / (costs.round_us(rows, nodes, depth=depth) + draft_us)
        if here > rate:
            most, rate = count, here
    chosen = [draft for draft in order[:most] if draft.survival >= LEAST_SURVIVAL]
    return _priced(chosen, rows, costs)


def most_probable(
    trees: Sequence[DraftTree],
    survival: Sequence[Sequence[float]],
    costs: RoundCosts,
    *,
    drafts: int,
) -> Choice:
    """At most so many of each row's drafts, whatever they cost."""
    order = _in_order(trees, survival, padded=costs.padded)
    return _priced([draft for draft in order if draft.place < drafts], len(trees), costs)


def kept(tree: DraftTree, drafts: Sequence[int]) -> DraftTree:
    """The tree without its other drafts. `drafts` is increasing and holds every parent."""
    if len(drafts) == tree.num_drafts:
        return tree
    nodes = (0, *drafts)
    place = {node: i for i, node in enumerate(nodes)}
    return DraftTree(
        tuple(tree.tokens[node] for node in nodes),
        tuple(place[tree.parents[node]] if node else -1 for node in nodes),
        None if tree.logprobs is None else tuple(tree.logprobs[node] for node in nodes),
    )


def break_even(
    costs: RoundCosts, rows: int, max_nodes: int, *, draft_us: float
) -> tuple[float, int]:
    """The least acceptance per draft at which some chain is as fast as plain decoding, and the
    smallest such chain's nodes. Infinite if even a perfect drafter would lose."""
    step = costs.round_us(rows, 1)
    widths = [n for n in (1 << i for i in range(1, 12)) if n < max_nodes] + [max_nodes]
    found = (math.inf, widths[0])
    for n in widths:
        cost = (costs.round_us(rows, n, depth=n - 1) + draft_us) / step
        found = min(found, (least_acceptance(cost, n - 1), n))
    return found


def _in_order(
    trees: Sequence[DraftTree], survival: Sequence[Sequence[float]], *, padded: bool
) -> list[_Draft]:
    """Every row's drafts in the order in which rounds grow: most probable first, and where the
    widest row sets the price, all rows' first ones before their second ones. Ties by depth, row
    and node, so that parents come before their children."""
    order: list[_Draft] = []
    for row, (tree, a) in enumerate(zip(trees, survival, strict=True)):
        depths = tree.depths()
        nodes = sorted(range(1, tree.num_nodes), key=lambda node: (-a[node], depths[node], node))
        order += [_Draft(a[n], depths[n], row, n, place) for place, n in enumerate(nodes)]
    if len(trees) > 1:
        order.sort(key=lambda d: (padded and d.place, -d.survival, d.depth, d.row, d.node))
    return order


def _mean(rows: int, drafts: int) -> int:
    """Nodes per row, rounded up."""
    return -(-(rows + drafts) // rows)


def _priced(taken: Sequence[_Draft], rows: int, costs: RoundCosts) -> Choice:
    widest = max((draft.place + 2 for draft in taken), default=1)
    nodes = widest if costs.padded else _mean(rows, len(taken))
    depth = max((draft.depth for draft in taken), default=0)
    keep: list[list[int]] = [[] for _ in range(rows)]
    for draft in taken:
        keep[draft.row].append(draft.node)
    return Choice(
        keep=tuple(tuple(sorted(nodes)) for nodes in keep),
        nodes=nodes,
        depth=depth,
        expected=math.fsum(draft.survival for draft in taken),
        us=costs.round_us(rows, nodes, depth=depth),
    )


@lru_cache(maxsize=1024)
def least_acceptance(cost: float, depth: int) -> float:
    """p at which drafts as deep as that emit `cost` tokens: 1 + p + ... + p^depth; infinite if no
    p does."""
    if cost > depth + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(depth + 1)) < cost else (low, p)
    return high
