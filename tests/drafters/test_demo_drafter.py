# SPDX-License-Identifier: Apache-2.0
"""The demo model's own drafter, as it ships."""

from __future__ import annotations

from specla import LLM, SamplingParams
from specla.drafters import beside
from specla.models.resolve import resolve

QUESTION = (
    "Tom has 20 marbles. He gives 5 marbles to Ben and 3 marbles to Lisa. "
    "How many marbles does he have left?"
)


def test_it_is_small() -> None:
    folder = resolve("demo") / "eagle"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6_000_000


def test_auto_takes_it_and_it_pays() -> None:
    """Three tokens per round and more on the kind of problem that the demo model knows."""
    params = SamplingParams(max_tokens=60, temperature=0)
    asked = [{"role": "user", "content": QUESTION}]
    llm = LLM("demo", budget="off")
    assert llm.config.drafter == beside(resolve("demo"))
    (drafted,) = llm.chat(asked, params)
    (plain,) = LLM("demo", drafter="none").chat(asked, params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.drafter == "eagle"
    assert drafted.speculation.tokens_per_round > 3
