# SPDX-License-Identifier: Apache-2.0
"""Counter-based noise. Tier: exact; the law by chi-square at a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specla.sampling.noise import gumbel, philox, uniform

MASK = 2**32 - 1


def _words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    assert tuple(int(word) for word in philox(_words(*counter), _words(*key))) == output


def _philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & MASK, (low >> 32) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def test_philox_equals_python_integers():
    random = np.random.default_rng(0)
    words = random.integers(0, 2**32, (6, 200), dtype=np.int64)
    got = torch.stack(philox(tuple(torch.tensor(words[:4])), tuple(torch.tensor(words[4:]))))
    for i in range(words.shape[1]):
        by_hand = _philox_by_hand(words[:4, i].tolist(), words[4:, i].tolist())
        assert got[:, i].tolist() == by_hand


@pytest.mark.parametrize("seed", [0, 5, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 77, 2**40 + 3])
def test_uniform_follows_its_formula(seed, position):
    ids = [0, 1, 31_999, 2**31]
    got = uniform([seed], [position], torch.tensor(ids), purpose=3)[0].tolist()
    for token, u in zip(ids, got, strict=True):
        counter = [token, position & MASK, position >> 32, 3]
        high, low, _, _ = _philox_by_hand(counter, [seed & MASK, seed >> 32])
        assert u == (high * 2**20 + (low >> 12) + 0.5) / 2**52


def test_extreme_words_stay_inside_the_open_interval():
    for bits in (0, 2**52 - 1):
        u = torch.tensor(bits).to(torch.float64).add_(0.5).mul_(2.0**-52)
        assert 0 < float(u) < 1
        assert math.isfinite(-math.log(-math.log(float(u))))


def test_every_part_of_the_key_matters():
    ids = torch.arange(64)
    base = uniform([5], [9], ids)
    for other in (
        uniform([6], [9], ids),
        uniform([5 + 2**32], [9], ids),
        uniform([5], [10], ids),
        uniform([5], [9 + 2**32], ids),
        uniform([5], [9], ids + 64),
        uniform([5], [9], ids, purpose=1),
    ):
        assert not torch.isin(base, other).any()


@pytest.mark.parametrize("num_ids", [1, 2, 17, 250])
def test_bits_do_not_depend_on_company(num_ids):
    ids = torch.arange(1000)
    alone = gumbel([2**63 + 5], [123], ids)[0]
    for num_rows in range(1, 34):
        seeds, positions = list(range(num_rows)), [3 * i for i in range(num_rows)]
        at = num_rows // 2
        seeds[at], positions[at] = 2**63 + 5, 123
        picked = torch.randperm(1000)[:num_ids]
        assert torch.equal(gumbel(seeds, positions, picked)[at], alone[picked])
        own = picked.expand(num_rows, -1).contiguous()
        assert torch.equal(gumbel(seeds, positions, own)[at], alone[picked])


def test_uniforms_are_uniform_and_independent():
    """Chi-square over 64 bins (63 degrees of freedom: mean 63, sd 11.2) and pairs."""
    u = uniform(list(range(200)), [11] * 200, torch.arange(500)).flatten().numpy()
    expected = len(u) / 64
    for values in (u, (u * 64) % 1, (u[:-1] + u[1:]) % 1, (u[:-500] - u[500:]) % 1):
        counts = np.bincount((values * 64).astype(int), minlength=64)
        chi = ((counts - len(values) / 64) ** 2 / expected).sum()
        assert 20 < chi < 110


def test_gumbel_max_has_the_law():
    """100,000 draws at a fixed seed: chi-square with 3 degrees of freedom, p > 1e-3."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    n = 100_000
    noise = gumbel([42] * n, list(range(n)), torch.arange(4))
    counts = torch.bincount((p.log() + noise).argmax(-1), minlength=4)
    chi = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi < 16.27
    assert abs(float(noise.mean()) - 0.5772) < 0.01
