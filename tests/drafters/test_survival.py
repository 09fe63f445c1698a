# SPDX-License-Identifier: Apache-2.0
"""Survival: priors at first, then what was seen; never more than a probability."""

from __future__ import annotations

import math
import random

import pytest

from specla.drafters.survival import PRIORS, Prior, Survival
from specla.topology.tree import DraftTree

CHAIN = DraftTree.chain(0, (1, 2, 3))
FORK = DraftTree((0, 1, 2, 3), (-1, 0, 0, 1), (0.0, math.log(0.6), math.log(0.3), math.log(0.9)))


def test_the_prior_is_what_is_known_at_first() -> None:
    a = Survival(Prior(rate=0.5)).path(CHAIN, 1)
    assert a == pytest.approx([1, 0.5, 0.25, 0.125])
    a = Survival(Prior(temperature=1.0)).path(FORK, 1)
    assert a == pytest.approx([1, 0.6, 0.3, 0.54])
    hot = Survival(PRIORS["suffix"]).path(FORK, 1)
    assert 0.5 < hot[1] < 0.6


def test_it_learns_by_depth() -> None:
    survival = Survival(Prior())
    for _ in range(300):
        survival.observe(CHAIN, (0, 1), 2, 1)
    a = survival.path(CHAIN, 1)
    assert a[1] > 0.8
    assert a[2] < 0.15 * a[1]


def test_it_learns_by_row_and_forgets_a_row() -> None:
    survival = Survival(Prior())
    for _ in range(100):
        survival.observe(CHAIN, (0, 1, 2, 3), 4, 1)
        survival.observe(CHAIN, (0,), 1, 2)
    easy, hard = survival.path(CHAIN, 1)[1], survival.path(CHAIN, 2)[1]
    assert easy > 0.7
    assert hard < 0.2
    survival.reset(2)
    assert hard < survival.path(CHAIN, 2)[1] < easy


def test_confidence_is_calibrated() -> None:
    """A drafter that says 0.9 and 0.4 and is right half and a third of the time."""
    survival, rng = Survival(Prior()), random.Random(0)
    sure, unsure = (DraftTree.chain(0, (1,), (math.log(q),)) for q in (0.9, 0.4))
    for _ in range(600):
        for tree, p in ((sure, 0.5), (unsure, 0.33)):
            path = (0, 1) if rng.random() < p else (0,)
            survival.observe(tree, path, len(path), 1)
    assert survival.path(sure, 1)[1] == pytest.approx(0.5, abs=0.12)
    assert survival.path(unsure, 1)[1] == pytest.approx(0.33, abs=0.1)
    assert survival.temperature > 1


def test_what_an_end_cut_off_is_not_held_against_anybody() -> None:
    """The path ends at node 1, and nothing was drawn below it."""
    cut, whole = Survival(Prior()), Survival(Prior())
    for _ in range(50):
        cut.observe(CHAIN, (0, 1), 1, 1)
        whole.observe(CHAIN, (0, 1), 2, 1)
    assert cut.path(CHAIN, 2)[2] / cut.path(CHAIN, 2)[1] > 0.4
    assert whole.path(CHAIN, 2)[2] / whole.path(CHAIN, 2)[1] < 0.3


def test_siblings_share_one_probability_and_children_have_less_than_their_parent() -> None:
    rng, survival = random.Random(1), Survival(Prior(rate=0.98))
    for _ in range(200):
        parents = [-1] + [rng.randrange(node) for node in range(1, 9)]
        tree = DraftTree(tuple(range(9)), tuple(parents))
        a = survival.path(tree, 1)
        for node, children in enumerate(tree.children()):
            assert sum(a[child] for child in children) <= a[node] * (1 + 1e-12)
            assert all(0 <= a[child] <= a[node] for child in children)
        path = [0]
        while kids := tree.children()[path[-1]]:
            path.append(rng.choice(kids))
        survival.observe(tree, tuple(path), len(path), 1)


def test_new_evidence_replaces_old() -> None:
    survival = Survival(Prior())
    for path in [(0, 1, 2, 3)] * 300 + [(0,)] * 100:
        survival.observe(CHAIN, path, len(path), 1)
    assert survival.path(CHAIN, 1)[1] < 0.2
    assert survival.first < 0.6
