# SPDX-License-Identifier: Apache-2.0
"""Compile one round: logs and trees of the rows -> the RoundPlan all layers share.

Integers only; nothing here depends on the values of tokens, so the same shapes always give the
same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specla.ops.contract import Level, Moves, Places, Replay, RoundPlan
from specla.state.log import Log
from specla.topology.tree import DraftTree

Ints = Callable[[Sequence[int]], Tensor]


def compile_round(
    slots: Sequence[int],
    logs: Sequence[Log],
    trees: Sequence[DraftTree],
    *,
    conv_width: int,
    device: torch.device,
) -> RoundPlan:
    """The plan of a round over rows (slots[b], logs[b], trees[b])."""

    def ints(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    offsets = tuple(accumulate((tree.num_nodes for tree in trees), initial=0))
    sizes = [tree.num_nodes for tree in trees]
    fold = [b for b, log in enumerate(logs) if log.fold_due]
    flat = [(b, i) for b, size in enumerate(sizes) for i in range(size)]
    return RoundPlan(
        slots=ints(slots),
        read_bank=ints([log.bank for log in logs]),
        replay=_replays(slots, logs, ints),
        fold_rows=ints(fold),
        fold_slots=ints([slots[b] for b in fold]),
        moves=_moves(slots, logs, ints),
        tokens=ints([token for tree in trees for token in tree.tokens]),
        node_slot=ints([slots[b] for b, _ in flat]),
        node_index=ints([i for _, i in flat]),
        write_bank=ints([1 - logs[b].bank for b, _ in flat]),
        write_entry=ints([logs[b].bank_entry(1 - logs[b].bank, i) for b, i in flat]),
        levels=tuple(_levels(trees, offsets, ints)),
        tail_source=ints([_tail(log, conv_width - 1) for log in logs]).reshape(len(logs), -1),
        rows=ints(range(len(logs))).unsqueeze(1),
        taps=tuple(
            _places(column, ints)
            for column in zip(*_taps(trees, offsets, conv_width), strict=True)
        ),
        offsets=offsets,
        trees=tuple(trees),
    )


def _replays(slots: Sequence[int], logs: Sequence[Log], ints: Ints) -> tuple[Replay, ...]:
    entries = [log.entries() for log in logs]
    replays = []
    for j in range(max(map(len, entries))):
        rows = [b for b, row in enumerate(entries) if len(row) > j]
        replays.append(
            Replay(
                ints(rows),
                ints([slots[b] for b in rows]),
                ints([entries[b][j] for b in rows]),
                len(rows) == len(slots),
            )
        )
    return tuple(replays)


def _moves(slots: Sequence[int], logs: Sequence[Log], ints: Ints) -> Moves | None:
    moves = [
        (slot, log.bank_entry(log.bank, node), log.ring_len + j)
        for slot, log in zip(slots, logs, strict=True)
        if not log.fold_due
        for j, node in enumerate(log.path)
    ]
    return Moves(*map(ints, zip(*moves, strict=True))) if moves else None


def _levels(trees: Sequence[DraftTree], offsets: Sequence[int], ints: Ints) -> Iterator[Level]:
    """Nodes by depth; only states that something stands below are carried down."""
    by_depth, parent = _by_depth(trees, offsets)
    yield Level(_places(by_depth[0], ints), None, None, None)
    for upper, nodes in pairwise(by_depth):
        inner = {parent[node] for node in nodes}
        carried = [i for i, node in enumerate(upper) if node in inner]
        above = [upper[i] for i in carried]
        place = {node: i for i, node in enumerate(above)}
        source = [place[parent[node]] for node in nodes]
        yield Level(
            _places(nodes, ints),
            _places(above, ints),
            None if len(carried) == len(upper) else ints(carried),
            None if source == list(range(len(above))) else ints(source),
        )


def _by_depth(
    trees: Sequence[DraftTree], offsets: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """(flat nodes of each depth, each flat node's parent)."""
    levels: list[list[int]] = []
    parent: list[int] = []
    for tree, start in zip(trees, offsets, strict=False):
        parent += [start + above for above in tree.parents]
        for i, depth in enumerate(tree.depths()):
            if depth == len(levels):
                levels.append([])
            levels[depth].append(start + i)
    return levels, parent


def _places(values: Sequence[int], ints: Ints) -> Places:
    """A slice where the values are consecutive."""
    first = values[0]
    if list(values) == list(range(first, first + len(values))):
        return slice(first, first + len(values))
    return ints(values)


def _tail(log: Log, taps: int) -> list[int]:
    """The newest `taps` of (old tail | path inputs), as indices into (tail | bank inputs)."""
    history = [*range(taps), *(taps + node for node in log.path)]
    return history[len(history) - taps :]


def _taps(trees: Sequence[DraftTree], offsets: Sequence[int], width: int) -> list[list[int]]:
    """Each node's window, oldest first: indices into (all rows' tails | flat nodes)."""
    history = width - 1
    base = len(trees) * history
    taps: list[list[int]] = []
    for b, tree in enumerate(trees):
        windows: list[list[int]] = []
        tail = list(range(b * history, (b + 1) * history))
        for i, parent in enumerate(tree.parents):
            above = tail if parent < 0 else windows[parent][1:]
            windows.append([*above, base + offsets[b] + i])
        taps += windows
    return taps
