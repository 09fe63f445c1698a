# SPDX-License-Identifier: Apache-2.0
"""Test tools for users: drafters whose behaviour is known in advance, and a loop without a model.

Speculation must not change the output, so an engine is tested with drafters that are always
right, always wrong, random, or silent in some rounds: outputs stay equal, only the number of
rounds may differ. Drafters that need to know the truth are given it per prompt:

    oracle = OracleDrafter({tuple(prompt_ids): plain_decoding_output_ids})

Invariant: what a double proposes depends only on its arguments and the row, never on other rows
or on the slot number, so results can be compared between batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specla.drafters.base import Drafter, DrafterInfo, DraftRow, Observation
from specla.topology.tree import DraftTree

__all__ = [
    "AdversarialDrafter",
    "OracleDrafter",
    "RandomTreeDrafter",
    "Replay",
    "ScriptedDrafter",
    "Truth",
    "follow",
    "replay",
]

# The output of plain decoding: by prompt, or by row where one prompt has several outputs
# (another seed, other sampling parameters).
Truth = Mapping[tuple[int, ...], Sequence[int]] | Callable[[DraftRow], Sequence[int]]


def _truth_ahead(truth: Truth, row: DraftRow) -> Sequence[int]:
    """The true tokens that come after the row's last token."""
    if callable(truth):
        continuation = truth(row)
    else:
        prompt = tuple(row.tokens[: row.num_prompt_tokens])
        if prompt not in truth:
            raise KeyError(f"no continuation was given for the prompt {prompt}")
        continuation = truth[prompt]
    return continuation[len(row.tokens) - row.num_prompt_tokens :]


class _Double:
    """The part that doubles without memory share."""

    info: DrafterInfo

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row."""
        return [self._draft_row(row) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to learn: the row says where it is."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""

    def _draft_row(self, row: DraftRow) -> DraftTree:
        raise NotImplementedError


class OracleDrafter(_Double):
    """Always right: every round accepts as deep as the tree goes.

    Args:
        truth: the output of plain decoding. Where it ends, nothing is proposed.
        depth: longest proposal.
        decoys: wrong siblings beside each right node. They share the node budget with it and
            take turns in being first, so that accepting by position is caught.
        vocab_size: bound of decoy token ids; required with decoys.
    """

    def __init__(
        self, truth: Truth, *, depth: int = 8, decoys: int = 0, vocab_size: int | None = None
    ) -> None:
        if decoys and (vocab_size is None or vocab_size <= decoys):
            raise ValueError(f"vocab_size must be > {decoys} for that many decoys")
        self.info = DrafterInfo(name="oracle", max_depth=depth, may_return_nothing=True)
        self._truth, self._decoys, self._vocab_size = truth, decoys, vocab_size or 0

    def _draft_row(self, row: DraftRow) -> DraftTree:
        tokens, parents, right_node = [row.tokens[-1]], [-1], 0
        for level, right in enumerate(_truth_ahead(self._truth, row)[: self.info.max_depth]):
            room = row.max_drafts + 1 - len(tokens)
            if room <= 0:
                break
            siblings = self._siblings(right, level)[:room]
            if right not in siblings:
                siblings[-1] = right
            parents += [right_node] * len(siblings)
            right_node = len(tokens) + siblings.index(right)
            tokens += siblings
        return DraftTree(tuple(tokens), tuple(parents))

    def _siblings(self, right: int, level: int) -> list[int]:
        decoys = [(right + 1 + i) % self._vocab_size for i in range(self._decoys)]
        place = level % (len(decoys) + 1)
        return [*decoys[:place], right, *decoys[place:]]


class AdversarialDrafter(_Double):
    """Always wrong: a chain whose every token differs from the true one at its position, so each
    round emits exactly one token.

    Args:
        truth: the output of plain decoding. Where it ends, nothing is proposed.
        vocab_size: bound of token ids, at least 2.
        depth: length of the chain.
    """

    def __init__(self, truth: Truth, *, vocab_size: int, depth: int = 4) -> None:
        if vocab_size < 2:
            raise ValueError("vocab_size must be at least 2, or every guess is right")
        self.info = DrafterInfo(name="adversarial", max_depth=depth, may_return_nothing=True)
        self._truth, self._vocab_size = truth, vocab_size

    def _draft_row(self, row: DraftRow) -> DraftTree:
        length = min(row.max_drafts, self.info.max_depth)
        ahead = _truth_ahead(self._truth, row)[:length]
        return DraftTree.chain(row.tokens[-1], map(self._wrong, ahead, range(length)))

    def _wrong(self, right: int, level: int) -> int:
        # A shift in [1, vocab_size) never comes back to the right token.
        return (right + 1 + level % (self._vocab_size - 1)) % self._vocab_size


class RandomTreeDrafter(_Double):
    """Random trees of random size, the same for the same (seed, tokens of the row).

    Args:
        seed: of the trees.
        vocab_size: bound of token ids.
        max_depth, max_children: bounds of the shape.
        truth: where given, a node on the true path gets the right token among its children with
            probability `p_right` each time it gets a child.
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        max_depth: int = 6,
        max_children: int = 3,
        *,
        truth: Truth | None = None,
        p_right: float = 0.5,
    ) -> None:
        self.info = DrafterInfo(name="random-tree", max_depth=max_depth, may_return_nothing=True)
        self._seed, self._vocab_size = seed, vocab_size
        self._max_children = min(max_children, vocab_size)
        self._truth, self._p_right = truth, p_right

    def _draft_row(self, row: DraftRow) -> DraftTree:
        # Integers only: their hash does not depend on the process, as that of strings does.
        rng = random.Random(hash((self._seed, *row.tokens)))
        ahead = _truth_ahead(self._truth, row) if self._truth is not None else ()
        tree = _Growing(row.tokens[-1])
        for _ in range(rng.randint(0, row.max_drafts)):
            parents = [
                node
                for node, children in enumerate(tree.children)
                if len(children) < self._max_children and tree.depths[node] < self.info.max_depth
            ]
            if not parents:
                break
            parent = rng.choice(parents)
            tree.add(parent, self._token(rng, tree, parent, ahead), ahead)
        return DraftTree(tuple(tree.tokens), tuple(tree.parents))

    def _token(self, rng: random.Random, tree: _Growing, parent: int, ahead: Sequence[int]) -> int:
        right = tree.right_below(parent, ahead)
        if right in tree.children[parent]:
            right = None
        if right is not None and rng.random() < self._p_right:
            return right
        token = rng.randrange(self._vocab_size)
        while token in tree.children[parent]:
            token = (token + 1) % self._vocab_size
        return token


