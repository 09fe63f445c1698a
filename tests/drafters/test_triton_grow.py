# SPDX-License-Identifier: Apache-2.0
"""Trees grown by the kernels against `Growing`, for the same log-probabilities. Tier: exact."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from specla.drafters.grow import Growing
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.drafters.triton_grow import (
    BLOCK,
    Best,
    Grown,
    Reading,
    Rules,
    extend,
    top_blocks,
)
from specla.ops.rows import INTERPRET

GARBAGE = 10**6
DEVICE = "cpu" if INTERPRET else "cuda"


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


def int32(*size: int) -> torch.Tensor:
    return torch.full(size, GARBAGE, dtype=torch.int32)


def new_grown(rows: int, nodes: int, width: int) -> Grown:
    score = torch.full((rows, nodes), float("nan"), dtype=torch.float64)
    trees = (int32(rows, nodes), int32(rows, nodes), int32(rows))
    return Grown(*trees, score, int32(rows, nodes), int32(rows, width), int32(rows))


def logits_after(seed: int, path: tuple[int, ...], vocab: int) -> torch.Tensor:
    """Few values, so that ties abound within a row and across rows."""
    rng = np.random.default_rng(abs(hash((seed, path))))
    return torch.from_numpy(rng.choice(np.float32([0, 1, 2, 3.5, 5]), vocab)).to(DEVICE)


def children(x: torch.Tensor, top_k: int, best: Best, m: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens, the lowest id among equals, with the kernel's own softmax total."""
    x, best = x.cpu(), Best(*(part.cpu() for part in best))
    ids = sorted(range(len(x)), key=lambda i: (-float(x[i]), i))[:top_k]
    top = best.top[m].max().numpy()
    total = np.float32(0)
    for part in range(best.top.shape[1]):
        total += best.total[m, part].numpy() * np.exp(best.top[m, part].numpy() - top)
    log_total = top + np.log(total)
    return ids, [float(min(x[i].numpy() - log_total, np.float32(0))) for i in ids]


def paths_of(tree: Grown, b: int) -> list[tuple[int, ...]]:
    """The tokens down to each node of a row's tree."""
    paths: list[tuple[int, ...]] = []
    for node in range(int(tree.num_nodes[b])):
        parent = int(tree.parents[b, node])
        above = paths[parent] if node else ()
        paths.append((*above, int(tree.tokens[b, node])))
    return paths


class Grower:
    """Both trees of some rows, a level at a time."""

    def __init__(
        self, seeds: list[int], vocab: int, depth: int, nodes: int, remaining: list[int],
        rules: Rules,
    ) -> None:  # fmt: skip
        self.seeds, self.vocab, self.depth, self.rules = seeds, vocab, depth, rules
        rows, self.width = len(seeds), min(rules.top_k, nodes - 1)
        self.remaining = torch.tensor(remaining, dtype=torch.int32)
        self.live = torch.ones(rows, dtype=torch.int32)
        self.buffers = [new_grown(rows, nodes, self.width) for _ in range(3)]
        self.buffers[0].tokens[:, 0] = torch.tensor(seeds)
        self.buffers[0].count[:] = 1
        self.best_score = torch.full((rows,), float("nan"), dtype=torch.float64)
        self.host = [
            Growing(
                seed, top_k=rules.top_k, max_depth=depth, tau=rules.tau, spine=rules.spine,
                max_drafts=0 if left == 1 else rules.max_drafts,
            )
            for seed, left in zip(seeds, remaining, strict=True)
        ]  # fmt: skip
        self.levels: list[list[int]] = [[0] for _ in seeds]
        self.chain = int32(rows, 1 + self.width * depth, 8)

    def reading(self, level: int, before: torch.Tensor) -> Reading:
        """Widths 3 and 2; the output of step s of row b is (b, s)."""
        rows = len(self.seeds)
        return Reading(
            torch.arange(self.vocab * 3).view(-1, 3).float(), torch.ones(3), torch.ones(2), before,
            torch.zeros(rows * self.width, 5), torch.zeros(rows * self.width, 2), self.chain,
            1 + level * self.width, 1e-6,
        )  # fmt: skip

    def grow(self) -> tuple[list[DraftTree], list[DraftTree]]:
        tree, per_row = self.buffers[0], 1
        outputs = torch.tensor([[b, 0.0] for b in range(len(self.seeds))])
        for level in range(self.depth):
            best = self.expand(tree, per_row)
            last = level + 1 == self.depth
            reading = None if last else self.reading(level, outputs)
            after = self.buffers[1 + level % 2]
            extend(
                best, None, self.remaining, self.live, tree, after, self.best_score, self.rules,
                reading, is_first=level == 0,
            )  # fmt: skip
            if reading is not None:
                self.check_reading(after, reading, level)
                outputs = reading.residual.clone()
                outputs[:, 1] = 1 + level * self.width + torch.arange(len(outputs)) % self.width
            tree, per_row = after, self.width
        trees = [
            DraftTree(tree.tokens[b, :n].tolist(), tree.parents[b, :n].tolist())
            for b, n in enumerate(tree.num_nodes.tolist())
        ]
        return trees, [DraftTree(t.tokens, t.parents) for t in (h.tree() for h in self.host)]

    def expand(self, tree: Grown, per_row: int) -> Best:
        """Logits of the frontier, and the host's next level from them."""
        rows = len(self.seeds)
        logits = torch.full((rows * per_row, self.vocab), float("nan"))
        for b, seed in enumerate(self.seeds):
            paths = paths_of(tree, b) if per_row > 1 or self.levels[b] != [0] else [(seed,)]
            for j in range(int(tree.count[b])):
                place = int(tree.place[b, j]) if len(paths) > 1 else 0
                logits[b * per_row + j] = logits_after(seed, paths[place], self.vocab)
        best = Best.allocate(rows * per_row, self.vocab, self.rules.top_k, DEVICE)
        for tensor in best:
            tensor.fill_(77)
        top_blocks(logits, tree.count, best)
        for b, host in enumerate(self.host):
            assert len(self.levels[b]) == int(tree.count[b])
            for j, node in enumerate(self.levels[b]):
                x = logits[b * per_row + j]
                host.add(node, *children(x, self.rules.top_k, best, b * per_row + j))
            self.levels[b] = host.frontier() if self.levels[b] else []
        return best

    def check_reading(self, after: Grown, reading: Reading, level: int) -> None:
        for b in range(len(self.seeds)):
            for j in range(int(after.count[b])):
                m, token = b * self.width + j, int(after.tokens[b, int(after.place[b, j])])
                e = torch.arange(3.0) + 3 * token
                torch.testing.assert_close(reading.x[m, :3], e / (e.square().mean() + 1e-6).sqrt())
                row, step = reading.residual[m].tolist()
                assert row == b
                chain = self.chain[b, reading.first + j].tolist()
                assert chain[0] == step
                assert chain[1:] == (self.chain[b, int(step), :7].tolist() if level else [0] * 7)
                assert step == 0 if level == 0 else step > 0


