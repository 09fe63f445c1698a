# SPDX-License-Identifier: Apache-2.0
"""A drafter that reads features, in the engine: forks, chains against trees, what it is fed.
That it changes no output: `test_lossless.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from eagle_toy import habits_drafter, toy_config, write_drafter
from engine_harness import drive, make_engine, outcome, plain, request
from engine_requests import LONG, LOOP, WALK

from specla.drafters.base import DraftRow, Observation
from specla.drafters.eagle import EagleDrafter
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.state import State
from specla.testing import follow
from specla.topology.tree import DraftTree

REQUESTS = [
    request(f"{i}/{t}", prompt, temperature=t, seed=i, max_tokens=24)
    for i, prompt in enumerate((LOOP, WALK, LONG, LOOP[:5], LONG[:70]))
    for t in (0.0, 0.9)
]


class Both:
    """Drafts with a tree; also asks for the chain that the same drafter would have drafted."""

    def __init__(self, inner: EagleDrafter) -> None:
        self.inner, self.chains = inner, dict[int, DraftTree]()
        self.longer = self.equal = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        top_k, self.inner._top_k = self.inner._top_k, 1
        self.chains = dict(zip((r.slot for r in rows), self.inner.draft(rows), strict=True))
        self.inner._top_k = top_k
        return self.inner.draft(rows)

    def observe(self, seen: Sequence[Observation]) -> None:
        for one in seen:
            path, _ = follow(self.chains[one.slot], one.emitted)
            assert len(path) <= len(one.path)
            self.longer += len(path) < len(one.path)
            self.equal += len(path) == len(one.path)


@pytest.mark.parametrize("nodes", [4, 8])
def test_a_tree_never_accepts_less_than_its_chain(target: TargetModel, nodes: int) -> None:
    both = Both(habits_drafter(max_depth=2))
    run = drive(make_engine(target, both, slots=3, nodes=nodes), REQUESTS)  # type: ignore[arg-type]
    assert run.outcomes() == _plain(target)
    assert both.longer
    assert both.equal


def _plain(target: TargetModel) -> dict[str, tuple[object, ...]]:
    return {name: outcome(c) for name, c in plain(target, REQUESTS).items()}


def test_requests_that_share_a_prompt_share_its_features(target: TargetModel) -> None:
    """Forked slots draft what a slot prefilled by itself would: the same rounds."""
    many = [request(f"r{i}", LONG, temperature=1.0, seed=i) for i in range(4)]
    together = drive(make_engine(target, habits_drafter(), slots=4), many)
    for one in many:
        alone = drive(make_engine(target, habits_drafter(), slots=1), [one])
        a, b = alone.completions[one.request_id], together.completions[one.request_id]
        assert a.token_ids == b.token_ids
        assert a.speculation == b.speculation


class Recorder(EagleDrafter):
    """Keeps what it is fed: (token before which the features stand, features)."""

    def __init__(self, inner: EagleDrafter) -> None:
        super().__init__(path=str(inner._folder), tau=50.0)
        self.fed: list[tuple[list[int], object]] = []

    def prefill(self, slot, tokens, features):  # type: ignore[no-untyped-def]
        self.fed.append((list(tokens), features))
        super().prefill(slot, tokens, features)

    def feed(self, seen, features):  # type: ignore[no-untyped-def]
        self.fed.append(([t for one in seen for t in one.emitted], features))
        super().feed(seen, features)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_features_belong_to_the_tokens_they_come_with(
    target: TargetModel, temperature: float
) -> None:
    """All that was fed, end to end, is the text moved by one and the features of one long
    prefill of it."""
    drafter = Recorder(habits_drafter())
    one = request("a", LONG, temperature=temperature, seed=3, max_tokens=30)
    done = drive(make_engine(target, drafter, slots=2, nodes=8), [one]).completions["a"]
    assert done.speculation.accepted
    text = [*LONG, *done.token_ids]
    assert [t for tokens, _ in drafter.fed for t in tokens] == text[1:]
    state = State(target.info.recurrent, num_slots=1, max_nodes=1, dtype=target.dtype)
    features, slot, want = Features(drafter.feature_layers), state.acquire(), []
    for start in range(0, len(text) - 1, 64):
        target.prefill(text[start : min(start + 64, len(text) - 1)], slot, state, features)
        want.append(features.rows())
    given = torch.cat([rows for _, rows in drafter.fed])  # type: ignore[misc]
    torch.testing.assert_close(given, torch.cat(want), rtol=1e-3, atol=1e-4)


def test_the_drafter_of_another_target_is_refused(
    target: TargetModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_drafter(
        tmp_path_factory.mktemp("other"), toy_config(target.info, vocab_size=25)
    )
    with pytest.raises(ConfigError, match="vocabulary"):
        make_engine(target, EagleDrafter(path=str(folder)))


def test_a_target_without_such_a_drafter_takes_no_features(target: TargetModel) -> None:
    engine: Engine = make_engine(target)
    assert engine._features is None
    engine.use(habits_drafter())
    assert engine._features is not None
