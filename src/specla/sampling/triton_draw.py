# SPDX-License-Identifier: Apache-2.0
"""Noise on the device, and drawing from a block of the vocabulary with it: what `sampling.triton`
calls for rows with a temperature. Letters and the law are its own."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
_INF, _ULP = tl.constexpr(float("inf")), tl.constexpr(2.0**-52)
_NO_TOKEN = tl.constexpr(2**31 - 1)

SLACK, REACH = 2.0**-10, 42.0
"""See `bound_above`."""

_SLACK, _REACH = tl.constexpr(SLACK), tl.constexpr(REACH)
_LN2, _HIGHEST = tl.constexpr(0.6931471805599453), tl.constexpr(36.75)
# How many tokens of a block are scored one by one; the temperatures whose inverse and multiples
# float32 holds with room to spare.
_TRIES = tl.constexpr(8)
_COLDEST, _HOTTEST = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)


@triton.jit
def uniform(seed, position, token):
    """`noise.uniform` with purpose 0, for int32 positions and tokens: float64, inside (0, 1)."""
    high, low, _, _ = tl.philox(seed, token, position, 0, 0)
    bits = (high.to(tl.int64) << 20) | (low >> 12).to(tl.int64)
    return (bits.to(tl.float64) + 0.5) * _ULP


@triton.jit
def gumbel(seed, position, token):
    """`noise.gumbel` with purpose 0, float64."""
    return -tl.log(-tl.log(uniform(seed, position, token)))


@triton.jit
def draw(
    logits_ptr,
    first,
    vocab_size,
    top,
    temperature,
    seed,
    position,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EXACT_TILE: tl.constexpr,
):
    """Score and token of the best of ids first .. first + BLOCK - 1, scores relative to `top`.

    A float32 pass bounds every score from above, with one logarithm instead of two in float64;
    the tokens with the highest bounds are scored, until no bound left reaches the best score.
    Every lane keeps its highest bound with its token, and the second highest without: where that
    one still reaches, or too many tokens do, or the temperature is out of float32's reach, all
    tokens are scored. The choice is the same either way.
    """
    lane = tl.arange(0, TILE)
    bound = tl.full([TILE], -_INF, tl.float32)
    second = tl.full([TILE], -_INF, tl.float32)
    holder = tl.full([TILE], _NO_TOKEN, tl.int32)
    mild = tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST)
    rate, reach = (1.0 / mild).to(tl.float32), (mild * _REACH).to(tl.float32)
    for start in range(0, BLOCK, TILE):
        token = first + start + lane
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=-_INF)
        high = bound_above(x - top, rate, reach, seed, position, token)
        holder = tl.where(high > bound, token, holder)
        second = tl.maximum(second, tl.minimum(high, bound))
        bound = tl.maximum(high, bound)

    best = tl.full([], -_INF, tl.float64)
    best_token = tl.full([], _NO_TOKEN, tl.int32)
    tries = 0
    highest = tl.max(bound, axis=0)
    while (tries < _TRIES) & (highest.to(tl.float64) + _SLACK >= best):
        token = tl.min(tl.where(bound == highest, holder, _NO_TOKEN), axis=0)
        score = _score(tl.load(logits_ptr + token), top, temperature, seed, position, token)
        is_better = (score > best) | ((score == best) & (token < best_token))
        best_token = tl.where(is_better, token, best_token)
        best = tl.maximum(score, best)
        bound = tl.where(holder == token, -_INF, bound)
        highest = tl.max(bound, axis=0)
        tries += 1
    left = tl.maximum(highest, tl.max(second, axis=0)).to(tl.float64) + _SLACK
    if (left >= best) | (temperature != mild):
        best, best_token = _draw_from_all(
            logits_ptr, first, vocab_size, top, temperature, seed, position, BLOCK, EXACT_TILE
        )
    return best, best_token


@triton.jit
def bound_above(below, rate, reach, seed, position, token):
    """A float32 that the token's score does not exceed by _SLACK; -inf if it cannot win.

    below: x - top, <= 0; rate: 1 / temperature; reach: _REACH * temperature; in float32 all. h
    is the noise's first word.

    1. u < (h + 1) / 2^32, so 1 - u > v for v = floor((2^32 - 1 - h) / 2^9) / 2^23, which
       float32 holds exactly.
    2. -log u >= 1 - u > v, so the noise -log(-log u) is below -log v; and it is at most
       -log(-log(1 - 2^-53)) < 36.75.
    3. The score of `top` is its noise, at least -log(-log 2^-53) > -3.61. So a token that can
       win has (x - top) / temperature > -40.4, which _REACH keeps. Its difference, rate and their
       product are rounded once each: together less than 42 * 2^-22 < 2^-16.
    4. log2(v) lies in [-23, 0) or is -inf. The hardware promises 2^-22, absolute near 1 and
       relative elsewhere, hence below 2^-17; the product with log 2 adds less than 2^-18.
    5. The sum is below 64 and its rounding below 2^-18; the error of the float64 score that is
       compared is nothing beside. In all less than 2^-14, and _SLACK is 2^-10.
    """
    word, _, _, _ = tl.philox(seed, token, position, 0, 0)
    # 1.m with m the upper 23 bits of 2^32 - 1 - h, less 1: v without a conversion.
    v = ((word >> 9) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - 1.0
    if _INTERPRET:  # noqa: SIM108 - known at compile time
        log2 = tl.log2(v)
    else:
        log2 = tl.extra.cuda.libdevice.fast_log2f(v)
    near = tl.where(below >= -reach, below, -_INF)
    return near * rate + tl.minimum(log2 * -_LN2, _HIGHEST)


@triton.jit
def _score(x, top, temperature, seed, position, token):
    """float64, relative to `top`."""
    below = (x.to(tl.float64) - top.to(tl.float64)) / temperature
    return below + gumbel(seed, position, token)


@triton.jit
def _draw_from_all(
    logits_ptr,
    first,
    vocab_size,
    top,
    temperature,
    seed,
    position,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `draw`, every token scored. Tile by tile, because float64 and noise need registers; the
    best is found per lane first."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], -_INF, tl.float64)
    best_token = tl.full([TILE], _NO_TOKEN, tl.int32)
    for start in range(0, BLOCK, TILE):
        token = first + start + lane
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=-_INF)
        score = _score(x, top, temperature, seed, position, token)
        best_token = tl.where(score > best, token, best_token)
        best = tl.maximum(score, best)
    score = tl.max(best, axis=0)
    return score, tl.min(tl.where(best == score, best_token, _NO_TOKEN), axis=0)
