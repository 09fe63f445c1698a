# SPDX-License-Identifier: Apache-2.0
"""The headline's prompts, none of which target or drafters have seen.

GSM8K's test problems without those that gsm_symbolic's templates were made from; HumanEval's
functions, asked for in words; and six kinds of 80 prompts each, mixed in equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specla.bench.headline import GSM8K, HUMANEVAL, MIXED
from specla.bench.measure import Prompt
from specla.bench.suites import read_suites, sample
from specla.train import corpus
from specla.train.pack import HUMANEVAL_FILE, MIXED_FOLDER

FUNCTION = "Complete this function:\n```python\n{}\n```"


def suites(data: Path, count: int | None, seed: int = 0) -> dict[str, list[Prompt]]:
    """So many prompts of each suite, drawn with a seed; None: all.

    Raises:
        ConfigError: a suite is not there.
    """
    allowed = [row["question"] for row in corpus.gsm8k_test(data)]
    found = {
        GSM8K: [Prompt(kind=GSM8K, text=text) for text in allowed],
        HUMANEVAL: _functions(data),
    }
    drawn = {name: sample(prompts, count, seed) for name, prompts in found.items()}
    return drawn | {MIXED: _mixed(data, set(allowed), count, seed)}


def _functions(data: Path) -> list[Prompt]:
    (prompts,) = read_suites([corpus.locate(data, HUMANEVAL_FILE)]).values()
    return [Prompt(kind=HUMANEVAL, text=FUNCTION.format(p.text.rstrip())) for p in prompts]


def _mixed(data: Path, allowed: set[str], count: int | None, seed: int) -> list[Prompt]:
    """The same number of every kind, in turn."""
    kinds = read_suites([corpus.locate(data, MIXED_FOLDER)])
    kinds[GSM8K] = [p for p in kinds[GSM8K] if p.text.strip() in allowed]
    each = None if count is None else -(-count // len(kinds))
    drawn = [sample(prompts, each, seed) for prompts in kinds.values()]
    mixed = [replace(p, kind=MIXED, part=p.kind) for row in _columns(drawn) for p in row]
    return mixed[:count]


def _columns(rows: Sequence[Sequence[Prompt]]) -> list[list[Prompt]]:
    longest = max(map(len, rows))
    return [[row[i] for row in rows if i < len(row)] for i in range(longest)]
