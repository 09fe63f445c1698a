# SPDX-License-Identifier: Apache-2.0
"""Speculation changes nothing but speed: every drafter, every parameter, bit for bit (rule I4)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from engine_harness import (
    Run,
    States,
    drive,
    load_target,
    make_engine,
    outcome,
    plain,
    request,
    same_state,
    truth_of,
)
from engine_requests import EVERY, LONG, LOOP, PROMPTS, WALK, build, mixed

from specla import drafters
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.request import Completion, Request

TEMPERATURES = (0.0, 0.7, 1.3)


@dataclass(frozen=True)
class Reference:
    """Requests and what plain decoding makes of each, alone."""

    requests: list[Request]
    completions: dict[str, Completion]

    def run(self, model: TargetModel, name: str, *, budget: str = "off", **sizes: int) -> Run:
        """The same requests with a drafter; asserts that nothing else differs."""
        truth = truth_of(self.requests, self.completions)
        run = drive(make_engine(model, build(name, truth), budget=budget, **sizes), self.requests)
        assert run.outcomes() == {n: outcome(c) for n, c in self.completions.items()}
        return run


@pytest.fixture(scope="module")
def reference(target: TargetModel) -> Reference:
    requests = [one for t in TEMPERATURES for one in mixed(t)]
    return Reference(requests, plain(target, requests))


@pytest.fixture(scope="module")
def short(reference: Reference) -> Reference:
    """A third of them, the temperatures in turn."""
    requests = [one for i, one in enumerate(reference.requests) if i % 12 % 3 == i // 12]
    assert len({one.params.temperature for one in requests}) == 3
    return Reference(
        requests, {r.request_id: reference.completions[r.request_id] for r in requests}
    )


def test_the_reference_is_not_trivial(reference: Reference) -> None:
    done = reference.completions.values()
    assert {c.finish_reason for c in done} == {"stop", "length"}
    assert any(isinstance(c.stop_reason, str) for c in done)
    assert any(isinstance(c.stop_reason, int) for c in done)
    assert len({c.token_ids for c in done}) > len(done) // 2


@pytest.mark.parametrize("name", EVERY)
def test_batch_equals_plain(target: TargetModel, reference: Reference, name: str) -> None:
    """36 requests of three temperatures share 5 slots: rows are at different phases, slots are
    used again, every row has its own parameters."""
    run = reference.run(target, name, slots=5, nodes=8, log=3)
    if name not in ("none", "adversarial"):
        assert any(c.speculation.accepted for c in run.completions.values())


@pytest.mark.parametrize("name", EVERY)
def test_alone_equals_plain(target: TargetModel, short: Reference, name: str) -> None:
    short.run(target, name, slots=1, nodes=16, log=16)


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "paying") for name in EVERY), ("random-tree", "2"), ("suffix", "2")],
)
def test_a_budget_changes_nothing(
    target: TargetModel, short: Reference, name: str, policy: str
) -> None:
    """Whatever it drafts, drops and looks at; and every round says why."""
    run = short.run(target, name, budget=policy, slots=4, nodes=8, log=3)
    for one in run.completions.values():
        s = one.speculation
        if name == "none":
            assert s.budget is None
            continue
        assert s.budget is not None
        assert sum(s.budget.reasons.values()) == sum(s.budget.shapes.values()) == s.rounds
        assert s.drafted <= s.budget.chosen <= s.budget.proposed
        assert s.budget.chosen <= (7 if policy == "paying" else 2) * s.rounds


@pytest.mark.parametrize(
    ("nodes", "log"), [(1, 0), (1, 16), (2, 3), (3, 0), (3, 16), (16, 0), (16, 3)]
)
def test_capacities_change_nothing(
    target: TargetModel, short: Reference, nodes: int, log: int
) -> None:
    short.run(target, "random-tree", slots=4, nodes=nodes, log=log)


def test_fold_threshold_changes_nothing(target: TargetModel, short: Reference) -> None:
    for fold in (0, 5):
        short.run(target, "scripted-tree", slots=4, nodes=8, log=16, fold=fold)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, target: TargetModel
) -> None:
    model = load_target(tmp_path_factory.mktemp("other"), dtype=dtype)
    requests = mixed(0.7)[:6]
    Reference(requests, plain(model, requests)).run(model, "random-tree", log=3)


def test_four_kinds_of_prompts_for_every_drafter(target: TargetModel) -> None:
    """20 prompts, temperature 0, and 0.8 with seed 7."""
    chooser = random.Random(1)
    kinds = [
        [LOOP * (i + 1) for i in range(5)],
        [WALK[i:] + WALK for i in range(5)],
        [LONG[: 20 + 17 * i] for i in range(5)],
        [tuple(chooser.randrange(24) for _ in range(1 + 3 * i)) for i in range(5)],
    ]
    prompts = [prompt for kind in kinds for prompt in kind]
    requests = [
        request(f"{t}/{i}", prompt, temperature=t, seed=7, ignore_eos=False, max_tokens=10)
        for t in (0.0, 0.8)
        for i, prompt in enumerate(prompts)
    ]
    want = drive(make_engine(target, slots=8), requests).outcomes()
    assert len(want) == 40
    for name in drafters.REGISTRY:
        engine = make_engine(target, build(name, lambda row: ()), slots=8, nodes=16)
        assert drive(engine, requests).outcomes() == want, name


def test_always_right(target: TargetModel, reference: Reference) -> None:
    """Acceptance is exactly 1, and a round is as deep as the tree."""
    for one in reference.run(target, "oracle", slots=6, nodes=5).completions.values():
        s = one.speculation
        assert s.accepted == s.drafted
        assert all(rate == 1 for rate in s.acceptance_by_depth)
        if one.finish_reason == "length":
            assert s.rounds == -(-len(one.token_ids) // 5)


def test_decoys_do_not_hide_the_right_child(target: TargetModel, reference: Reference) -> None:
    for one in reference.run(target, "oracle-decoys", slots=6, nodes=16).completions.values():
        assert all(rate == 1 for rate in one.speculation.acceptance_by_depth)


def test_always_wrong(target: TargetModel, reference: Reference) -> None:
    """One token per round, none accepted, all of them counted as drafted."""
    for one in reference.run(target, "adversarial", slots=6).completions.values():
        s = one.speculation
        assert (s.accepted, s.tokens_per_round) == (0, 1.0)
        assert s.acceptance_histogram == (s.rounds,)
        assert not any(s.acceptance_by_depth)
        if len(one.token_ids) > 2 and not isinstance(one.stop_reason, str):
            assert s.drafted > 0
            assert s.rounds == len(one.token_ids)


def record(model: TargetModel, one: Request) -> dict[int, States]:
    """The state of plain decoding, alone, by number of committed tokens."""
    states: dict[int, States] = {}

    def keep(engine: Engine) -> None:
        for row in engine.scheduler.running.values():
            states[engine.state.logs[row.slot].committed_len] = engine.state.committed_state(
                row.slot
            )

    drive(make_engine(model, slots=1, nodes=1), [one], keep)
    return states


@pytest.fixture(scope="module")
def histories(target: TargetModel) -> list[tuple[Request, dict[int, States], Completion]]:
    requests = [
        request(f"s{i}", prompt, seed=i, temperature=TEMPERATURES[i % 3], max_tokens=20)
        for i, prompt in enumerate(PROMPTS)
    ]
    done = plain(target, requests)
    return [(one, record(target, one), done[one.request_id]) for one in requests]


@pytest.mark.parametrize(
    ("name", "log", "budget"),
    [
        *((name, (0, 3, 16)[i % 3], "off") for i, name in enumerate(EVERY)),
        *(("scripted-tree", log, "off") for log in (0, 3)),
        *((name, 3, "paying") for name in ("adversarial", "random-tree", "scripted-tree")),
    ],
)
def test_state_equals_plain_state(
    target: TargetModel,
    histories: list[tuple[Request, dict[int, States], Completion]],
    name: str,
    log: int,
    budget: str,
) -> None:
    """After every step, the folded state of every row has the bits of a fresh engine's that
    decoded the same tokens one by one."""
    requests = [one for one, _, _ in histories]
    want = {one.request_id: states for one, states, _ in histories}
    truth = truth_of(requests, {one.request_id: done for one, _, done in histories})
    compared = 0

    def compare(engine: Engine) -> None:
        nonlocal compared
        for name, row in engine.scheduler.running.items():
            committed = engine.state.logs[row.slot].committed_len
            if row.acceptance.rounds:
                assert same_state(engine.state.committed_state(row.slot), want[name][committed])
                compared += 1

    engine = make_engine(target, build(name, truth), slots=3, nodes=6, log=log, budget=budget)
    drive(engine, requests, compare)
    assert compared >= len(requests)


def test_a_wrong_state_is_noticed(target: TargetModel) -> None:
    """The comparison above can fail: one bit of one factor is enough."""
    one = request("a", LOOP, max_tokens=6)
    want = record(target, one)
    engine = make_engine(target, log=16)
    engine.add(one)
    engine.step()
    engine.step()
    assert same_state(engine.state.committed_state(1), want[len(LOOP) + 1])
    engine.state.layers[1].factors.u[1, 0, 0, 0] *= 1 + 2**-20
    assert not same_state(engine.state.committed_state(1), want[len(LOOP) + 1])
