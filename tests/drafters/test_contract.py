# SPDX-License-Identifier: Apache-2.0
"""The contract of DESIGN section 6, for every drafter without weights and every double.

One that reads the target's features has nothing to go by here: `test_eagle.py` has its own, and
`engine/test_lossless.py` runs it on a target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import pytest

from specla.drafters import UNTRAINED, Drafter, DraftRow, Observation, build
from specla.testing import (
    AdversarialDrafter,
    OracleDrafter,
    RandomTreeDrafter,
    ScriptedDrafter,
    follow,
    replay,
)
from specla.topology.tree import DraftTree

VOCAB_SIZE = 11


def text(seed: int, length: int) -> list[int]:
    """Repetitive tokens, so that drafters which look back find something."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 7))] for _ in range(3)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += rng.choice(phrases)
    return tokens[:length]


TEXTS = [text(seed, 60) for seed in range(4)]
NUM_PROMPT = 20
TRUTH = {tuple(t[:NUM_PROMPT]): t[NUM_PROMPT:] for t in TEXTS}

# A new drafter each time: contract tests compare histories.
CASES: dict[str, Callable[[], Drafter]] = {
    **{name: partial(build, name) for name in UNTRAINED},
    "suffix-not-shared": lambda: build("suffix", options={"global_tokens": 0}),
    "ngram-one": lambda: build("ngram", options={"prompt_lookup_min": 1}),
    "oracle": lambda: OracleDrafter(TRUTH),
    "oracle-decoys": lambda: OracleDrafter(TRUTH, decoys=2, vocab_size=VOCAB_SIZE),
    "adversarial": lambda: AdversarialDrafter(TRUTH, vocab_size=VOCAB_SIZE),
    "random-tree": lambda: RandomTreeDrafter(5, VOCAB_SIZE),
    "random-tree-right": lambda: RandomTreeDrafter(5, VOCAB_SIZE, truth=TRUTH),
    "scripted": lambda: ScriptedDrafter([4, 0, 1], OracleDrafter(TRUTH)),
    "scripted-suffix": lambda: ScriptedDrafter(
        [3, 0], build("suffix", options={"global_tokens": 0})
    ),
}
# These remember finished outputs on purpose (see their own tests).
SHARING = {"suffix"}
PRIVATE = {name: make for name, make in CASES.items() if name not in SHARING}
every_drafter = pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
every_private_drafter = pytest.mark.parametrize("make", PRIVATE.values(), ids=PRIVATE.keys())


