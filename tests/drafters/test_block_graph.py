# SPDX-License-Identifier: Apache-2.0
"""A block drafter whose products are CUDA graphs, played by launching again: the same trees as the
eager drafter's, whatever rows come, go and share, and however far their contexts grow."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_toy import block_config, reader_config, write_block
from engine_harness import load_target
from test_block import KINDS, SLOTS, outputs, text
from torch import Tensor

from specla.drafters import DraftRow, Observation
from specla.drafters.block import BlockDrafter
from specla.drafters.block_graph import GraphBlock
from specla.models.base import TargetModel
from specla.topology.tree import DraftTree

OPTIONS: dict[str, Any] = {"tau": 50.0, "top_k": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """In float64, so that no tie is settled by the order of a sum."""
    return load_target(tmp_path_factory.mktemp("wide"), dtype=torch.float64)


def played(launch: Callable[[], Tensor]) -> tuple[object, Tensor]:
    found = launch()
    return SimpleNamespace(replay=lambda: found.copy_(launch())), found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specla.drafters.block_graph.captured", played)
    monkeypatch.setattr("specla.drafters.block_graph.LEAST_CONTEXT", 4)
    monkeypatch.setattr("specla.drafters.block_graph.MOST_AT_ONCE", 8)


class Pair:
    """The two drafters, fed alike."""

    def __init__(self, folder: Path, target: TargetModel, **options: Any) -> None:
        self.rng, self.target = random.Random(1), target
        self.eager = BlockDrafter(path=str(folder), **OPTIONS, **options)
        made = self.eager.for_gpu(num_slots=SLOTS, max_nodes=9)
        assert isinstance(made, GraphBlock)
        self.both = self.eager, made
        self.texts: dict[int, list[int]] = {}
        for one in self.both:
            one.bind(target, num_slots=SLOTS, max_nodes=9, exact=False)

    def start(self, slot: int, prompt: int) -> None:
        self.texts[slot] = text(self.rng, prompt)
        given = outputs(self.rng, self.target, prompt - 1)
        if prompt > 1:
            for one in self.both:
                one.prefill(slot, self.texts[slot][1:], given)

    def end(self, slot: int) -> None:
        for one in self.both:
            one.reset(slot)
        del self.texts[slot]

    def fork(self, slot: int, to: int) -> None:
        self.texts[to] = list(self.texts[slot])
        for one in self.both:
            one.fork(slot, to)

    def round(self) -> int:
        """The same trees, then tokens for every row. Returns the nodes drafted."""
        rows = [
            DraftRow(slot=s, tokens=t, num_prompt_tokens=1, max_drafts=8, seed=0)
            for s, t in self.texts.items()
        ]
        want, got = (one.draft(rows) for one in self.both)
        assert [(t.tokens, t.parents) for t in got] == [(t.tokens, t.parents) for t in want]
        for a, b in zip(got, want, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, rel=1e-9)
        counts = {slot: self.rng.randint(1, 4) for slot in self.texts}
        emitted = {slot: text(self.rng, count) for slot, count in counts.items()}
        seen = [
            Observation(
                slot=slot, tree=DraftTree.root(self.texts[slot][-1]),
                path=tuple(range(counts[slot])), emitted=tuple(tokens),
            )
            for slot, tokens in emitted.items()
        ]  # fmt: skip
        given = outputs(self.rng, self.target, sum(counts.values()))
        for one in self.both:
            one.feed(seen, given)
        for slot, tokens in emitted.items():
            self.texts[slot] += tokens
        return sum(tree.num_drafts for tree in want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trees_are_the_eager_drafters(tmp_path: Path, target: TargetModel, kind: str) -> None:
    pair = Pair(write_block(tmp_path, block_config(target.info, **KINDS[kind])), target)
    pair.start(2, 21)
    pair.start(4, 1)
    drafted = pair.round()
    pair.fork(2, 1)
    drafted += pair.round()
    pair.end(2)
    pair.start(2, 3)
    pair.start(3, 9)
    drafted += sum(pair.round() for _ in range(3))
    pair.end(1)
    drafted += pair.round()
    assert drafted > 30
    lengths = pair.both[1]._lengths
    assert lengths == {slot: len(tokens) - 1 for slot, tokens in pair.texts.items()}


@pytest.mark.parametrize("options", [{"window": 3}, {"min_survival": 0.3}, {"max_depth": 2}])
def test_options(tmp_path: Path, target: TargetModel, options: dict[str, Any]) -> None:
    pair = Pair(write_block(tmp_path, block_config(target.info)), target, **options)
    pair.start(1, 12)
    pair.start(2, 2)
    assert sum(pair.round() for _ in range(3)) > 0


def test_it_can_be_bound_again_with_more_slots(tmp_path: Path, target: TargetModel) -> None:
    """As a profile does, in an engine for every number of rows."""
    drafter = GraphBlock(path=str(write_block(tmp_path, block_config(target.info))), **OPTIONS)
    for slots in (1, 3):
        drafter.bind(target, num_slots=slots, max_nodes=9, exact=False)
        given = outputs(random.Random(slots), target, 6)
        drafter.prefill(slots, list(range(6)), given)
        row = DraftRow(slot=slots, tokens=[5], num_prompt_tokens=1, max_drafts=8, seed=0)
        assert drafter.draft([row])[0].num_drafts
        drafter.reset(slots)


def test_one_that_reads_states_has_graphs_too(tmp_path: Path, target: TargetModel) -> None:
    """Unless the kernel that reads them cannot hold its rank. That trees are the eager drafter's:
    test_block_device.py."""
    for rank, form in ((32, GraphBlock), (33, BlockDrafter)):
        path = tmp_path / str(rank)
        write_block(path, block_config(target.info), reader_config(target.info, rank=rank))
        made = BlockDrafter(path=str(path), on_device=False).for_gpu(num_slots=1, max_nodes=4)
        assert type(made) is form
        assert made.info.name == "block+reader"
        assert ("a rank of at most 32, got 33" in str(made.info.fallback)) == (rank == 33)
    without = BlockDrafter(path=str(path), reader=False, on_device=False, **OPTIONS)
    made = without.for_gpu(num_slots=1, max_nodes=4)
    assert isinstance(made, GraphBlock)
    assert made.info.priced_as == f"{without.info.priced_as} graphs"
