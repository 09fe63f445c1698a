# SPDX-License-Identifier: Apache-2.0
"""Where two ways of decoding first differ, and by what margin: on a target that was tampered with
at a known place by a known amount."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine_harness import VOCAB, load_target, make_engine, one_thread
from torch import Tensor

from specla.bench.exactness import (
    CHAIN,
    Comparison,
    Divergence,
    compare,
    compare_decoding,
    csv_rows,
    decode,
    exact_logits,
    metrics,
    random_prompts,
)
from specla.bench.report import COLUMNS
from specla.errors import ExactnessUnavailable
from specla.models.base import TargetModel
from specla.testing import RandomTreeDrafter

PROMPTS = ((5, 6, 7), tuple(5 + i % 15 for i in range(70)))
TOKENS = 2 * CHAIN + 3
WHERE = 9
LOGITS = {"prefill_chunk": 64, "log_capacity": 3}


class Tampered:
    """The target; call `at` of its verify gives the second best token `more` than the best has.
    Remembers the true logits of every call. For one row without drafts: a call is a token."""

    def __init__(self, target: TargetModel, at: int | None = None, more: float = 0.25) -> None:
        self._target, self._at, self._more = target, at, more
        self.seen: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = self._target.verify(*args, **kwargs)
        self.seen.append(logits[0].clone())
        if len(self.seen) - 1 == self._at:
            (best, _), (_, second) = logits[0].topk(2)
            logits = logits.clone()
            logits[0, second] = best + self._more
        return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    with one_thread():
        yield load_target(tmp_path_factory.mktemp("target"))


def run(model: Any) -> list[Any]:
    """The prompts one after the other."""
    return decode(make_engine(model, slots=1, nodes=1, log=2), PROMPTS, TOKENS)


def test_the_place_the_tokens_and_the_margin(target: TargetModel) -> None:
    true = Tampered(target)
    exact = run(true)
    other = run(Tampered(target, at=WHERE))
    rows = compare(PROMPTS, ["a", "b"], exact, other, partial(exact_logits, target, **LOGITS))
    (best, second), (first, runner_up) = true.seen[WHERE].topk(2)
    assert rows[0].divergence == Divergence(
        index=WHERE, expected=int(first), got=int(runner_up), margin=float(best - second)
    )
    assert rows[0].divergence.margin > 0
    assert rows[1].divergence is None, "the next prompt is not to blame"
    assert [row.num_tokens for row in rows] == [TOKENS] * 2


def test_the_last_token_counts(target: TargetModel) -> None:
    exact, other = run(target), run(Tampered(target, at=2 * TOKENS - 1))
    rows = compare(PROMPTS, ["a", "b"], exact, other, partial(exact_logits, target, **LOGITS))
    assert rows[0].divergence is None
    assert rows[1].divergence is not None
    assert rows[1].divergence.index == TOKENS - 1


def test_replayed_logits_have_the_bits_of_decoding(target: TargetModel) -> None:
    """On both sides of a chain's end, of prompts of one chunk and of two."""
    true = Tampered(target)
    completions = run(true)
    for p, prompt in enumerate(PROMPTS):
        output = completions[p].token_ids
        for index in (0, 1, CHAIN - 1, CHAIN, CHAIN + 1, TOKENS - 1):
            got = exact_logits(target, prompt, output[:index], **LOGITS)
            assert torch.equal(got, true.seen[p * TOKENS + index])


def test_exact_mode_must_stand_by_its_tokens(target: TargetModel) -> None:
    exact, other = run(target), run(Tampered(target, at=WHERE))
    with pytest.raises(ExactnessUnavailable, match=f"output token {WHERE}"):
        compare(PROMPTS, ["a", "b"], exact, other, lambda prompt, output: torch.zeros(VOCAB))


def test_trees_around_the_truth_are_identical_in_exact_mode(target: TargetModel) -> None:
    rows = compare_decoding(
        target,
        random_prompts(5, VOCAB),
        lambda truth: RandomTreeDrafter(0, VOCAB, truth=truth, p_right=0.7),
        mode="exact",
        batch=2,
        max_nodes=8,
        max_tokens=20,
    )
    assert [row.divergence for row in rows] == [None] * 5
    assert all(row.accepted > 0 for row in rows)
    assert all(sum(row.kernels.values()) < 20 for row in rows), "drafts were accepted"


def comparison(prompt: int, divergence: Divergence | None) -> Comparison:
    return Comparison(
        prompt=prompt, kind="k", num_tokens=10, divergence=divergence, accepted=0, kernels={}
    )


def test_summary() -> None:
    margins = {1: 0.5, 2: 0.125, 4: 2.0}
    rows = [
        comparison(i, Divergence(index=i, expected=1, got=2, margin=margins[i]))
        if i in margins
        else comparison(i, None)
        for i in range(5)
    ]
    found = {one.name: one.value for one in metrics(rows, "mode fast")}
    assert found == {
        "exactness_identical": 0.4,
        "exactness_margin_median": 0.5,
        "exactness_margin_smallest": 0.125,
        "exactness_margin_largest": 2.0,
        "exactness_first_divergence_median": 2,
    }
    (same,) = metrics([comparison(0, None)], "mode fast")
    assert same.value == 1
    assert same.notes == "mode fast; 1 of 1 prompts identical, 10 tokens"
    (row,) = csv_rows([same], commit="c", device="d", versions={"torch": "2"}, command="x")
    assert set(row) == set(COLUMNS)
    assert (row["value"], row["torch"], row["triton"]) == ("1", "2", "")


def test_random_prompts_are_distinct_and_the_same_every_time() -> None:
    prompts = random_prompts(16, 32000)
    assert prompts == random_prompts(16, 32000)
    assert len(set(prompts)) == 16
    assert all(4 <= len(p) < 96 and max(p) < 32000 for p in prompts)
