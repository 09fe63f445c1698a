# SPDX-License-Identifier: Apache-2.0
"""Truth for any tree: replay each root-to-node path token by token in float64.

Nothing is shared between paths, so a bug in a tree form cannot hide here. Slow by design.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PathResult(NamedTuple):
    """o [N, G, V], u [N, G, V], states [N, G, V, K], all float64."""

    o: Tensor
    u: Tensor
    states: Tensor


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def gdn_paths(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parents: Sequence[int]
) -> PathResult:
    """Gated delta rule along every path. S [G, V, K]; q, k [N, G, K]; v [N, G, V]; g, beta [N, G].

    u = beta (v - e^g S k);  S <- e^g S + u k^T;  o = S q.
    """
    outputs = []
    for node in range(len(parents)):
        state = S.double()
        for i in path_to(parents, node):
            state = state * g[i].double().exp()[:, None, None]
            predicted = torch.einsum("gvk,gk->gv", state, k[i].double())
            u = beta[i].double()[:, None] * (v[i].double() - predicted)
            state = state + torch.einsum("gv,gk->gvk", u, k[i].double())
        outputs.append((torch.einsum("gvk,gk->gv", state, q[node].double()), u, state))
    return PathResult(*(torch.stack(part) for part in zip(*outputs, strict=True)))


def conv_paths(x: Tensor, weight: Tensor, tail: Tensor, parents: Sequence[int]) -> Tensor:
    """Causal convolution and SiLU along every path. x [N, C], weight [C, W], tail [W-1, C]."""
    outputs = []
    for node in range(len(parents)):
        history = torch.cat([tail, x[path_to(parents, node)]]).double()[-weight.shape[1] :]
        y = (history * weight.double().t()).sum(0)
        outputs.append(y * torch.sigmoid(y))
    return torch.stack(outputs)
