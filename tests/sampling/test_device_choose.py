# SPDX-License-Identifier: Apache-2.0
"""Choosing on the device against `sampling.draw`. Tier: exact (words, uniforms, greedy); drawn
tokens are equal unless two scores differ by a float64's last bit, which these inputs avoid."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from device_rows import DEVICE, chosen, device_round, row_arrays, signed
from toy_target import row_law

from specla.request import SamplingParams
from specla.sampling.draw import Draw, draw
from specla.sampling.noise import gumbel, uniform
from specla.sampling.triton import block_size, choose, new_choices
from specla.sampling.triton_draw import gumbel as device_gumbel
from specla.sampling.triton_draw import uniform as device_uniform
from specla.topology.tree import DraftTree

VOCAB = 2500  # three blocks, the last one not full
TREE = DraftTree((7, 1, 2, 3, 4), (-1, 0, 1, 1, 0))
DEPTHS = (0, 1, 2, 2, 1)


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, ids_ptr, uniform_ptr, gumbel_ptr, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    seed, position = tl.load(seed_ptr), tl.load(position_ptr)
    token = tl.load(ids_ptr + lane)
    tl.store(uniform_ptr + lane, device_uniform(seed, position, token))
    tl.store(gumbel_ptr + lane, device_gumbel(seed, position, token))


@pytest.mark.parametrize("seed", [0, 5, 2**32 + 3, 2**63 + 9, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 77, 2**31 - 1])
def test_uniforms_have_the_same_bits(seed: int, position: int) -> None:
    ids = torch.cat([torch.arange(60), torch.tensor([31_999, 151_935, 2**24, 2**31 - 1])])
    got = torch.empty(2, 64, dtype=torch.float64, device=DEVICE)
    _noise_kernel[(1,)](
        torch.tensor([signed(seed)], device=DEVICE),
        torch.tensor([position], dtype=torch.int32, device=DEVICE),
        ids.int().to(DEVICE),
        *got,
        COUNT=64,
    )
    assert torch.equal(got[0].cpu(), uniform([seed], [position], ids)[0])
    expected = gumbel([seed], [position], ids)[0]
    torch.testing.assert_close(got[1].cpu(), expected, rtol=1e-14, atol=1e-15)


def run(
    logits: torch.Tensor, trees: list[DraftTree | None], temperatures: list[float]
) -> tuple[list[int], list[bool]]:
    """choose() over len(trees) rows of five nodes; logits [M, V]."""
    laws = [
        row_law(SamplingParams(temperature=t, max_tokens=50), [1, 2, 7], 2, seed=b + 2**63)
        for b, t in enumerate(temperatures)
    ]
    rows, rnd = row_arrays(laws), device_round(trees, 5)
    out = new_choices(logits.shape[0] + 3, logits.shape[1], DEVICE)
    choose(logits.to(DEVICE), rows, rnd, out)
    return chosen(out, rows.temperature.repeat_interleave(5))


def test_blocks_come_from_the_vocabulary_only() -> None:
    sizes = [block_size(vocab) for vocab in (23, 2500, 32_000, 50_257, 151_936, 262_144)]
    assert sizes == [1024, 1024, 2048, 4096, 8192, 8192]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(5, VOCAB)
    logits[0, [9, 8, 2000]] = 3.0  # in one block, and in a later one
    logits[1, [2400, 1024]] = 3.0
    logits[2, 2499] = 1e-30
    logits[3] = -torch.inf
    logits[3, [1023, 1024]] = -3e38
    tokens, finite = run(logits, [TREE], [0.0])
    assert tokens == [8, 1024, 2499, 1023, 0]
    assert all(finite)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_finite_maximum_is_flagged(temperature: float) -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, 17] = torch.nan
    logits[1] = -torch.inf
    logits[2, 2499] = torch.inf
    logits[3, 100:] = -torch.inf  # whole blocks without a chance: still fine
    tokens, finite = run(logits, [TREE], [temperature])
    assert finite == [False, False, False, True, True]
    assert tokens[3] < 100


def test_drawn_tokens_are_the_hosts() -> None:
    """Every node draws at its own position, whatever its row's neighbours do."""
    logits = (torch.randn(15, VOCAB) * 2).round() / 2
    temperatures = [1.0, 0.0, 0.3]
    tokens, _ = run(logits, [TREE, TREE, TREE], temperatures)
    draws = [
        Draw(params=SamplingParams(temperature=t), seed=b + 2**63, position=3 + depth)
        for b, t in enumerate(temperatures)
        for depth in DEPTHS
    ]
    assert tokens == draw(logits, draws)


def test_no_temperature_is_too_low() -> None:
    """Where only equals have a chance, the noise still decides among them."""
    logits = torch.randn(5, VOCAB)
    logits[:, ::300] = 1e30
    tokens, _ = run(logits, [TREE], [math.ulp(1.0)])
    params = SamplingParams(temperature=math.ulp(1.0))
    draws = [Draw(params=params, seed=2**63, position=3 + depth) for depth in DEPTHS]
    assert tokens == draw(logits, draws)
    assert len(set(tokens)) > 1


def test_bits_do_not_depend_on_company() -> None:
    logits = torch.randn(10, VOCAB, device=DEVICE)
    laws = [
        row_law(SamplingParams(temperature=0.9, max_tokens=9), [4, 5], 1, seed=s) for s in (1, 2)
    ]
    together = new_choices(10, VOCAB, DEVICE)
    choose(logits, row_arrays(laws), device_round([TREE, TREE], 5), together)
    alone = new_choices(1, VOCAB, DEVICE)
    root = device_round([DraftTree.root(7)], 1)
    choose(logits[5:6], row_arrays(laws[1:]), root, alone)
    for one, many in zip(alone, together, strict=True):
        assert torch.equal(one[0], many[5])


def test_nodes_out_of_use_are_left_alone() -> None:
    logits = torch.randn(15, VOCAB, device=DEVICE)
    logits[10:] = torch.nan
    two = DraftTree.chain(7, [1])
    laws = [row_law(SamplingParams(temperature=0.0), [7], 1)] * 3
    out = new_choices(15, VOCAB, DEVICE)
    for tensor in out:
        tensor.fill_(-7)
    choose(logits, row_arrays(laws), device_round([two, None, TREE], 5), out)
    untouched = [bool((out.token[m] == -7).all() and (out.top[m] == -7).all()) for m in range(15)]
    assert untouched == [False] * 2 + [True] * 8 + [False] * 5
