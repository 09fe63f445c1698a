# SPDX-License-Identifier: Apache-2.0
"""The host one round behind: rows that join, end, are stopped or fail while a round is under way.
The device is played by the CPU, the bookkeeping is the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from behind import Behind, Turns, behind
from engine_harness import (
    Run,
    check_rules,
    check_whole,
    make_engine,
    outcome,
    plain,
    request,
    truth_of,
)
from engine_requests import LONG, LOOP, PROMPTS, WALK, mixed

from specla import drafters
from specla.drafters.base import Drafter, DraftRow, Observation, Shape
from specla.engine.engine import Engine
from specla.engine.kernels import Kernels
from specla.engine.prices import Prices
from specla.engine.spending import Spending
from specla.engine.stats import Decisions
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import Request
from specla.testing import AdversarialDrafter, OracleDrafter
from specla.topology.tree import DraftTree

# All of them rows that a device can judge.
FREE = [
    request("stop string", WALK, seed=1, max_tokens=30, temperature=1.0, stop=("ab", "d", "x")),
    request("loop", LOOP, seed=2, max_tokens=25),
    request("one token", (11,), seed=3, max_tokens=1),
    request("long", LONG, seed=4, max_tokens=9, temperature=0.8),
    request("ends", (23, 5), seed=5, max_tokens=40, stop_token_ids=(9, 11, 20)),
    *(request(f"n{i}", LONG[:65], seed=60 + i, temperature=1.1, max_tokens=7) for i in range(3)),
    request("two", LOOP[:3], seed=7, max_tokens=2),
]


def run_behind(
    engine: Engine,
    rounds: Behind,
    requests: Sequence[Request],
    on_step: Callable[[int], None] = lambda step: None,
    every: int = 1,
) -> Run:
    """Add a request every few steps and run to the end."""
    run, waiting, step = Run(), list(requests), 0
    while waiting or engine.has_work:
        if waiting and step % every == 0:
            engine.add(waiting.pop(0))
        run.take(engine.step())
        if not rounds._flight.rows:
            check_rules(engine)
        on_step(step)
        step += 1
        assert step < 2000, "the engine does not come to an end"
    check_whole(engine)
    return run


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("log", [0, 5])
@pytest.mark.parametrize(("slots", "every"), [(1, 1), (3, 1), (3, 4), (8, 2)])
def test_free_rounds_change_nothing(
    target: TargetModel, drafter: str, log: int, slots: int, every: int
) -> None:
    engine = make_engine(target, drafters.build(drafter), slots=slots, log=log)
    rounds = behind(engine)
    run = run_behind(engine, rounds, FREE, every=every)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, FREE).items()}
    assert rounds.launches > 0
    assert all(c.timing.decode_s > 0 for c in run.completions.values())


def test_free_and_driven_rounds_by_turns(target: TargetModel) -> None:
    requests = [x for pair in zip(FREE, mixed(0.9), strict=False) for x in pair]
    engine = make_engine(target, drafters.build("ngram"), slots=3, log=4)
    rounds = behind(engine)
    run = run_behind(engine, rounds, requests, every=3)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, requests).items()}
    assert rounds.launches > 0


def test_guests_of_a_steady_row(target: TargetModel) -> None:
    """Free, driven while a guest is there, free again."""
    steady = request("steady", LOOP, seed=20, temperature=0.6, max_tokens=60)
    guests = [request(f"g{i}", WALK, seed=i, top_k=3, max_tokens=3) for i in range(4)]
    engine = make_engine(target, drafters.build("ngram"), slots=2, log=4)
    rounds = behind(engine)
    run = run_behind(engine, rounds, [steady, *guests], every=6)
    want = plain(target, [steady, *guests])
    assert run.outcomes() == {n: outcome(c) for n, c in want.items()}
    assert rounds.launches > 10


def test_a_text_longer_than_the_device_keeps(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts come from the host then. A drafter that does not look back needs no history."""
    monkeypatch.setattr("specla.engine.graphs.MAX_HISTORY", 48)
    launches = {}
    for name in ("none", "ngram"):
        engine = make_engine(target, drafters.build(name), slots=3, log=2)
        rounds = behind(engine)
        run = run_behind(engine, rounds, FREE)
        assert run.outcomes() == {n: outcome(c) for n, c in plain(target, FREE).items()}
        launches[name] = rounds.launches
    assert launches["none"] > launches["ngram"] > 0