@pytest.mark.parametrize(
    ("top_k", "depth", "nodes", "tau", "spine"),
    [
        (4, 3, 16, 6.0, True),
        (3, 2, 8, 2.0, False),
        (2, 5, 16, 50.0, True),
        (1, 5, 8, 50.0, False),
        (2, 1, 4, 50.0, True),
        (8, 2, 4, 50.0, True),
        (2, 3, 2, 9.0, True),
    ],
)
def test_the_same_trees(top_k: int, depth: int, nodes: int, tau: float, spine: bool) -> None:
    rng = random.Random(top_k + nodes)
    seeds, rules = rng.sample(range(50), 3), Rules(top_k, nodes - 1, tau, spine)
    got, want = Grower(seeds, 50, depth, nodes, [9, 1, 2], rules).grow()
    assert got == want
    assert got[1].num_nodes == 1
    assert max(tree.num_drafts for tree in got) >= min(nodes - 1, 2)


def test_a_budget_smaller_than_the_bucket() -> None:
    both = Grower([1, 2], 40, 3, 8, [9, 9], Rules(3, 4, 50.0, True))
    got, want = both.grow()
    assert got == want
    assert [tree.num_drafts for tree in got] == [4, 4]


def test_the_best_of_several_blocks() -> None:
    """Ties across blocks, ids of an own vocabulary, NaN and -inf; a vocabulary's ragged end."""
    vocab = 2 * BLOCK + 5
    logits = torch.full((4, vocab), -1.0)
    logits[0, [7, BLOCK + 1, 2 * BLOCK + 4, 9]] = torch.tensor([3.0, 4.0, 4.0, 3.0])
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[2, [2 * BLOCK, 5]] = torch.tensor([0.0, -0.0])
    rows, count = 4, torch.tensor([1, 1, 1, 0], dtype=torch.int32)
    best = Best.allocate(rows, vocab, 3, DEVICE)
    before, after = new_grown(rows, 8, 3), new_grown(rows, 8, 3)
    before.tokens[:, 0] = torch.arange(rows)
    before.count[:] = count
    live, remaining = torch.ones(rows, dtype=torch.int32), torch.full((rows,), 9).int()
    top_blocks(logits, count, best)
    score = torch.zeros(rows, dtype=torch.float64)
    extend(
        best, torch.arange(vocab) + 100, remaining, live, before, after, score,
        Rules(3, 7, 99.0, False), None, is_first=True,
    )  # fmt: skip
    assert after.num_nodes.tolist() == [4, 1, 3, 1]
    assert after.tokens[0, :4].tolist() == [0, 101 + BLOCK, 104 + 2 * BLOCK, 107]
    assert after.tokens[2, :3].tolist() == [2, 105, 100 + 2 * BLOCK]
    want = torch.log_softmax(logits[0].double(), 0).max()
    torch.testing.assert_close(score[0], want, rtol=0, atol=1e-6)
    assert after.parents[0, :4].tolist() == [-1, 0, 0, 0]


def test_rows_that_are_not_live_stay_as_they_are() -> None:
    best = Best.allocate(2, 10, 2, DEVICE)
    before, after = new_grown(2, 4, 2), new_grown(2, 4, 2)
    before.count[:], before.tokens[:, 0] = 1, 3
    top_blocks(torch.arange(20.0).view(2, 10), before.count, best)
    live = torch.tensor([0, 1], dtype=torch.int32)
    extend(
        best, None, torch.full((2,), 5).int(), live, before, after,
        torch.zeros(2, dtype=torch.float64), Rules(2, 3, 9.0, True), None, is_first=True,
    )  # fmt: skip
    assert (after.tokens[0] == GARBAGE).all()
    assert after.num_nodes.tolist() == [GARBAGE, 3]
    assert after.tokens[1, :3].tolist() == [3, 9, 8]
