# SPDX-License-Identifier: Apache-2.0
"""A row that joins others which an EAGLE drafter has on the device and does not draft for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_eagle_device import game, needs_interpreter

from specla.drafters.eagle_device import _in_parts
from specla.models.base import TargetModel


@needs_interpreter
def test_a_row_that_joins_others_that_rest_on_the_device(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has missed less than they have: less than is encoded at once, or nothing but the round
    that is under way."""
    monkeypatch.setattr("specla.drafters.eagle_buffers.CHUNK", 4)
    play = game(tmp_path, target, 8, top_k=2, max_depth=3)
    play.start(1, 6)
    play.start(2, 9)
    play.start(3, 4)
    rnd, arrays = play.load([1], 8)
    play.round([1], rnd, arrays)
    play.device.launch(arrays, rnd, play.features, depth=1)  # takes in what is to be
    kept, slots = play.rested([1], rnd, 4), [1]
    for joining, rounds in ((2, 3), (3, 1)):
        slots = [*slots, joining]
        rnd, arrays = play.load(slots, 8, enter=False)
        play.device.move(range(len(slots) - 1), [joining])
        kept += play.rested(slots, rnd, rounds)
    missed = {1: 7, 2: 3, 3: 0}
    given = [[one[b] for one in kept[:-1] if b < len(one)] for b in range(3)]
    assert [len(one) for one in given] == [*missed.values()]
    tokens = [play.texts[slot][-1 - count : -1] for slot, count in missed.items()]
    play.device.catch_up(tokens, torch.stack([x for one in given for x in one]))
    for _ in range(2):
        play.round(slots, rnd, arrays)
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    assert play.accepted > 3 * 2


def test_parts_of_rows_that_have_missed_more_and_less() -> None:
    """Each row's tokens in order, with their own features."""
    tokens = [[11, 12, 13, 14, 15], [], [31, 32], [41, 42, 43]]
    features = torch.tensor([x for row in tokens for x in row])[:, None]
    parts = list(_in_parts(tokens, features, 2))
    assert [rows for rows, _ in parts] == [
        [[11, 12], [], [31, 32], [41, 42]], [[13, 14], [], [], [43]], [[15], [], [], []],
    ]  # fmt: skip
    for rows, part in parts:
        assert part[:, 0].tolist() == [x for row in rows for x in row]
    ((rows, part),) = _in_parts(tokens, features, 5)
    assert rows == tokens
    assert part.equal(features)
    assert not list(_in_parts([[], []], features[:0], 2))
