# SPDX-License-Identifier: Apache-2.0
"""Rows join, leave, are aborted and fail; nobody else notices, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_harness import (
    END,
    VOCAB,
    Run,
    check_counts,
    check_rules,
    check_whole,
    drive,
    make_engine,
    outcome,
    plain,
    request,
    truth_of,
)
from engine_requests import LONG, LOOP, WALK, build

from specla import drafters
from specla.drafters.base import DraftRow, Observation
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.errors import RequestRejected
from specla.models.base import TargetModel
from specla.request import Completion
from specla.testing import OracleDrafter
from specla.topology.tree import DraftTree

REQUESTS = [
    request("loop", LOOP, seed=1, max_tokens=12),
    request("walk", WALK, seed=2, temperature=0.7, max_tokens=12, logprobs=1),
    request("long", LONG, seed=3, temperature=1.3, max_tokens=8),
    request("one", (11,), seed=4, max_tokens=12),
]


@pytest.fixture(scope="module")
def alone(target: TargetModel) -> dict[str, Completion]:
    return plain(target, REQUESTS)


def finish(engine: Engine, run: Run) -> Run:
    """Step until nothing is left."""
    for _ in range(300):
        if not engine.has_work:
            break
        run.take(engine.step())
        check_rules(engine)
    check_whole(engine)
    return run


def same_as(alone: dict[str, Completion], run: Run) -> None:
    """Everything that completed normally equals the run alone."""
    for name, completion in run.completions.items():
        if completion.finish_reason != "abort":
            assert outcome(completion) == outcome(alone[name])


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("victim", [r.request_id for r in REQUESTS])
def test_abort_frees_the_slot_and_disturbs_nobody(
    target: TargetModel, alone: dict[str, Completion], victim: str, steps: int
) -> None:
    """With 3 slots and 64-token chunks the victim is waiting, in prefill or between rounds."""
    engine, run = make_engine(target, drafters.build("suffix"), slots=3, log=3), Run()
    for one in REQUESTS:
        engine.add(one)
    for _ in range(steps):
        run.take(engine.step())
    live = engine.scheduler.find(victim)
    delta = engine.abort(victim)
    if victim in run.completions:
        assert live is None
        assert delta is None
    else:
        assert delta is not None
        run.take([delta])
    check_rules(engine)
    assert engine.scheduler.find(victim) is None
    assert engine.abort(victim) is None
    finish(engine, run)
    assert set(run.completions) == set(alone)
    same_as(alone, run)
    aborted = run.completions[victim]
    assert aborted.token_ids == alone[victim].token_ids[: len(aborted.token_ids)]
    assert alone[victim].text.startswith(aborted.text.rstrip("\ufffd"))
    check_counts(aborted)


def test_the_phases_of_the_test_above(target: TargetModel) -> None:
    engine = make_engine(target, slots=3)
    for one in REQUESTS:
        engine.add(one)
    assert len(engine.scheduler.waiting) == 4
    engine.step()
    assert list(engine.scheduler.waiting) == ["one"]
    assert not engine.scheduler.running["long"].ready
    assert engine.scheduler.running["loop"].acceptance.rounds == 1


def test_joining_and_leaving(target: TargetModel, alone: dict[str, Completion]) -> None:
    """A request per step; early ones leave while later ones are still to come."""
    engine, run = make_engine(target, drafters.build("ngram"), slots=2, log=16), Run()
    for one in REQUESTS:
        engine.add(one)
        run.take(engine.step())
        check_rules(engine)
    finish(engine, run)
    assert run.outcomes() == {name: outcome(c) for name, c in alone.items()}


def test_an_idle_engine_wakes_up(target: TargetModel, alone: dict[str, Completion]) -> None:
    engine = make_engine(target)
    assert engine.step() == []
    for one in REQUESTS:
        assert outcome(drive(engine, [one]).completions[one.request_id]) == outcome(
            alone[one.request_id]
        )


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 128, 129, 130])
def test_chunked_prefill_between_rounds(
    target: TargetModel, alone: dict[str, Completion], length: int
) -> None:
    """A long prompt comes in piece by piece while a neighbour decodes. The size of the pieces
    changes nothing."""
    late = request("late", LONG[:length], seed=9, temperature=0.7, max_tokens=3)
    want = outcome(drive(make_engine(target, chunk=128), [late]).completions["late"])
    engine, run = make_engine(target, drafters.build("suffix"), chunk=64), Run()
    engine.add(REQUESTS[0])
    run.take(engine.step())
    engine.add(late)
    rounds = engine.scheduler.running["loop"].acceptance.rounds
    run.take(engine.step())
    assert engine.scheduler.running["loop"].acceptance.rounds == rounds + 1
    assert engine.stats.prefill_tokens == len(LOOP) - 1 + min(64, length - 1)
    finish(engine, run)
    assert outcome(run.completions["late"]) == want
    assert outcome(run.completions["loop"]) == outcome(alone["loop"])


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_siblings_share_one_prefill(target: TargetModel, slots: int) -> None:
    """n completions of one prompt: n separate runs with seeds seed + i, one prefill for as many
    as there are slots."""
    siblings = [
        request(f"n{i}", LONG, seed=40 + i, temperature=1.3, max_tokens=8) for i in range(4)
    ]
    engine = make_engine(target, drafters.build("suffix"), slots=slots)
    run = drive(engine, siblings)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, siblings).items()}
    assert len({c.token_ids for c in run.completions.values()}) == 4
    prefills, rest = divmod(engine.stats.prefill_tokens, len(LONG) - 1)
    assert rest == 0
    # With 3 slots the last one waits until a sibling leaves, and nothing is kept for it.
    assert prefills == -(-4 // slots)


def test_siblings_keep_their_place_in_the_queue(target: TargetModel) -> None:
    """Those who come later do not take the slots of siblings that wait for a prefill."""
    engine, run = make_engine(target, slots=3), Run()
    names = ("a", "b", "c")
    for name, prompt in zip((*names, "d"), (LONG, LONG, LONG, WALK), strict=True):
        engine.add(request(name, prompt, max_tokens=4))
    run.take(engine.step())
    assert list(engine.scheduler.running) == ["a"]
    run.take([*engine.step(), *engine.step()])
    assert tuple(engine.scheduler.running) == names
    assert engine.stats.prefill_tokens == len(LONG) - 1
    finish(engine, run)


def test_siblings_of_an_aborted_prefill(target: TargetModel) -> None:
    siblings = [request(f"n{i}", LONG, seed=i, temperature=1.0, max_tokens=4) for i in range(3)]
    engine, run = make_engine(target), Run()
    for one in siblings:
        engine.add(one)
    engine.step()
    engine.abort("n0")
    finish(engine, run)
    want = plain(target, siblings[1:])
    assert run.outcomes() == {name: outcome(c) for name, c in want.items()}


def failing(engine: Engine, name: str, error: BaseException, after: bool) -> Callable[[], None]:
    """Make one method of the engine's parts raise once, before or after its work."""
    owner = {"draft": engine.drafter, "observe": engine.drafter, "begin": engine.state}.get(
        name, engine.state if name == "commit" else engine.model
    )
    work = getattr(owner, name)

    def raising(*args: object) -> object:
        setattr(owner, name, work)
        if after:
            work(*args)
        raise error

    setattr(owner, name, raising)
    return lambda: setattr(owner, name, work)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["draft", "begin", "verify", "commit", "observe", "prefill"])
