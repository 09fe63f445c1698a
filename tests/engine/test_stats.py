# SPDX-License-Identifier: Apache-2.0
"""Counts that users compare with other engines': each has one meaning and they add up."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from engine_harness import Run, check_counts, drive, make_engine, plain, request, truth_of
from engine_requests import EVERY, LOOP, WALK, build, mixed
from hypothesis import given
from hypothesis import strategies as st

from specla.engine.stats import PHASES, Acceptance, EngineStats
from specla.models.base import TargetModel
from specla.request import Completion, Request

# What a result says, where that is not the registry's name.
SAYS = {"scripted-tree": "scripted", "oracle-decoys": "oracle", "block": "block+reader"}


@pytest.fixture(scope="module")
def runs(target: TargetModel) -> dict[str, tuple[EngineStats, Run]]:
    """Every drafter over the same requests, stop strings included."""
    requests = mixed(0.7)
    truth = truth_of(requests, plain(target, requests))
    done = {}
    for name in EVERY:
        engine = make_engine(target, build(name, truth), slots=3, nodes=7)
        done[name] = (engine.stats, drive(engine, requests))
    return done


def emitted(c: Completion) -> int:
    """Tokens that rounds gave, before a stop string cut some of them off."""
    return round(c.speculation.tokens_per_round * c.speculation.rounds)


@pytest.mark.parametrize("name", EVERY)
def test_identities_of_every_request(runs: dict[str, tuple[EngineStats, Run]], name: str) -> None:
    for c in runs[name][1].completions.values():
        cut = emitted(c) - len(c.token_ids)
        assert cut >= 0
        assert cut == 0 or isinstance(c.stop_reason, str)
        check_counts(c, cut_text=cut)
        s = c.speculation
        # A depth is offered once per round at most, and reached as often as it was accepted.
        for depth, rate in enumerate(s.acceptance_by_depth):
            reached = sum(s.acceptance_histogram[depth + 1 :])
            assert reached == 0 or reached / s.rounds <= rate <= 1
        assert s.drafter == SAYS.get(name, name)
        assert (s.mode, s.fallback) == ("exact", None)


@pytest.mark.parametrize("name", EVERY)
def test_totals_are_sums(runs: dict[str, tuple[EngineStats, Run]], name: str) -> None:
    stats, run = runs[name]
    reports = [c.speculation for c in run.completions.values()]
    total = stats.acceptance
    for field in ("rounds", "drafted", "accepted"):
        assert getattr(total, field) == sum(getattr(s, field) for s in reports)
    assert total.emitted == sum(map(emitted, run.completions.values()))
    for i, count in enumerate(total.histogram):
        assert count == sum(dict(enumerate(s.acceptance_histogram)).get(i, 0) for s in reports)
    assert sum(stats.finished.values()) == len(reports)
    assert stats.finished.get("abort", 0) == 0
    assert stats.prefill_tokens == sum(
        len(c.prompt_token_ids) - 1 for c in run.completions.values()
    )


@pytest.mark.parametrize("before", [None, "drafted on the host"])
def test_a_text_too_long_for_its_drafter_says_so(target: TargetModel, before: str | None) -> None:
    """By what had been committed when its last round began."""
    some = [request(f"{n}", LOOP, max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4)]
    drafter = build("none", {})
    drafter.info = replace(drafter.info, longest=len(LOOP) + 1, fallback=before)
    done = drive(make_engine(target, drafter, slots=4, nodes=1), some).completions
    why = "no drafts after 13 tokens of prompt and output"
    for name in "123":
        assert done[name].speculation.fallback == before
    said = str(done["4"].speculation.fallback)
    assert said.startswith(f"{before}; {why}" if before else why)


def test_plain_decoding_drafts_nothing(runs: dict[str, tuple[EngineStats, Run]]) -> None:
    for c in runs["none"][1].completions.values():
        s = c.speculation
        assert (s.drafted, s.accepted, s.acceptance_by_depth) == (0, 0, ())
        assert s.tokens_per_round == 1.0


def test_a_round_is_not_counted_twice(target: TargetModel) -> None:
    """The first token comes from a round too, so there is no extra one: completion tokens are
    rounds + accepted, less the missing bonus of a cut round."""
    one = request("a", LOOP, max_tokens=9)
    truth = truth_of([one], plain(target, [one]))
    for depth in range(1, 10):
        engine = make_engine(target, build("oracle", truth), nodes=depth + 1)
        s = drive(engine, [one]).completions["a"].speculation
        assert s.accepted == s.drafted
        assert 9 in (s.rounds + s.accepted, s.rounds + s.accepted - 1)
        assert s.tokens_per_round * s.rounds == 9


def test_drafts_past_a_cut_had_no_chance(target: TargetModel) -> None:
    """Bug 45's cousin: an always-right drafter must read 1.0 although its last tree is cut."""
    ahead = plain(target, [request("x", WALK, max_tokens=24)])["x"].token_ids
    for length in range(1, 9):
        engine = make_engine(target, build("oracle", lambda row: ahead), nodes=16)
        s = drive(engine, [request("a", WALK, max_tokens=length)]).completions["a"].speculation
        assert s.accepted == s.drafted
        assert set(s.acceptance_by_depth) <= {1.0}


