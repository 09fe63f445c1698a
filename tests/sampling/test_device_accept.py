# SPDX-License-Identifier: Apache-2.0
"""The walk and the cursors on the device against `sampling.accept` and `state.Log`. Tier: exact.

`test_random_rounds` is short because the interpreter is slow; `-m slow` plays thousands.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from device_rows import DEVICE, GARBAGE, device_round, int32, row_arrays
from toy_target import VOCAB as TOY_VOCAB
from toy_target import nothing, random_tree, row_law, speculate, tokens_of, tree_logits

from specla.ops.contract import DeviceRound
from specla.request import SamplingParams
from specla.sampling.accept import RowLaw, Verdict, Walk
from specla.sampling.triton import (
    FINISH_INVALID,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    VERDICT_HEADER,
    Choices,
    RowArrays,
    accept,
    choose,
    new_choices,
)
from specla.state.log import Log
from specla.topology.tree import DraftTree

VOCAB, MAX_NODES, MAX_LEN, CAPACITY = 7, 16, 40, 6
FINISH = {
    None: FINISH_NONE, "stop": FINISH_STOP, "length": FINISH_LENGTH, "error": FINISH_INVALID,
}  # fmt: skip


@dataclass
class Row:
    """One row before a round: its tree (None: idle), what is chosen at each node (None: no
    finite maximum), its law and its cursors."""

    tree: DraftTree | None
    choices: list[int | None]
    law: RowLaw
    log: Log


def random_row(rng: random.Random, num_nodes: int) -> Row:
    tree = _tree(rng, rng.randint(1, num_nodes))
    children = tree.children()
    chosen: list[int | None] = []
    for node in range(tree.num_nodes):
        right = [tree.tokens[child] for child in children[node]]
        token = rng.choice(right) if right and rng.random() < 0.8 else rng.randrange(VOCAB)
        chosen.append(None if rng.random() < 0.04 else token)
    history = [rng.randrange(VOCAB) for _ in range(rng.randint(1, MAX_LEN))]
    ends = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1, 2])))
    law = row_law(
        SamplingParams(temperature=rng.choice([0.0, 0.5]), stop_token_ids=ends),
        [*history[:-1], tree.tokens[0]],
        1,
        remaining=rng.choice([1, 2, 3, 4, 100]),
    )
    log = Log(CAPACITY, MAX_NODES, rng.randint(0, CAPACITY), durable_len=5)
    log.bank, log.ring_len = rng.randrange(2), rng.randint(0, log.threshold)
    log.path = tuple(range(rng.randint(0, 4)))
    return Row(None if rng.random() < 0.05 else tree, chosen, law, log)


def _tree(rng: random.Random, num_nodes: int) -> DraftTree:
    tokens, parents, reach = [rng.randrange(VOCAB)], [-1], rng.randint(1, num_nodes)
    for node in range(1, num_nodes):
        parent = rng.randint(max(0, node - reach), node - 1)
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        if free := sorted(set(range(VOCAB)) - taken):
            tokens.append(rng.choice(free))
            parents.append(parent)
        else:
            break
    return DraftTree(tuple(tokens), tuple(parents))


def blocks_of(
    rows: Sequence[Row], num_nodes: int, rng: random.Random, num_blocks: int = 3
) -> Choices:
    """Blocks' best in which the chosen token wins. Where none is, a draft would."""
    top = torch.full((len(rows) * num_nodes, num_blocks), torch.nan)
    token = torch.full(top.shape, VOCAB, dtype=torch.int32)
    for b, row in enumerate(rows):
        for node, choice in enumerate(row.choices):
            here, best = b * num_nodes + node, rng.randrange(num_blocks)
            top[here] = torch.arange(num_blocks) - 1.0
            top[here, 0] = -torch.inf
            top[here, best] = 99.0 if choice is not None else torch.inf
            below = [] if row.tree is None else row.tree.children()[node]
            wrong = row.tree.tokens[below[0]] if row.tree is not None and below else 0
            token[here, best] = wrong if choice is None else choice
    score = torch.zeros(top.shape, dtype=torch.float64, device=DEVICE)
    return Choices(top=top.to(DEVICE), score=score, token=token.to(DEVICE))


def expected(row: Row) -> Verdict:
    """The host's verdict."""
    assert row.tree is not None
    one = Walk(row.tree, row.law)
    while not one.done:
        if (token := row.choices[one.path[-1]]) is None:
            one.fail()
        else:
            one.advance(token)
    return one.verdict()


