# SPDX-License-Identifier: Apache-2.0
"""Requests that use every sampling parameter, and every drafter and double by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from block_toy import habits_block
from eagle_toy import habits_drafter
from engine_harness import VOCAB, request

from specla import drafters
from specla.drafters.base import Drafter, DraftRow
from specla.request import Request
from specla.testing import (
    AdversarialDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ScriptedDrafter,
)

Truth = Callable[[DraftRow], Sequence[int]]

# One text that repeats, one that does not, one longer than two prefill chunks.
LOOP = (18, 19, 20, 21) * 3
WALK = (5, 9, 14, 15, 16, 17, 10, 22, 6)
LONG = tuple(5 + (i * i + 3 * i) % 19 for i in range(131))
PROMPTS = (LOOP, WALK, LONG, (11,), (23, 5), LONG[:65], LONG[:64], LOOP[:3])

# Each changes the law or the end in another way.
VARIANTS: tuple[dict[str, object], ...] = (
    {"logprobs": 2},
    {"top_k": 4, "logprobs": 0},
    {"top_p": 0.7, "min_p": 0.02},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 1},
    {"repetition_penalty": 1.6, "logit_bias": {11: 3.5, 4: -100.0}},
    {"stop": ("ab", "d d", " the"), "logprobs": 1},
    {"stop_token_ids": (11, 13), "min_tokens": 5},
    {"ignore_eos": False, "min_tokens": 2, "logit_bias": {4: 2.0}},
    {"max_tokens": 1, "top_k": 1},
    {"stop": ("c d",), "min_tokens": 4, "presence_penalty": -1.0},
    {"max_tokens": 2, "skip_special_tokens": False},
    {"repetition_penalty": 0.7, "stop": ("\u6f22q", "\U0001f600"), "logprobs": 3},
)


def mixed(temperature: float, **common: object) -> list[Request]:
    """One request per variant, each with its own prompt kind and seed."""
    return [
        request(
            f"t{temperature}-{i}",
            PROMPTS[i % len(PROMPTS)],
            seed=int(100 * temperature) + i,
            temperature=temperature,
            **{"max_tokens": 14, **variant, **common},
        )
        for i, variant in enumerate(VARIANTS)
    ]


def doubles(truth: Truth) -> dict[str, Callable[[], Drafter]]:
    """Makers of every double."""

    def random_tree() -> Drafter:
        return RandomTreeDrafter(3, VOCAB, truth=truth, p_right=0.7)

    return {
        "oracle": lambda: OracleDrafter(truth),
        "oracle-decoys": lambda: OracleDrafter(truth, decoys=2, vocab_size=VOCAB),
        "adversarial": lambda: AdversarialDrafter(truth, vocab_size=VOCAB),
        "random-tree": random_tree,
        "scripted": lambda: ScriptedDrafter((4, 0), OracleDrafter(truth)),
        "scripted-tree": lambda: ScriptedDrafter((7, 0, 0, 2), random_tree()),
    }


DOUBLES = tuple(doubles(lambda row: ()))
EVERY = (*drafters.REGISTRY, *DOUBLES)


def build(name: str, truth: Truth) -> Drafter:
    """A fresh drafter or double."""
    if name in drafters.TRAINED:
        return {"eagle": habits_drafter, "block": habits_block}[name]()
    return drafters.build(name) if name in drafters.REGISTRY else doubles(truth)[name]()
