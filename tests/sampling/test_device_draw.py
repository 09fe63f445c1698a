# SPDX-License-Identifier: Apache-2.0
"""Drawing with a float32 bound first: every score stays below its bound, and where scores nearly
tie, the choice is still the host's, and that of scoring every token. Tier: exact (choices)."""

from __future__ import annotations

import math

import pytest
import torch
from device_rows import DEVICE, signed
from torch import Tensor

from specla.sampling.noise import gumbel, uniform

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from specla.sampling import triton_draw  # noqa: E402
from specla.sampling.triton_draw import REACH, SLACK, bound_above, draw  # noqa: E402

BLOCK, TILE = 512, 256  # two tokens to a lane
POSITION = 31


@triton.jit
def _draw_kernel(
    logits_ptr, seed_ptr, temperature_ptr, vocab_size, score_ptr, token_ptr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_ptr += row * vocab_size
    ids = FIRST + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf"))
    score, token = draw(
        logits_ptr, FIRST, vocab_size, tl.max(x, axis=0), tl.load(temperature_ptr),
        tl.load(seed_ptr + row), 31, BLOCK, TILE, TILE,
    )  # fmt: skip
    tl.store(score_ptr + row, score)
    tl.store(token_ptr + row, token)


@triton.jit
def _bound_kernel(below_ptr, ids_ptr, seed_ptr, temperature_ptr, bound_ptr, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    temperature = tl.load(temperature_ptr)
    rate, reach = (1.0 / temperature).to(tl.float32), (temperature * 42.0).to(tl.float32)
    below, token = tl.load(below_ptr + lane), tl.load(ids_ptr + lane)
    bound = bound_above(below, rate, reach, tl.load(seed_ptr), 31, token)
    tl.store(bound_ptr + lane, bound)


def float64(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device=DEVICE)


def drawn(
    logits: Tensor, seeds: list[int], temperature: float, first: int = 0
) -> tuple[list[int], Tensor]:
    """Row by row, one block from `first` on: tokens and scores [n]. logits [n, V] float32."""
    scores = torch.empty(len(seeds), dtype=torch.float64, device=DEVICE)
    tokens = torch.empty(len(seeds), dtype=torch.int32, device=DEVICE)
    _draw_kernel[(len(seeds),)](
        logits.to(DEVICE),
        torch.tensor([signed(seed) for seed in seeds], device=DEVICE),
        float64(temperature),
        logits.shape[1],
        scores,
        tokens,
        BLOCK=BLOCK,
        TILE=TILE,
        FIRST=first,
    )
    return tokens.tolist(), scores.cpu()


def host_scores(logits: Tensor, seeds: list[int], temperature: float, first: int = 0) -> Tensor:
    """float64 [n, tokens of the block], as `sampling.filters.law` and `draw` make them."""
    block = logits[:, first : first + BLOCK].double()
    ids = torch.arange(first, first + block.shape[1])
    below = (block - block.amax(-1, keepdim=True)) / temperature
    return below + gumbel(seeds, [POSITION] * len(seeds), ids)


def assert_as_host(logits: Tensor, seeds: list[int], temperature: float, first: int = 0) -> None:
    want = host_scores(logits, seeds, temperature, first)
    tokens, scores = drawn(logits, seeds, temperature, first)
    assert tokens == (want.argmax(-1) + first).tolist()
    torch.testing.assert_close(scores, want.amax(-1), rtol=1e-14, atol=1e-14)


def cancelling(seeds: list[int], temperature: float, vocab_size: int) -> Tensor:
    """Logits that undo the noise: scores differ by float32's rounding of them alone, 1e-7."""
    noise = gumbel(seeds, [POSITION] * len(seeds), torch.arange(vocab_size))
    return (-temperature * noise).float()


@pytest.mark.parametrize("temperature", [0.05, 3.0])
def test_where_all_scores_nearly_tie(temperature: float) -> None:
    seeds = [2**63 + i for i in range(5)]
    assert_as_host(cancelling(seeds, temperature, BLOCK), seeds, temperature)


@pytest.mark.parametrize("count", [2, 3, 8, 20])
def test_where_some_scores_nearly_tie(count: int) -> None:
    """A few tokens lead by far; they share lanes in every other row."""
    seeds = [5 * i for i in range(6)]
    logits = cancelling(seeds, 0.8, BLOCK)
    generator = torch.Generator().manual_seed(count)
    for i, row in enumerate(logits):
        step = TILE if i % 2 and count * TILE <= BLOCK else 1
        leaders = torch.randperm(BLOCK // step, generator=generator)[:count] * step
        behind = torch.ones(BLOCK, dtype=torch.bool)
        behind[leaders] = False
        row[behind] -= 20 * torch.rand(int(behind.sum()), generator=generator)
    assert_as_host(logits, seeds, 0.8)


def test_equal_scores_give_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by giving every token the same noise, below all bounds."""
    if DEVICE == "cuda":
        pytest.skip("a compiled kernel's functions cannot be replaced")
    monkeypatch.setattr(triton_draw, "gumbel", lambda seed, position, token: -3.0)
    seeds = [1, 2, 3]
    logits = cancelling(seeds, 1.0, BLOCK)
    logits[:, [500, 77, 205]] = 30.0
    tokens, _ = drawn(logits, seeds, 1.0)
    assert tokens == [77] * 3


@pytest.mark.parametrize(
    ("temperature", "scale"),
    [(1e-270, 1e30), (2.0**-61, 1.0), (2.0**-60, 1e30), (0.3, 0.0), (2.0**60, 1e18), (1e300, 1.0)],
)
def test_any_temperature_and_any_logits(temperature: float, scale: float) -> None:
    seeds = [0, 2**64 - 1]
    logits = torch.randn(2, BLOCK, generator=torch.Generator().manual_seed(0)) * scale
    logits[1, 9:] = -torch.inf
    assert_as_host(logits, seeds, temperature)


def test_the_last_block_ends_with_the_vocabulary() -> None:
    seeds = [3, 4, 5]
    logits = torch.randn(3, BLOCK + 40, generator=torch.Generator().manual_seed(1))
    assert_as_host(logits, seeds, 1.0, first=BLOCK)


def test_ordinary_logits_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are close: of flat and of peaked laws few tokens are scored."""
    if DEVICE == "cuda":
        pytest.skip("a compiled kernel's functions cannot be replaced")
    calls: list[int] = []

    def counted(x: object, top: object, temperature: object, *key: object) -> object:
        calls.append(1)
        return score(x, top, temperature, *key)

    score = triton_draw._score
    monkeypatch.setattr(triton_draw, "_score", counted)
    monkeypatch.setattr(triton_draw, "_draw_from_all", None)
    seeds = list(range(8))
    generator = torch.Generator().manual_seed(2)
    for scale in (0.0, 1.0, 6.0):
        assert_as_host(torch.randn(8, BLOCK, generator=generator) * scale, seeds, 0.9)
    assert len(calls) < 1.5 * 24


def extreme_ids(count: int) -> Tensor:
    """Tokens of seed 7 whose uniforms are the closest to 0 and to 1 of two million."""
    order = uniform([7], [POSITION], torch.arange(1 << 21))[0].argsort()
    return torch.cat([order[: count // 2], order[-count // 2 :]])


@pytest.mark.parametrize("temperature", [0.1, 8.0])
def test_no_score_exceeds_its_bound(temperature: float) -> None:
    count = 1024
    for ids in (torch.arange(count), extreme_ids(count)):
        generator = torch.Generator().manual_seed(3)
        below = -50 * temperature * torch.rand(count, generator=generator)
        below[::2] = -torch.rand(count // 2, generator=generator) * temperature
        bound = torch.empty(count, device=DEVICE)
        seed = torch.tensor([7], device=DEVICE)
        _bound_kernel[(1,)](
            below.to(DEVICE), ids.int().to(DEVICE), seed, float64(temperature), bound, COUNT=count
        )
        noise = gumbel([7], [POSITION], ids)[0]
        score = below.double() / temperature + noise
        bound = bound.cpu().double()
        reached = below.double() / temperature >= -40.4
        assert (bound + SLACK > score)[reached].all()
        assert (bound[below.double() / temperature < -REACH - 1e-3] == -torch.inf).all()
        # As close as -log(1 - u) is to 1 - u, but for the bits that are cut off.
        rest = 1 - uniform([7], [POSITION], ids)[0]
        slack = (-torch.log1p(-rest) / rest).log() + 2.0**-23 / (rest - 2.0**-23) + SLACK
        tight = reached & (rest > 2.0**-22)
        assert (bound - score <= slack)[tight].all()


def test_the_noise_is_bounded_as_the_proof_says() -> None:
    smallest, largest = 0.5 * 2.0**-52, 1 - 2.0**-53
    assert -math.log(-math.log(smallest)) > -3.61
    assert -math.log(-math.log(largest)) < 36.75
    assert REACH > 36.75 + 3.61
