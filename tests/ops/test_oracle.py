# SPDX-License-Identifier: Apache-2.0
"""The truth itself, against loops over single numbers. Tier: algebra."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from random_inputs import TREES, oracle, random_inputs, random_parents, random_state

from specla.ops.gdn.reference import per_value_head
from specla.ops.oracle import conv_paths, gdn_paths, path_to


@pytest.mark.parametrize("name", TREES)
def test_path_to(name: str) -> None:
    parents = TREES[name]
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert path[0] == 0
        assert path[-1] == node
        assert all(parents[b] == a for a, b in pairwise(path))


def one_head(S, q, k, v, g, beta, path):  # type: ignore[no-untyped-def]
    """Three nested loops, nothing borrowed from the oracle."""
    values, keys = S.shape
    S = S.copy()
    for t in path:
        u = np.zeros(values)
        for i in range(values):
            for j in range(keys):
                S[i, j] *= math.exp(g[t])
            u[i] = beta[t] * (v[t, i] - sum(S[i, j] * k[t, j] for j in range(keys)))
        for i in range(values):
            for j in range(keys):
                S[i, j] += u[i] * k[t, j]
    o = [sum(S[i, j] * q[path[-1], j] for j in range(keys)) for i in range(values)]
    return np.array(o), u, S


@pytest.mark.parametrize("parents", [TREES["out of order"], TREES["star"], random_parents(3, 9)])
def test_gdn_paths(parents: tuple[int, ...]) -> None:
    S, x = random_state(0), random_inputs(1, len(parents))
    q, k = per_value_head(x.q, 4), per_value_head(x.k, 4)
    got = gdn_paths(S, q, k, x.v, x.g, x.beta, parents)
    for node in range(len(parents)):
        path = path_to(parents, node)
        for head in range(4):
            args = (t[:, head].numpy() for t in (q, k, x.v, x.g, x.beta))
            want = one_head(S[head].numpy(), *args, path)
            for a, b in zip((got.o, got.u, got.states), want, strict=True):
                np.testing.assert_allclose(a[node, head].numpy(), b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("parents", [*TREES.values(), random_parents(1, 20, 2)])
def test_going_on_from_a_parents_state_is_replaying_the_path(parents: tuple[int, ...]) -> None:
    S, x = random_state(0, dtype=torch.float32), random_inputs(1, len(parents))
    q, k = per_value_head(x.q, 4), per_value_head(x.k, 4)
    want = gdn_paths(S, q, k, x.v, x.g, x.beta, parents)
    assert all(map(torch.equal, oracle(S, x, parents), want))


def test_a_key_head_is_read_by_consecutive_value_heads() -> None:
    k = random_inputs(2, 3).k
    assert torch.equal(per_value_head(k, 4), torch.stack([k[:, h // 2] for h in range(4)], dim=1))
    assert per_value_head(k, 2) is k


@pytest.mark.parametrize("width", [2, 3, 4])
def test_conv_paths(width: int) -> None:
    parents = TREES["out of order"]
    rng = np.random.default_rng(width)
    x, tail = rng.normal(size=(len(parents), 5)), rng.normal(size=(width - 1, 5))
    weight = rng.normal(size=(5, width))
    got = conv_paths(*map(torch.from_numpy, (x, weight, tail)), parents).numpy()
    for node in range(len(parents)):
        line = [*tail, *(x[i] for i in path_to(parents, node))][-width:]
        for c in range(5):
            y = sum(weight[c, j] * line[j][c] for j in range(width))
            assert got[node, c] == pytest.approx(y / (1 + math.exp(-y)), rel=1e-10)


def test_results_are_float64_whatever_the_inputs() -> None:
    S, x = random_state(0, dtype=torch.float32), random_inputs(1, 2, dtype=torch.float32)
    q, k = per_value_head(x.q, 4), per_value_head(x.k, 4)
    got = gdn_paths(S, q, k, x.v, x.g, x.beta, (-1, 0))
    assert {t.dtype for t in got} == {torch.float64}