def test_an_abort_while_a_round_is_under_way(target: TargetModel) -> None:
    """The slot is the next row's at once."""
    engine = make_engine(target, drafters.build("ngram"), slots=2, log=3)
    rounds = behind(engine)
    doomed = [request(f"doomed{i}", PROMPTS[i], seed=i, max_tokens=50) for i in range(3)]

    aborted: list[str] = []

    def abort(step: int) -> None:
        for name, row in list(engine.scheduler.running.items()):
            if rounds._flight.unread and name.startswith("doomed") and len(row.output) > 2:
                assert engine.abort(name) is not None
                aborted.append(name)

    order = [x for pair in zip(doomed, FREE, strict=False) for x in pair]
    run = run_behind(engine, rounds, order, abort)
    assert len(aborted) == 3
    want = {n: outcome(c) for n, c in plain(target, order).items() if n not in aborted}
    assert run.outcomes() == want


@pytest.mark.parametrize("where", ["_launch", "_load", "_read", "_land"])
@pytest.mark.parametrize("after", [False, True])
def test_a_failure_while_a_round_is_under_way(
    target: TargetModel, where: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device still does for dropped rows is nobody's, and the engine goes on."""
    engine = make_engine(target, drafters.build("ngram"), slots=2, log=3)
    rounds = behind(engine)
    for one in FREE[:2]:
        engine.add(one)
    for _ in range(3):
        engine.step()
    assert rounds._flight.unread
    work = getattr(rounds, where)

    def fails(*args: object) -> object:
        monkeypatch.setattr(rounds, where, work)
        if after:
            work(*args)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(rounds, where, fails)
    if where in ("_load", "_land"):
        engine.abort(FREE[0].request_id)
    with pytest.raises(RuntimeError, match="lost"):
        run_behind(engine, rounds, [])
    assert not engine.scheduler.running
    run = run_behind(engine, rounds, FREE)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, FREE).items()}


@pytest.mark.parametrize("neighbour", [{}, {"top_k": 3}])
def test_nothing_to_draw(
    target: TargetModel, neighbour: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's word is the last one, in free and in driven rounds."""
    beside = request("beside", LOOP, seed=2, max_tokens=12, **neighbour)
    alone = plain(target, [beside])
    engine = make_engine(target, drafters.build("none"), slots=2)
    rounds = behind(engine)
    verify, calls = target.verify, 0

    def broken(plan: object, state: object, features: object = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = verify(plan, state).clone()  # type: ignore[arg-type]
        if calls == 4:
            logits[:1] = float("nan")
        return logits

    monkeypatch.setattr(target, "verify", broken, raising=False)
    run = Run()
    for one in (request("bad", WALK, seed=1, max_tokens=20), beside):
        engine.add(one)
    while engine.has_work:
        run.take(engine.step())
    assert bool(rounds.launches) == (not neighbour)
    bad = run.completions.pop("bad")
    assert bad.finish_reason == "error"
    assert len(bad.token_ids) == 3
    assert engine.stats.finished["error"] == 1
    assert run.outcomes() == {n: outcome(c) for n, c in alone.items()}


@pytest.mark.parametrize("every", [1, 3])
def test_another_number_of_nodes_changes_nothing(target: TargetModel, every: int) -> None:
    """The budget's number of nodes is that of the round, and every round is in the results."""
    engine = make_engine(target, drafters.build("ngram"), slots=3, log=5, budget="paying")
    shapes = Shape(8, 7), Shape(1, 0), Shape(2, 1), Shape(4, 2)
    rounds, turns = behind(engine), Turns(shapes, every)
    assert engine.spending is not None
    engine.spending.free = turns  # type: ignore[assignment]
    rounds._width = engine._width
    run = run_behind(engine, rounds, FREE, every=2)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, FREE).items()}
    assert {shape.nodes for shape, _ in turns.seen} == {1, 2, 4, 8}
    assert all(depth <= shape.depth for shape, depth in turns.seen)
    assert len(turns.ended) == len(FREE)
    for one in run.completions.values():
        s = one.speculation
        assert s.budget is not None
        assert sum(s.budget.reasons.values()) == s.rounds
        assert s.budget.chosen == s.drafted


