# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk: ends, counts, log-probabilities, errors. Tier: exact."""

from __future__ import annotations

import math

import pytest
import torch
from toy_target import row_law

from specla.request import SamplingParams
from specla.sampling.accept import accept, walk
from specla.topology.tree import DraftTree

VOCAB = 32


def logits_for(tree: DraftTree, answers: dict[int, int], vocab: int = VOCAB) -> torch.Tensor:
    """float32 [N, V] with a clear argmax at each node: `answers[node]`, or token 0."""
    logits = torch.zeros(tree.num_nodes, vocab)
    for node in range(tree.num_nodes):
        logits[node, answers.get(node, 0)] = 5.0
    return logits


def judge(tree, answers, *, stop=(), remaining=100, **params):
    given = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 100, "stop_token_ids": stop, **params}
    )
    row = row_law(given, [tree.tokens[0]], 1, remaining=remaining)
    (verdict,) = accept(logits_for(tree, answers), [tree], [0], [row])
    return verdict


TREE = DraftTree.from_paths(3, [[10, 11, 12], [10, 20], [30]])


def test_a_miss_at_the_root_is_an_ordinary_step():
    verdict = judge(TREE, {0: 7})
    assert (verdict.path, verdict.emitted, verdict.finish) == ((0,), (7,), None)
    assert (verdict.num_drafted, verdict.offered_depth, verdict.num_accepted) == (5, 3, 0)


def test_the_walk_goes_down_and_adds_a_bonus():
    verdict = judge(TREE, {0: 10, 1: 20, 4: 9})
    assert (verdict.path, verdict.emitted) == ((0, 1, 4), (10, 20, 9))
    assert verdict.num_accepted == 2
    leaf = judge(TREE, {0: 10, 1: 11, 2: 12, 3: 1})
    assert (leaf.path, leaf.emitted) == ((0, 1, 2, 3), (10, 11, 12, 1))


def test_one_node_tree():
    verdict = judge(DraftTree.root(4), {0: 9})
    assert (verdict.path, verdict.emitted) == ((0,), (9,))
    assert (verdict.num_drafted, verdict.offered_depth) == (0, 0)


@pytest.mark.parametrize(
    ("cap", "emitted", "finish", "path"),
    [
        (1, (10,), "length", (0, 1)),
        (2, (10, 11), "length", (0, 1, 2)),
        (3, (10, 11, 2), "stop", (0, 1, 2, 3)),
        (4, (10, 11, 2), "stop", (0, 1, 2, 3)),
        (5, (10, 11, 2), "stop", (0, 1, 2, 3)),
        (99, (10, 11, 2), "stop", (0, 1, 2, 3)),
    ],
)
def test_stop_inside_the_budget_beats_length(cap, emitted, finish, path):
    """ids [10, 11, STOP, 20, 21, 22] accepted at once, every cap (sglang#31599)."""
    tree = DraftTree.chain(3, [10, 11, 2, 20, 21, 22])
    answers = {0: 10, 1: 11, 2: 2, 3: 20, 4: 21, 5: 22}
    verdict = judge(tree, answers, stop=[2], remaining=cap)
    assert (verdict.emitted, verdict.finish, verdict.path) == (emitted, finish, path)
    assert verdict.stop_token == (2 if finish == "stop" else None)
    # The drafter was right as far as it was asked: acceptance 1.
    assert verdict.num_accepted == verdict.num_drafted == verdict.offered_depth


@pytest.mark.parametrize("offset", range(5))
def test_end_token_at_every_offset(offset):
    """An end token anywhere in the accepted run ends it there (transformers#47912)."""
    drafts = [10, 11, 12, 13]
    drafts[offset:] = [2] * (4 - offset)
    answers = dict(enumerate([*drafts, 2]))
    verdict = judge(DraftTree.chain(3, drafts), answers, stop=[2])
    assert verdict.emitted == (*(10, 11, 12, 13)[:offset], 2)
    assert (verdict.finish, verdict.stop_token) == ("stop", 2)
    # The last one is the bonus: not a node, so not on the path.
    assert len(verdict.path) == min(offset + 2, 5)


