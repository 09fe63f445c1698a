# SPDX-License-Identifier: Apache-2.0
"""The weights of a Gated DeltaNet decoder as its forward passes read them: projections fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """One layer, projections fused.

    in_proj [2 H K + G V (+ G V with a gate) + 2 G, D], rows ordered q | k | v | (gate) | a | b;
    conv [C, W]; A [G] = -exp(A_log) and dt_bias [G] in compute dtype; o_norm [V];
    o_proj [D, G V]; gate_up [2 I, D]; down [D, I]; attn_norm, mlp_norm [D].
    """

    attn_norm: Tensor
    in_proj: Tensor
    conv: Tensor
    A: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    o_proj: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """embeddings [vocab, D], norm [D], head [vocab, D] (the same tensor where tied), blocks."""

    embeddings: Tensor
    blocks: tuple[BlockWeights, ...]
    norm: Tensor
    head: Tensor
