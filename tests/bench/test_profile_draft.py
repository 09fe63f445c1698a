# SPDX-License-Identifier: Apache-2.0
"""What a call of a drafter that reads features costs: what is called, and under which sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from block_toy import block_config, reader_config, write_block
from eagle_toy import toy_config, write_drafter
from engine_harness import load_target, one_thread

from specla.bench import profile_draft as draft
from specla.bench.profile import Profile
from specla.drafters.base import Shape
from specla.drafters.eagle import EagleDrafter
from specla.models.base import TargetModel
from specla.ops.contract import RowArrays
from specla.state import State
from specla.state.rounds import DeviceRounds

pytest.importorskip("triton")
from specla.drafters.block_device import DeviceBlock
from specla.drafters.eagle_device import DeviceEagle
from specla.ops.rows import INTERPRET


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tmp_path_factory.mktemp("target"))


def folder(tmp_path: Path, target: TargetModel) -> str:
    sizes = {"head_dim": 64, "head_v_dim": 64, "num_v_heads": 1, "draft_vocab_size": 24}
    return str(write_drafter(tmp_path, toy_config(target.info, **sizes)))


def state(target: TargetModel) -> State:
    return State(target.info.recurrent, num_slots=2, max_nodes=2, dtype=target.dtype)


@pytest.mark.skipif(not INTERPRET, reason="this target is a CPU's")
def test_one_that_reads_states_is_given_some(tmp_path: Path, target: TargetModel) -> None:
    sizes = {"block_size": 3, "windows": (None,), "num_kv_heads": 1}
    write_block(tmp_path, block_config(target.info, **sizes), reader_config(target.info))
    block = DeviceBlock(path=str(tmp_path), top_k=1)
    assert draft.placed(block, target, state(target), rows=2, nodes=2, exact=True) is block
    rnd = DeviceRounds(2, target.device).round(2, 2)
    rows = RowArrays(*[torch.full((2,), 50, dtype=torch.int32)] * 6)
    draft.launching(block, target, rows, rnd, 1)()
    assert rnd.num_nodes.tolist() == [2, 2]


@pytest.mark.skipif(not INTERPRET, reason="this target is a CPU's")
def test_a_call_on_the_device_encodes_and_drafts(tmp_path: Path, target: TargetModel) -> None:
    eagle = DeviceEagle(path=folder(tmp_path, target), top_k=1, max_depth=1)
    made = draft.placed(eagle, target, state(target), rows=2, nodes=2, exact=True)
    assert made is eagle
    rnd = DeviceRounds(2, target.device).round(2, 2)
    rows = RowArrays(*[torch.full((2,), 50, dtype=torch.int32)] * 6)
    call = draft.launching(eagle, target, rows, rnd, 1)
    for nodes in (1, 2):
        call()
        assert rnd.num_nodes.tolist() == [nodes, nodes]
    cursors = eagle._layer.read(2)  # type: ignore[union-attr]
    # A path of one token, in each round but the first.
    assert [encoded for *_, encoded in cursors] == [1, 1]


def test_which_calls_are_measured(tmp_path: Path, target: TargetModel) -> None:
    path = folder(tmp_path, target)
    device, host = DeviceEagle(path=path, max_depth=6), EagleDrafter(path=path)
    shapes = [Shape(2, 1), Shape(4, 2), Shape(4, 3), Shape(8, 4), Shape(8, 6)]
    assert draft.asked(device, 8, on_gpu=True) == shapes
    assert draft.asked(host, 8, on_gpu=True) == [Shape(8, 7)]
    assert draft.asked(device, 8, on_gpu=False) == [Shape(8, 7)]


def test_a_drafter_of_the_host_reads_the_targets_own_features(
    tmp_path: Path, target: TargetModel
) -> None:
    host = EagleDrafter(path=folder(tmp_path, target))
    measuring = Profile(
        target, mode="exact", max_batch=1, max_nodes=2, log_capacity=0, drafter=host,
        budget_s=0.001,
    )  # fmt: skip
    assert measuring.drafter is host
    measuring._measure_draft(1, Shape(2, 1))
    table = measuring.table()
    assert table.draft_us(1, 2, host.info.priced_as, depth=1) > 0
    assert [(cost.rows, cost.nodes, cost.depth) for cost in table.costs] == [(1, 2, 1)]