class _Growing:
    """A tree under construction, which knows the nodes on the true path."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.children: list[set[int]] = [set()]  # tokens of the children
        self._on_path = [True]

    def right_below(self, parent: int, ahead: Sequence[int]) -> int | None:
        """The token that is right below `parent`, if `parent` is right and the truth known."""
        depth = self.depths[parent]
        return ahead[depth] if self._on_path[parent] and depth < len(ahead) else None

    def add(self, parent: int, token: int, ahead: Sequence[int]) -> None:
        """Append a node."""
        self._on_path.append(token == self.right_below(parent, ahead))
        self.children[parent].add(token)
        self.children.append(set())
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)


class ScriptedDrafter:
    """Another drafter, held to a script of node budgets: round i of a row gets at most
    `counts[i % len(counts)]` drafts. `[4, 0]` alternates drafts and silence, the sequence that
    corrupts engines which keep rejected state around.

    Rounds are counted per slot by `observe` and start again at `reset`.
    """

    def __init__(self, counts: Sequence[int], inner: Drafter) -> None:
        if not counts or min(counts) < 0:
            raise ValueError(f"counts must be draft counts >= 0, at least one, got {counts!r}")
        self.info = DrafterInfo(
            name="scripted", max_depth=inner.info.max_depth, may_return_nothing=True
        )
        self._counts, self._inner = tuple(counts), inner
        self._rounds: dict[int, int] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """The inner drafter's trees under this round's budget."""
        return self._inner.draft([self._limit(row) for row in rows])

    def observe(self, seen: Sequence[Observation]) -> None:
        """Count a round."""
        for row in seen:
            self._rounds[row.slot] = self._rounds.get(row.slot, 0) + 1
        self._inner.observe(seen)

    def reset(self, slot: int) -> None:
        """Start the script again."""
        self._rounds.pop(slot, None)
        self._inner.reset(slot)

    def _limit(self, row: DraftRow) -> DraftRow:
        count = self._counts[self._rounds.get(row.slot, 0) % len(self._counts)]
        return DraftRow(
            slot=row.slot,
            tokens=row.tokens,
            num_prompt_tokens=row.num_prompt_tokens,
            max_drafts=min(row.max_drafts, count),
            seed=row.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a drafter did on a known text. `emitted[i]` tokens came out of round i, whose tree is
    `trees[i]`; the mean of `emitted` is the speed-up if a round cost one step."""

    trees: tuple[DraftTree, ...]
    emitted: tuple[int, ...]

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens emitted by one round."""
        return sum(self.emitted) / len(self.emitted)


def follow(tree: DraftTree, ahead: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk a tree along the true tokens `ahead` (at least one).

    Returns:
        The committed path (nodes from node 0 down) and the tokens emitted: the path's drafts and
        one more, or all of `ahead` where the text ends on the way.
    """
    path = [0]
    for token in ahead[:-1]:
        child = tree.child_with(path[-1], token)
        if child is None:
            break
        path.append(child)
    return tuple(path), tuple(ahead[: len(path)])


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    continuation: Sequence[int],
    *,
    slot: int = 1,
    max_drafts: int = 16,
    seed: int = 0,
) -> Replay:
    """Run the rounds that would produce `continuation` after `prompt`, without a model.

    The slot is not reset, before or after: that belongs to the caller.
    """
    tokens, ahead = list(prompt), list(continuation)
    trees: list[DraftTree] = []
    counts: list[int] = []
    while ahead:
        row = DraftRow(
            slot=slot,
            tokens=tokens,
            num_prompt_tokens=len(prompt),
            max_drafts=max_drafts,
            seed=seed,
        )
        (tree,) = drafter.draft([row])
        path, emitted = follow(tree, ahead)
        tokens += emitted
        del ahead[: len(emitted)]
        drafter.observe([Observation(slot=slot, tree=tree, path=path, emitted=emitted)])
        trees.append(tree)
        counts.append(len(emitted))
    return Replay(trees=tuple(trees), emitted=tuple(counts))