def test_aborted_requests_are_counted(target: TargetModel) -> None:
    engine = make_engine(target)
    requests: list[Request] = [request(name, WALK) for name in "ab"]
    for one in requests:
        engine.add(one)
    engine.step()
    assert engine.abort("a") is not None
    engine.step()
    assert engine.stats.finished == {"abort": 1}
    assert engine.stats.acceptance.rounds == 3
    engine.abort("b")
    assert engine.stats.finished == {"abort": 2}


def test_a_waiting_request_costs_nothing(target: TargetModel) -> None:
    engine = make_engine(target)
    engine.add(request("a", WALK))
    delta = engine.abort("a")
    assert delta is not None
    assert delta.completion is not None
    c = delta.completion
    assert (c.token_ids, c.text, c.finish_reason) == ((), "", "abort")
    assert (c.timing.prefill_s, c.timing.decode_s, c.timing.tokens_per_s) == (0, 0, 0)
    assert c.speculation.tokens_per_round == 0
    check_counts(c)


def test_phase_times(runs: dict[str, tuple[EngineStats, Run]]) -> None:
    stats, run = runs["suffix"]
    assert set(stats.seconds) == set(PHASES)
    assert all(seconds > 0 for seconds in stats.seconds.values())
    summary = stats.summary()
    assert summary["steps"] == stats.steps
    assert {f"{name}_s" for name in PHASES} <= set(summary)
    assert all(c.timing.decode_s > 0 for c in run.completions.values())
    assert sum(c.timing.prefill_s for c in run.completions.values()) <= stats.seconds["prefill"]


def test_a_phase_that_raises_is_still_timed() -> None:
    stats = EngineStats()
    with pytest.raises(ValueError), stats.phase("verify"):
        raise ValueError
    assert stats.seconds["verify"] > 0


ROUNDS = st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()).map(
    lambda r: (max(r[0], r[1]), min(r[0], r[1]), r[2] and r[1] > 0)
)


@given(st.lists(ROUNDS, max_size=30))
def test_acceptance_adds_up(rounds: list[tuple[int, int, bool]]) -> None:
    a = Acceptance()
    for offered, accepted, is_cut in rounds:
        is_cut = is_cut and accepted > 0
        a.add(
            drafted=offered,
            offered_depth=offered,
            accepted=accepted,
            emitted=accepted + (not is_cut),
            kernel="ab"[is_cut],
        )
    assert sum(a.histogram) == a.rounds == sum(a.kernels.values()) == len(rounds)
    assert a.kernels.get("b", 0) == sum(1 for _, accepted, is_cut in rounds if is_cut and accepted)
    assert sum(i * h for i, h in enumerate(a.histogram)) == a.accepted
    assert sum(a.taken) == a.accepted
    assert sum(a.offered) == a.drafted
    cuts = sum(1 for _, accepted, is_cut in rounds if is_cut and accepted)
    assert a.emitted == a.rounds + a.accepted - cuts
    assert all(0 <= rate <= 1 for rate in a.by_depth)


def test_a_prompt_is_no_part_of_decoding_time(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it has only been launched when the host goes on: the device is waited for, once,
    and prompts that were on their way together share that time by their tokens."""
    engine = make_engine(target)
    waits: list[int] = []

    def wait() -> None:
        time.sleep(0.02)
        rows = engine.scheduler.ready()
        waits.append(sum(row.decode_start is None for row in rows))

    monkeypatch.setattr("specla.engine.prompts.mark", lambda device: wait)
    for one in (request("loop", LOOP, max_tokens=12), request("walk", WALK, max_tokens=12)):
        engine.add(one)
    seen = [row for _ in range(4) for _ in engine.step() for row in engine.scheduler.ready()]
    assert sum(waits) == 2
    assert all(waits)
    prefill = {row.slot: row.seconds["prefill"] for row in seen}
    assert sum(prefill.values()) >= 0.02 * len(waits)
    total = len(LOOP) + len(WALK)
    for row in seen:
        assert row.seconds["prefill"] >= 0.02 * len(waits) * len(row.prompt) / total
    assert engine.stats.seconds["prefill"] >= 0.02 * len(waits)
