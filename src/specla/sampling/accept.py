# SPDX-License-Identifier: Apache-2.0
"""Acceptance: walk the tree along the tokens the target itself would have drawn.

At each node draw one token from the target's own filtered law. If it is a child, go down; if not,
emit it as the bonus and stop. The emitted token is the drawn one either way, so its law is the
target's whatever the tree, the drafter or the pruning: lossless by construction. The draw after
the node at depth d has absolute position len(history) + d and its own noise, so the walk emits
exactly the tokens of autoregressive decoding.

Ends cut the path (rule I5): an accepted draft that is an end token, or that reaches max_tokens,
is emitted, stays on the path, and nothing follows it. A stop beats a length at the same token.
So does a node whose logits leave nothing to draw: what was accepted above it stands, as it would
in autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specla.request import SamplingParams, TokenLogprob
from specla.sampling.draw import Draw, InvalidLogits, draw, greedy, token_logprobs
from specla.sampling.filters import History, is_penalised
from specla.topology.tree import DraftTree

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLaw:
    """How one row draws, and what ends it.

    Attributes:
        seed: the request's noise seed, in [0, 2**64).
        history: prompt and output so far; the last token is node 0. Read, never kept.
        num_prompt_tokens: how many of `history` are the prompt.
        end_token_ids: stop_token_ids, and the model's own end tokens unless ignore_eos.
        remaining: tokens this row may still emit; >= 1.
    """

    params: SamplingParams
    seed: int
    history: Sequence[int]
    num_prompt_tokens: int
    end_token_ids: Collection[int]
    remaining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one row's tree.

    Attributes:
        path: node indices from node 0 down, after any cut.
        emitted: this round's tokens: the drafts on the path below node 0, then the bonus unless
            the path was cut. Without a cut as many as `path` has nodes.
        finish: None while the row goes on; "error" where there was nothing to draw.
        stop_token: the end token if `finish` is "stop".
        logprobs: one per emitted token, if the row asked for them.
        num_drafted: drafts that had a chance: all, or if the path was cut at depth d those of
            depth <= d. An always-right drafter has num_accepted == num_drafted for chains.
        offered_depth: depth of the deepest of them; 0 if there was none.
    """

    path: tuple[int, ...]
    emitted: tuple[int, ...]
    finish: Finish | None
    stop_token: int | None
    logprobs: tuple[TokenLogprob, ...] | None
    num_drafted: int
    offered_depth: int

    @property
    def num_accepted(self) -> int:
        """Drafts on the path."""
        return len(self.path) - 1


class Walk:
    """One row's way down its tree, one drawn token at a time.

    Knows nothing of logits: whoever drives it chooses the token for `draw` at node `path[-1]`
    and calls `advance` until `done`.
    """

    __slots__ = ("done", "emitted", "finish", "history", "path", "row", "tree")

    def __init__(self, tree: DraftTree, row: RowLaw) -> None:
        self.tree = tree
        self.row = row
        self.path = [0]
        self.emitted: list[int] = []
        self.finish: Finish | None = None
        self.done = False
        self.history: History | None = None
        if is_penalised(row.params):
            self.history = History(row.history, row.num_prompt_tokens)

    @property
    def draw(self) -> Draw:
        """The draw to make at the current node."""
        row = self.row
        position = len(row.history) + len(self.emitted)
        too_early = position - row.num_prompt_tokens < row.params.min_tokens
        return Draw(
            params=row.params,
            seed=row.seed,
            position=position,
            history=self.history,
            forbidden=row.end_token_ids if too_early else (),
        )

    def advance(self, token: int) -> None:
        """Emit the token drawn at the current node; go down if it is a child."""
        child = self.tree.child_with(self.path[-1], token)
        self.emitted.append(token)
        if child is not None:
            self.path.append(child)
        if self.history is not None:
            self.history.append(token)
        if token in self.row.end_token_ids:
            self.finish = "stop"
        elif len(self.emitted) >= self.row.remaining:
            self.finish = "length"
        self.done = child is None or self.finish is not None

    def fail(self) -> None:
        """There is nothing to draw at the current node: NaN, +inf, or all of it forbidden."""
        self.finish, self.done = "error", True

    def verdict(self, logprobs: tuple[TokenLogprob, ...] | None = None) -> Verdict:
        """What the walk came to, once `done`."""
        depths = self.tree.depths()[1:]
        # No bonus: the last emitted token is the last node of the path.
        if len(self.emitted) < len(self.path):
            depths = tuple(depth for depth in depths if depth <= len(self.emitted))
        return Verdict(
            path=tuple(self.path),
            emitted=tuple(self.emitted),
            finish=self.finish,
            stop_token=self.emitted[-1] if self.finish == "stop" else None,
            logprobs=logprobs,
            num_drafted=len(depths),
            offered_depth=max(depths, default=0),
        )


