# SPDX-License-Identifier: Apache-2.0
"""The EAGLE drafter after rounds in which nobody asked it. Untrained weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from test_eagle import NODES, bound, committed, gdn, outputs, row, seen, text

from specla.models.base import TargetModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafter")


def test_what_many_rounds_have_left_is_encoded_at_once(
    folder: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for the slot that waits longest instead of seven, and none waits for ever."""
    rng, count, slots = random.Random(5), 7 * NODES, (1, 2)
    monkeypatch.setattr("specla.drafters.eagle.MOST_WAITING", 5 * NODES)
    rested, single = bound(folder, target), bound(folder, target)
    texts = {slot: text(rng, count) for slot in slots}
    given = {slot: outputs(rng, target, count) for slot in slots}
    calls: list[int] = []
    encode, prefill = rested.model.encode, rested.model.prefill

    def counted(call):  # type: ignore[no-untyped-def]
        return lambda at, *rest: (calls.append(at), call(at, *rest))

    monkeypatch.setattr(rested.model, "encode", counted(encode))
    monkeypatch.setattr(rested.model, "prefill", counted(prefill))
    for i in range(count):
        for drafter in (rested, single):
            now = [seen(slot, texts[slot][i : i + 1]) for slot in slots]
            drafter.feed(now, torch.cat([given[slot][i : i + 1] for slot in slots]))
        single.draft([row(texts[slot][: i + 1], slot, 0) for slot in slots])
    assert calls == [1, 2], "at MOST_WAITING"
    rested.draft([row(texts[slot], slot, 0) for slot in slots])
    assert calls == [1, 2, [1, 2], [1, 2]]
    for slot in slots:
        for a, b in zip(committed(rested.model, slot), committed(single.model, slot), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert gdn(rested).state.logs[slot].committed_len == count
