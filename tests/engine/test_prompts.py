# SPDX-License-Identifier: Apache-2.0
"""Prompts of several rows in one step: side by side for the model, and each its own row's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from eagle_toy import habits_drafter
from engine_harness import drive, make_engine, outcome, plain, request
from engine_requests import LONG, LOOP, WALK
from torch import Tensor

from specla.models.base import TargetModel
from specla.models.features import Features
from specla.state import State

REQUESTS = [
    request(name, prompt, seed=seed, max_tokens=9)
    for seed, (name, prompt) in enumerate(
        {"loop": LOOP, "walk": WALK, "long": LONG[:70], "again": LOOP}.items()
    )
]


class Watched:
    """A target whose prefills are seen, and end the features of the one before."""

    def __init__(self, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[list[int]] = []
        self.outside, self.fails = 0, 0
        self._inside, self._given = False, list[Tensor]()
        self._prefill = target.prefill
        monkeypatch.setattr(target, "prefill", self.prefill, raising=False)
        monkeypatch.setattr(target, "side_by_side", self.side_by_side, raising=False)

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        self._inside = True
        self.blocks.append([])
        try:
            yield
        finally:
            self._inside = False

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], slot: int, state: State, features: Features | None = None
    ) -> None:
        if self._inside:
            self.blocks[-1].append(len(tokens))
        else:
            self.outside += 1
        for x in self._given:
            x.fill_(float("nan"))
        if slot == self.fails:
            raise ValueError("no")
        self._prefill(tokens, slot, state, features)
        self._given = [features.output(i) for i in features.layers] if features else []


def test_a_step_has_all_its_prompts_at_once(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that somebody else has is his; one that is alone is not beside anybody."""
    want = {name: outcome(c) for name, c in plain(target, REQUESTS).items()}
    seen = Watched(target, monkeypatch)
    assert drive(make_engine(target), REQUESTS).outcomes() == want
    assert seen.blocks == [[len(LOOP) - 1, len(WALK) - 1, 64]]
    assert seen.outside == 1, "what was left of the long one"
    drive(make_engine(target), [REQUESTS[1]])
    assert (len(seen.blocks), seen.outside) == (1, 2)


def test_features_are_read_before_the_next_prompt(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds() -> dict[str, tuple[int, int]]:
        done = drive(make_engine(target, habits_drafter()), REQUESTS).completions
        return {name: (c.speculation.drafted, c.speculation.accepted) for name, c in done.items()}

    want = rounds()
    assert sum(accepted for _, accepted in want.values()) > 0
    Watched(target, monkeypatch)
    assert rounds() == want


def test_a_prompt_that_fails_ends_alone(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = {name: outcome(c) for name, c in plain(target, REQUESTS).items()}
    seen, engine = Watched(target, monkeypatch), make_engine(target)
    for one in REQUESTS[:3]:
        engine.add(one)
    seen.fails = 2
    with pytest.raises(ValueError, match="no"):
        engine.step()
    seen.fails = 0
    assert [row.request.request_id for row in engine.scheduler.running.values()] == [
        "loop",
        "long",
    ]
    assert engine.stats.finished == {"abort": 1}
    run = drive(engine, [])
    assert run.outcomes() == {name: want[name] for name in ("loop", "long")}
    assert seen.blocks[0] == [len(LOOP) - 1, len(WALK) - 1]