def walk(tree: DraftTree, row: RowLaw, choose: Callable[[int, Draw], int]) -> Walk:
    """Walk one tree to its end with any chooser: (node, draw) -> token."""
    one = Walk(tree, row)
    while not one.done:
        one.advance(choose(one.path[-1], one.draw))
    return one


def accept(
    logits: Tensor,
    trees: Sequence[DraftTree],
    offsets: Sequence[int],
    rows: Sequence[RowLaw],
) -> list[Verdict]:
    """Judge one round: one verdict per row.

    Args:
        logits: float32 [M, V], the target's, of all rows' nodes end to end; padding rows after a
            tree's nodes are not read.
        trees: B draft trees.
        offsets: node i of row b is at `offsets[b] + i`; B entries are read.
        rows: B records.
    """
    assert logits.dtype == torch.float32
    assert logits.ndim == 2
    assert len(trees) == len(rows) <= len(offsets)
    walks = [Walk(tree, row) for tree, row in zip(trees, rows, strict=True)]
    argmax = [b for b, one in enumerate(walks) if _is_argmax(one)]
    if argmax:
        _walk_argmax(logits, offsets, walks, argmax)
    _walk_drawing(logits, offsets, walks)
    logprobs = _report_logprobs(logits, offsets, walks)
    return [one.verdict(logprobs.get(b)) for b, one in enumerate(walks)]


def _is_argmax(one: Walk) -> bool:
    """Greedy on untouched logits; what holds at the root holds further down."""
    return one.row.params.temperature == 0 and one.draw.is_plain


def _walk_argmax(
    logits: Tensor, offsets: Sequence[int], walks: Sequence[Walk], members: Sequence[int]
) -> None:
    """One argmax over all nodes decides every plain greedy row."""
    tokens, finite = greedy(logits)
    for b in members:
        one = walks[b]
        while not one.done and finite[offsets[b] + one.path[-1]]:
            one.advance(tokens[offsets[b] + one.path[-1]])
        if not one.done:
            one.fail()


def _walk_drawing(logits: Tensor, offsets: Sequence[int], walks: Sequence[Walk]) -> None:
    """One level of all remaining rows at a time; only visited nodes are looked at."""
    while active := [b for b, one in enumerate(walks) if not one.done]:
        nodes = [offsets[b] + walks[b].path[-1] for b in active]
        try:
            tokens = draw(_select(logits, nodes), [walks[b].draw for b in active])
        except InvalidLogits as error:
            # The others draw the same again.
            for i in error.rows:
                walks[active[i]].fail()
            continue
        for b, token in zip(active, tokens, strict=True):
            walks[b].advance(token)


def _report_logprobs(
    logits: Tensor, offsets: Sequence[int], walks: Sequence[Walk]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Log-probabilities of the emitted tokens, by row, for rows that asked."""
    asking = [(b, one) for b, one in enumerate(walks) if one.row.params.logprobs is not None]
    if not asking:
        return {}
    # Emitted token i was drawn at path node i; a cut path has one node more.
    nodes = [offsets[b] + n for b, one in asking for n in one.path[: len(one.emitted)]]
    chosen = [token for _, one in asking for token in one.emitted]
    num_top = [one.row.params.logprobs or 0 for _, one in asking for _ in one.emitted]
    reports = iter(token_logprobs(_select(logits, nodes), chosen, num_top))
    return {b: tuple(next(reports) for _ in one.emitted) for b, one in asking}


def _select(logits: Tensor, nodes: Sequence[int]) -> Tensor:
    return logits.index_select(0, torch.tensor(nodes, device=logits.device))
