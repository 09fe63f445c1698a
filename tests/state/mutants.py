# SPDX-License-Identifier: Apache-2.0
"""Bugs that engines have shipped, one function each, to show that the histories find them.

A mutant is (owner, attribute, make): `make(original)` is the broken replacement. Plain decoding
keeps the original: a bug shared with the truth would be invisible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specla.ops.contract import Factors, LayerState, RoundPlan
from specla.ops.gdn import reference
from specla.state import State, plan
from specla.state.log import Log


class Mutant(NamedTuple):
    owner: Any
    attribute: str
    make: Callable[[Any], Any]


def weighted_replay(original: Any) -> Any:
    """Replay as one weighted sum: right in real numbers, other bits than stepwise (I4)."""

    def live_states(layer: LayerState, at: RoundPlan) -> Tensor:
        S = layer.S[at.slots].clone()
        for b, slot in enumerate(at.slots.tolist()):
            rows = [(r.entries[r.rows == b]) for r in at.replay]
            entries = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
            if entries.numel() > 1:
                S[b] = _weighted(S[b], Factors(*(f[slot, entries] for f in layer.factors)))
            elif entries.numel():
                S[b] = reference.fold(S[b], Factors(*(f[slot, entries] for f in layer.factors)))
        if at.fold_rows.numel():
            layer.S[at.fold_slots] = S[at.fold_rows]
        return S

    return live_states


def _weighted(S: Tensor, f: Factors) -> Tensor:
    total = f.g.cumsum(0)
    left = torch.exp(total[-1] - total).unsqueeze(-1)
    k = reference.per_value_head(f.k, S.shape[0])
    update = torch.einsum("tgv,tgk->gvk", f.u * left, k)
    return torch.exp(total[-1])[:, None, None] * S + update


def stale_bank(original: Any) -> Any:
    """A round without drafts does not flip the bank: the next one reads old factors."""

    def commit(log: Log, path: tuple[int, ...]) -> None:
        original(log, path)
        if len(path) == 1 and log.num_nodes > 1:
            log.bank = 1 - log.bank

    return commit


def sibling_taps(original: Any) -> Any:
    """The conv reads the neighbour in node order instead of the parent."""

    def taps(trees: Any, offsets: Any, width: int) -> list[list[int]]:
        return original([_Chain(len(tree.parents)) for tree in trees], offsets, width)

    return taps


class _Chain:
    def __init__(self, count: int) -> None:
        self.parents = range(-1, count - 1)


def tree_as_chain(original: Any) -> Any:
    """Every level continues from the first state of the level above."""

    def levels(trees: Any, offsets: Any, ints: Any) -> Iterator[Any]:
        for level in original(trees, offsets, ints):
            nodes = level.nodes
            count = nodes.stop - nodes.start if isinstance(nodes, slice) else len(nodes)
            yield level if level.above is None else level._replace(source=ints([0] * count))

    return levels


def reset_keeps_ring(original: Any) -> Any:
    """A freed slot keeps its factors (I6)."""

    def reset(state: State, slot: int) -> None:
        kept = [[f[slot].clone() for f in layer.factors] for layer in state.layers]
        original(state, slot)
        for layer, factors in zip(state.layers, kept, strict=True):
            for store, old in zip(layer.factors, factors, strict=True):
                store[slot] = old

    return reset


def reset_keeps_log(original: Any) -> Any:
    """A freed slot keeps its cursors."""

    def reset(state: State, slot: int) -> None:
        log = state.logs[slot]
        original(state, slot)
        state.logs[slot] = log

    return reset


def fold_from_all_candidates(original: Any) -> Any:
    """Commit takes the first len(path) candidates instead of the path's."""

    def commit(log: Log, path: tuple[int, ...]) -> None:
        original(log, tuple(range(len(path))))

    return commit


def moves_backwards(original: Any) -> Any:
    """The path enters the ring in reverse."""

    def moves(slots: Any, logs: Any, ints: Any) -> Any:
        out = original(slots, logs, ints)
        return out if out is None else out._replace(source=out.source.flip(0))

    return moves


def tail_without_path(original: Any) -> Any:
    """The conv tail is not advanced over the accepted path."""

    def tail(log: Log, taps: int) -> list[int]:
        return list(range(taps))

    return tail


def fork_shares_log(original: Any) -> Any:
    """A fork and its origin share cursors."""

    def fork(state: State, slot: int) -> int:
        copy = original(state, slot)
        state.logs[copy] = state.logs[slot]
        return copy

    return fork


def fold_one_late(original: Any) -> Any:
    """The fold is accounted for but S is written only for rows without drafts in the log."""

    def live_states(layer: LayerState, at: RoundPlan) -> Tensor:
        before = layer.S.clone()
        S = original(layer, at)
        if len(at.replay) > 2:
            layer.S.copy_(before)
        return S

    return live_states


MUTANTS = {
    make.__name__: Mutant(owner, attribute, make)
    for owner, attribute, make in (
        (reference, "_live_states", weighted_replay),
        (Log, "commit", stale_bank),
        (plan, "_taps", sibling_taps),
        (plan, "_levels", tree_as_chain),
        (State, "reset", reset_keeps_ring),
        (State, "reset", reset_keeps_log),
        (Log, "commit", fold_from_all_candidates),
        (plan, "_moves", moves_backwards),
        (plan, "_tail", tail_without_path),
        (State, "fork", fork_shares_log),
        (reference, "_live_states", fold_one_late),
    )
}
