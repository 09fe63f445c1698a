# SPDX-License-Identifier: Apache-2.0
"""Trees over laws per depth: against a definition by enumerating every node."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from specla.drafters.marginals import best_first
from specla.topology.tree import DraftTree

# Exact sums of sixteenths: scores that tie, tie exactly.
LOGS = [-i / 16 for i in range(1, 40)]


def laws(
    rng: random.Random, depth: int, count: int, distinct: int
) -> list[list[tuple[int, float]]]:
    """Few distinct values make many ties."""
    return [
        list(
            zip(
                rng.sample(range(50), count),
                sorted(rng.choices(LOGS[:distinct], k=count), reverse=True),
                strict=True,
            )
        )
        for _ in range(depth)
    ]


def enumerated(given: list[list[tuple[int, float]]], tau: float) -> list[tuple[int, ...]]:
    """Every node as its ranks, best first by (score, depth, ranks), within tau."""
    nodes = [
        ranks
        for depth in range(1, len(given) + 1)
        for ranks in itertools.product(*(range(len(law)) for law in given[:depth]))
    ]
    score = {r: math.fsum(given[d][i][1] for d, i in enumerate(r)) for r in nodes}
    kept = [r for r in nodes if given[0][0][1] - score[r] <= tau]
    return sorted(kept, key=lambda r: (-score[r], len(r), r))


def ranks_of(tree: DraftTree, given: list[list[tuple[int, float]]]) -> list[tuple[int, ...]]:
    """Ranks of every draft, in the tree's order."""
    paths = [tree.path_to(node)[1:] for node in range(1, tree.num_nodes)]
    orders = [[token for token, _ in law] for law in given]
    return [tuple(orders[d].index(tree.tokens[n]) for d, n in enumerate(path)) for path in paths]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tau", [0.25, 1.0, 100.0])
def test_it_is_the_best_of_all_nodes_in_order(seed: int, tau: float) -> None:
    rng = random.Random(seed)
    given = laws(rng, rng.randint(1, 4), rng.randint(1, 5), rng.choice([2, 6, 39]))
    want = enumerated(given, tau)
    for drafts in (1, 2, 5, 11, 22, 1000):
        tree = best_first(7, given, max_drafts=drafts, tau=tau, spine=False)
        assert ranks_of(tree, given) == want[:drafts]
        assert tree.tokens[0] == 7
        assert tree.logprobs is not None
        depths = tree.depths()
        for node in range(1, tree.num_nodes):
            law = dict(given[depths[node] - 1])
            assert tree.logprobs[node] == law[tree.tokens[node]]


@pytest.mark.parametrize("seed", range(40))
def test_the_spine_comes_first_then_the_best(seed: int) -> None:
    rng = random.Random(seed)
    given = laws(rng, 4, 4, 12)
    for tau, drafts in itertools.product((0.6, 100.0), (1, 3, 4, 9, 30)):
        want = enumerated(given, tau)
        spine = [r for r in want if not any(r)][:drafts]
        others = [r for r in want if r not in spine][: drafts - len(spine)]
        tree = best_first(7, given, max_drafts=drafts, tau=tau, spine=True)
        found = ranks_of(tree, given)
        assert found == spine + [r for r in others if any(r)]
        chain = best_first(7, [law[:1] for law in given], max_drafts=drafts, tau=tau, spine=False)
        assert set(ranks_of(chain, given)) <= set(found)


def test_without_a_spine_a_small_budget_can_lose_the_chain() -> None:
    given = [[(1, -1.0), (2, -1.0), (3, -1.0)]] * 3
    tree = best_first(0, given, max_drafts=3, tau=9.0, spine=False)
    assert tree.depths() == (0, 1, 1, 1)
    assert best_first(0, given, max_drafts=3, tau=9.0, spine=True).is_chain


def test_no_room_or_no_law_is_no_draft() -> None:
    assert best_first(5, [[(1, -1.0)]], max_drafts=0, tau=1.0, spine=True) == DraftTree.root(5)
    gap = [[(1, -1.0)], [], [(2, -1.0)]]
    assert best_first(5, gap, max_drafts=4, tau=9.0, spine=True).tokens == (5, 1)
    assert best_first(5, [], max_drafts=4, tau=1.0, spine=True) == DraftTree.root(5)