def test_a_round_is_counted_as_what_it_was_launched_for(target: TargetModel) -> None:
    """The budget may have decided anew, for as many nodes, before the host reads a round."""

    class Numbered(Turns):
        def width(self, rows: Sequence[int], fresh: int = 0) -> Shape:
            self.asked = getattr(self, "asked", 0) + 1
            self.reason = self.detail = f"round {self.asked}"
            return super().width(rows, fresh)

        def expected(self, depth: int) -> float:
            return float(self.asked)

    engine = make_engine(target, drafters.build("ngram"), slots=1, log=5, budget="paying")
    rounds = behind(engine)
    assert engine.spending is not None
    engine.spending.free = Numbered([Shape(4, 3)], 1)  # type: ignore[assignment]
    rounds._width = engine._width
    run = run_behind(engine, rounds, [request("r", LOOP, seed=2, max_tokens=25)])
    s = run.completions["r"].speculation
    assert s.budget is not None
    assert s.budget.reasons == {f"round {i + 1}": 1 for i in range(s.rounds)}
    assert s.budget.last == f"round {s.rounds}"
    assert s.budget.expected == sum(range(1, s.rounds + 1))


@pytest.mark.parametrize("hopeless", [True, False])
def test_a_drafter_of_the_host_rests_on_the_device(target: TargetModel, hopeless: bool) -> None:
    """Where it is not asked, rounds need no host; it still hears of every one of them."""
    requests = [request(f"r{i}", p, seed=i, max_tokens=120) for i, p in enumerate(PROMPTS[:4])]
    done = plain(target, requests)
    truth = truth_of(requests, done)
    drafter = Hearing(
        AdversarialDrafter(truth, vocab_size=24) if hopeless else OracleDrafter(truth)
    )
    engine = make_engine(target, drafter, slots=3, log=4, budget="paying")
    rounds = behind(engine)
    run = run_behind(engine, rounds, requests)
    assert run.outcomes() == {n: outcome(c) for n, c in done.items()}
    assert (rounds.launches > 100) == hopeless
    reports = [c.speculation for c in run.completions.values()]
    assert all(sum(s.budget.reasons.values()) == s.rounds for s in reports if s.budget)
    assert drafter.heard == sum(len(c.token_ids) for c in done.values())


class Hearing:
    """Another drafter; counts the tokens that it was told of."""

    def __init__(self, inner: Drafter) -> None:
        self.info, self._inner, self.heard = inner.info, inner, 0

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return self._inner.draft(rows)

    def observe(self, seen: Sequence[Observation]) -> None:
        self.heard += sum(len(one.emitted) for one in seen)

    def reset(self, slot: int) -> None:
        self._inner.reset(slot)


def test_a_number_of_drafts_that_a_graph_cannot_have_is_refused(target: TargetModel) -> None:
    prices = Prices(Kernels(target, "exact", costs=None), mode="exact", device="cuda", drafter="x")
    with pytest.raises(ConfigError, match="one below a power of two, got 4; use 7"):
        Spending("4", drafters.build("ngram"), 16, prices, Decisions(), on_device=True)
    made = Spending("3", drafters.build("ngram"), 16, prices, Decisions(), on_device=True)
    assert made.free is not None
    assert made.free.width(range(5)) == (4, 3)


def test_graphs_stay_with_their_kind_of_drafter(target: TargetModel) -> None:
    engine = make_engine(target, drafters.build("ngram"))
    rounds = behind(engine)
    before, again = engine.drafter, drafters.build("ngram")
    engine.use(again)
    assert engine.drafter is again
    assert rounds._drafter is before, "graphs hold what it launches"
    with pytest.raises(ConfigError, match=r"one kind, ngram, .*; got suffix"):
        engine.use(drafters.build("suffix"))
    assert engine.drafter is again