class View(Sequence[int]):
    """Read-only tokens that are gone once the round is over."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] | None = list(tokens)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        assert self._tokens is not None, "a drafter kept the row's tokens"
        return self._tokens[at]

    def __len__(self) -> int:
        assert self._tokens is not None, "a drafter kept the row's tokens"
        return len(self._tokens)

    def expire(self) -> None:
        self._tokens = None


def row(tokens: Sequence[int], *, slot: int = 1, max_drafts: int = 8, seed: int = 0) -> DraftRow:
    return DraftRow(
        slot=slot,
        tokens=tokens,
        num_prompt_tokens=NUM_PROMPT,
        max_drafts=max_drafts,
        seed=seed,
    )


def rounds(
    drafter: Drafter, texts: Sequence[Sequence[int]], *, max_drafts: int = 8, first_slot: int = 1
) -> list[list[DraftTree]]:
    """Every tree of every text, all texts in one batch; checks what holds in each round."""
    tokens = [list(t[:NUM_PROMPT]) for t in texts]
    trees: list[list[DraftTree]] = [[] for _ in texts]
    while live := [i for i, t in enumerate(texts) if len(tokens[i]) < len(t)]:
        views = [View(tokens[i]) for i in live]
        rows = [
            row(view, slot=first_slot + i, max_drafts=max_drafts)
            for i, view in zip(live, views, strict=True)
        ]
        drafted = drafter.draft(rows)
        for view in views:
            view.expire()
        assert len(drafted) == len(rows)
        seen = []
        for i, tree in zip(live, drafted, strict=True):
            check_tree(drafter, tree, tokens[i], max_drafts)
            path, emitted = follow(tree, texts[i][len(tokens[i]) :])
            trees[i].append(tree)
            tokens[i] += emitted
            seen.append(Observation(slot=first_slot + i, tree=tree, path=path, emitted=emitted))
        drafter.observe(seen)
    return trees


def check_tree(drafter: Drafter, tree: DraftTree, tokens: Sequence[int], max_drafts: int) -> None:
    # That it is a tree at all was checked when it was built.
    assert tree.tokens[0] == tokens[-1]
    assert tree.num_nodes <= 1 + max_drafts
    assert max(tree.depths()) <= drafter.info.max_depth
    assert all(0 <= token < VOCAB_SIZE for token in tree.tokens)
    if max_drafts > 0 and not drafter.info.may_return_nothing:
        assert tree.num_nodes > 1


@every_drafter
@pytest.mark.parametrize("max_drafts", [0, 1, 2, 5, 16])
def test_trees_are_within_their_limits(make: Callable[[], Drafter], max_drafts: int) -> None:
    drafter = make()
    assert drafter.info.name
    trees = rounds(drafter, TEXTS, max_drafts=max_drafts)
    if max_drafts == 0:
        assert all(tree.num_nodes == 1 for row_trees in trees for tree in row_trees)


@every_drafter
def test_same_history_same_trees(make: Callable[[], Drafter]) -> None:
    assert rounds(make(), TEXTS) == rounds(make(), TEXTS)


@every_drafter
def test_drafting_twice_changes_nothing(make: Callable[[], Drafter]) -> None:
    drafter, tokens = make(), TEXTS[0][: NUM_PROMPT + 9]
    assert drafter.draft([row(tokens)]) == drafter.draft([row(tokens)])


@every_drafter
def test_rows_are_independent(make: Callable[[], Drafter]) -> None:
    alone = [tree for i in range(4) for tree in rounds(make(), TEXTS[i : i + 1])]
    assert rounds(make(), TEXTS) == alone
    assert rounds(make(), TEXTS[::-1], first_slot=7) == alone[::-1]


@every_drafter
def test_order_of_rows_is_kept(make: Callable[[], Drafter]) -> None:
    rows = [row(t[: NUM_PROMPT + i], slot=5 - i) for i, t in enumerate(TEXTS)]
    trees = make().draft(rows)
    assert [tree.tokens[0] for tree in trees] == [r.tokens[-1] for r in rows]
    assert trees[::-1] == make().draft(rows[::-1])
    assert make().draft([]) == []


@every_private_drafter
def test_reset_forgets(make: Callable[[], Drafter]) -> None:
    used = make()
    rounds(used, TEXTS[:1])
    used.reset(1)
    assert rounds(used, TEXTS[1:2]) == rounds(make(), TEXTS[1:2])


@every_private_drafter
def test_reset_in_the_middle_and_of_unknown_slots(make: Callable[[], Drafter]) -> None:
    """A cancel between draft and observe, a second reset, slots that were never used."""
    used = make()
    used.reset(3)
    used.draft([row(TEXTS[0][: NUM_PROMPT + 5], slot=2)])
    used.reset(2)
    used.reset(2)
    used.observe([])
    assert rounds(used, TEXTS[1:2], first_slot=2) == rounds(make(), TEXTS[1:2])


@every_drafter
def test_tokens_never_drafted_for_are_learned_later(make: Callable[[], Drafter]) -> None:
    """Drafting may be off for some rounds: the next tree is as if it had not been."""
    tokens = TEXTS[2]
    drafter, always = make(), make()
    (expected,) = always.draft([row(tokens[:45])])
    drafter.draft([row(tokens[:NUM_PROMPT])])
    assert drafter.draft([row(tokens[:45])]) == [expected]


@every_drafter
def test_replay_emits_the_text(make: Callable[[], Drafter]) -> None:
    result = replay(make(), TEXTS[3][:NUM_PROMPT], TEXTS[3][NUM_PROMPT:])
    assert sum(result.emitted) == len(TEXTS[3]) - NUM_PROMPT
    assert result.tokens_per_round >= 1