def test_bonus_that_ends_cuts_no_path():
    verdict = judge(TREE, {0: 10, 1: 2}, stop=[2])
    assert (verdict.path, verdict.emitted, verdict.finish) == ((0, 1), (10, 2), "stop")
    assert verdict.num_drafted == 5
    verdict = judge(TREE, {0: 10, 1: 5}, remaining=2)
    assert (verdict.path, verdict.emitted, verdict.finish) == ((0, 1), (10, 5), "length")


def test_drafts_past_a_cut_do_not_count():
    verdict = judge(TREE, {0: 10, 1: 20}, stop=[20])
    assert (verdict.path, verdict.emitted) == ((0, 1, 4), (10, 20))
    # Depth 3 is past the cut; siblings at depths 1 and 2 were judged.
    assert (verdict.num_drafted, verdict.offered_depth) == (4, 2)


def test_without_a_cut_path_and_emitted_are_equally_long():
    for answers in ({}, {0: 10}, {0: 10, 1: 11}, {0: 10, 1: 11, 2: 12}):
        verdict = judge(TREE, answers)
        assert len(verdict.emitted) == len(verdict.path)


def test_min_tokens_forbids_ends_exactly_that_long():
    tree = DraftTree.chain(3, [10, 11, 12])
    logits = torch.zeros(4, VOCAB)
    logits[:, 2] = 9.0
    for node, token in enumerate([10, 11, 12, 13]):
        logits[node, token] = 5.0
    for min_tokens in range(6):
        params = SamplingParams(
            temperature=0.0, max_tokens=50, min_tokens=min_tokens, stop_token_ids=[2]
        )
        (verdict,) = accept(logits, [tree], [0], [row_law(params, [3], 1)])
        free = (10, 11, 12, 13)[:min_tokens]
        expected = (*free, 2) if min_tokens < 4 else free
        assert verdict.emitted == expected
        assert verdict.finish == ("stop" if min_tokens < 4 else None)


def test_end_tokens_come_from_the_row_alone():
    """ignore_eos is the caller's: an eos left out of end_token_ids is a token like others."""
    tree = DraftTree.chain(3, [2, 11])
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    row = row_law(params, [3], 1, eos=[2])
    (verdict,) = accept(logits_for(tree, {0: 2, 1: 11, 2: 4}), [tree], [0], [row])
    assert verdict.emitted == (2, 11, 4)


def test_greedy_ties_go_to_the_lowest_id():
    """Exact ties, in both greedy paths and in vocabularies of any size (vllm#54506)."""
    for vocab in (5, 8, 33, 1000, 50_021):
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, logit_bias={0: -1.0}),
        ):
            logits = torch.zeros(3, vocab)
            logits[1, vocab // 2 :] = 1.0
            logits[2, [1, vocab - 1]] = 7.0
            trees = [DraftTree.root(0)] * 3
            verdicts = accept(logits, trees, [0, 1, 2], [row_law(params, [0], 1)] * 3)
            lowest = 1 if params.logit_bias else 0
            assert [v.emitted[0] for v in verdicts] == [lowest, vocab // 2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", range(21))
def test_logprobs(count, temperature):
    """Every count from 0 to 20, also beyond the vocabulary, for drafts and bonus alike."""
    tree = DraftTree.chain(3, [1, 2])
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(count))
    logits[0, 1] = logits[1, 2] = 60.0
    params = SamplingParams(
        temperature=temperature, logprobs=count, logit_bias={5: 0.5}, top_k=3, max_tokens=9
    )
    (verdict,) = accept(logits, [tree], [0], [row_law(params, [3], 1)])
    assert len(verdict.logprobs) == len(verdict.emitted) == 3
    raw = torch.log_softmax(logits, -1)
    for node, (token, got) in enumerate(zip(verdict.emitted, verdict.logprobs, strict=True)):
        assert got.token_id == token
        assert got.logprob == float(raw[node, token])
        assert len(got.top) == min(count, 12)
        assert [lp for _, lp in got.top] == raw[node].sort(descending=True)[0][:count].tolist()
        assert all(lp == float(raw[node, t]) for t, lp in got.top)
    assert any(one.logprob != 0 for one in verdict.logprobs)


def test_logprobs_stay_with_emitted_tokens_after_a_cut():
    tree = DraftTree.chain(3, [10, 11, 12])
    verdict = judge(tree, {0: 10, 1: 11}, stop=[11], logprobs=0)
    assert [one.token_id for one in verdict.logprobs] == [10, 11]
    assert judge(tree, {0: 10}).logprobs is None


def test_logprob_ties_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    params = SamplingParams(temperature=0.0, logprobs=4)
    (verdict,) = accept(logits, [DraftTree.root(0)], [0], [row_law(params, [0], 1)])
    assert [t for t, _ in verdict.logprobs[0].top] == [1, 2, 4, 0]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "penalised", "sampled", "sorted"])
