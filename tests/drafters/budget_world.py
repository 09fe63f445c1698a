# SPDX-License-Identifier: Apache-2.0
"""A world where acceptance and costs are known: rounds without a model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specla.drafters.base import DraftRow, Observation
from specla.drafters.budget import Budget
from specla.topology.tree import DraftTree


@dataclass
class Stairs:
    """Costs of a round in microseconds: `fixed` and `each` per node of a row and bucket; of a
    call, `draft` and `level` per level."""

    fixed: float = 1000.0
    each: float = 10.0
    draft: float | None = 50.0
    level: float = 0.0
    padded: bool = True

    def round_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float:
        width = 1 << (nodes - 1).bit_length() if self.padded else nodes
        return self.fixed + self.each * rows * width

    def draft_us(self, rows: int, nodes: int, *, depth: int | None = None) -> float | None:
        if self.draft is None or depth is None:
            return self.draft
        return self.draft + self.level * depth


@dataclass
class Played:
    """What a run came to: tokens per row, AR steps, and the nodes of each round."""

    tokens: float
    steps: float
    nodes: list[int]

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return self.tokens / self.steps


Law = Callable[[int, int], float]
"""(round, depth) -> probability that a draft is accepted if its parent was."""


def play(
    budget: Budget | None,
    costs: Stairs,
    law: Law,
    *,
    rows: int,
    rounds: int,
    max_nodes: int = 16,
    drafts: int = 0,
    seed: int = 0,
    confidence: float | None = None,
) -> Played:
    """Chains as long as asked for. Without a budget: `drafts` of them, always. confidence: that
    the drafter has in every one."""
    rng, step = random.Random(seed), costs.round_us(rows, 1)
    played = Played(0.0, 0.0, [])
    for i in range(rounds):
        slots = range(1, rows + 1)
        asked = [_row(slot, max_nodes, i) for slot in slots]
        if budget is None:
            sizes = [drafts] * rows
        else:
            sizes = [row.max_drafts for row in budget.ask(asked)]
        trees = [_chain(size, confidence) for size in sizes]
        drafted = any(sizes)
        us = (costs.draft or 0.0) if drafted else 0.0
        decision = None
        if budget is not None:
            trees, decision = budget.choose(slots, trees, draft_us=us if drafted else None)
        nodes = _nodes(trees, costs)
        seen = [_judge(slot, tree, law, i, rng) for slot, tree in zip(slots, trees, strict=True)]
        if budget is not None and decision is not None:
            budget.observe(seen, decision.reason)
        played.tokens += sum(len(one.emitted) for one in seen) / rows
        played.steps += (costs.round_us(rows, nodes) + us) / step
        played.nodes.append(nodes)
    return played


def _chain(drafts: int, confidence: float | None) -> DraftTree:
    logprobs = None if confidence is None else [math.log(confidence)] * drafts
    return DraftTree.chain(1, range(2, 2 + drafts), logprobs)


def _nodes(trees: Sequence[DraftTree], costs: Stairs) -> int:
    if costs.padded:
        return max(tree.num_nodes for tree in trees)
    return -(-sum(tree.num_nodes for tree in trees) // len(trees))


def _row(slot: int, max_nodes: int, output: int) -> DraftRow:
    return DraftRow(
        slot=slot,
        tokens=(1,) * (1 + output),
        num_prompt_tokens=1,
        max_drafts=max_nodes - 1,
        seed=0,
    )


def _judge(slot: int, tree: DraftTree, law: Law, i: int, rng: random.Random) -> Observation:
    path = [0]
    while len(path) < tree.num_nodes and rng.random() < law(i, len(path)):
        path.append(len(path))
    emitted = tuple(range(len(path)))
    return Observation(slot=slot, tree=tree, path=tuple(path), emitted=emitted)
