# SPDX-License-Identifier: Apache-2.0
"""A block drafter on a GPU, driven by the host, with a state reader, or inside the round's graph:
it changes no token, inside the graph its trees are the host's, and what it reads is what is
committed. GDN-1.3B's shape in two or four layers, random weights. States after rounds inside the
graph: test_gpu_free.py.

    pytest -m gpu tests/engine/test_gpu_block.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from block_toy import DFLASH, block_config, random_tensors, reader_config, write_block
from test_block_device import Blocks, Reads
from test_gpu_eagle import Counting

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.drafters.base import Drafter
from specla.drafters.block import BlockDrafter
from specla.drafters.block_device import DeviceBlock
from specla.drafters.block_graph import GraphBlock
from specla.drafters.none import NoDrafter
from specla.drafters.reader import Reader, reader_tensors
from specla.engine.engine import Engine
from specla.ops.contract import Factors
from specla.request import Completion, Request, SamplingParams
from specla.state import State

pytestmark = pytest.mark.gpu
ROWS, TOKENS = 4, 200
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": dict(DFLASH),
    "windows": {"windows": (16, None)},
}
SIZES: dict[str, Any] = {"head_dim": 64, "intermediate_size": 512, "target_layer_ids": (0, 2)}


@cache
def target() -> RandomGDN:
    return gdn_1_3b(layers=4)


def decode(
    drafter: Drafter, max_nodes: int, on_step: Callable[[Engine], None] = lambda engine: None
) -> dict[str, Completion]:
    model = target()
    state = State(
        model.info.recurrent,
        num_slots=ROWS,
        max_nodes=max_nodes,
        log_capacity=16,
        dtype=model.dtype,
        device=model.device,
    )
    engine = Engine(model, state, drafter, mode="exact", prefill_chunk=256, budget="off")
    for row in range(ROWS):
        params = SamplingParams(temperature=0.8 * (row % 2), max_tokens=TOKENS, ignore_eos=True)
        tokens = tuple((37 * row + 11 * i) % 31000 + 5 for i in range(3 + 40 * row))
        engine.add(
            Request(
                request_id=str(row),
                prompt=None,
                prompt_token_ids=tokens,
                params=params,
                seed=row,
            )
        )
    done: dict[str, Completion] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                done[delta.request_id] = delta.completion
        on_step(engine)
    return done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reads", [False, True], ids=["graphs", "reader"])
def test_it_changes_no_token(kind: str, reads: bool, tmp_path: Path) -> None:
    """As graphs, with a context that outgrows its first room, and with a reader in them."""
    config = block_config(target().info, **{**SIZES, **KINDS[kind]})
    write_block(tmp_path, config, reader_config(target().info, state_layers=(1, 3), rank=8))
    reader = None if reads else False
    drafter = BlockDrafter(path=str(tmp_path), tau=50.0, reader=reader, on_device=False)
    forms = set[type]()
    done = decode(drafter, 8, lambda engine: forms.add(type(engine.drafter)))
    assert tokens(done) == plain()
    assert forms == {GraphBlock}


def tokens(done: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {name: one.token_ids for name, one in done.items()}


@cache
def plain() -> dict[str, tuple[int, ...]]:
    return tokens(decode(NoDrafter(), 1))


@pytest.mark.parametrize(
    ("kind", "reads"), [*((kind, False) for kind in KINDS), ("dspark", True), ("dflash", True)]
)
def test_inside_the_graph_no_token_changes_and_runs_repeat(
    kind: str, reads: bool, tmp_path: Path
) -> None:
    """Rows of different lengths, one of which grows longer than it may draft for."""
    config = block_config(target().info, **{**SIZES, **KINDS[kind]})
    reader = reader_config(target().info, state_layers=(1, 3), rank=8) if reads else None
    path = str(write_block(tmp_path, config, reader))
    forms = set[type]()
    one, two = (
        decode(
            BlockDrafter(path=path, tau=50.0, on_device=True, longest=300), 8,
            lambda engine: forms.add(type(engine.drafter)),
        )
        for _ in "ab"
    )  # fmt: skip
    assert forms == {DeviceBlock}
    assert tokens(one) == plain()
    for name, done in one.items():
        assert done.speculation == two[name].speculation
        assert done.speculation.drafted > TOKENS


class Counted(Counting, Blocks):
    """Counts what the two trees of a row have in common."""


class CountedReads(Counting, Reads):
    """The same, reading states."""


@pytest.mark.parametrize("kind", KINDS)
def test_inside_the_graph_trees_are_the_hosts(kind: str, tmp_path: Path) -> None:
    """In float32; sums in another order may settle a near tie otherwise."""
    model = gdn_1_3b(layers=2, dtype=torch.float32)
    sizes = {**SIZES, "target_layer_ids": (0, 1), "head_dim": 128, **KINDS[kind]}
    write_block(tmp_path, block_config(model.info, **sizes))
    play = Counted(tmp_path, model, 16, {"tau": 50.0, "top_k": 4})
    slots = [1, 2, 3]
    for slot, prompt in zip(slots, (300, 1, 65), strict=True):
        play.start(slot, prompt)
    rnd, arrays = play.load(slots, 16)
    for last in ((), (), (2,), ()):
        play.round(slots, rnd, arrays, last)
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    play.rest(2, 70)
    rnd, arrays = play.load(slots, 16)
    play.round(slots, rnd, arrays)
    assert play.most > 100
    assert play.shared / play.most > 0.95


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_with_a_reader_trees_are_the_hosts_too(kind: str, tmp_path: Path) -> None:
    """States and logs being noise."""
    model = gdn_1_3b(layers=2, dtype=torch.float32)
    sizes = {**SIZES, "target_layer_ids": (0, 1), "head_dim": 128, **KINDS[kind]}
    write_block(tmp_path, block_config(model.info, **sizes), reader_config(model.info, rank=8))
    play = CountedReads(tmp_path, model, 16, {"tau": 50.0, "top_k": 4}, capacity=16)
    slots = [1, 2, 3]
    for slot, prompt in zip(slots, (300, 1, 65), strict=True):
        play.start(slot, prompt)
    rnd, arrays = play.load(slots, 16)
    for last in ((), (), (2,), ()):
        play.round(slots, rnd, arrays, last)
    assert len(play.logs_seen) > 6
    assert play.most > 100
    assert play.shared / play.most > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_host_it_waits_once_per_level(kind: str, tmp_path: Path) -> None:
    """To read the level's likeliest tokens, and the engine for the verdict; all that is sent goes
    without waiting."""
    write_block(tmp_path, block_config(target().info, **{**SIZES, **KINDS[kind]}))
    drafter = BlockDrafter(path=str(tmp_path), tau=50.0, on_device=False)
    levels = drafter.info.max_depth if drafter.config.markov_rank else 1
    rounds: list[int] = []

    def count(engine: Engine) -> None:
        """Of the round before, and from here on of the next one."""
        rounds.append(sum("synchroniz" in str(one.message) for one in caught))
        caught.clear()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            decode(drafter, 8, count)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    later = rounds[TOKENS // 4 : -ROWS]
    assert later
    assert 1 <= min(later) <= max(later) <= levels + 1


def test_it_reads_what_is_committed() -> None:
    """Base and log against the state that the fold kernel makes of them."""
    config = reader_config(target().info, state_layers=(1, 3), rank=8)
    tensors = random_tensors(reader_tensors(config), 3)
    reader = Reader(config, {name: x.to(target().device) for name, x in tensors.items()})
    lengths = set[int]()

    def compare(engine: Engine) -> None:
        state = engine.state
        for slot in [row.slot for row in engine.scheduler.running.values()]:
            found, folded = reader.read(state.committed, [slot]), state.committed_state(slot)
            for i, layer in enumerate(config.state_layers):
                none = Factors(*(x[:0] for x in state.committed(layer, slot)[1]))
                R, scale = reader.project(i, folded[layer][0], none)
                torch.testing.assert_close(found.R[0, i], R, rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(found.scale[0, i], scale, rtol=1e-3, atol=1e-3)
            lengths.add(state.logs[slot].log_len)

    class OnTheHost(NoDrafter):
        launch = None  # type: ignore[assignment]

    decode(OnTheHost(), 1, compare)
    assert len(lengths) > 8
