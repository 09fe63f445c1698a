# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: the index against brute-force counting, and the drafter's use of it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.drafters import DraftRow
from specla.drafters.suffix import SuffixDrafter
from specla.drafters.suffix_index import SuffixIndex
from specla.testing import replay
from specla.topology.tree import DraftTree

ALL = 10**6
tokens_of_few_kinds = st.lists(st.integers(0, 2), max_size=30)


def occurrences(texts: Sequence[Sequence[int]], pattern: Sequence[int]) -> int:
    size = len(pattern)
    return sum(
        list(text[i : i + size]) == list(pattern)
        for text in texts
        for i in range(len(text) - size + 1)
    )


def longest_match(texts: Sequence[Sequence[int]], context: Sequence[int], limit: int) -> list[int]:
    """The longest suffix of `context` that occurs in `texts` followed by a token."""
    for size in range(min(limit, len(context)), 0, -1):
        suffix = list(context[-size:])
        if any(occurrences([text[:-1]], suffix) for text in texts):
            return suffix
    return []


def build(texts: Sequence[Sequence[int]], limit: int, capacity: int = ALL) -> SuffixIndex:
    index = SuffixIndex(max_match=limit, max_votes=ALL)
    for text in texts[:-1]:
        index.extend(text)
        index.close(capacity)
    index.extend(texts[-1])
    return index


