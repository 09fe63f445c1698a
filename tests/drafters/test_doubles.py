# SPDX-License-Identifier: Apache-2.0
"""The doubles do what their names say, or tests that use them prove nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafters import DraftRow
from specla.testing import (
    AdversarialDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ScriptedDrafter,
    follow,
    replay,
)
from specla.topology.tree import DraftTree

PROMPT = (3, 1, 4)
OUTPUT = [random.Random(0).randrange(8) for _ in range(41)]
TRUTH: dict[tuple[int, ...], list[int]] = {PROMPT: OUTPUT}


@pytest.mark.parametrize("decoys", [0, 1, 3])
@pytest.mark.parametrize("max_drafts", [1, 2, 3, 8, 30])
def test_oracle_is_always_right(decoys: int, max_drafts: int) -> None:
    drafter = OracleDrafter(TRUTH, depth=6, decoys=decoys, vocab_size=8)
    result = replay(drafter, PROMPT, OUTPUT, max_drafts=max_drafts)
    depth = min(6, -(-max_drafts // (decoys + 1)))
    assert set(result.emitted[:-1]) == {depth + 1}
    for tree, emitted in zip(result.trees[:-1], result.emitted, strict=False):
        assert max(tree.depths()) + 1 == emitted


def test_oracle_with_decoys_is_not_right_by_position() -> None:
    drafter = OracleDrafter(TRUTH, decoys=2, vocab_size=8)
    (tree,) = drafter.draft(
        [DraftRow(slot=1, tokens=PROMPT, num_prompt_tokens=3, max_drafts=24, seed=0)]
    )
    path, _ = follow(tree, OUTPUT)
    places = {tree.children()[parent].index(node) for parent, node in pairwise(path)}
    assert places == {0, 1, 2}


def test_oracle_stops_where_the_truth_ends() -> None:
    result = replay(OracleDrafter(TRUTH, depth=8), PROMPT, OUTPUT)
    assert sum(result.emitted) == len(OUTPUT)
    assert result.trees[-1].num_drafts <= result.emitted[-1]


def test_oracle_by_row_tells_seeds_apart() -> None:
    drafter = OracleDrafter(lambda row: [row.seed] * 4)
    rows = [
        DraftRow(slot=s, tokens=PROMPT, num_prompt_tokens=3, max_drafts=2, seed=s) for s in (5, 6)
    ]
    assert [tree.tokens for tree in drafter.draft(rows)] == [(4, 5, 5), (4, 6, 6)]


def test_unknown_prompt_is_named() -> None:
    with pytest.raises(KeyError, match=r"\(9, 9\)"):
        replay(OracleDrafter(TRUTH), (9, 9), OUTPUT)


def test_decoys_need_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        OracleDrafter(TRUTH, decoys=2)
    with pytest.raises(ValueError, match="vocab_size"):
        AdversarialDrafter(TRUTH, vocab_size=1)


@pytest.mark.parametrize("vocab_size", [2, 3, 8])
def test_adversary_is_always_wrong(vocab_size: int) -> None:
    output = [token % vocab_size for token in OUTPUT]
    drafter = AdversarialDrafter({PROMPT: output}, vocab_size=vocab_size, depth=5)
    result = replay(drafter, PROMPT, output)
    assert result.emitted == (1,) * len(output)
    for done, tree in enumerate(result.trees):
        drafts = tree.tokens[1:]
        assert all(x != y for x, y in zip(drafts, output[done:], strict=False))
        assert len(drafts) == min(5, len(output) - done)


@given(st.integers(0, 999), st.integers(0, 20), st.integers(1, 5), st.integers(1, 4))
def test_random_trees_keep_their_shape(
    seed: int, max_drafts: int, max_depth: int, max_children: int
) -> None:
    drafter = RandomTreeDrafter(seed, 8, max_depth, max_children, truth=TRUTH)
    for tree in replay(drafter, PROMPT, OUTPUT, max_drafts=max_drafts).trees:
        assert tree.num_drafts <= max_drafts
        assert max(tree.depths()) <= max_depth
        assert max(map(len, tree.children())) <= max_children


def test_random_trees_hold_the_truth_as_often_as_asked() -> None:
    rate = {
        p: replay(
            RandomTreeDrafter(1, 1000, truth=TRUTH, p_right=p), PROMPT, OUTPUT
        ).tokens_per_round
        for p in (0.0, 0.5, 1.0)
    }
    assert rate[0.0] == 1.0
    assert 1.0 < rate[0.5] < rate[1.0]


def test_script_alternates_drafts_and_silence() -> None:
    drafter = ScriptedDrafter([3, 0, 1], OracleDrafter(TRUTH))
    result = replay(drafter, PROMPT, OUTPUT)
    assert [tree.num_drafts for tree in result.trees[:7]] == [3, 0, 1, 3, 0, 1, 3]
    assert result.emitted[:7] == (4, 1, 2, 4, 1, 2, 4)
    drafter.reset(1)
    assert replay(drafter, PROMPT, OUTPUT) == result
    with pytest.raises(ValueError, match="counts"):
        ScriptedDrafter([], OracleDrafter(TRUTH))


def test_follow_walks_branches_and_stops_at_the_end() -> None:
    tree = DraftTree.from_paths(0, [[1, 2], [3, 4, 5]])
    assert follow(tree, [3, 4, 9, 9]) == ((0, 3, 4), (3, 4, 9))
    assert follow(tree, [3, 4]) == ((0, 3), (3, 4))
    assert follow(tree, [7]) == ((0,), (7,))
