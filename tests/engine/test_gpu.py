# SPDX-License-Identifier: Apache-2.0
"""Exactness on a GPU (rule I4) where the host has the trees: 512 tokens with every draft rejected,
accepted, or a random part of them; tokens and folded state are the bytes of each row's own plain
decoding, alone. GDN-1.3B's shape with random bfloat16 weights, and the demo model (key heads of
64, value heads of 128). Rounds without the host: test_gpu_free.py.

    pytest -m gpu tests/engine/test_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from gpu_rows import DEMO, GDN, TOKENS, Outcome, Rows

from specla.drafters.base import Drafter
from specla.testing import AdversarialDrafter, OracleDrafter, RandomTreeDrafter

pytestmark = pytest.mark.gpu
TARGETS = {"gdn-1.3b": GDN, "demo": DEMO}
DRAFTERS: dict[str, Callable[[Rows, int], Drafter]] = {
    "every draft rejected": lambda rows, nodes: AdversarialDrafter(
        rows.truth, vocab_size=rows.vocab_size, depth=nodes - 1
    ),
    "every draft accepted": lambda rows, nodes: OracleDrafter(
        rows.truth, depth=deepest(nodes), decoys=2, vocab_size=rows.vocab_size
    ),
    "random acceptance": lambda rows, nodes: RandomTreeDrafter(
        5, rows.vocab_size, max_depth=12, max_children=4, truth=rows.truth, p_right=0.7
    ),
}


def deepest(nodes: int) -> int:
    """Of the right nodes, where each has two wrong ones beside it."""
    return max(1, (nodes - 1) // 3)


def check_kind(kind: str, nodes: int, got: Sequence[Outcome]) -> None:
    """Drafts fared as they were meant to."""
    rounds = {one.rounds for one in got}
    if kind == "every draft rejected":
        assert rounds == {TOKENS}
    elif kind == "every draft accepted":
        assert rounds == {-(-TOKENS // (deepest(nodes) + 1))}
    else:
        assert TOKENS // 13 < min(rounds) <= max(rounds) < TOKENS


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("batch", "nodes"), [(1, 4), (1, 64), (8, 16), (8, 64)])
def test_trees_give_the_bytes_of_plain_decoding(
    name: str, kind: str, batch: int, nodes: int
) -> None:
    target, rows = TARGETS[name], range(batch)
    got = target.decode(rows, DRAFTERS[kind](target, nodes), max_nodes=nodes)
    target.check(rows, got)
    check_kind(kind, nodes, got)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_sixty_four_rows_of_sixteen_nodes(name: str, kind: str) -> None:
    """Eight prompts, each in eight rows that start at different rounds, four at a time."""
    target, rows = TARGETS[name], [i % 8 for i in range(64)]
    got = target.decode(rows, DRAFTERS[kind](target, 16), max_nodes=16, at_once=4)
    target.check(rows, got)
    check_kind(kind, 16, got)
