# SPDX-License-Identifier: Apache-2.0
"""Which drafters `lineup` trains for a target, and how: those of the headline, and some that only
studies compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specla.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One drafter of the line-up.

    kind, options, schedule: see `kinds.kind_of`. share: of the time for training. start: the
    entry whose drafter it goes on from. like: an entry before it whose steps it repeats, as many
    and at the same rates, as far as its time allows.
    """

    name: str
    kind: str
    share: float
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUp:
    """Entries in order, and how the target answers.

    prompts: at most so many, by pool, in these proportions. answering: share of all the time.
    probe: seconds of the stretch that measures a run's speed. keep_bytes: of features. extras:
    entries that are trained where they are asked for.
    """

    entries: tuple[Entry, ...]
    extras: tuple[Entry, ...] = ()
    prompts: int
    pools: Mapping[str, float]
    max_tokens: int = 256
    answering: float = 0.25
    probe: float = 15.0
    keep_bytes: int = 40 << 30

    def also(self, names: Sequence[str]) -> LineUp:
        """With extras of these names, last.

        Raises:
            ConfigError: there is none of a name.
        """
        known = {one.name: one for one in self.extras}
        for name in names:
            if name not in known:
                raise ConfigError(f"--also must name one of {', '.join(known)}, got {name!r}")
        return replace(self, entries=(*self.entries, *(known[n] for n in dict.fromkeys(names))))


def _reading(schedule: Mapping[str, Any], **alone: Any) -> tuple[Entry, ...]:
    """A reader in two stages, of which the first has little to learn; and what its gain is
    measured against: the same lessons by the same loss, without a state, and at the same rates but
    for those of the first stage, in which the reader is new (alone)."""
    joint, plain, new = {"joint": True}, {"reader_loss": True}, {**schedule, **alone}
    return (
        Entry(name="reader", kind="reader", share=0.03, schedule=new, start="block"),
        Entry(
            name="reader-joint", kind="reader", share=0.17, schedule=schedule, start="reader",
            options=joint,
        ),
        Entry(
            name="block-first", kind="block", share=0.03, schedule=schedule, start="block",
            options=plain, like="reader",
        ),
        Entry(
            name="block-more", kind="block", share=0.17, schedule=schedule, start="block-first",
            options=plain, like="reader-joint",
        ),
    )  # fmt: skip


def _attention(eagle: Entry, intermediate_size: int) -> Entry:
    """The same with attention, by as many steps; its MLP is as much wider as attention is
    smaller."""
    options = {**eagle.options, "mixer": "attention", "intermediate_size": intermediate_size}
    return replace(eagle, name=f"{eagle.name}-attention", options=options, like=eagle.name)


_LARGE = {"rows": 8, "length": 1024}
_READING = {**_LARGE, "lr": 1e-4}
# Width 1,024, 4 heads, 8,192 tokens that can be drafted: a level of drafts takes 0.038 of a plain
# step.
_LARGE_EAGLE = Entry(
    name="eagle", kind="eagle", share=0.4, schedule={**_LARGE, "lr": 1e-3},
    options={
        "hidden_size": 1024, "num_heads": 4, "intermediate_size": 2816, "draft_vocab_size": 8192,
    },
)  # fmt: skip
GPU_LINE_UP = LineUp(
    entries=(
        _LARGE_EAGLE,
        Entry(name="block", kind="block", share=0.24, schedule={**_LARGE, "lr": 6e-4}),
        *_reading(_READING, lr=6e-4),
    ),
    extras=(_attention(_LARGE_EAGLE, 3848),),
    prompts=12_000,
    keep_bytes=72 << 30,
    pools={"gsm8k": 0.4, "symbolic": 0.15, "generated": 0.15, "mined": 0.2, "functions": 0.1},
)  # fmt: skip

_SMALL = {"rows": 2, "length": 96}
_SMALL_EAGLE = Entry(
    name="eagle", kind="eagle", share=0.4, schedule=_SMALL,
    options={"hidden_size": 32, "num_heads": 2, "head_dim": 16, "intermediate_size": 48},
)  # fmt: skip
_BLOCK = {"draft_layers": 1, "block_size": 4, "head_dim": 32, "anchors": 8}
TOY_LINE_UP = LineUp(
    entries=(
        _SMALL_EAGLE,
        Entry(name="block", kind="block", share=0.24, schedule=_SMALL, options=_BLOCK),
        *_reading(_SMALL),
    ),
    extras=(_attention(_SMALL_EAGLE, 80),),
    prompts=30,
    pools={"gsm8k": 0.6, "functions": 0.4},
    max_tokens=16,
    answering=0.2,
    probe=0.3,
)  # fmt: skip
"""Of `target.toy_scale`'s target."""
