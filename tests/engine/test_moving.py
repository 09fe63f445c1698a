# SPDX-License-Identifier: Apache-2.0
"""Several rows on a played CUDA (`played`) that are moved to other buckets, and others that join
them: what the device does with them is what it does with rows that it is loaded with. Tokens are
those of plain decoding. Tier: exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import outcome, plain, request
from engine_requests import LOOP
from torch import Tensor

from specla import drafters
from specla.drafters.base import Drafter, Shape
from specla.models.base import TargetModel
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from played import SHAPES, by_launch, engine_with, go, play

from specla.ops.rows import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="a GPU has its own tests")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


# Prompts that go on in circles, so that something is accepted of an untrained drafter's.
SEVERAL = [
    request(f"row {i}", LOOP[: 3 + 2 * i], seed=i, max_tokens=most)
    for i, most in enumerate((9, 34, 5, 40, 21))
]


def several(
    target: TargetModel,
    drafter: Drafter,
    shapes: Sequence[Shape],
    moves: bool,
    every: int = 1,
    apart: int = 0,
) -> tuple[int, list[DraftTree], int]:
    """Rows that end one after another, in rounds of other shapes, and come so many steps apart.
    Returns how many drafts were accepted, the trees, and how often the device was loaded."""
    engine, _, loads, trees = by_launch(
        target, drafter, shapes, every=every, moves=moves, slots=len(SEVERAL)
    )
    run = go(engine, SEVERAL, every=apart)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, SEVERAL).items()}
    accepted = sum(one.speculation.accepted for one in run.completions.values())
    return accepted, trees, len(loads)


def check_moves(
    target: TargetModel, new: Callable[[], Drafter], shapes: Sequence[Shape], every: int = 1
) -> None:
    """What the device does with rows that it moves is what it does with those that it is given."""
    moved, loaded = (several(target, new(), shapes, moves, every) for moves in (True, False))
    assert moved[:2] == loaded[:2]
    assert moved[0] > 0, "where nothing is accepted nothing has to be taken along"
    assert moved[2] == 1
    assert loaded[2] > 3


def watched(played: type) -> type:
    """One that keeps what it was given: tokens and their features, by prompt."""

    class Watched(played):  # type: ignore[misc]
        def bind(self, *args: object, **named: object) -> None:
            super().bind(*args, **named)
            self.given: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
            self.prompts: dict[int, tuple[int, ...]] = {}
            encode = self.model.encode

            def keep(
                slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
            ) -> None:
                flat = [(s, t) for s, row in zip(slots, tokens, strict=True) for t in row]
                for (slot, token), row in zip(flat, features, strict=True):
                    self.given[self.prompts[slot]].append((token, row.clone()))
                encode(slots, tokens, features)

            self.model.encode = keep

        def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
            self.prompts[slot] = tuple(tokens)
            self.given[self.prompts[slot]] = []
            super().prefill(slot, tokens, features)

    return Watched


@pytest.mark.parametrize(("rests", "every"), [(False, 1), (True, 3)])
def test_several_rows_are_moved(
    tmp_path: Path, target: TargetModel, rests: bool, every: int
) -> None:
    """... to other shapes, and closer together where some have ended."""
    import test_eagle_behind as eagle

    path = eagle.folder(tmp_path, target)
    shapes = SHAPES if rests else [shape for shape in SHAPES if shape.depth]
    check_moves(target, lambda: eagle.Played(path=path, **eagle.OPTIONS), shapes, every)


def test_for_another_depth_nothing_is_moved(tmp_path: Path, target: TargetModel) -> None:
    """Nor loaded, whatever the drafter: rows keep their bucket."""
    import test_eagle_behind as eagle

    path, depths = eagle.folder(tmp_path, target), [Shape(4, 3), Shape(4, 2)]
    runs = [
        several(target, eagle.Played(path=path, **eagle.OPTIONS), depths, moves)
        for moves in (True, False)
    ]
    assert runs[0][:2] == runs[1][:2]
    assert [run[2] for run in runs] == [1, 4], "5 rows, 4, 2, and 1"


@pytest.mark.parametrize("seed", [3])
def test_several_rows_in_any_order_of_shapes(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Rests of one round and of more than there is room for, in which rows end. A drafter is given
    every token's own features."""
    import test_eagle_behind as eagle

    rng, path = random.Random(seed), eagle.folder(tmp_path, target)
    monkeypatch.setattr("specla.engine.resting.MOST_ROUNDS", 4)
    rest = [Shape(1, 0)] * (2 * seed)
    shapes = [*rest, *(rng.choice([*SHAPES, Shape(1, 0)]) for _ in range(11))]
    made: list[eagle.Played] = []

    def new() -> eagle.Played:
        made.append(watched(eagle.Played)(path=path, **eagle.OPTIONS))
        return made[-1]

    check_moves(target, new, shapes)
    check_given(made)


