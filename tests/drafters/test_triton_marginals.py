# SPDX-License-Identifier: Apache-2.0
"""Trees over marginals by the kernel against the host's heap, for the same log-probabilities: the
same nodes in the same order, where ties abound. Tier: exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_triton_grow import DEVICE, children

from specla.drafters.marginals import best_first as on_the_host
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.drafters.triton_grow import Best, top_blocks
from specla.drafters.triton_marginals import best_first
from specla.state.rounds import DeviceRounds

VOCAB, POSITIONS = 40, 4


@pytest.mark.parametrize(
    ("top_k", "depth", "nodes", "drafts", "tau", "spine"),
    [
        (4, 3, 16, 15, 50.0, True),
        (4, 3, 16, 15, 50.0, False),
        (3, 2, 8, 5, 2.0, False),
        (3, 3, 16, 15, 0.5, True),
        (1, 3, 8, 7, 50.0, False),
        (8, 2, 32, 31, 50.0, True),
        (2, 3, 2, 1, 9.0, True),
    ],
)
def test_the_same_trees(
    top_k: int, depth: int, nodes: int, drafts: int, tau: float, spine: bool
) -> None:
    """Four rows: one with a single token to go, one without laws; and one that is idle."""
    rng = np.random.default_rng(top_k + nodes)
    rows, first = 4, 1
    values = rng.choice(np.float32([0, 1, 2, 3.5]), (rows * POSITIONS, VOCAB))
    logits = torch.from_numpy(values).to(DEVICE)
    best = Best.allocate(len(logits), VOCAB, top_k, DEVICE)
    counts = torch.full((rows,), POSITIONS, dtype=torch.int32, device=DEVICE)
    top_blocks(logits, counts, best)
    rnd = DeviceRounds(nodes, torch.device(DEVICE)).round(rows, nodes)
    rnd.tokens[:] = 77
    rnd.num_nodes[:3] = 1
    remaining = torch.tensor([9, 1, 9, 9], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    best_first(
        best, first, depth, remaining, count, rnd, max_drafts=drafts, tau=tau, spine=spine
    )  # fmt: skip
    assert rnd.num_nodes.tolist()[1:] == [1, 1, 0]
    assert rnd.parents[:3, 0].tolist() == [-1] * 3
    assert (rnd.tokens[1:] == 77).all()
    laws = [
        list(zip(*children(logits[m], top_k, best, m), strict=True))
        for m in range(first, first + depth)
    ]
    want = on_the_host(77, laws, max_drafts=drafts, tau=tau, spine=spine)
    n = int(rnd.num_nodes[0])
    assert DraftTree(rnd.tokens[0, :n].tolist(), rnd.parents[0, :n].tolist()) == DraftTree(
        want.tokens, want.parents
    )
    assert n > 1