def test_a_failure_drops_only_the_rows_it_happened_to(
    target: TargetModel,
    alone: dict[str, Completion],
    where: str,
    after: bool,
    error: BaseException,
) -> None:
    engine, run = make_engine(target, drafters.build("suffix"), slots=3, log=3), Run()
    for one in REQUESTS:
        engine.add(one)
    run.take(engine.step())
    restore = failing(engine, where, error, after)
    with pytest.raises(type(error)):
        engine.step()
    restore()
    lost = {"long"} if where == "prefill" else {"loop", "walk"}
    check_rules(engine)
    finish(engine, run)
    assert set(run.completions) == set(alone) - lost
    same_as(alone, run)
    assert engine.stats.finished["abort"] == len(lost)
    assert drive(engine, REQUESTS).outcomes() == {n: outcome(c) for n, c in alone.items()}


def test_a_tokenizer_that_fails(target: TargetModel, alone: dict[str, Completion]) -> None:
    """Text comes after commit: a row whose state went on without its tokens must not live."""
    engine, run = make_engine(target, slots=4), Run()
    for one in REQUESTS:
        engine.add(one)
    run.take(engine.step())
    text = engine.scheduler.running["walk"].text
    text.put = lambda ids: 1 / 0  # type: ignore[method-assign,union-attr,return-value]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    check_rules(engine)
    assert "walk" not in engine.scheduler.running
    same_as(alone, finish(engine, run))


class Watching(NoDrafter):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[DraftRow] = []
        self.seen: list[Observation] = []
        self.resets: list[int] = []

    def draft(self, rows: list[DraftRow]) -> list[DraftTree]:
        self.rows += rows
        return super().draft(rows)

    def observe(self, seen: list[Observation]) -> None:
        self.seen += seen

    def reset(self, slot: int) -> None:
        self.resets.append(slot)


