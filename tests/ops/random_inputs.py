# SPDX-License-Identifier: Apache-2.0
"""Inputs of the recurrence for tests: keys normalised and decays bounded, or comparisons mean
nothing; K != V and G a multiple of H, or transpositions and head mix-ups hide."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import Inputs, per_value_head
from specla.ops.oracle import PathResult, gdn_paths

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4
)
TREES = {
    "root": (-1,),
    "chain": tuple(range(-1, 11)),
    "star": (-1,) + (0,) * 9,
    "binary": (-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5),
    "comb": (-1, 0, 0, 2, 2, 4, 4, 6, 6, 8),
    "out of order": (-1, 0, 0, 1, 2, 1, 3, 2, 5, 0, 6, 9),
}


def random_parents(seed: int, num_nodes: int, reach: int | None = None) -> tuple[int, ...]:
    """A random tree; a small reach makes it deep."""
    rng = random.Random(seed)
    reach = num_nodes if reach is None else reach
    return (-1, *(rng.randrange(max(0, i - reach), i) for i in range(1, num_nodes)))


def random_state(seed: int, shape: RecurrentShape = SHAPE, dtype=torch.float64) -> Tensor:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_value_heads, shape.value_dim, shape.key_dim)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def random_inputs(  # type: ignore[no-untyped-def]
    seed: int,
    count: int,
    shape: RecurrentShape = SHAPE,
    *,
    dtype=torch.float64,
    max_beta: float = 2.0,
    slowest: float = 0.0,
    fastest: float = -1.5,
) -> Inputs:
    """Tokens with beta in (0, max_beta) and g between slowest and fastest."""
    generator = torch.Generator().manual_seed(seed)
    s = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(count, *size, generator=generator, dtype=torch.float64)

    def uniform(low: float, high: float) -> Tensor:
        x = torch.rand(count, s.num_value_heads, generator=generator, dtype=torch.float64)
        return low + x * (high - low)

    return Inputs(
        q=(F.normalize(normal(s.num_key_heads, s.key_dim), dim=-1) * s.key_dim**-0.5).to(dtype),
        k=F.normalize(normal(s.num_key_heads, s.key_dim), dim=-1).to(dtype),
        v=normal(s.num_value_heads, s.value_dim).to(dtype),
        g=uniform(fastest, slowest).to(dtype),
        beta=uniform(0, max_beta).to(dtype),
    )


def with_keys(x: Inputs, k: Tensor, *, beta: float, g: float) -> Inputs:
    """The same tokens with chosen keys [N, H, K] and constant gates."""
    return x._replace(
        k=F.normalize(k, dim=-1).to(x.k.dtype),
        beta=torch.full_like(x.beta, beta),
        g=torch.full_like(x.g, g),
    )


def correlated_keys(seed: int, count: int, correlation: float, shape: RecurrentShape) -> Tensor:
    """Unit keys [N, H, K] float64 whose pairwise cosine is about `correlation`."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_key_heads, shape.key_dim)
    common = F.normalize(torch.randn(1, *size, generator=generator, dtype=torch.float64), dim=-1)
    own = F.normalize(torch.randn(count, *size, generator=generator, dtype=torch.float64), dim=-1)
    own = F.normalize(own - (own * common).sum(-1, keepdim=True) * common, dim=-1)
    return correlation**0.5 * common + (1 - correlation) ** 0.5 * own


def oracle(S: Tensor, x: Inputs, parents: Sequence[int]) -> PathResult:
    """Float64 truth for inputs with H key heads. `gdn_paths` replays the whole path of every node,
    which for 64 in a row takes a second; here each goes on from its parent's state, to the same
    bits (`test_oracle`)."""
    heads, nodes = S.shape[0], list[PathResult]()
    tokens = (per_value_head(x.q, heads), per_value_head(x.k, heads), x.v, x.g, x.beta)
    for i, parent in enumerate(parents):
        above = S if parent < 0 else nodes[parent].states[0]
        nodes.append(gdn_paths(above, *(t[i : i + 1] for t in tokens), (-1,)))
    return PathResult(*(torch.cat(part) for part in zip(*nodes, strict=True)))


def ancestors(parents: Sequence[int]) -> Tensor:
    """[N, N] bool: j is i or above it."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask


class Budget(NamedTuple):
    """Error against the float64 truth on the same, already rounded inputs."""

    error: float
    allowed: float


def budget(got: Tensor, reference: Tensor, truth: Tensor) -> Budget:
    """err <= 2 (err of a reference in the same precision + eps max|truth|): no tolerance is
    picked by hand."""
    worst = (got.double() - truth).abs().max().item()
    same_precision = (reference.double() - truth).abs().max().item()
    rounding = torch.finfo(got.dtype).eps * truth.abs().max().item()
    return Budget(worst, 2 * (same_precision + rounding))
