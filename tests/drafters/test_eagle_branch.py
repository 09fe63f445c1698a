# SPDX-License-Identifier: Apache-2.0
"""What is attention's alone in an EAGLE drafter's rounds on the device: long contexts, many heads
and nodes, rows that have no room. The rest: `test_eagle_device`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config, write_drafter
from test_eagle_device import ATTENTION, Game, game, needs_interpreter, small

from specla.drafters import DraftRow
from specla.models.base import TargetModel
from specla.ops.contract import DeviceRound

pytest.importorskip("triton")

__all__ = ["small"]

pytestmark = needs_interpreter


@pytest.mark.parametrize("num_v_heads", [1, 4])
def test_a_long_context_is_read_in_parts(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, num_v_heads: int
) -> None:
    """More parts than tiles, and more tiles than parts; a frontier of several tiles of queries;
    chunks are not divided."""
    monkeypatch.setattr("specla.drafters.triton_block.UNDIVIDED", 64)
    monkeypatch.setattr("specla.drafters.triton_block.PARTS", 4)
    monkeypatch.setattr("specla.drafters.eagle_buffers.CHUNK", 16)
    sizes = {**ATTENTION, "num_v_heads": num_v_heads}
    play = game(tmp_path, target, 24, sizes, top_k=6, max_depth=4, longest=128)
    slots = [1, 2]
    play.start(1, 90)
    play.start(2, 9)
    rnd, arrays = play.load(slots, 32)
    for _ in range(2):
        play.round(slots, rnd, arrays)
    assert play.drafted == 4 * 23
    assert play.deepest == 4
    play.device.leave(slots, rnd, play.features)
    play.rest(1, 9)
    play.check_states(slots)


class Short(Game):
    """Its host drafts nothing for rows that are too long, as the device does."""

    longest = 24

    def row(self, slot: int, rnd: DeviceRound, is_last: bool) -> DraftRow:
        return super().row(slot, rnd, is_last or len(self.texts[slot]) - 1 > self.longest)


def test_a_row_that_grows_too_long_drafts_nothing(tmp_path: Path, target: TargetModel) -> None:
    """There or on the host, when it comes back or comes with a long prompt; what is beside it
    in the cache stays."""
    write_drafter(tmp_path, toy_config(target.info, **ATTENTION))
    options: dict[str, object] = {"tau": 50.0, "top_k": 2, "max_depth": 3}
    play = Short(tmp_path, target, 4, {**options, "longest": Short.longest})
    play.start(1, 24)
    play.start(2, 12)
    slots = [1, 2]
    rnd, arrays = play.load(slots, 4)
    while len(play.texts[1]) - 1 <= play.longest:
        play.round(slots, rnd, arrays)
    device, drafted = play.device, play.drafted
    last = device.model.last[1].clone()
    for _ in range(2):
        play.round(slots, rnd, arrays)
    assert play.drafted == drafted + 2 * 3
    assert torch.equal(device.model.last[1], last), "nothing is read where there is no room"
    device.leave(slots, rnd, play.features)
    play.check_states([2])
    play.rest(1, 2)
    play.start(3, 30, chunk=8)
    rows = [Game.row(play, slot, rnd, False) for slot in (1, 2, 3)]
    assert [tree.num_drafts for tree in device.draft(rows)] == [0, 3, 0]
    assert device._mixer.cursor(1).length == len(play.texts[1]) - 1
    assert device._mixer.cursor(3).length == 29
    play.check_states([2])
    play.end(3)
    play.start(3, 5)
    rnd, arrays = play.load([3, 1], 4)
    for _ in range(2):
        play.round([3, 1], rnd, arrays)


def test_runs_repeat_and_drafts_enter_no_context(tmp_path: Path, target: TargetModel) -> None:
    """The same bits of all logits, and of what is kept."""

    def run() -> list[torch.Tensor]:
        play = game(tmp_path, target, 8, ATTENTION, top_k=3, max_depth=3)
        play.start(1, 20)
        play.start(2, 3)
        rnd, arrays = play.load([1, 2], 8)
        mixer = play.device.model.mixer
        before = mixer.kept.clone()  # type: ignore[attr-defined]
        play.device.launch(arrays, rnd, play.features, depth=3)
        assert rnd.num_nodes.tolist()[:2] == [8, 8]
        assert torch.equal(before, mixer.kept)  # type: ignore[attr-defined]
        play.accept([1, 2], rnd, play.eager.draft([play.row(s, rnd, False) for s in (1, 2)]))
        play.device.launch(arrays, rnd, play.features, depth=3)
        layer = play.device._layer
        assert layer is not None
        return [layer._buffers.take("logits", 2 * 3).clone(), mixer.kept.clone()]  # type: ignore[attr-defined]

    assert all(map(torch.equal, run(), run()))
