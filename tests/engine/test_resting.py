# SPDX-License-Identifier: Apache-2.0
"""Drafters that read features and rest: rounds that nobody drafts for, on a device that the host
is one round behind, and the drafter knows every token and its features when it is asked again.
The device is played by the CPU, the bookkeeping is the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from behind import Behind, Turns
from engine_harness import VOCAB, drive, make_engine, outcome, plain, request, truth_of
from engine_requests import LONG, LOOP, PROMPTS, WALK
from test_free_rounds import run_behind
from torch import Tensor

from specla.drafters.base import DrafterInfo, DraftRow, Observation, ResidentDrafter, Shape
from specla.models.base import TargetModel
from specla.request import Completion, Request
from specla.topology.tree import DraftTree

REQUESTS = [
    request("stop", WALK, seed=1, max_tokens=40, temperature=1.0, stop=("ab", "d", "x")),
    request("loop", LOOP, seed=2, max_tokens=40),
    request("one token", (11,), seed=3, max_tokens=20),
    request("long", LONG, seed=4, max_tokens=12, temperature=0.8),
    *(request(f"n{i}", LONG[:65], seed=60 + i, temperature=1.1, max_tokens=12) for i in range(2)),
    request("host's", WALK, seed=8, top_k=3, max_tokens=6),
]
SHAPES = Shape(4, 3), Shape(1, 0), Shape(4, 2), Shape(1, 0), Shape(8, 3)
PLAIN: dict[str, Completion] = {}
Known = list[tuple[int, Tensor | None]]


class Reading:
    """Reads features and keeps all that it was given; drafts chains that are right or wrong, as
    `is_right` has it for a number of tokens."""

    feature_layers = (0, 1)

    def __init__(
        self, truth: Callable[[DraftRow], Sequence[int]], is_right: Callable[[int], bool]
    ) -> None:
        self.info = DrafterInfo(name="reading", max_depth=3, may_return_nothing=True)
        self._truth, self._is_right = truth, is_right
        self.known: dict[int, Known] = {}
        self.seen: dict[int, Tensor] = {}
        """Features of a token, by the text that ends with it."""
        self.checked: dict[int, int] = {}

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        self.known.clear()

    def check_tokenizer(self, digest: str) -> None:
        pass

    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        self.known.setdefault(slot, []).extend(zip(tokens, features, strict=True))

    def feed(self, seen: Sequence[Observation], features: Tensor) -> None:
        parts = features.split([len(one.emitted) for one in seen])
        for one, part in zip(seen, parts, strict=True):
            assert one.path == tuple(range(len(one.path))), "these drafts are chains"
            self.prefill(one.slot, one.emitted, part)

    def fork(self, slot: int, to: int) -> None:
        self.known[to] = list(self.known.get(slot, []))

    def observe(self, seen: Sequence[Observation]) -> None:
        pass

    def reset(self, slot: int) -> None:
        self.known.pop(slot, None)
        self.checked.pop(slot, None)

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [self._draft(row) for row in rows]

    def check(self, slot: int, tokens: Sequence[int]) -> None:
        """It knows all of this text."""
        known = self.known.get(slot, [])
        assert [token for token, _ in known] == list(tokens[1:])
        for i in range(self.checked.get(slot, 0), len(known)):
            features = known[i][1]
            if features is not None:
                before = self.seen.setdefault(hash(tuple(tokens[: i + 1])), features.clone())
                # A prompt's are those of the chunked form.
                torch.testing.assert_close(before, features, rtol=1e-3, atol=1e-3)
        self.checked[slot] = len(known)

    def _draft(self, row: DraftRow) -> DraftTree:
        self.check(row.slot, row.tokens)
        out = len(row.tokens) - row.num_prompt_tokens
        drafts = list(self._truth(row)[out : out + min(row.max_drafts, self.info.max_depth)])
        if not self._is_right(out):
            drafts = [(token + 1) % VOCAB for token in drafts]
        return DraftTree.chain(row.tokens[-1], drafts)


class Resident(Reading):
    """Drafts on the device, and has all it knows there meanwhile."""

    rounds: Behind

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        return tuple(sorted({min(2, num_nodes - 1), min(3, num_nodes - 1)}))

    def launch(self, *_: object, depth: int) -> None:
        raise AssertionError("played by draft()")

    def enter(self, slots: Sequence[int]) -> None:
        for place in self.rounds._places:
            self.check(place.slot, place.law.history)

    def leave(self, slots: Sequence[int | None], rnd: object, features: object) -> None:
        for slot, place in zip(slots, self.rounds._places, strict=True):
            if slot is not None:
                assert slot == place.slot
                self._follow(slot, place.law.history)

    def _follow(self, slot: int, tokens: Sequence[int]) -> None:
        """What the device has encoded by itself; its features are not looked at."""
        known = self.known.setdefault(slot, [])
        known += [(token, None) for token in tokens[len(known) + 1 :]]

    def _draft(self, row: DraftRow) -> DraftTree:
        if self.rounds._depth:
            self._follow(row.slot, row.tokens)
        tree = super()._draft(row)
        if self.rounds._depth:
            kept = min(tree.num_nodes, self.rounds._depth + 1)
            tree = DraftTree(tree.tokens[:kept], tree.parents[:kept])
        return tree


class Rounds(Behind):
    def _last_round(self):  # type: ignore[no-untyped-def]
        return None, None


def setup(
    target: TargetModel, drafter: Reading, slots: int, budget: str = "paying"
) -> tuple[object, Rounds]:
    engine = make_engine(target, slots=slots, log=4, budget=budget)
    engine._on_gpu = True
    engine.use(drafter)
    engine._graphs = rounds = Rounds(engine)
    if isinstance(drafter, Resident):
        assert isinstance(drafter, ResidentDrafter)
        drafter.rounds, rounds._width = rounds, engine._width
    return engine, rounds


def truth(target: TargetModel, requests: Sequence[Request]) -> Callable[[DraftRow], Sequence[int]]:
    return truth_of(requests, known(target, requests))


def known(target: TargetModel, requests: Sequence[Request]) -> dict[str, Completion]:
    """Plain decoding of each, once."""
    for one in requests:
        if repr(one) not in PLAIN:
            PLAIN[repr(one)] = plain(target, [one])[one.request_id]
    return {one.request_id: PLAIN[repr(one)] for one in requests}


def outcomes(target: TargetModel, requests: Sequence[Request]) -> dict[str, tuple[object, ...]]:
    return {n: outcome(c) for n, c in known(target, requests).items()}


@pytest.mark.parametrize("hopeless", [True, False])
def test_a_drafter_of_the_host_rests_and_misses_nothing(
    target: TargetModel, hopeless: bool
) -> None:
    requests = [request(f"r{i}", p, seed=i, max_tokens=40) for i, p in enumerate(PROMPTS[:3])]
    drafter = Reading(truth(target, requests), lambda out: not hopeless)
    drive(make_engine(target, drafter, slots=2), requests)  # what features should be
    engine, rounds = setup(target, drafter, 3)
    engine.spending.budget.account.credit = 2.0  # type: ignore[attr-defined]
    run = run_behind(engine, rounds, requests)  # type: ignore[arg-type]
    assert run.outcomes() == outcomes(target, requests)
    assert (rounds.launches > 20) == hopeless


@pytest.mark.parametrize(("slots", "every", "stretch"), [(1, 1, 3), (3, 2, 1), (8, 1, 7)])
def test_shapes_and_rest_by_turns(
    target: TargetModel, slots: int, every: int, stretch: int
) -> None:
    """Rows that join, end, are stopped, share prompts and draw by the host meanwhile."""
    drafter = Resident(truth(target, REQUESTS), lambda out: out % 3 > 0)
    drive(make_engine(target, Reading(drafter._truth, drafter._is_right)), REQUESTS)
    engine, rounds = setup(target, drafter, slots)
    turns = engine.spending.free = Turns(SHAPES, stretch)  # type: ignore[attr-defined]
    run = run_behind(engine, rounds, REQUESTS, every=every)  # type: ignore[arg-type]
    assert run.outcomes() == outcomes(target, REQUESTS)
    assert {shape for shape, _ in turns.seen} >= set(SHAPES[:2])
    assert all(depth <= shape.depth for shape, depth in turns.seen)
    assert sum(c.speculation.accepted for c in run.completions.values()) > 10


def test_drafting_stops_where_it_does_not_pay_and_starts_again(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a larger allowance than there is, for a shorter text."""
    for module in ("budget", "budget_free"):
        monkeypatch.setattr(f"specla.drafters.{module}.ALLOWANCE", 0.25)
    (one,) = requests = [request("turns", LOOP, seed=2, temperature=0.7, max_tokens=220)]
    drafter = Resident(truth(target, requests), lambda out: out > 70)
    engine, rounds = setup(target, drafter, 1)
    done = run_behind(engine, rounds, requests).completions[one.request_id]  # type: ignore[arg-type]
    assert outcome(done) == outcomes(target, requests)[one.request_id]
    found = done.speculation
    assert found.budget is not None
    assert sum(found.budget.reasons.values()) == found.rounds
    assert found.budget.reasons["off"] > 20
    assert found.budget.reasons["probe"] <= 30
    assert found.budget.reasons["pays"] > 15
    assert found.budget.last.startswith("pays: ")
    assert found.budget.shapes["none"] >= found.budget.reasons["off"]
    assert found.accepted > 50


