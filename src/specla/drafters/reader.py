# SPDX-License-Identifier: Apache-2.0
"""ReaDy's state reader: each draft position asks the target's committed states.

    S_bar = S / rms(S)                                 per layer and head
    z_j = W_q RN(h_j),  q_j = U^T z_j,  u_j = V^T S_bar q_j / sqrt(K)
    delta_j = W_up silu(W_down [u_j; log rms])         over all layers and heads, added once

with V [V, r], U [r, K] of rank r, so that all a block needs of a head is the r x r matrix
R = V^T S U^T and the norm of S. What is committed is not in one place: it is the base S0 and the
log of (k, u, g) that has not been folded into it. Both are projected, and S is never formed:

    S = A S0 + sum_i c_i u_i k_i^T,   A = e^{sum_j g_j},   c_i = e^{sum_{j > i} g_j}
    R = A V^T S0 U^T + sum_i c_i (V^T u_i) (U k_i)^T
    |S|^2 = A^2 |S0|^2 + 2 A sum_i c_i u_i . S0 k_i + sum_ij c_i c_j (u_i . u_j) (k_i . k_j)

Source: ReaDy (arXiv 2610.20503), sections on the reader, as far as published; whether its
projections are shared between heads is not, here they are each head's own. The log is our own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.drafters.agreement import check_layers, check_same
from specla.errors import ConfigError
from specla.models.base import ModelInfo
from specla.models.fields import Fields
from specla.models.weights import Shape
from specla.ops.contract import Factors
from specla.ops.linear import Linear
from specla.ops.norm import compute_dtype, rms_norm
from specla.ops.pointwise import silu

Committed = Callable[[int, int], tuple[Tensor, Factors]]
"""(layer, slot) -> base S [G, V, K] and the log's factors in order: `State.committed`."""
PROJECTIONS = ("keys", "values")
"""Tensors U and V."""
LEAST_SQUARE = 1e-12
"""Added to the mean square of S: an empty state has no direction."""
MAX_RANK = 32
"""On a GPU, whose kernels hold an r x r matrix per head in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """state_layers: whose states are read. rank: r. num_heads, key_dim, value_dim: G, K, V of a
    state. hidden_size: the drafter's width. bottleneck: of the MLP."""

    state_layers: tuple[int, ...]
    rank: int
    num_heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    bottleneck: int
    norm_eps: float

    def as_dict(self) -> dict[str, Any]:
        """reader_config.json's content."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "state_layers": list(self.state_layers)}


def parse_reader_config(values: Mapping[str, Any], where: str) -> ReaderConfig:
    """Read reader_config.json's content.

    Raises:
        InvalidCheckpoint: a field is missing or cannot be.
    """
    read = Fields(values, where)
    return ReaderConfig(
        state_layers=read.counts("state_layers", most=1024),
        rank=read.count("rank", most=1024),
        num_heads=read.count("num_heads"),
        key_dim=read.count("key_dim"),
        value_dim=read.count("value_dim"),
        hidden_size=read.count("hidden_size"),
        bottleneck=read.count("bottleneck"),
        norm_eps=read.positive("norm_eps", default=1e-6),
    )


def check_states(config: ReaderConfig, target: ModelInfo, where: str) -> None:
    """Refuse a target whose states are not those that the reader was trained on.

    Raises:
        ConfigError: another width, layer or shape of a state.
    """
    shape = target.recurrent
    check_same(
        (
            ("width (hidden_size)", config.hidden_size, target.hidden_size),
            ("state heads (num_heads)", config.num_heads, shape.num_value_heads),
            ("key width (key_dim)", config.key_dim, shape.key_dim),
            ("value width (value_dim)", config.value_dim, shape.value_dim),
        ),
        where,
        "a state reader",
    )
    check_layers("state layers (state_layers)", config.state_layers, shape.num_layers, where)


def check_rank(config: ReaderConfig | None) -> None:
    """Refuse what the kernels on a GPU cannot hold.

    Raises:
        ConfigError: a rank above MAX_RANK.
    """
    if config is not None and config.rank > MAX_RANK:
        raise ConfigError(
            "to be part of graphs on a GPU a state reader must have a rank of at most "
            f"{MAX_RANK}, got {config.rank}; use reader=False"
        )


def reader_tensors(config: ReaderConfig) -> dict[str, Shape]:
    """Name and shape of every tensor. Linear weights are [out, in]."""
    L, G, r, D = len(config.state_layers), config.num_heads, config.rank, config.hidden_size
    return {
        "norm.weight": (D,),
        "query.weight": (L * G * r, D),
        "keys": (L, G, r, config.key_dim),
        "values": (L, G, config.value_dim, r),
        "mlp.down.weight": (config.bottleneck, L * G * (r + 1)),
        "mlp.up.weight": (D, config.bottleneck),
    }


class Reading(NamedTuple):
    """What a block sees of n states: R [n, L, G, r, r], of unit mean square, and log rms
    [n, L, G]; compute dtype."""

    R: Tensor
    scale: Tensor


class Reader:
    """The reader's forward. Differentiable; products are row-invariant after `check_rows`.

    weights: names and shapes of `reader_tensors`.
    """

    def __init__(self, config: ReaderConfig, weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        names = ("query", "mlp.down", "mlp.up")
        self._linears = {name: Linear(weights[f"{name}.weight"]) for name in names}

    def check_rows(self) -> None:
        """Make every product row-invariant.

        Raises:
            ExactnessUnavailable: no such product exists here.
        """
        for name, linear in self._linears.items():
            linear.check(f"reader {name}")

    def read(self, committed: Committed, slots: Sequence[int]) -> Reading:
        """Project the committed states of some slots."""
        layers = list(enumerate(self.config.state_layers))
        return _stacked(
            _stacked((self.project(i, *committed(layer, slot)) for i, layer in layers))
            for slot in slots
        )

    def read_folded(self, states: Sequence[Tensor]) -> Reading:
        """Project n states without a log, given per layer as [n, G, V, K]."""
        return _stacked((self._of_state(i, S) for i, S in enumerate(states)), dim=1)

    def _of_state(self, index: int, S: Tensor) -> Reading:
        U, V = (self.weights[name][index].to(S.dtype) for name in PROJECTIONS)
        return self.normed(V.mT @ S @ U.mT, torch.linalg.vector_norm(S, dim=(-2, -1)).square())

    def project(self, index: int, S: Tensor, log: Factors) -> Reading:
        """One state: base S [G, V, K] and log of n factors -> (R [G, r, r], log rms [G]). index:
        of the layer in `state_layers`."""
        wide = compute_dtype(S.dtype)
        U, V = (self.weights[name][index].to(wide) for name in PROJECTIONS)
        total, left = _decays(log.g)
        k = log.k.transpose(0, 1).repeat_interleave(len(S) // log.k.shape[1], dim=0)
        u = log.u.transpose(0, 1) * left.unsqueeze(-1)  # [G, n, V]
        A, Sk = total.exp(), k @ S.mT  # [G], [G, n, V]
        R = A[:, None, None] * (V.mT @ S @ U.mT) + (u @ V).mT @ (k @ U.mT)
        parts = (S * S, 2 * u * Sk, (u @ u.mT) * (k @ k.mT))
        base, cross, own = (x.sum((1, 2)) for x in parts)
        square = A * A * base + A * cross + own
        return self.normed(R, square)

    def normed(self, R: Tensor, square: Tensor) -> Reading:
        """R [..., G, r, r] and |S|^2 [..., G], a difference of large numbers which may fall a
        little below 0."""
        size = self.config.value_dim * self.config.key_dim
        rms = (square.clamp(min=0) / size + LEAST_SQUARE).sqrt()
        return Reading(R / rms[..., None, None], rms.log())

    def delta(self, h: Tensor, reading: Reading) -> Tensor:
        """What is added to the last layer's normed MLP input: h [M, D], M / n positions of each
        of the reading's n rows -> [M, D]."""
        c, positions = self.config, len(h) // len(reading.R)
        x = rms_norm(h, self.weights["norm.weight"], c.norm_eps)
        z = self._linears["query"](x).unflatten(-1, (len(c.state_layers), c.num_heads, c.rank))
        R, scale = (x.repeat_interleave(positions, dim=0) for x in reading)
        u = (R * z.to(R.dtype).unsqueeze(-2)).sum(-1) / math.sqrt(c.key_dim)
        f = torch.cat([u, scale.unsqueeze(-1)], dim=-1).flatten(1).to(h.dtype)
        hidden = silu(self._linears["mlp.down"](f).to(R.dtype)).to(h.dtype)
        return self._linears["mlp.up"](hidden)


def _stacked(found: Iterable[Reading], dim: int = 0) -> Reading:
    return Reading(*(torch.stack(x, dim=dim) for x in zip(*found, strict=True)))


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Log decays g [n, G] -> (their sum [G], e^{sum_{j > i} g_j} [G, n])."""
    sums = g.cumsum(0)
    total = sums[-1] if len(g) else g.new_zeros(g.shape[1])
    return total, (total - sums).exp().t()
