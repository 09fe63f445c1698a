# SPDX-License-Identifier: Apache-2.0
"""States of packed texts by a kernel, against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specla.ops.gdn.reference import per_value_head, step_
from specla.train.states import _documents

pytest.importorskip("triton")
from specla.ops import rows
from specla.train.triton_states import states_at

DEVICE = "cuda" if not rows.INTERPRET else "cpu"
H, G, K, V = 2, 4, 24, 20


def test_documents_of_places() -> None:
    """Documents without places, of one token, two rows, padding between."""
    ends = torch.tensor([3] * 3 + [4] + [9] * 5 + [0] * 2 + [14] * 3 + [16] * 2)
    found = _documents(ends, torch.tensor([0, 2, 4, 7, 8, 14]))
    assert [x.tolist() for x in found] == [[0, 4, 14], [0, 2, 5], [2, 5, 6]]


def test_states_before_places() -> None:
    """Every place of a text, its first token alone, its last two; tiles that are not full."""
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    ends = torch.tensor([6] * 6 + [7] + [19] * 12 + [0] * 3 + [30] * 8)
    places = torch.tensor([0, 1, 2, 3, 4, 5, 17, 18, 22])
    k, v, g, beta = normal(30, H, K), normal(30, G, V), -normal(30, G).abs(), normal(30, G)
    k, beta = k / k.norm(dim=-1, keepdim=True), beta.sigmoid()
    documents = _documents(ends, places)
    asked = torch.cat([*documents, places]).int()
    found = states_at(*(x.to(DEVICE) for x in (k, v, g, beta, asked)), len(documents[0]))
    starts = {
        int(place): start
        for start, first, past in zip(*documents, strict=True)
        for place in places[first:past]
    }
    assert found.shape == (len(places), G, V, K)
    for a, place in enumerate(places.tolist()):
        S = torch.zeros(G, V, K)
        for t in range(int(starts[place]), place):
            step_(S, per_value_head(k[t], G), v[t], g[t], beta[t])
        torch.testing.assert_close(found[a].cpu(), S, rtol=1e-5, atol=1e-5)