def test_nothing_is_kept_for_rows_that_are_gone(target: TargetModel) -> None:
    """Rows that are stopped while their drafter rests, and their slots' next rows."""
    doomed = [request(f"doomed{i}", PROMPTS[i], seed=100 + i, max_tokens=30) for i in range(3)]
    order = [x for pair in zip(doomed, REQUESTS, strict=False) for x in pair]
    drafter = Resident(truth(target, order), lambda out: True)
    engine, rounds = setup(target, drafter, 2)
    engine.spending.free = Turns([Shape(1, 0)] * 3 + [Shape(4, 3)], 2)  # type: ignore[attr-defined]
    aborted: list[str] = []

    def abort(step: int) -> None:
        for name, row in list(engine.scheduler.running.items()):  # type: ignore[attr-defined]
            if not rounds._depth and name.startswith("doomed") and len(row.output) > 3:
                engine.abort(name)  # type: ignore[attr-defined]
                aborted.append(name)

    run = run_behind(engine, rounds, order, abort)  # type: ignore[arg-type]
    assert len(aborted) == 3
    want = {n: o for n, o in outcomes(target, order).items() if n not in aborted}
    assert run.outcomes() == want
    assert not drafter.known


@pytest.mark.parametrize("stretch", [2, 7])
def test_an_eagle_drafter_that_rests_drafts_as_if_it_had_not(
    tmp_path: Path, target: TargetModel, stretch: int
) -> None:
    """Against the host's, asked for the same shapes round by round."""
    pytest.importorskip("triton")
    import test_eagle_behind as eagle

    path, one = eagle.folder(tmp_path, target), request("a", LOOP, seed=2, max_tokens=40)
    engine = make_engine(target, slots=1, log=4, budget="paying")
    engine._on_gpu = True
    engine.use(eagle.Played(path=path, **eagle.OPTIONS))
    rounds = eagle.resident(engine)
    rounds._width = engine._width
    engine.spending.free = Turns(SHAPES, stretch)  # type: ignore[union-attr, assignment]
    launched: list[Shape] = []
    start = rounds._start

    def remembering() -> None:
        launched.append(Shape(rounds._key[1], rounds._depth))
        start()

    rounds._start = remembering  # type: ignore[method-assign]
    run = run_behind(engine, rounds, [one])

    class AsLaunched(eagle.EagleDrafter):
        def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            shape = launched.pop(0)
            self.info = eagle.replace(self.info, max_depth=shape.depth)
            rows = [eagle.replace(r, max_drafts=min(r.max_drafts, shape.nodes - 1)) for r in rows]
            return super().draft(rows)

    drafter = AsLaunched(path=path, min_survival=0, **eagle.OPTIONS)
    host = drive(make_engine(target, drafter, slots=1), [one])
    eagle.check(run, host, target, [one], accepted=3)
