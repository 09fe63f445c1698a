# SPDX-License-Identifier: Apache-2.0
"""A row with nothing to draw from ends with an error; the rows beside it never notice."""

from __future__ import annotations

import pytest
import torch
from behind import behind
from engine_harness import VOCAB, Run, drive, make_engine, outcome, plain, request
from engine_requests import LOOP, WALK

from specla import drafters
from specla.drafters.none import NoDrafter
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import RoundPlan
from specla.state import State
from specla.testing import OracleDrafter

FORBIDS_ALL = {"min_tokens": 4, "stop_token_ids": range(VOCAB), "max_tokens": 8}
NEIGHBOURS = [
    request("loop", LOOP, seed=1, max_tokens=12),
    request("walk", WALK, seed=2, temperature=0.7, max_tokens=12, logprobs=1),
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("drafter", ["none", "suffix"])
@pytest.mark.parametrize("log", [0, 5])
def test_parameters_that_forbid_every_token(
    target: TargetModel, temperature: float, drafter: str, log: int
) -> None:
    bad = request("bad", WALK, seed=3, temperature=temperature, **FORBIDS_ALL)
    engine = make_engine(target, drafters.build(drafter), log=log)
    run = drive(engine, [NEIGHBOURS[0], bad, NEIGHBOURS[1]])
    failed = run.completions.pop("bad")
    assert (failed.finish_reason, failed.token_ids, failed.text) == ("error", (), "")
    assert "min_tokens" in str(failed.stop_reason)
    assert engine.stats.finished["error"] == 1
    alone = plain(target, NEIGHBOURS)
    assert run.outcomes() == {name: outcome(c) for name, c in alone.items()}


def test_nan_in_one_row_mid_way(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(target, drafters.build("ngram"), log=3)
    verify, rounds = target.verify, 0

    def broken(plan: RoundPlan, state: State, features: Features | None) -> torch.Tensor:
        nonlocal rounds
        rounds += 1
        logits = verify(plan, state, features).clone()
        if rounds == 3:
            logits[: plan.offsets[1]] = float("nan")
        return logits

    alone = plain(target, NEIGHBOURS)
    monkeypatch.setattr(target, "verify", broken, raising=False)
    bad = request("bad", LOOP, seed=9, max_tokens=30)
    run = drive(engine, [bad, *NEIGHBOURS])
    failed = run.completions.pop("bad")
    assert failed.finish_reason == "error"
    assert len(failed.token_ids) >= 2, "what was generated before is kept"
    assert run.outcomes() == {name: outcome(c) for name, c in alone.items()}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("stops", [False, True])
def test_what_was_accepted_before_it_failed_stands(
    target: TargetModel, stops: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding emits these tokens, and comes to a stop string among them, first."""
    good = plain(target, [request("a", WALK, seed=1, max_tokens=12)])["a"]
    poison = next(t for t in good.token_ids[4:] if t not in (*WALK, *good.token_ids[:4]))
    params = {"stop": [good.text[3]]} if stops else {}
    verify = target.verify

    def broken(plan: RoundPlan, state: State, features: Features | None = None) -> torch.Tensor:
        logits = verify(plan, state, features).clone()
        logits[plan.tokens == poison] = float("nan")
        return logits

    monkeypatch.setattr(target, "verify", broken, raising=False)
    one = request("a", WALK, seed=1, max_tokens=12, **params)
    found = []
    for drafter in (NoDrafter(), OracleDrafter(lambda row: good.token_ids, depth=6)):
        engine, run = make_engine(target, drafter), Run()
        if on_device:
            behind(engine)
        engine.add(one)
        while engine.has_work:
            run.take(engine.step())
        found.append(run.completions["a"])
    alone, speculative = found
    assert outcome(speculative) == outcome(alone)
    assert alone.finish_reason == ("stop" if stops else "error")
    assert stops or alone.token_ids[-1] == poison
    assert speculative.speculation.rounds < alone.speculation.rounds