@given(
    st.lists(tokens_of_few_kinds, min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_matches_and_ratios_equal_brute_force(
    texts: list[list[int]], context: list[int], limit: int
) -> None:
    index = build(texts, limit)
    match = index.match(context)
    suffix = longest_match(texts, context, limit)
    assert match.length == len(suffix)
    if not suffix:
        return
    tree = index.grow(match.votes, max_nodes=ALL, max_depth=4, min_prob=0.0)
    paths: list[tuple[int, ...]] = []
    for token, parent, ratio in zip(tree.tokens, tree.parents, tree.ratios, strict=True):
        above = paths[parent] if parent >= 0 else ()
        counts = Counter({t: occurrences(texts, [*suffix, *above, t]) for t in range(3)})
        assert math.isclose(ratio, counts[token] / counts.total())
        paths.append((*above, token))
    assert len(set(paths)) == len(paths)
    assert set(paths) == {
        tuple(text[i + len(suffix) : i + len(suffix) + depth])
        for text in texts
        for i in range(len(text))
        for depth in range(1, 5)
        if text[i : i + len(suffix)] == suffix and i + len(suffix) + depth <= len(text)
    }


@given(
    st.lists(tokens_of_few_kinds, min_size=1, max_size=4),
    st.integers(1, 12),
    st.floats(0, 0.6),
    st.integers(0, 5),
)
def test_growth_is_best_first(
    texts: list[list[int]], max_nodes: int, min_prob: float, max_depth: int
) -> None:
    """The nodes are those of the largest path probabilities, parents first, and no others."""
    index = build(texts, 8)
    votes = index.match([0]).votes
    grown = index.grow(votes, max_nodes=max_nodes, max_depth=max_depth, min_prob=min_prob)
    every = index.grow(votes, max_nodes=ALL, max_depth=max_depth, min_prob=min_prob)
    paths = [1.0] * len(every.tokens)
    for node, (parent, ratio) in enumerate(zip(every.parents, every.ratios, strict=True)):
        assert parent < node
        paths[node] = ratio * (paths[parent] if parent >= 0 else 1.0)
    assert paths == sorted(paths, reverse=True)
    assert all(path >= min_prob for path in paths)
    assert math.isclose(every.score, sum(paths), abs_tol=1e-12)
    assert grown.tokens == every.tokens[:max_nodes]
    assert grown.parents == every.parents[:max_nodes]


@given(st.lists(tokens_of_few_kinds.filter(bool), min_size=1, max_size=8), st.integers(8, 60))
def test_eviction_drops_whole_sequences_oldest_first(
    texts: list[list[int]], capacity: int
) -> None:
    index = SuffixIndex(max_match=8, max_votes=ALL)
    for text in texts:
        index.extend(text)
        index.close(capacity)
        assert len(index) <= capacity
    kept = list(texts)
    while sum(len(text) + 1 for text in kept) > capacity:
        kept.pop(0)
    fresh = build([*kept, []], 8)
    for context in ([0], [1, 0], [2, 2], [0, 1, 2, 0], [1, 1, 1, 1, 1]):
        ours, theirs = index.match(context), fresh.match(context)
        assert ours == theirs
        assert index.grow(ours.votes, max_nodes=9, max_depth=3, min_prob=0.0) == fresh.grow(
            theirs.votes, max_nodes=9, max_depth=3, min_prob=0.0
        )


def test_evicted_grams_leave_no_memory() -> None:
    index = SuffixIndex(max_match=8, max_votes=64)
    for start in range(0, 100_000, 50):
        index.extend(range(start, start + 50))
        index.close(500)
    assert len(index) <= 500
    assert len(index._latest) <= 3 * 500


def test_only_the_latest_votes_count() -> None:
    index = SuffixIndex(max_match=4, max_votes=2)
    index.extend([1, 5] * 8 + [1, 7, 1, 8, 1])
    assert [index.tokens_from(at)[0] for at in index.match([1]).votes] == [8, 7]


def one_tree(
    drafter: SuffixDrafter,
    tokens: Sequence[int],
    *,
    slot: int = 1,
    prompt: int = 1,
    max_drafts: int = 16,
) -> DraftTree:
    row = DraftRow(
        slot=slot, tokens=tokens, num_prompt_tokens=prompt, max_drafts=max_drafts, seed=0
    )
    return drafter.draft([row])[0]


def test_tree_holds_the_branches_that_occurred() -> None:
    tree = one_tree(
        SuffixDrafter(max_spec_offset=1), [1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 5, 8, 1, 2]
    )
    # After (2,), length-two match (1, 2): twice 3, once 5.
    assert tree.tokens[1:3] == (3, 4)
    assert 5 in tree.tokens
    assert tree.logprobs is not None
    assert math.isclose(tree.logprobs[1], math.log(2 / 3))
    assert math.isclose(tree.logprobs[tree.tokens.index(5)], math.log(1 / 3))


def test_depth_follows_match_length() -> None:
    repeated = list(range(10, 30))
    for length in (1, 2, 5):
        tokens = [*repeated, 99, *repeated[:length]]
        assert max(one_tree(SuffixDrafter(), tokens).depths()) == length
        doubled = SuffixDrafter(max_spec_factor=2, max_spec_offset=-1)
        assert max(one_tree(doubled, tokens).depths()) == 2 * length - 1
        assert one_tree(SuffixDrafter(max_spec_factor=0), tokens).num_nodes == 1


def test_nothing_where_nothing_repeats() -> None:
    assert one_tree(SuffixDrafter(), [1, 2, 3]) == DraftTree((3,), (-1,), (0.0,))
    assert one_tree(SuffixDrafter(min_match=2), [1, 2, 3, 1]).num_nodes == 1


def test_global_memory_speeds_up_the_second_request() -> None:
    output = list(range(100, 160))
    drafter = SuffixDrafter()
    first = replay(drafter, [1, 2], output, slot=1)
    drafter.reset(1)
    second = replay(drafter, [3, 4], output, slot=2)
    assert len(first.emitted) == len(output)
    assert len(second.emitted) < 15


def test_prompts_do_not_enter_the_global_memory() -> None:
    drafter = SuffixDrafter()
    replay(drafter, list(range(50)), [90, 91], slot=1)
    drafter.reset(1)
    assert one_tree(drafter, [7, 8, 9], slot=2).num_nodes == 1
    assert one_tree(drafter, [5, 90], slot=3).tokens == (90, 91)


def test_global_memory_can_be_turned_off() -> None:
    drafter = SuffixDrafter(global_tokens=0)
    replay(drafter, [1], list(range(10, 30)))
    drafter.reset(1)
    assert one_tree(drafter, [10, 11, 12]).num_nodes == 1


@pytest.mark.parametrize("global_tokens", [1, 2, 5])
def test_tiny_global_memory_keeps_the_end(global_tokens: int) -> None:
    drafter = SuffixDrafter(global_tokens=global_tokens)
    replay(drafter, [1], list(range(10, 30)))
    drafter.reset(1)
    assert len(drafter._global) <= global_tokens
    assert one_tree(drafter, [28]).num_nodes == (2 if global_tokens == 5 else 1)


def test_replaced_tokens_are_our_bug() -> None:
    drafter = SuffixDrafter()
    one_tree(drafter, [1, 2, 3])
    with pytest.raises(AssertionError, match="without reset"):
        one_tree(drafter, [1, 2])
    with pytest.raises(AssertionError, match="without reset"):
        one_tree(drafter, [1, 2, 4, 5])


@pytest.mark.parametrize("period", [1, 7, 1000])
def test_a_draft_costs_well_under_a_millisecond(period: int) -> None:
    """1,000 tokens of context, the worst kinds: a loop, and text that recurs."""
    drafter, tokens = SuffixDrafter(), [i % period for i in range(1000)]
    replay(drafter, [1], tokens, slot=2)
    drafter.reset(2)
    one_tree(drafter, tokens)
    spent = []
    for i in range(1000, 1020):
        tokens.append(i % period)
        start = time.thread_time()
        one_tree(drafter, tokens)
        spent.append(time.thread_time() - start)
    # CPU time, the least of many: other work on the machine is not the drafter's.
    assert min(spent) < 1e-3
