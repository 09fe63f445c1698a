# SPDX-License-Identifier: Apache-2.0
"""A block drafter inside the round's graph, in the engine: its kernels, in Triton's interpreter,
on the played CUDA of `test_graph_rounds`. Rows that join, end and are the host's, shapes and rest
by turns. Tier: exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from behind import Turns
from block_toy import DFLASH, block_config, reader_config, write_block
from engine_harness import drive, make_engine, outcome, plain, request
from engine_requests import LOOP, WALK
from test_block_graph import played
from test_graph_rounds import cuda, engine_with, go  # noqa: F401 - a fixture

from specla.drafters.base import Shape
from specla.drafters.block import BlockDrafter
from specla.models.base import TargetModel

pytest.importorskip("triton")
from specla.drafters.block_device import DeviceBlock
from specla.ops.rows import INTERPRET

pytestmark = pytest.mark.skipif(not INTERPRET, reason="a GPU has its own tests")
OPTIONS: dict[str, Any] = {"tau": 50.0, "top_k": 2, "longest": 64}
SOME = [
    request("a", LOOP, seed=2, max_tokens=7),
    request("b", (11,), seed=3, max_tokens=4),
    request("host's", WALK, seed=8, top_k=3, temperature=0.5, max_tokens=2),
]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specla.drafters.block_graph.captured", played)


def folder(tmp_path: Path, target: TargetModel, reads: bool = False, **sizes: Any) -> str:
    small = {"windows": (None,), "block_size": 3, "num_kv_heads": 1, "target_fingerprint": None}
    reader = reader_config(target.info) if reads else None
    return str(write_block(tmp_path, block_config(target.info, **{**small, **sizes}), reader))


@pytest.mark.parametrize(
    "kind", ["dspark", "reader", pytest.param("dflash", marks=pytest.mark.slow)]
)
def test_rounds_are_the_host_drafters(tmp_path: Path, target: TargetModel, kind: str) -> None:
    sizes = {**DFLASH, "block_size": 4} if kind == "dflash" else {}
    path = folder(tmp_path, target, kind == "reader", **sizes)
    drafter = BlockDrafter(path=path, on_device=True, **OPTIONS)
    engine, rounds = engine_with(target, drafter, "off")
    assert type(engine.drafter) is DeviceBlock
    run = go(engine, SOME)
    host = drive(make_engine(target, BlockDrafter(path=path, **OPTIONS), nodes=4), SOME)
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, SOME).items()}
    for name, done in run.completions.items():
        want = host.completions[name].speculation
        assert done.speculation.acceptance_histogram == want.acceptance_histogram
        assert done.speculation.drafted == want.drafted
    assert rounds._count > 4


def test_shapes_and_rest_by_turns(tmp_path: Path, target: TargetModel) -> None:
    engine, rounds = engine_with(
        target, BlockDrafter(path=folder(tmp_path, target), on_device=True, **OPTIONS), "paying"
    )
    turns = Turns([Shape(4, 3), Shape(1, 0), Shape(2, 1)], 2)
    engine.spending.free = turns  # type: ignore[union-attr, assignment]
    run = go(engine, SOME[:2])
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, SOME[:2]).items()}
    assert {shape for shape, _ in turns.seen} >= {Shape(4, 3), Shape(1, 0)}
    assert rounds._resting is not None
    drafter = engine.drafter
    assert isinstance(drafter, DeviceBlock)
    assert torch.isfinite(drafter._caches).all()