@pytest.mark.parametrize("bad", ["nan", "one nan", "+inf", "-inf"])
def test_bad_logits_end_their_rows(params, bad):
    logits = torch.zeros(4, 8)
    if bad == "one nan":
        logits[1, 5] = logits[3, 0] = math.nan
    else:
        logits[[1, 3]] = float(bad)
    rows = [row_law(params, [0], 1)] * 4
    got = accept(logits, [DraftTree.root(0)] * 4, [0, 1, 2, 3], rows)
    assert [v.finish for v in got] == [None, "error", None, "error"]
    assert [len(v.emitted) for v in got] == [1, 0, 1, 0]
    assert got[0] == got[2] == accept(logits[:1], [DraftTree.root(0)], [0], rows[:1])[0]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "penalised", "sampled", "sorted"])
def test_bad_logits_of_a_rejected_branch_do_not_matter(params):
    """Autoregressive decoding would never have seen them."""
    tree = DraftTree.from_paths(0, [[1], [2]])
    logits = torch.full((3, 8), math.nan)
    logits[:2] = 0.0
    logits[0, 1] = logits[1, 4] = 90.0
    row = row_law(params, [0], 1)
    assert accept(logits, [tree], [0], [row])[0].emitted == (1, 4)
    logits[1] = math.nan
    failed = accept(logits, [tree], [0], [row])[0]
    assert (failed.emitted, failed.path, failed.finish) == ((1,), (0, 1), "error")
    assert (failed.num_drafted, failed.num_accepted, failed.offered_depth) == (2, 1, 1)


def test_forbidding_everything_is_an_error_of_that_row():
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[0, 1])
    logits = torch.zeros(2, 2)
    rows = [row_law(SamplingParams(temperature=0.0), [0], 1), row_law(params, [0], 1)]
    got = accept(logits, [DraftTree.root(0)] * 2, [0, 1], rows)
    assert [v.finish for v in got] == [None, "error"]


def test_logits_are_left_alone_and_padding_is_not_read():
    tree = DraftTree.chain(0, [1])
    logits = torch.randn(7, 8)
    logits[2:4] = logits[6] = math.nan
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 3.0}, frequency_penalty=1.0, top_k=4)
    rows = [row_law(params, [0], 1, seed=s) for s in (1, 2)]
    accept(logits, [tree, tree], [0, 4, 7], rows)
    assert torch.equal(logits.nan_to_num(9.0), before.nan_to_num(9.0))


def test_positions_are_absolute():
    """The draw after depth d is at len(history) + d, whatever the round."""
    seen = []

    def choose(node, draw):
        seen.append((node, draw.position, draw.seed))
        return {0: 10, 1: 11}.get(node, 5)

    row = row_law(SamplingParams(max_tokens=99), [1, 2, 3], 2, seed=77)
    one = walk(DraftTree.chain(3, [10, 11, 12]), row, choose)
    assert seen == [(0, 3, 77), (1, 4, 77), (2, 5, 77)]
    assert one.emitted == [10, 11, 5]
