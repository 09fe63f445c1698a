# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet targets of a real shape with random weights: speed and exactness depend on the
shape, not on what the weights say, and need no download."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specla.models.base import ModelInfo
from specla.models.gdn_decoder import Decoder
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.ops.contract import RecurrentShape

# GDN-1.3B: 1,466,343,808 parameters, untied.
WIDTH, INTERMEDIATE, VOCAB, LAYERS, HEADS, HEAD_DIM = 2048, 5632, 32000, 24, 8, 256


class RandomGDN(Decoder):
    """A target for the engine: `info`, `device` and `dtype` beside what every decoder has."""

    def __init__(self, weights: DecoderWeights, shape: RecurrentShape) -> None:
        super().__init__(weights, shape, eps=1e-6)
        self.device, self.dtype = weights.head.device, weights.head.dtype
        tensors = [weights.embeddings, weights.norm, weights.head]
        for block in weights.blocks:
            tensors += [getattr(block, name) for name in BlockWeights.__dataclass_fields__]
        self.info = ModelInfo(
            architecture="GatedDeltaNetForCausalLM",
            vocab_size=weights.head.shape[0],
            hidden_size=weights.head.shape[1],
            num_parameters=sum(t.numel() for t in tensors),
            weight_bytes=sum(t.nbytes for t in tensors),
            recurrent=shape,
            eos_token_ids=(),
            fingerprint="random",
        )
        self.read_bytes = weights.head.nbytes + sum(
            t.nbytes for b in weights.blocks for t in (b.in_proj, b.o_proj, b.gate_up, b.down)
        )


def gdn_1_3b(
    *, layers: int = LAYERS, seed: int = 0, device: str = "cuda", dtype: torch.dtype | None = None
) -> RandomGDN:
    """GDN-1.3B's shape; fewer layers for tests. Statistics as of a trained model: decays from
    slow to fast, taps that weigh the current token most, logits that vary."""
    generator = torch.Generator(device).manual_seed(seed)
    wanted = dtype or torch.bfloat16

    def normal(*size: int, scale: float | None = None) -> Tensor:
        x = torch.randn(size, generator=generator, device=device)
        return (x * (scale or size[-1] ** -0.5)).to(wanted)

    def ones(size: int) -> Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, device=device)).to(wanted)

    def block() -> BlockWeights:
        uniform = torch.rand(2, HEADS, generator=generator, device=device)
        step = (uniform[1] * math.log(100) + math.log(1e-3)).exp()
        taps = torch.linspace(0, 0.6, 4, device=device, dtype=torch.float32)
        return BlockWeights(
            attn_norm=ones(WIDTH),
            in_proj=normal(4 * WIDTH + 2 * HEADS, WIDTH),
            conv=(0.25 * normal(3 * WIDTH, 4, scale=1.0).float() + taps).to(wanted),
            A=-(uniform[0] * 15.9 + 0.1),
            dt_bias=step + torch.log(-torch.expm1(-step)),
            o_norm=ones(HEAD_DIM),
            o_proj=normal(WIDTH, WIDTH),
            mlp_norm=ones(WIDTH),
            gate_up=normal(2 * INTERMEDIATE, WIDTH),
            down=normal(WIDTH, INTERMEDIATE),
        )

    shape = RecurrentShape(
        num_layers=layers,
        num_key_heads=HEADS,
        num_value_heads=HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        conv_width=4,
    )
    wide = 2 * WIDTH**-0.5
    weights = DecoderWeights(
        embeddings=normal(VOCAB, WIDTH, scale=wide),
        blocks=tuple(block() for _ in range(layers)),
        norm=ones(WIDTH),
        head=normal(VOCAB, WIDTH, scale=wide),
    )
    return RandomGDN(weights, shape)
