# SPDX-License-Identifier: Apache-2.0
"""A random Gated DeltaNet decoder, small enough for thousands of histories.

The forward and the ops are those of production; only the sizes are small. K != V, so that a
transposition shows; G = 2 H, so that a key head feeds two value heads; beta up to 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.models.gdn_decoder import Decoder
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.ops.contract import RecurrentShape

VOCAB, WIDTH, HIDDEN = 17, 12, 20
SHAPE = RecurrentShape(
    num_layers=2, num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=6, conv_width=4
)


def tiny_decoder(
    shape: RecurrentShape = SHAPE, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Decoder:
    """Random weights of lively size: logits of different contexts differ from the first layer on.
    Products are row-invariant: `check_rows` has run."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        return (x / size[-1] ** 0.5).to(dtype)

    blocks = tuple(_block(shape, normal) for _ in range(shape.num_layers))
    weights = DecoderWeights(
        embeddings=normal(VOCAB, WIDTH) * WIDTH**0.5,
        blocks=blocks,
        norm=1 + normal(WIDTH),
        head=normal(VOCAB, WIDTH) * 3,
    )
    decoder = Decoder(weights, shape, eps=1e-6, gated=True, beta_scale=2.0)
    decoder.check_rows(64)
    return decoder


def _block(s: RecurrentShape, normal) -> BlockWeights:  # type: ignore[no-untyped-def]
    heads, values = s.num_value_heads, s.num_value_heads * s.value_dim
    return BlockWeights(
        attn_norm=1 + normal(WIDTH),
        in_proj=normal(s.conv_channels + values + 2 * heads, WIDTH),
        conv=normal(s.conv_channels, s.conv_width),
        # Decays from slow to fast: both an old and a new token must matter.
        A=-torch.linspace(0.02, 0.5, heads).to(normal(1).dtype),
        dt_bias=normal(heads),
        o_norm=1 + normal(s.value_dim),
        o_proj=normal(WIDTH, values),
        mlp_norm=1 + normal(WIDTH),
        gate_up=normal(2 * HIDDEN, WIDTH),
        down=normal(WIDTH, HIDDEN),
    )
