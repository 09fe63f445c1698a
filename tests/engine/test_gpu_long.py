# SPDX-License-Identifier: Apache-2.0
"""A prompt of 32,768 tokens on a GPU, in chunks: with every drafter the bytes of plain decoding,
while other rows' rounds go on. GDN-1.3B's shape in two layers, random weights.

    pytest -m gpu tests/engine/test_gpu_long.py
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from gpu_drafters import NAMES, made
from gpu_rows import Rows

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.config import GPU_PREFILL_CHUNK
from specla.engine.engine import Engine

pytestmark = pytest.mark.gpu
LENGTH, TOKENS = 32768, 64


@cache
def model() -> RandomGDN:
    return gdn_1_3b(layers=2)


def length(row: int) -> int:
    return LENGTH if row == 0 else 40 * row


# The default's chunks are launched, shorter ones replayed.
TARGETS = {
    chunk: Rows(model, tokens=TOKENS, chunk=chunk, lengths=length)
    for chunk in (256, GPU_PREFILL_CHUNK)
}


@pytest.mark.parametrize("chunk", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_long_prompt_beside_short_ones(name: str, chunk: int, tmp_path: Path) -> None:
    """The block drafters have no room for so many tokens, and say nothing to that row."""
    target, rows, meanwhile = TARGETS[chunk], range(3), list[int]()

    def watch(engine: Engine) -> None:
        """How much of a short row there is while the long one is not ready."""
        running = engine.scheduler.running
        if "0" in running and not running["0"].ready:
            meanwhile.append(len(running["1"].output) if "1" in running else TOKENS)

    drafter, nodes = made(name, target.model.info, tmp_path), 1 if name == "none" else 16
    got = target.decode(rows, drafter, max_nodes=nodes, on_step=watch)
    target.check(rows, got)
    assert len(meanwhile) == -(-(LENGTH - 1) // chunk) - 1
    assert meanwhile[-1] >= min(TOKENS, len(meanwhile) - 2)
