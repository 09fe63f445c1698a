# SPDX-License-Identifier: Apache-2.0
"""DraftTree. Tier: exact."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import parents as random_parents

from specla.errors import InvalidTree
from specla.topology.tree import DraftTree, check_parents

PROPERTY = settings(max_examples=50)


@pytest.mark.parametrize(
    ("tokens", "parents", "logprobs", "node", "match"),
    [
        ((), (), None, 0, "at least node 0"),
        ((1, 2), (-1,), None, 1, "2 tokens and 1 parents"),
        ((1,), (-1, 0), None, 1, "1 tokens and 2 parents"),
        ((1,), (0,), None, 0, "node 0 must be the root"),
        ((1, 2), (1, -1), None, 0, "node 0 must be the root"),
        ((1, 2, 3), (-1, 0, -1), None, 2, "second root"),
        ((1, 2, 3), (-1, 2, 0), None, 1, "later node or a cycle"),
        ((1, 2, 3), (-1, 2, 1), None, 1, "later node or a cycle"),
        ((1, 2), (-1, 1), None, 1, "the node itself"),
        ((1, 2), (-1, 2), None, 1, "outside the tree"),
        ((1, 2), (-1, -2), None, 1, "outside the tree"),
        ((1, 2, 2), (-1, 0, 0), None, 2, "distinct tokens"),
        ((-1,), (-1,), None, 0, "token id >= 0"),
        ((1, 2, -7), (-1, 0, 1), None, 2, "token id >= 0"),
        ((1, 2), (-1, 0), (0.0,), 1, "one entry per node"),
        ((1, 2), (-1, 0), (0.0, -1.0, -1.0), 2, "one entry per node"),
        ((1, 2), (-1, 0), (0.0, 0.25), 1, "<= 0"),
        ((1, 2), (-1, 0), (0.0, math.nan), 1, "<= 0"),
        ((1, 2), (-1, 0), (-0.5, -1.0), 0, "must be 0"),
        ((1, 2.5), (-1, 0), None, 1, "tokens must be integers"),
        ((1, 2), (-1, 0.0), None, 1, "parents must be integers"),
        ((1, torch.tensor(2.5)), (-1, 0), None, 1, "tokens must be integers"),
    ],
)
def test_invalid_tree_names_the_node(tokens, parents, logprobs, node, match):
    with pytest.raises(InvalidTree, match=match) as error:
        DraftTree(tokens, parents, logprobs)
    assert error.value.node == node
    assert isinstance(error.value, ValueError)


def test_first_bad_node_is_named():
    with pytest.raises(InvalidTree) as error:
        check_parents((-1, 0, 5, -1, 4))
    assert error.value.node == 2


def test_cousins_may_share_tokens():
    tree = DraftTree((5, 1, 2, 3, 3), (-1, 0, 0, 1, 2))
    assert tree.child_with(1, 3) == 3
    assert tree.child_with(2, 3) == 4


def test_any_integer_sequences_become_tuples_of_ints():
    tree = DraftTree(np.array([4, 5]), torch.tensor([-1, 0]), np.array([0, -0.5]))
    assert tree == DraftTree((4, 5), (-1, 0), (0.0, -0.5))
    assert all(type(x) is int for x in tree.tokens + tree.parents)
    assert all(type(x) is float for x in tree.logprobs)


def test_root():
    tree = DraftTree.root(7)
    assert (tree.tokens, tree.parents, tree.logprobs) == ((7,), (-1,), None)
    assert (tree.num_nodes, tree.num_drafts, tree.is_chain) == (1, 0, True)
    assert tree.children() == ((),)
    assert tree.depths() == (0,)


def test_chain():
    tree = DraftTree.chain(7, [8, 9], [-0.5, -1.5])
    assert tree == DraftTree((7, 8, 9), (-1, 0, 1), (0.0, -0.5, -1.5))
    assert tree.is_chain
    assert DraftTree.chain(7, []) == DraftTree.root(7)
    assert DraftTree.chain(7, iter([1, 1, 1])).depths() == (0, 1, 2, 3)


def test_from_paths_merges_prefixes():
    tree = DraftTree.from_paths(0, [[1, 2, 3], [1, 4], [], [1, 2], [5]])
    assert tree.tokens == (0, 1, 2, 3, 4, 5)
    assert tree.parents == (-1, 0, 1, 2, 1, 0)
    assert not tree.is_chain
    assert tree.children() == ((1, 5), (2, 4), (3,), (), (), ())
    assert tree.depths() == (0, 1, 2, 3, 2, 1)
    assert tree.path_to(3) == (0, 1, 2, 3)


def test_path_to_refuses_strangers():
    with pytest.raises(InvalidTree, match="in \\[0, 1\\)"):
        DraftTree.root(0).path_to(1)


def test_trees_are_values():
    tree = DraftTree.from_paths(0, [[1, 2], [3]])
    assert hash(tree) == hash(DraftTree.from_paths(0, [[1, 2], [3]]))
    for twin in (copy.copy(tree), copy.deepcopy(tree)):
        assert twin == tree
        assert twin.child_with(0, 3) == 3
    assert "_index" not in repr(tree)
    with pytest.raises(AttributeError):
        tree.tokens = (1,)


@PROPERTY
@given(random_parents(), st.randoms(use_true_random=False))
def test_views_agree(parents, random):
    children: dict[int, set[int]] = {}
    tokens = [random.randrange(99)]
    for parent in parents[1:]:
        free = set(range(99)) - children.setdefault(parent, set())
        tokens.append(random.choice(sorted(free)))
        children[parent].add(tokens[-1])
    tree = DraftTree(tuple(tokens), parents)
    for node in range(1, tree.num_nodes):
        path = tree.path_to(node)
        assert len(path) == tree.depths()[node] + 1
        assert path[-2] == parents[node]
        assert node in tree.children()[parents[node]]
        assert tree.child_with(parents[node], tokens[node]) == node
    for node in range(tree.num_nodes):
        held = {tokens[child] for child in tree.children()[node]}
        assert all(tree.child_with(node, t) is None for t in range(99) if t not in held)
    paths = [[tokens[v] for v in tree.path_to(node)[1:]] for node in range(tree.num_nodes)]
    assert DraftTree.from_paths(tokens[0], paths) == tree
