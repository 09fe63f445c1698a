# SPDX-License-Identifier: Apache-2.0
"""Counter-based Gumbel noise: a pure function of (request seed, absolute position, token id).

There is no generator state: nothing depends on how many rows ride along, on the drafts offered,
or on how many steps the engine took. That is why sampled speculative output equals sampled
autoregressive output token for token.

    words = philox4x32-10(counter = (token id, position lo, position hi, purpose),
                          key = (seed lo, seed hi))
    u = ((words[0] << 20 | words[1] >> 12) + 1/2) / 2^52,    noise = -log(-log u)

Every step up to u is integer arithmetic or exact in float64, so u has the same bits on every
device. Triton's `tl.philox(seed, c0, c1, c2, c3)` is the same function with the same 64-bit seed:
a GPU kernel can reproduce the words.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Random123.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TARGET_PURPOSE = 0
"""The target's own draws. A drafter that wants coupled draws reads these; one that wants
independent draws uses another purpose."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def gumbel(
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: Tensor,
    purpose: int = TARGET_PURPOSE,
) -> Tensor:
    """Standard Gumbel noise for each row's candidate tokens.

    Args:
        seeds: n request seeds in [0, 2**64).
        positions: n absolute positions of the token to draw (prompt + output before it).
        token_ids: int64 [n, m], or [m] shared by all rows.
        purpose: separates independent uses of the same seed; in [0, 2**32).

    Returns:
        float64 [n, m] on the device of `token_ids`.
    """
    u = uniform(seeds, positions, token_ids, purpose)
    return u.log_().neg_().log_().neg_()


def uniform(
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: Tensor,
    purpose: int = TARGET_PURPOSE,
) -> Tensor:
    """The uniforms behind `gumbel`, strictly inside (0, 1). Shapes as there."""
    device = token_ids.device
    seed_lo, seed_hi = _halves(seeds, device)
    position_lo, position_hi = _halves(positions, device)
    fixed = torch.full_like(position_lo, purpose)
    counter = (token_ids.expand(len(seeds), -1), position_lo, position_hi, fixed)
    high, low, _, _ = philox(counter, (seed_lo, seed_hi))
    # 52 random bits and a half need 53: exact in float64, and never 0 or 1.
    bits = (high << 20) | (low >> 12)
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52)


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10 on int64 tensors holding 32-bit words; all arguments broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # Products wrap modulo 2^64, as signed; shift and mask recover both unsigned halves.
        p0, p2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p2 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = p2 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _halves(values: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Low and high 32-bit halves of 64-bit integers, each int64 [n, 1]."""
    low = torch.tensor([value & _MASK for value in values], dtype=torch.int64, device=device)
    high = torch.tensor(
        [value >> 32 & _MASK for value in values], dtype=torch.int64, device=device
    )
    return low[:, None], high[:, None]