def test_what_a_drafter_is_told(target: TargetModel) -> None:
    drafter = Watching()
    engine = make_engine(target, drafter, slots=1, nodes=6)
    drive(engine, [request("a", WALK, max_tokens=3), request("b", LOOP, max_tokens=1)])
    assert [row.max_drafts for row in drafter.rows] == [5, 5, 0, 0]
    assert {row.num_prompt_tokens for row in drafter.rows} == {len(WALK), len(LOOP)}
    assert drafter.resets == [1, 1]
    assert [one.slot for one in drafter.seen] == [1] * 4


def test_duplicate_ids(target: TargetModel) -> None:
    """Refused while live, waiting or running; free again afterwards. The first goes on."""
    engine, run = make_engine(target, slots=1), Run()
    for name in ("a", "b"):
        engine.add(request(name, WALK, max_tokens=3))
    run.take(engine.step())
    for name in ("a", "b"):
        with pytest.raises(RequestRejected, match="unique") as refused:
            engine.add(request(name, LOOP))
        assert refused.value.param == "request_id"
    assert len(finish(engine, run).completions) == 2
    drive(engine, [request("a")])


@pytest.mark.parametrize(
    "prompt", [(), (-1,), (VOCAB,), (5, 2**31), (2**63,), (5.5,), ("5",), (None,)]
)
def test_prompts_that_cannot_be(target: TargetModel, prompt: tuple[int, ...]) -> None:
    engine = make_engine(target)
    with pytest.raises(RequestRejected, match="prompt") as refused:
        engine.add(request("a", prompt))
    assert refused.value.param == "prompt"
    assert not engine.has_work


@pytest.mark.parametrize("token", [VOCAB, 2**31, 2**63])
@pytest.mark.parametrize("param", ["stop_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary(target: TargetModel, param: str, token: int) -> None:
    engine = make_engine(target)
    value = {token: 1.0} if param == "logit_bias" else (token,)
    with pytest.raises(RequestRejected, match=param) as refused:
        engine.add(request("a", **{param: value}))
    assert refused.value.param == param
    assert not engine.has_work


@pytest.fixture(scope="module")
def ahead(target: TargetModel) -> tuple[int, ...]:
    """What follows WALK if nothing ends it."""
    return plain(target, [request("x", WALK, max_tokens=24)])["x"].token_ids


@pytest.mark.parametrize("name", ["oracle", "oracle-decoys", "random-tree"])
@pytest.mark.parametrize("place", range(1, 10))
def test_nothing_is_emitted_or_counted_past_an_end(
    target: TargetModel, ahead: tuple[int, ...], place: int, name: str
) -> None:
    """I5: whatever ends a request inside a block of right drafts."""
    first = ahead.index(ahead[place - 1]) + 1
    for one, length, reason in (
        (request("a", WALK, max_tokens=place), place, "length"),
        (request("a", WALK, stop_token_ids=(ahead[place - 1],)), first, "stop"),
    ):
        engine = make_engine(target, build(name, lambda row: ahead), nodes=16)
        done = drive(engine, [one]).completions["a"]
        assert (done.token_ids, done.finish_reason) == (ahead[:length], reason)
        check_counts(done)
        s = done.speculation
        if name == "oracle":
            assert s.accepted == s.drafted <= length


def test_model_end_tokens(target: TargetModel) -> None:
    """The model's own end token ends a request unless it ignores it."""
    bias = {END: 100.0}
    stop = drive(
        make_engine(target), [request("a", ignore_eos=False, logit_bias=bias)]
    ).completions["a"]
    assert (stop.token_ids, stop.finish_reason, stop.text) == ((END,), "stop", "")
    goes_on = request("a", logit_bias=bias, max_tokens=3)
    assert drive(make_engine(target), [goes_on]).completions["a"].token_ids == (END,) * 3


def test_stop_strings_need_a_tokenizer(target: TargetModel) -> None:
    engine = make_engine(target)
    engine._tokenizer = None
    with pytest.raises(RequestRejected, match="tokenizer"):
        engine.add(request("a", stop="x"))
    done = drive(engine, [request("a", max_tokens=3)]).completions["a"]
    assert (done.text, len(done.token_ids)) == ("", 3)


def test_oracle_depth_is_the_round(target: TargetModel) -> None:
    one = request("a", WALK, max_tokens=21)
    truth = truth_of([one], plain(target, [one]))
    done = drive(make_engine(target, OracleDrafter(truth, depth=6), nodes=8), [one])
    assert done.completions["a"].speculation.acceptance_histogram == (0, 0, 0, 0, 0, 0, 3)
