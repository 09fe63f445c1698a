# SPDX-License-Identifier: Apache-2.0
"""Rule I4 for the shapes and types that `test_machine` leaves out. Tier: exact."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from histories import same
from plain_run import PROMPTS, PlainRun
from tiny_decoder import SHAPE, VOCAB, tiny_decoder

from specla.ops.contract import RecurrentShape
from specla.state import State
from specla.topology.tree import DraftTree

HEADS = replace(SHAPE, num_key_heads=2, num_value_heads=6)
CASES = {
    "bfloat16": (SHAPE, torch.bfloat16),
    "float64": (SHAPE, torch.float64),
    "three value heads per key head": (HEADS, torch.float32),
    "one value head per key head": (replace(HEADS, num_value_heads=2), torch.float32),
    "conv of 2": (replace(SHAPE, conv_width=2), torch.float32),
    "conv of 3, bfloat16": (replace(SHAPE, conv_width=3), torch.bfloat16),
    "one layer, V < K": (replace(SHAPE, num_layers=1, value_dim=2), torch.float32),
}
ROUNDS, MAX_NODES = 7, 9


def random_tree(rng: random.Random, root: int) -> DraftTree:
    tokens, parents = [root], [-1]
    for _ in range(rng.randrange(MAX_NODES)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_plain_decoding(case: str) -> None:
    shape, dtype = CASES[case]
    decoder = tiny_decoder(shape, dtype=dtype)
    for capacity in (0, 4):
        state = State(shape, num_slots=2, max_nodes=MAX_NODES, log_capacity=capacity, dtype=dtype)
        play_and_compare(state, decoder, PlainRun(decoder, shape, dtype), shape)


def play_and_compare(state: State, decoder, plain: PlainRun, shape: RecurrentShape) -> None:  # type: ignore[no-untyped-def]
    rng, prompts = random.Random(0), (4, 9)  # 5 and 66 tokens
    slots, tokens = [], [[PROMPTS[p][-1]] for p in prompts]
    for p in prompts:
        slots.append(state.acquire())
        decoder.prefill(PROMPTS[p][:-1], slots[-1], state)
    for _ in range(ROUNDS):
        trees = [random_tree(rng, t[-1]) for t in tokens]
        plan = state.begin(slots, trees)
        logits = decoder.verify(plan, state)
        paths = [tree.path_to(rng.randrange(tree.num_nodes)) for tree in trees]
        for b, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            for node in range(tree.num_nodes):
                line = tokens[b] + [tree.tokens[i] for i in tree.path_to(node)[1:]]
                want = plain.at(prompts[b], line).logits
                assert torch.equal(logits[plan.offsets[b] + node], want)
            tokens[b] += [tree.tokens[i] for i in path[1:]]
        state.commit(slots, paths)
        for b, slot in enumerate(slots):
            assert same(state.committed_state(slot), plain.at(prompts[b], tokens[b]).committed)
        tokens = [[*line, rng.randrange(VOCAB)] for line in tokens]
