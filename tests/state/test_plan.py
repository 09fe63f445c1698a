# SPDX-License-Identifier: Apache-2.0
"""A round's integers against brute force. Tier: exact."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specla.ops.contract import Places, RoundPlan
from specla.state.log import Log
from specla.state.plan import compile_round
from specla.topology.tree import DraftTree

NODES = 9


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, NODES))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, size)))
    return DraftTree(tuple(draw(st.integers(0, 9)) * NODES + i for i in range(size)), parents)


@st.composite
def logs(draw: st.DrawFn, capacity: int) -> Log:
    """A log after some rounds."""
    log = Log(capacity, NODES, draw(st.integers(0, capacity)))
    for _ in range(draw(st.integers(0, 4))):
        log.commit((0, *sorted(draw(st.sets(st.integers(1, NODES - 1), max_size=4)))))
    return log


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[Log], list[DraftTree], int]:
    slots = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True))
    capacity = draw(st.integers(0, 12))
    rows = len(slots)
    return (
        slots,
        [draw(logs(capacity)) for _ in range(rows)],
        [draw(trees()) for _ in range(rows)],
        draw(st.integers(2, 4)),
    )


Case = tuple[list[int], list[Log], list[DraftTree], int]


def compiled(case: Case) -> RoundPlan:
    slots, log, tree, width = case
    return compile_round(slots, log, tree, conv_width=width, device=torch.device("cpu"))


def ints(tensor: Tensor) -> list[int]:
    assert tensor.dtype == torch.int64
    return tensor.tolist()


def places(where: Places) -> list[int]:
    return list(range(where.start, where.stop)) if isinstance(where, slice) else ints(where)


def flat(case: Case) -> list[tuple[int, int]]:
    """(row, node) of every flat node."""
    return [(b, i) for b, tree in enumerate(case[2]) for i in range(tree.num_nodes)]


@given(cases())
def test_nodes(case: Case) -> None:
    slots, log, tree, _ = case
    plan, nodes = compiled(case), flat(case)
    assert ints(plan.slots) == slots
    assert ints(plan.read_bank) == [x.bank for x in log]
    assert ints(plan.tokens) == [tree[b].tokens[i] for b, i in nodes]
    assert ints(plan.node_slot) == [slots[b] for b, _ in nodes]
    assert ints(plan.node_index) == [i for _, i in nodes]
    assert ints(plan.write_bank) == [1 - log[b].bank for b, _ in nodes]
    assert ints(plan.write_entry) == [log[b].bank_entry(1 - log[b].bank, i) for b, i in nodes]
    assert [nodes[o] for o in plan.offsets[:-1]] == [(b, 0) for b in range(len(slots))]
    assert plan.offsets[-1] == len(nodes)
    assert plan.trees == tuple(tree)


@given(cases())
def test_replay_is_each_log_in_order(case: Case) -> None:
    slots, log, _, _ = case
    seen: dict[int, list[int]] = {b: [] for b in range(len(slots))}
    for part in compiled(case).replay:
        rows = ints(part.rows)
        assert len(rows) == len(set(rows)) > 0
        assert part.all_rows == (rows == list(range(len(slots))))
        assert ints(part.slots) == [slots[b] for b in rows]
        for b, entry in zip(rows, ints(part.entries), strict=True):
            seen[b].append(entry)
    assert [tuple(seen[b]) for b in range(len(slots))] == [x.entries() for x in log]


@given(cases())
def test_fold_or_move_never_both(case: Case) -> None:
    """Every pending entry ends in S or in the ring, where the log after the commit finds it."""
    slots, log, _, _ = case
    plan = compiled(case)
    due = [b for b, x in enumerate(log) if x.log_len > x.threshold]
    assert ints(plan.fold_rows) == due
    assert ints(plan.fold_slots) == [slots[b] for b in due]
    moves = zip(*map(ints, plan.moves), strict=True) if plan.moves is not None else ()
    content = {(s, e): (s, e) for b, s in enumerate(slots) for e in log[b].entries()}
    for slot, source, target in moves:
        content[slot, target] = content[slot, source]
    for b, slot in enumerate(slots):
        before = log[b].entries()
        log[b].commit((0,))
        ring = log[b].entries()[:-1]
        assert [content[slot, e] for e in ring] == (
            [] if b in due else [(slot, e) for e in before]
        )


@given(cases())
def test_no_entry_is_written_that_the_round_reads(case: Case) -> None:
    """One writer per entry: a candidate's record and a move never meet, or meet the log."""
    slots, log, _, _ = case
    plan = compiled(case)
    written = list(zip(ints(plan.node_slot), ints(plan.write_entry), strict=True))
    if plan.moves is not None:
        written += zip(ints(plan.moves.slots), ints(plan.moves.target), strict=True)
    assert len(set(written)) == len(written)
    read = {(slots[b], e) for b in range(len(slots)) for e in log[b].entries()}
    assert not read & set(written)
    assert 0 not in {slot for slot, _ in written}


@given(cases())
def test_levels_carry_each_node_its_parents_state(case: Case) -> None:
    """Walk the levels with paths instead of states."""
    tree, nodes = case[2], flat(case)
    states: list[tuple[int, ...]] = [()] * len(tree)
    seen: list[int] = []
    for depth, level in enumerate(compiled(case).levels):
        at = places(level.nodes)
        if depth:
            assert level.above is not None
            carried = range(len(states)) if level.carried is None else ints(level.carried)
            assert (level.carried is None) == (list(carried) == list(range(len(states))))
            states = [states[i] for i in carried]
            assert states == [tree[nodes[n][0]].path_to(nodes[n][1]) for n in places(level.above)]
        source = range(len(states)) if level.source is None else ints(level.source)
        assert (level.source is None) == (list(source) == list(range(len(states))))
        assert set(source) == set(range(len(states)))
        states = [(*states[s], nodes[n][1]) for n, s in zip(at, source, strict=True)]
        for n, path in zip(at, states, strict=True):
            row, node = nodes[n]
            assert path == tree[row].path_to(node)
        seen += at
    assert sorted(seen) == list(range(len(nodes)))


@given(cases())
def test_taps_and_tail_are_the_nearest_ancestors(case: Case) -> None:
    """Histories as lists: each committed token by name, then the node's path."""
    _, log, tree, width = case
    plan, reach = compiled(case), width - 1
    old = [[f"tail {j}" for j in range(reach)] for _ in log]
    tails = []
    for b, x in enumerate(log):
        banks = old[b] + [f"node {n}" for n in range(NODES)]
        tails.append([banks[i] for i in ints(plan.tail_source[b])])
        assert tails[b] == (old[b] + [f"node {n}" for n in x.path])[-reach:]
    history = [(b, name) for b in range(len(log)) for name in tails[b]]
    history += [(b, f"new {i}") for b, i in flat(case)]
    for n, (b, i) in enumerate(flat(case)):
        window = [history[places(tap)[n]] for tap in plan.taps]
        line = tails[b] + [f"new {j}" for j in tree[b].path_to(i)]
        assert window == [(b, name) for name in line[-width:]]