def with_cursors(rnd: DeviceRound, rows: Sequence[Row]) -> DeviceRound:
    for b, row in enumerate(rows):
        if row.log.path:
            rnd.path[b, : len(row.log.path)] = int32(row.log.path)
    return rnd._replace(
        bank=int32([row.log.bank for row in rows]),
        ring_len=int32([row.log.ring_len for row in rows]),
        path_len=int32([len(row.log.path) for row in rows]),
    )


def play(rows: Sequence[Row], num_nodes: int, threshold: int, rng: random.Random) -> None:
    """One round on the device, everything it wrote compared. Rows share the threshold."""
    for row in rows:
        row.log.threshold = threshold
        row.log.ring_len = min(row.log.ring_len, threshold)
    arrays = row_arrays([row.law for row in rows], max_len=MAX_LEN + 4)
    rnd = with_cursors(device_round([row.tree for row in rows], num_nodes, MAX_NODES), rows)
    before = [tensor.clone() for tensor in (*rnd, *arrays)]
    verdicts = torch.full((len(rows), VERDICT_HEADER + MAX_NODES), -1).int().to(DEVICE)
    accept(blocks_of(rows, num_nodes, rng), arrays, rnd, verdicts, fold_threshold=threshold)
    for b, row in enumerate(rows):
        if row.tree is None:
            assert verdicts[b, :VERDICT_HEADER].tolist() == [0] * VERDICT_HEADER
            for old, new in zip(before, (*rnd, *arrays), strict=True):
                assert torch.equal(old[b], new[b])
        else:
            check(b, row, expected(row), arrays, rnd, verdicts[b].tolist())


def check(
    b: int,
    row: Row,
    verdict: Verdict,
    arrays: RowArrays,
    rnd: DeviceRound,
    got: list[int],
) -> None:
    path, emitted = verdict.path, list(verdict.emitted)
    head = [len(emitted), FINISH[verdict.finish], verdict.num_accepted]
    head += [verdict.num_drafted, verdict.offered_depth]
    assert got[:VERDICT_HEADER] == head
    assert got[VERDICT_HEADER:][: len(emitted)] == emitted

    row.log.commit(path)
    cursors = rnd.bank[b], rnd.ring_len[b], rnd.path_len[b]
    assert [int(x) for x in cursors] == [row.log.bank, row.log.ring_len, len(path)]
    assert rnd.path[b, : len(path)].tolist() == list(path)
    tokens = [*row.law.history, *emitted]
    assert int(arrays.len_tokens[b]) == len(tokens)
    room = arrays.history.shape[1]
    assert arrays.history[b, : len(tokens)].tolist() == tokens[:room]
    assert int(arrays.remaining[b]) == row.law.remaining - len(emitted)
    assert int(rnd.tokens[b, 0]) == tokens[-1]
    assert int(rnd.num_nodes[b]) == (head[1] == FINISH_NONE)


def play_many(seed: int, num_rounds: int, num_rows: int) -> None:
    rng = random.Random(seed)
    for i in range(num_rounds):
        num_nodes = (1, 2, 3, 4, 8, 16)[i % 6]
        rows = [random_row(rng, num_nodes) for _ in range(num_rows)]
        play(rows, num_nodes, rng.randint(0, CAPACITY), rng)


