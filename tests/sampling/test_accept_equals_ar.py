# SPDX-License-Identifier: Apache-2.0
"""Speculative output equals autoregressive output, token for token; bits depend on no company.

Tier: exact. The target is a function of the whole history, with exact ties; trees are random.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from toy_target import (
    VOCAB,
    always_wrong,
    logprobs_of,
    nothing,
    oracle,
    random_tree,
    row_law,
    speculate,
    tokens_of,
    toy_target,
    tree_logits,
)

from specla.request import SamplingParams
from specla.sampling.accept import accept
from specla.topology.tree import DraftTree

PROMPT = (4, 1, 1, 19, 4)

LAWS = {
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "everything": {
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.5, 8: -2.0, 11: 4.0},
        "min_tokens": 9,
        "stop_token_ids": (11,),
        "logprobs": 3,
    },
}


def params_of(law: str, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=24, **LAWS[law])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("law", LAWS)
def test_speculation_changes_nothing(law, temperature):
    for seed in range(3):
        params, prompt = params_of(law, temperature), (*PROMPT, seed)
        want = speculate(nothing, prompt, params, seed=seed, eos=[17])
        answer = [*prompt, *tokens_of(want), *[0] * 9]
        assert len(want) == len(tokens_of(want))
        for propose in (random_tree, oracle(answer), always_wrong(answer)):
            got = speculate(propose, prompt, params, seed=seed, eos=[17])
            assert tokens_of(got) == tokens_of(want)
            assert logprobs_of(got) == logprobs_of(want)
            assert got[-1].finish == want[-1].finish
            assert got[-1].stop_token == want[-1].stop_token
            # completion tokens = rounds + accepted, one less if the last path was cut.
            cut = len(got[-1].emitted) < len(got[-1].path)
            assert len(tokens_of(got)) == len(got) + sum(v.num_accepted for v in got) - cut


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_reads_one_for_the_oracle_and_nought_for_the_adversary(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=23)
    want = tokens_of(speculate(nothing, PROMPT, params, eos=[17]))
    answer = [*PROMPT, *want, *[0] * 9]
    # An oracle offers nothing past the end.
    right = speculate(oracle([*PROMPT, *want]), PROMPT, params, eos=[17])
    assert sum(v.num_drafted for v in right) == sum(v.num_accepted for v in right) > 0
    wrong = speculate(always_wrong(answer), PROMPT, params, eos=[17])
    assert sum(v.num_accepted for v in wrong) == 0
    assert len(wrong) == len(want)


def _reference_greedy(params: SamplingParams, count: int) -> list[int]:
    """Penalised greedy decoding written out with plain floats, history and all."""
    history, output = list(PROMPT), []
    while len(output) < count:
        logits = toy_target(history).tolist()
        for token in range(VOCAB):
            if token in history:
                rate = params.repetition_penalty
                logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
            logits[token] -= params.frequency_penalty * output.count(token)
            logits[token] -= params.presence_penalty * (token in output)
        output.append(max(range(VOCAB), key=lambda t: (logits[t], -t)))
        history.append(output[-1])
    return output


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition"])
def test_penalties_count_each_nodes_own_history(name):
    """Accepted drafts count at once, rejected ones never (sglang PR#33643, vmlx-swift#357)."""
    given = {f"{name}_penalty": 2.0}
    params = SamplingParams(temperature=0.0, max_tokens=20, **given)
    want = _reference_greedy(params, 20)
    answer = [*PROMPT, *want, *[0] * 9]
    assert want != _reference_greedy(SamplingParams(), 20)
    for propose in (nothing, random_tree, oracle(answer, 7), always_wrong(answer)):
        assert tokens_of(speculate(propose, PROMPT, params)) == want


def test_siblings_do_not_share_history():
    """The same token under two branches meets two different counts."""
    tree = DraftTree.from_paths(0, [[1, 1, 1], [2, 1]])
    logits = torch.zeros(tree.num_nodes, 4)
    logits[:, 1] = 3.0
    logits[:, 2] = 2.0
    params = SamplingParams(temperature=0.0, frequency_penalty=0.75, max_tokens=9)
    (verdict,) = accept(logits, [tree], [0], [row_law(params, [0], 1)])
    # 3 - 0.75 n against 2: twice token 1, then token 2.
    assert verdict.emitted == (1, 1, 2)


def test_output_does_not_depend_on_the_request_being_cut_into_rounds():
    """Resuming with the output as history continues the same text."""
    params = SamplingParams(temperature=1.0, max_tokens=20, presence_penalty=0.5)
    want = tokens_of(speculate(nothing, PROMPT, params, seed=5))
    history = [*PROMPT, *want[:8]]
    row = row_law(params, history, len(PROMPT), seed=5)
    tree = DraftTree.chain(history[-1], want[8:13])
    (verdict,) = accept(tree_logits(tree, history), [tree], [0], [row])
    assert list(verdict.emitted) == want[8:14]


def test_seeds_matter_and_greedy_ignores_them():
    sampled = SamplingParams(temperature=1.0, max_tokens=20)
    texts = {tuple(tokens_of(speculate(nothing, PROMPT, sampled, seed=s))) for s in range(8)}
    assert len(texts) == 8
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    texts = {tuple(tokens_of(speculate(nothing, PROMPT, greedy, seed=s))) for s in range(8)}
    assert len(texts) == 1


def _mixed_batch(num_rows: int, vocab: int):
    """Rows of every kind side by side, with trees of different shapes."""
    kinds = [params_of(law, t) for t in (0.0, 0.1, 1.0) for law in LAWS]
    trees, rows, logits = [], [], []
    for b in range(num_rows):
        # Logprobs for some: the report must not depend on company either.
        params = dataclasses.replace(kinds[b % len(kinds)], logprobs=b % 4 if b % 3 else None)
        history = [*PROMPT, b % VOCAB]
        trees.append(random_tree(history, b))
        rows.append(row_law(params, history, len(PROMPT), seed=2**63 + b, eos=[17]))
        generator = torch.Generator().manual_seed(b)
        logits.append(torch.randn(trees[b].num_nodes, vocab, generator=generator) * 3)
        # Draws that follow the tree, so that walks go deep.
        for child, parent in enumerate(trees[b].parents[1:], start=1):
            logits[b][parent, trees[b].tokens[child]] += 12
    return trees, rows, logits


@pytest.mark.parametrize("vocab", [VOCAB, 1003])
def test_a_row_does_not_notice_its_company(vocab):
    """Alone, in any batch of 1 to 33 rows, at any place: the same verdict, bit for bit."""
    trees, rows, logits = _mixed_batch(33, vocab)
    alone = [
        accept(one, [tree], [0], [row])[0]
        for one, tree, row in zip(logits, trees, rows, strict=True)
    ]
    assert {len(v.path) for v in alone} >= {1, 2, 3, 4}
    for num_rows in range(1, 34):
        first = (num_rows * 7) % 33
        members = [(first + i) % 33 for i in range(num_rows)]
        offsets = [0]
        for b in members:
            offsets.append(offsets[-1] + trees[b].num_nodes)
        got = accept(
            torch.cat([logits[b] for b in members]),
            [trees[b] for b in members],
            offsets,
            [rows[b] for b in members],
        )
        assert got == [alone[b] for b in members]


def test_seeded_and_greedy_rows_mix():
    """Different temperatures and seeds in one call do not touch each other (vllm PR#10863)."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)).repeat(4, 1)
    tree = DraftTree.root(0)
    rows = [
        row_law(SamplingParams(temperature=t), [0], 1, seed=s)
        for t, s in ((0.1, 42), (0.0, 7), (0.1, 43), (0.1, 42))
    ]
    together = accept(logits, [tree] * 4, range(4), rows)
    single = [accept(logits[:1], [tree], [0], [row])[0] for row in rows]
    assert together == single
    assert together[0] == together[3]