@pytest.mark.parametrize(("rests", "apart"), [(False, 3), (True, 7)])
def test_rows_join_without_loading(
    tmp_path: Path, target: TargetModel, rests: bool, apart: int
) -> None:
    """Those that are there go on where they were, and the new ones begin."""
    import test_eagle_behind as eagle

    path, made = eagle.folder(tmp_path, target), list[eagle.Played]()
    shapes = [*SHAPES, SHAPES[1], SHAPES[1]] if rests else SHAPES[:1]
    for moves in (True, False):
        made.append(watched(eagle.Played)(path=path, **eagle.OPTIONS))
        accepted, _, loads = several(target, made[-1], shapes, moves, 2, apart)
        assert accepted > 0
        # A row that has ended before the next one comes leaves nothing to go on with.
        assert (loads <= 2) == moves
    check_given(made)


def test_rows_join_those_that_rest_and_nothing_is_taken_in(
    tmp_path: Path, target: TargetModel
) -> None:
    """What a drafter has missed waits until it is to draft, or until there is no more room."""
    import test_eagle_behind as eagle

    drafter = eagle.Played(path=eagle.folder(tmp_path, target), **eagle.OPTIONS)
    engine, turns, loads, _ = by_launch(
        target, drafter, SHAPES[1:2], every=1, moves=True, slots=len(SEVERAL)
    )
    told = list[int]()
    drafter.catch_up = lambda tokens, features: told.append(len(features))  # type: ignore[method-assign]
    turns.rounds._take_in = lambda: told.append(-1)  # type: ignore[method-assign]
    run = go(engine, SEVERAL, every=2)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, SEVERAL).items()}
    assert (len(loads), told) == (1, [])


def check_given(made: Sequence[Any]) -> None:
    """Two drafters were given the same tokens with the same features."""
    one, other = (drafter.given for drafter in made)
    assert len(one) == len(other) == len(SEVERAL)
    for prompt in one:
        # What is left where a row ends is nobody's.
        known = list(zip(one[prompt], other[prompt], strict=False))
        assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in known)
        assert len(known) > 2


def test_rows_join_with_ngram(target: TargetModel) -> None:
    shapes = [SHAPES[i] for i in (0, 1, 3)]
    runs = [several(target, drafters.build("ngram"), shapes, on, 2, 5) for on in (True, False)]
    assert runs[0][0] > 0
    assert runs[0][2] <= 2 < runs[1][2]


def test_several_rows_are_moved_with_ngram(target: TargetModel) -> None:
    shapes = [SHAPES[i] for i in (0, 1, 3)]
    check_moves(target, lambda: drafters.build("ngram"), shapes, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gdn", "attention"])
def test_several_rows_are_moved_by_an_eagle_drafters_kernels(
    tmp_path: Path, target: TargetModel, mixer: str
) -> None:
    import test_eagle_behind as eagle

    sizes = {"mixer": mixer, "head_dim": 64, "head_v_dim": 64}
    if mixer == "attention":
        sizes["num_v_heads"] = 1
    path = eagle.folder(tmp_path, target, **sizes)
    check_moves(target, lambda: eagle.EagleDrafter(path=path, **eagle.OPTIONS), SHAPES, 4)


def test_a_row_that_joins_does_not_keep_others_waiting(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next round is launched before the host waits for the new row's prompt; a row that comes
    to an idle device has its clock started before its first round."""
    done = list[str]()
    monkeypatch.setattr(
        "specla.engine.prompts.mark", lambda device: lambda: done.append("through its prompt")
    )
    engine, rounds = engine_with(target, drafters.build("ngram"), "off", slots=2)
    engine.capture()
    start = rounds._start
    monkeypatch.setattr(rounds, "_start", lambda: (done.append("round"), start())[1])
    for i in range(2):
        engine.add(SEVERAL[i])
        for _ in range(3):
            engine.step()
    assert done[:2] == ["through its prompt", "round"]
    at = done.index("through its prompt", 1)
    assert done[at - 1 : at + 2] == ["round", "through its prompt", "round"]
    assert done.count("through its prompt") == 2
    assert done[at - 2] == "round", "of the row that was there"
