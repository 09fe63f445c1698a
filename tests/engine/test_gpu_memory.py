# SPDX-License-Identifier: Apache-2.0
"""A short run through every kernel of the decode path, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python -m pytest -m gpu tests/engine/test_gpu_memory.py
    compute-sanitizer --tool racecheck --kernel-name-exclude kns=nvjet --error-exitcode 9 python -m pytest -m gpu tests/engine/test_gpu_memory.py

Two layers of GDN-1.3B's shape, a log of four so that most rounds fold, odd row counts, rows that
join and leave. racecheck without cuBLAS's kernels, which it has complaints about. Without the tool it only checks tokens, in seconds.
"""  # noqa: E501

from __future__ import annotations

from functools import cache
from typing import Literal

import pytest

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.drafters.base import Drafter
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.request import Request, SamplingParams
from specla.state import State
from specla.testing import RandomTreeDrafter

pytestmark = pytest.mark.gpu
TOKENS, ROWS, VOCAB = 12, 3, 32000
Tokens = list[tuple[int, ...]]


@cache
def model() -> RandomGDN:
    return gdn_1_3b(layers=2)


def decode(
    drafter: Drafter, *, max_nodes: int, mode: Literal["exact", "fast"], kernel: str = "walk"
) -> Tokens:
    """Tokens of ROWS rows that join one by one; every other row samples."""
    target = model()
    state = State(
        target.info.recurrent,
        num_slots=ROWS,
        max_nodes=max_nodes,
        log_capacity=4,
        dtype=target.dtype,
        device=target.device,
    )
    engine = Engine(target, state, drafter, mode=mode, prefill_chunk=64, kernel=kernel)
    found: dict[int, tuple[int, ...]] = {}
    waiting = list(range(ROWS))
    while waiting or engine.has_work:
        if waiting:
            row = waiting.pop()
            engine.add(_request(row))
        for delta in engine.step():
            if delta.completion is not None:
                found[int(delta.request_id)] = delta.completion.token_ids
    return [found[row] for row in range(ROWS)]


def _request(row: int) -> Request:
    params = SamplingParams(temperature=0.8 * (row % 2), max_tokens=TOKENS, ignore_eos=True)
    prompt = tuple((37 * row + i % 5) % 31000 + 5 for i in range(5 + 70 * row))
    return Request(
        request_id=str(row), prompt=None, prompt_token_ids=prompt, params=params, seed=row
    )


@cache
def plain() -> Tokens:
    return decode(NoDrafter(), max_nodes=1, mode="exact")


@pytest.mark.parametrize("kind", ["ngram", "trees"])
def test_exact_rounds(kind: str) -> None:
    drafter = NgramDrafter() if kind == "ngram" else RandomTreeDrafter(3, VOCAB, max_depth=6)
    assert decode(drafter, max_nodes=16, mode="exact") == plain()


def test_rounds_in_closed_form() -> None:
    """Their own roundings: lengths are what can be held against exact decoding."""
    drafter = RandomTreeDrafter(3, VOCAB, max_depth=6)
    found = decode(drafter, max_nodes=64, mode="fast", kernel="closed")
    assert [len(tokens) for tokens in found] == [TOKENS] * ROWS
