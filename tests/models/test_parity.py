# SPDX-License-Identifier: Apache-2.0
"""Tier: algebra. The target model against the float64 oracle: every node's logits equal the
oracle's after the prompt and the node's path, and committed state equals the oracle's memory."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_gdn import LayerMemory, Oracle
from torch import Tensor

from specla.models.fla_gdn import FlaGDN
from specla.models.toy import write_toy_checkpoint
from specla.state import State
from specla.topology.tree import DraftTree

VOCAB = 97
SHAPES: dict[str, dict[str, Any]] = {
    "K16 V32": {},
    "K32 V16": {"head_dim": 32, "expand_v": 0.5},
    "K = V": {"expand_v": 1.0},
    "grouped values": {"num_v_heads": 6, "hidden": 48},
    "negative eigenvalues": {"neg_eigval": True},
    "no gate": {"use_gate": False},
    "tied": {"tie": True},
    "all at once": {"num_v_heads": 4, "neg_eigval": True, "use_gate": False, "tie": True},
}


def chain(length: int) -> DraftTree:
    return DraftTree(tuple(range(5, 5 + length)), (-1, *range(length - 1)))


def random_tree(size: int, seed: int) -> DraftTree:
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(i) for i in range(1, size))]
    return DraftTree(tuple(rng.sample(range(VOCAB), size)), tuple(parents))


TREES = {
    "one node": DraftTree((7,), (-1,)),
    "chain": chain(6),
    "star": DraftTree((1, 2, 3, 4), (-1, 0, 0, 0)),
    "binary": DraftTree((1, 2, 3, 4, 5, 6, 7), (-1, 0, 0, 1, 1, 2, 2)),
    "repeated token": DraftTree((3, 3, 3, 4, 3), (-1, 0, 1, 0, 3)),
    "random": random_tree(16, 0),
}


class Case:
    """One model, its oracle, and a state with one prompt prefilled per row."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]], capacity: int = 4) -> None:
        self.model = FlaGDN.from_checkpoint(
            folder, device=torch.device("cpu"), dtype=torch.float64
        )
        config = json.loads((folder / "config.json").read_text())
        self.oracle = Oracle.from_folder(folder, config)
        self.state = State(
            self.model.info.recurrent,
            num_slots=len(prompts),
            max_nodes=16,
            log_capacity=capacity,
            dtype=torch.float64,
        )
        self.slots = [self.state.acquire() for _ in prompts]
        self.memory: list[list[LayerMemory]] = []
        for slot, prompt in zip(self.slots, prompts, strict=True):
            if prompt:
                self.model.prefill(prompt, slot, self.state)
            self.memory.append(self.oracle.run(prompt)[1] if prompt else self.oracle.start())

    def round(self, trees: Sequence[DraftTree], paths: Sequence[Sequence[int]]) -> None:
        """Verify, compare every node with the oracle, commit `paths` on both sides."""
        logits = self.model.verify(self.state.begin(self.slots, trees), self.state)
        sizes = [len(tree.tokens) for tree in trees]
        for row, (tree, given) in enumerate(zip(trees, logits.split(sizes), strict=True)):
            want, memories = self.walk(tree, self.memory[row])
            torch.testing.assert_close(given, want, rtol=1e-10, atol=1e-10)
            self.memory[row] = memories[paths[row][-1]]
        self.state.commit(self.slots, paths)
        self.check_state()

    def walk(
        self, tree: DraftTree, root: list[LayerMemory]
    ) -> tuple[Tensor, list[list[LayerMemory]]]:
        """The oracle at every node, each continued from its parent."""
        rows: list[Tensor] = []
        memories: list[list[LayerMemory]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            logits, memory = self.oracle.step(token, memories[parent] if parent >= 0 else root)
            rows.append(logits)
            memories.append(memory)
        return torch.stack(rows), memories

    def check_state(self) -> None:
        for slot, memory in zip(self.slots, self.memory, strict=True):
            for (S, tail), layer in zip(self.state.committed_state(slot), memory, strict=True):
                torch.testing.assert_close(S, layer.S, rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(tail, layer.past, rtol=1e-10, atol=1e-10)


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_node_equals_the_oracle_on_its_path(tmp_path: Path, shape: dict[str, Any]) -> None:
    trees = list(TREES.values())
    prompts = [[11, 12, 13, 14, 15][:i] for i in range(len(trees))]
    case = Case(write_toy_checkpoint(tmp_path, vocab=VOCAB, **shape), prompts)
    case.round(trees, [path_to(tree, len(tree.tokens) - 1) for tree in trees])
    case.round(trees[::-1], [[0]] * len(trees))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 63, 64, 65])
def test_prompts_shorter_than_the_convolution_and_across_chunks(
    tmp_path: Path, length: int
) -> None:
    prompt = [(7 * i + 3) % VOCAB for i in range(length)]
    case = Case(write_toy_checkpoint(tmp_path, vocab=VOCAB, num_layers=1), [prompt])
    case.check_state()
    case.round([TREES["random"]], [[0]])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 20])
def test_prefill_continues_where_it_stopped(tmp_path: Path, cut: int) -> None:
    prompt = [(5 * i + 1) % VOCAB for i in range(21)]
    case = Case(write_toy_checkpoint(tmp_path, vocab=VOCAB), [prompt[:cut]])
    case.model.prefill(prompt[cut:], case.slots[0], case.state)
    _, case.memory[0] = case.oracle.run(prompt)
    case.check_state()


@pytest.mark.parametrize("capacity", [0, 1, 4, 16])
def test_rounds_of_random_trees_follow_the_oracle(tmp_path: Path, capacity: int) -> None:
    prompts = [[1, 2, 3], [], [9] * 7]
    case = Case(write_toy_checkpoint(tmp_path, vocab=VOCAB), prompts, capacity)
    rng = random.Random(capacity)
    for _ in range(5):
        trees = [random_tree(rng.randrange(1, 12), rng.randrange(1 << 30)) for _ in prompts]
        paths = [path_to(tree, rng.randrange(len(tree.tokens))) for tree in trees]
        case.round(trees, paths)
