# SPDX-License-Identifier: Apache-2.0
"""Which nodes are verified: against every possible choice, on small batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from budget_world import Stairs

from specla.drafters.choose import best, break_even, kept, most_probable
from specla.topology.tree import DraftTree


class Bumpy:
    """Random stairs, never falling."""

    def __init__(self, seed: int, *, padded: bool) -> None:
        rng, self.padded = random.Random(seed), padded
        steps = itertools.accumulate(rng.choice((0, 0, 5, 40, 200)) for _ in range(12))
        self._us = [100.0 + step for step in steps]

    def round_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float:
        return self._us[nodes - 1]

    def draft_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float | None:
        return None


def random_batch(seed: int) -> tuple[list[DraftTree], list[list[float]]]:
    rng = random.Random(seed)
    trees, survival = [], []
    for _ in range(rng.randint(1, 3)):
        parents = [-1] + [rng.randrange(node) for node in range(1, rng.randint(1, 5))]
        trees.append(DraftTree(tuple(range(len(parents))), tuple(parents)))
        a = [1.0]
        # Few values, so that there are ties.
        for parent in parents[1:]:
            a.append(a[parent] * rng.choice((0.3, 0.6, 0.9)))
        survival.append(a)
    return trees, survival


def closed(tree: DraftTree) -> Iterator[tuple[int, ...]]:
    """Every choice of drafts that holds its parents."""
    drafts = range(1, tree.num_nodes)
    for count in range(tree.num_nodes):
        for some in itertools.combinations(drafts, count):
            if all(tree.parents[node] in (0, *some) for node in some):
                yield some


def rate_of(
    keep: Sequence[Sequence[int]], survival: Sequence[Sequence[float]], costs: Bumpy, draft: float
) -> float:
    rows = len(keep)
    total = sum(map(len, keep))
    nodes = 1 + max(map(len, keep)) if costs.padded else -(-(rows + total) // rows)
    tokens = rows + sum(a[node] for a, some in zip(survival, keep, strict=True) for node in some)
    return tokens / (costs.round_us(rows, nodes) + draft)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_best_equals_trying_everything(seed: int, padded: bool) -> None:
    trees, survival = random_batch(seed)
    costs = Bumpy(seed, padded=padded)
    choice = best(trees, survival, costs, draft_us=20)
    most = max(
        rate_of(keep, survival, costs, 20) for keep in itertools.product(*map(closed, trees))
    )
    assert rate_of(choice.keep, survival, costs, 20) == pytest.approx(most, rel=1e-12)
    for tree, keep in zip(trees, choice.keep, strict=True):
        assert keep in set(closed(tree))
    assert choice == best(trees, survival, costs, draft_us=20)


def test_of_equals_the_first() -> None:
    """Room for one draft: depth, then the order of the tree, settle ties."""
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1))
    choice = most_probable([tree], [[1, 0.5, 0.5, 0.5]], Bumpy(0, padded=True), drafts=2)
    assert choice.keep == ((1, 2),)
    choice = most_probable([tree], [[1, 0.5, 0.5, 0.5]], Bumpy(0, padded=True), drafts=1)
    assert choice.keep == ((1,),)


def test_what_the_bucket_has_room_for_comes_free() -> None:
    """A sure row pays for the bucket; an unsure one then gets what fits, but no hopeless node."""
    costs = Stairs(fixed=1000, each=1)
    chain = DraftTree.chain(0, range(1, 4))
    survival = [[1, 0.9, 0.8, 0.7], [1, 0.2, 0.1, 0.001]]
    choice = best([chain, chain], survival, costs, draft_us=0)
    assert choice.keep == ((1, 2, 3), (1, 2))
    assert choice.nodes == 4


def test_without_padding_a_row_pays_for_itself() -> None:
    costs = Stairs(fixed=10, each=10, padded=False)
    chain = DraftTree.chain(0, range(1, 4))
    survival = [[1, 0.95, 0.9, 0.9], [1, 0.2, 0.1, 0.1]]
    choice = best([chain, chain], survival, costs, draft_us=0)
    assert choice.keep[1] == ()
    assert choice.keep[0]


def test_kept_is_the_same_tree_with_less() -> None:
    tree = DraftTree((7, 1, 2, 3, 4), (-1, 0, 0, 2, 3), (0.0, -1.0, -0.5, -0.2, -0.1))
    assert kept(tree, (1, 2, 3, 4)) is tree
    assert kept(tree, (2, 3)) == DraftTree((7, 2, 3), (-1, 0, 1), (0.0, -0.5, -0.2))
    assert kept(tree, ()) == DraftTree((7,), (-1,), (0.0,))


def test_break_even() -> None:
    """A chain of one draft that costs half a step more pays from 0.5 on; longer ones here only
    from further up."""
    costs = Stairs(fixed=100, each=50, padded=False)
    p, nodes = break_even(costs, 1, 8, draft_us=25)
    assert nodes == 2
    assert p == pytest.approx(0.5, abs=1e-6)
    dear = Stairs(fixed=0, each=100, padded=False)
    assert break_even(dear, 1, 8, draft_us=1)[0] == math.inf
