# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup on the device against NgramDrafter, and the random tree double. Tier: exact."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from specla.drafters import DraftRow
from specla.drafters.ngram import NgramDrafter
from specla.drafters.ngram_device import draft_chain
from specla.ops.contract import DeviceRound
from specla.testing_device import draft_random_tree
from specla.topology.tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 10**9


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def new_round(num_rows: int, num_nodes: int) -> DeviceRound:
    """Live rows with nothing but garbage in their trees."""
    matrix = torch.full((num_rows, num_nodes), GARBAGE, dtype=torch.int32, device=DEVICE)
    ones = int32([1] * num_rows)
    return DeviceRound(
        slot=ones,
        num_nodes=ones.clone(),
        tokens=matrix,
        parents=matrix.clone(),
        bank=ones,
        ring_len=ones,
        path_len=ones,
        path=matrix,
        walk=matrix,
    )


def tree_of(rnd: DeviceRound, b: int) -> DraftTree:
    """Row b's tree; what comes after it must be as it was."""
    n = int(rnd.num_nodes[b])
    assert (rnd.tokens[b, n:] == GARBAGE).all()
    assert (rnd.parents[b, n:] == GARBAGE).all()
    return DraftTree(rnd.tokens[b, :n].tolist(), rnd.parents[b, :n].tolist())


def on_device(
    texts: Sequence[list[int]], remaining: Sequence[int], num_nodes: int, **options: int
) -> list[DraftTree]:
    max_len = max(map(len, texts)) + 3
    history = int32([[*text, *[GARBAGE] * max_len][:max_len] for text in texts])
    rnd = new_round(len(texts), num_nodes)
    draft_chain(history, int32([len(t) for t in texts]), int32(remaining), rnd, **options)
    return [tree_of(rnd, b) for b in range(len(texts))]


def on_host(text: list[int], remaining: int, num_nodes: int, **options: int) -> DraftTree:
    """As Running.draft_row asks."""
    row = DraftRow(
        slot=1,
        tokens=text,
        num_prompt_tokens=1,
        max_drafts=0 if remaining == 1 else num_nodes - 1,
        seed=0,
    )
    (tree,) = NgramDrafter(**options).draft([row])
    return tree


def compare(seed: int, num_rounds: int, longest: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_rounds):
        alphabet = rng.choice([2, 3, 5, 20])
        texts = [
            [rng.randrange(alphabet) for _ in range(rng.choice([1, 2, 3, 9, 40, 200]))]
            for _ in range(8)
        ]
        remaining = [rng.choice([1, 2, 50]) for _ in texts]
        options = {
            "prompt_lookup_max": longest,
            "prompt_lookup_min": rng.randint(1, longest),
            "num_draft_tokens": rng.choice([1, 3, 8, 20]),
        }
        num_nodes = rng.randint(1, 16)
        expected = [
            on_host(text, left, num_nodes, **options)
            for text, left in zip(texts, remaining, strict=True)
        ]
        assert on_device(texts, remaining, num_nodes, **options) == expected


@pytest.mark.parametrize("longest", [1, 2, 4, 7])
def test_equals_the_host(longest: int) -> None:
    compare(seed=longest, num_rounds=6, longest=longest)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_host_often(seed: int) -> None:
    for longest in (1, 2, 3, 4, 8, 64):
        compare(seed, num_rounds=20, longest=longest)


def test_loop_is_continued_by_whole_periods() -> None:
    (tree,) = on_device([[5, 6, 7] * 3], [9], 9)
    assert tree == DraftTree.chain(7, [5, 6, 7, 5, 6, 7, 5, 6])


def test_histories_of_several_tiles() -> None:
    """The latest of the longest matches, wherever the scan's tiles end."""
    rng = random.Random(5)
    texts = []
    for length, places in (
        (9000, [(4, 100), (3, 5000), (2, 8900)]),
        (9000, [(4, 100), (4, 9000 - 4096), (3, 8000)]),
        (8195, [(3, 1), (3, 4096), (3, 4099)]),
        (12_300, [(2, 12_000)]),
    ):
        text = [10 + rng.randrange(10**6) for _ in range(length)]
        text[-4:] = [1, 2, 3, 4]
        for size, after in places:
            text[after - size : after] = text[-size:]
        texts.append(text)
    expected = [on_host(text, 9, 8) for text in texts]
    assert on_device(texts, [9] * 4, 8) == expected
    assert {tree.num_nodes for tree in expected} == {8}


def test_a_bucket_with_more_room_than_a_tree_may_take() -> None:
    """max_nodes 5 runs in buckets of 8 nodes; a sixth node would be another bank's."""
    text = [1, 2, 3] * 4
    rnd = new_round(1, 8)
    rnd = rnd._replace(path=rnd.path[:, :5])
    draft_chain(int32([text]), int32([len(text)]), int32([50]), rnd)
    assert tree_of(rnd, 0) == on_host(text, 50, 5) == DraftTree.chain(3, [1, 2, 3, 1])


def test_idle_rows_stay_idle() -> None:
    rnd = new_round(2, 4)
    rnd.num_nodes[0] = 0
    length = int32([6, 6])
    draft_chain(int32([[1, 2, 1, 2, 1, 2]] * 2), length, int32([9, 9]), rnd)
    assert tree_of(rnd, 1) == DraftTree.chain(2, [1, 2, 1])
    assert rnd.num_nodes.tolist() == [0, 4]
    assert (rnd.tokens[0] == GARBAGE).all()


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 16, 64])
def test_random_trees_are_trees(num_nodes: int) -> None:
    """Exactly N nodes, distinct siblings (DraftTree checks), the same for the same row alone."""
    seed, lengths = torch.tensor([3, -1, 3, 3], device=DEVICE), int32([7, 7, 8, 7])
    rnd = new_round(4, num_nodes)
    rnd.tokens[:, 0] = 1
    rnd.num_nodes[3] = 0
    draft_random_tree(seed, lengths, rnd, vocab_size=100)
    assert rnd.num_nodes.tolist() == [num_nodes] * 3 + [0]
    trees = [tree_of(rnd, b) for b in range(3)]
    assert all(max(tree.tokens) < 100 for tree in trees)
    assert num_nodes < 5 or len(set(trees)) == 3
    alone = new_round(1, num_nodes)
    alone.tokens[:, 0] = 1
    draft_random_tree(seed[1:2], lengths[1:2], alone, vocab_size=100)
    assert tree_of(alone, 0) == trees[1]
