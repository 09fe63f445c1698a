# SPDX-License-Identifier: Apache-2.0
"""Growing a tree: pruning, budget, ties, the spine; against a definition by brute force."""

from __future__ import annotations

import math
import random

import pytest

from specla.drafters.grow import Growing
from specla.topology.tree import DraftTree

LOGS = [round(math.log(p), 3) for p in (0.5, 0.25, 0.125, 0.06)]


def model(path: tuple[int, ...]) -> list[tuple[int, float]]:
    """(token, log-probability) after a path, likeliest first; ties occur."""
    rng = random.Random(hash(path))
    tokens = rng.sample(range(50), 4)
    return list(zip(tokens, sorted(rng.choices(LOGS, k=4), reverse=True), strict=True))


def grow(root: int, **options: object) -> DraftTree:
    tree = Growing(root, **options)  # type: ignore[arg-type]
    level = [0]
    while level:
        for node in level:
            path = [node]
            while path[0]:
                path.insert(0, tree.parents[path[0]])
            found = model(tuple(tree.tokens[n] for n in path))[: int(options["top_k"])]  # type: ignore[call-overload]
            tree.add(node, [t for t, _ in found], [q for _, q in found])
        level = tree.frontier()
    return tree.tree()


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in tree.path_to(node)) for node in range(tree.num_nodes)}


def defined(root: int, top_k: int, depth: int, drafts: int, tau: float) -> set[tuple[int, ...]]:
    """The best `drafts` of all nodes within tau, with every node of every level expanded."""
    nodes = [((root,), 0.0)]
    for node, q in nodes:
        if len(node) <= depth:
            nodes += [((*node, token), q + p) for token, p in model(node)[:top_k]]
    best = max(q for node, q in nodes if len(node) == 2)
    kept = [(q, node) for node, q in nodes[1:] if best - q <= tau]
    worst = sorted((-q for q, _ in kept))[:drafts][-1]
    # Of nodes that tie with the last one that fits, any may be there.
    return {(root,), *(node for q, node in kept if -q < worst)}


@pytest.mark.parametrize("root", range(12))
@pytest.mark.parametrize(("drafts", "tau"), [(7, 100.0), (15, 2.0), (30, 4.0)])
def test_the_best_nodes_are_kept(root: int, drafts: int, tau: float) -> None:
    """A beam as wide as the budget loses nothing."""
    tree = grow(root, top_k=4, max_depth=4, max_drafts=drafts, tau=tau, spine=False)
    want = defined(root, 4, 4, drafts, tau)
    scores = {p: sum(dict(model(p[:i]))[p[i]] for i in range(1, len(p))) for p in paths(tree)}
    assert tree.num_drafts <= drafts
    best = max(scores[p] for p in scores if len(p) == 2)
    assert all(best - q <= tau + 1e-9 for q in scores.values() if q)
    # Nodes the beam of 4 could not see lie below nodes that it left out.
    assert all(p in paths(tree) for p in want if len(p) <= 3)


def test_ties_are_settled_by_depth_then_order() -> None:
    tree = Growing(9, top_k=2, max_depth=3, max_drafts=3, tau=9.0, spine=False)
    tree.add(0, [1, 2], [-1.0, -1.0])
    assert tree.frontier() == [1, 2]
    tree.add(1, [3], [0.0])
    tree.add(2, [4], [0.0])
    # All four have score -1: depth 1 first, then the first of depth 2.
    assert tree.tree() == DraftTree((9, 1, 2, 3), (-1, 0, 0, 1), (0.0, -1.0, -1.0, 0.0))


def test_tau_comes_before_the_budget_and_counts_from_the_best() -> None:
    tree = Growing(9, top_k=3, max_depth=1, max_drafts=3, tau=1.0, spine=True)
    tree.add(0, [1, 2, 3], [-2.0, -3.0, -3.1])
    assert tree.frontier() == []
    assert tree.tree().tokens == (9, 1, 2)


def test_one_child_per_node_is_a_chain() -> None:
    for root in range(12):
        tree = grow(root, top_k=1, max_depth=5, max_drafts=9, tau=99.0, spine=False)
        assert tree.is_chain
        assert tree.num_drafts == 5


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tau", [1.5, 6.0])
def test_a_spine_is_the_chain(drafts: int, tau: float) -> None:
    """Whatever the budget: what the chain offers, the tree offers."""
    for root in range(30):
        options = {"max_depth": 5, "max_drafts": drafts, "tau": tau}
        chain = grow(root, top_k=1, spine=False, **options)
        tree = grow(root, top_k=3, spine=True, **options)
        assert paths(chain) <= paths(tree)


def test_without_a_spine_a_small_budget_can_lose_the_chain() -> None:
    lost = 0
    for root in range(30):
        options = {"max_depth": 5, "max_drafts": 5, "tau": 99.0}
        chain = grow(root, top_k=1, spine=False, **options)
        lost += not paths(chain) <= paths(grow(root, top_k=3, spine=False, **options))
    assert lost


@pytest.mark.parametrize("root", range(8))
def test_nothing_grows_below_an_improbable_path(root: int) -> None:
    options = {"max_depth": 6, "max_drafts": 200, "tau": 99.0, "spine": True}
    tree = grow(root, top_k=3, min_survival=0.1, **options)
    assert tree.logprobs is not None

    def survival(node: int) -> float:
        return math.exp(sum(tree.logprobs[n] for n in tree.path_to(node)))  # type: ignore[index]

    inner = set(tree.parents) - {-1, 0}
    assert all(survival(node) >= 0.1 for node in inner)
    assert any(survival(node) < 0.1 for node in range(tree.num_nodes))
    chain = grow(root, top_k=1, min_survival=0.1, **options)
    assert paths(chain) <= paths(tree)


def test_no_budget_no_drafts() -> None:
    tree = Growing(9, top_k=2, max_depth=3, max_drafts=0, tau=9.0, spine=True)
    tree.add(0, [1, 2], [-1.0, -2.0])
    assert tree.frontier() == []
    assert tree.tree() == DraftTree((9,), (-1,), (0.0,))