def test_random_rounds() -> None:
    play_many(seed=0, num_rounds=6, num_rows=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_random_rounds(seed: int) -> None:
    play_many(seed, num_rounds=48, num_rows=16)


def test_a_long_chain_accepted_whole() -> None:
    """64 nodes: more than one warp, as deep as it gets, more blocks than fit a tile."""
    tokens = [i % VOCAB for i in range(64)]
    tree = DraftTree.chain(tokens[0], tokens[1:])
    law = row_law(SamplingParams(temperature=0.0), [tokens[0]], 1, remaining=99)
    choices: list[int | None] = [*tokens[1:], 5]
    arrays, rnd = row_arrays([law], max_len=80), device_round([tree], 64)
    verdicts = torch.zeros(1, VERDICT_HEADER + 64, dtype=torch.int32, device=DEVICE)
    row = Row(tree, choices, law, Log(6, 64, 6))
    blocks = blocks_of([row], 64, random.Random(3), num_blocks=20)
    # Of equal blocks the first wins, in a tile and between tiles.
    blocks.top.copy_(torch.where(blocks.token == VOCAB, blocks.top, 18.0))
    accept(blocks, arrays, rnd, verdicts, fold_threshold=6)
    assert verdicts[0].tolist() == [64, 0, 63, 63, 63, *choices]
    assert rnd.path[0].tolist() == list(range(64))


@pytest.mark.parametrize("room", [1, 2])
def test_a_full_history_is_not_overrun(room: int) -> None:
    tree = DraftTree.chain(3, [4, 5])
    laws = [row_law(SamplingParams(temperature=0.0), [1, 2, 3], 1, remaining=9)] * 2
    arrays, rnd = row_arrays(laws, max_len=3 + room), device_round([tree, None], 3)
    verdicts = torch.zeros(2, VERDICT_HEADER + 3, dtype=torch.int32, device=DEVICE)
    row = Row(tree, [4, 5, 6], laws[0], Log(6, 5, 6))
    accept(blocks_of([row], 3, random.Random(3)), arrays, rnd, verdicts, fold_threshold=6)
    assert verdicts[0].tolist() == [3, 0, 2, 2, 2, 4, 5, 6]
    assert arrays.history[0].tolist() == [1, 2, 3, 4, 5][: 3 + room]
    assert arrays.history[1].tolist() == [1, 2, 3, *[GARBAGE] * room]


def test_repeated_siblings_take_the_first() -> None:
    """No DraftTree has them, but a device drafter may go wrong: it costs time, not the text."""
    law = row_law(SamplingParams(temperature=0.0), [3], 1, remaining=9)
    chain = DraftTree.chain(3, [4, 4, 5, 6])
    arrays, rnd = row_arrays([law]), device_round([chain], 5)
    rnd.parents[0] = int32([-1, 0, 0, 1, 2])
    row = Row(chain, [4, 5, 6, 0, 0], law, Log(6, 5, 6))
    verdicts = torch.zeros(1, VERDICT_HEADER + 5, dtype=torch.int32, device=DEVICE)
    blocks = blocks_of([row], 5, random.Random(3))
    accept(blocks, arrays, rnd, verdicts, fold_threshold=6)
    assert verdicts[0, VERDICT_HEADER:][:3].tolist() == [4, 5, 0]
    assert rnd.path[0, :3].tolist() == [0, 1, 3]


def offer(rnd: DeviceRound, b: int, history: list[int], seed: int) -> torch.Tensor:
    """Put a random tree into row b; its logits, float32 [N, V], NaN where no node is."""
    num_nodes = rnd.tokens.shape[1]
    tree = random_tree(history, seed)
    tree = DraftTree(tree.tokens[:num_nodes], tree.parents[:num_nodes])
    rnd.tokens[b, 1 : tree.num_nodes] = int32(tree.tokens[1:])
    rnd.parents[b, : tree.num_nodes] = int32(tree.parents)
    rnd.num_nodes[b] = tree.num_nodes
    logits = torch.full((num_nodes, TOY_VOCAB), torch.nan)
    logits[: tree.num_nodes] = tree_logits(tree, history)
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rounds_on_the_device_equal_plain_decoding(temperature: float) -> None:
    """choose and accept, round after round; nothing else moves the rows on."""
    params = SamplingParams(temperature=temperature, max_tokens=7)
    prompts, seeds, num_nodes = [[1, 2, 3], [4, 5]], [2**64 - 1, 7], 6
    laws, alone = [], []
    for prompt, seed in zip(prompts, seeds, strict=True):
        laws.append(row_law(params, prompt, len(prompt), seed=seed))
        alone.append(tokens_of(speculate(nothing, prompt, params, seed=seed)))
    rows, rnd = row_arrays(laws), device_round([DraftTree.root(p[-1]) for p in prompts], num_nodes)
    out = new_choices(2 * num_nodes, TOY_VOCAB, DEVICE)
    verdicts = torch.zeros(2, VERDICT_HEADER + num_nodes, dtype=torch.int32, device=DEVICE)
    logits = torch.full((2, num_nodes, TOY_VOCAB), torch.nan)
    got: list[list[int]] = [[], []]
    while rnd.num_nodes.any():
        for b in rnd.num_nodes.nonzero()[:, 0].tolist():
            history = rows.history[b, : int(rows.len_tokens[b])].tolist()
            logits[b] = offer(rnd, b, history, seeds[b])
        choose(logits.flatten(0, 1).to(DEVICE), rows, rnd, out)
        accept(out, rows, rnd, verdicts, fold_threshold=4)
        for b, verdict in enumerate(verdicts.tolist()):
            got[b] += verdict[VERDICT_HEADER:][: verdict[0]]
    assert got == alone
