# SPDX-License-Identifier: Apache-2.0
"""Walk lists by simulation: whatever the tree and the number of parts, every operation continues
from the right state, every node is walked, and the list fits."""

from __future__ import annotations

import pytest
import torch
from random_inputs import TREES, random_parents

pytest.importorskip("triton")
from specla.ops.contract import DeviceRound
from specla.ops.walk import (
    NODE_MASK,
    RESTORE,
    SAVE,
    WALK,
    capacity,
    compile_walks,
)
from specla.state.rounds import walk_shape

GARBAGE = -77
Parents = tuple[int, ...]


def walks(trees: list[Parents], num_nodes: int, parts: int = 1) -> list[list[list[int]]]:
    """Per row and part the operations; the trees' padding holds garbage."""
    rows = len(trees)
    parents = torch.full((rows, num_nodes), GARBAGE, dtype=torch.int32)
    for b, tree in enumerate(trees):
        parents[b, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
    none = torch.zeros(rows, dtype=torch.int32)
    rnd = DeviceRound(
        slot=none,
        num_nodes=torch.tensor([len(tree) for tree in trees], dtype=torch.int32),
        tokens=parents,
        parents=parents,
        bank=none,
        ring_len=none,
        path_len=none,
        path=parents,
        walk=torch.full((rows, parts, 1 + capacity(num_nodes)), GARBAGE, dtype=torch.int32),
    )
    compile_walks(rnd)
    return [[line[1 : 1 + line[0]] for line in row] for row in rnd.walk.tolist()]


def follow(tree: Parents, parts: list[list[int]]) -> None:
    """Run every part with paths for states."""
    seen = set()
    for operations in parts:
        live: Parents = ()
        checkpoint: Parents | None = None
        walked = set()
        for word in operations:
            node = word & NODE_MASK
            if word & RESTORE:
                assert checkpoint is not None
                live = checkpoint
            assert (live[-1] if live else -1) == tree[node]
            if word & WALK:
                walked.add(node)
            assert node in walked, "only what this program has walked can be replayed"
            live = (*live, node)
            if word & SAVE:
                checkpoint = live
        seen |= walked
    assert seen == set(range(len(tree)))


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_every_operation_continues_the_right_state(parts: int) -> None:
    trees = [*TREES.values(), *(random_parents(i, 1 + i % 12, 1 + i % 5) for i in range(8))]
    for tree, compiled in zip(trees, walks(trees, 16, parts), strict=True):
        follow(tree, compiled)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 16])
def test_small_and_padded_rounds(num_nodes: int) -> None:
    trees = [random_parents(i, 1 + i % num_nodes) for i in range(4)]
    for tree, compiled in zip(trees, walks(trees, num_nodes, 2), strict=True):
        follow(tree, compiled)


def test_chains_and_stars_replay_nothing() -> None:
    chain, star = tuple(range(-1, 15)), (-1,) + (0,) * 15
    for tree, (operations,) in zip((chain, star), walks([chain, star], 16), strict=True):
        assert len(operations) == len(tree)


def test_a_binary_tree_replays_less_than_half_of_its_nodes() -> None:
    binary = (-1, *((i - 1) // 2 for i in range(1, 16)))
    ((operations,),) = walks([binary], 16)
    assert len(operations) == 16 + 6


@pytest.mark.parametrize(("num_nodes", "parts", "longest"), [(16, 2, 10), (16, 4, 6), (32, 4, 11)])
def test_parts_of_a_binary_tree_have_checkpoints_of_their_own(
    num_nodes: int, parts: int, longest: int
) -> None:
    binary = (-1, *((i - 1) // 2 for i in range(1, num_nodes)))
    (compiled,) = walks([binary], num_nodes, parts)
    follow(binary, compiled)
    assert max(map(len, compiled)) == longest


def test_a_chain_is_not_cut() -> None:
    chain = tuple(range(-1, 7))
    (compiled,) = walks([chain], 8, 2)
    follow(chain, compiled)
    assert list(map(len, compiled)) == [8, 0]


def test_parts_beyond_a_trees_nodes_are_empty() -> None:
    tree = (-1, 0, 0, 0)
    (compiled,) = walks([tree], 8, 4)
    follow(tree, compiled)
    assert sorted(map(len, compiled)) == [0, 0, 2, 3]


def test_idle_rows_do_nothing() -> None:
    assert walks([()], 4) == [[[]]]


def test_the_hungriest_trees_fit() -> None:
    """Two equal brooms below the root: one is light, and every one of its bristles but the first
    replays the whole handle."""

    def broom(first: int) -> list[int]:
        handle = [0, *range(first, first + 14)]
        return handle + [first + 14] * 16

    tree = (-1, *broom(1), *broom(32))
    assert len(tree) == 63
    (parts,) = walks([tree], 64)
    follow(tree, parts)
    assert 250 < len(parts[0]) <= capacity(64)


def test_buckets_have_room_for_their_walks() -> None:
    for rows in (1, 4, 64):
        for nodes in (1, 2, 4, 8, 16, 32, 64):
            _, parts, words = walk_shape(rows, nodes)
            assert words == 1 + capacity(nodes)
            assert parts & (parts - 1) == 0


def test_trees_of_one_or_two_rows_are_cut_up() -> None:
    """As was fastest on an H200 (docs/adr/0012)."""
    sizes = (1, 4, 8, 16, 32, 64)
    for rows, parts in ((1, (1, 1, 2, 2, 4, 4)), (2, (1, 1, 1, 2, 2, 2)), (4, (1,) * 6)):
        assert tuple(walk_shape(rows, nodes)[1] for nodes in sizes) == parts
