# SPDX-License-Identifier: Apache-2.0
"""Cursors of one slot (rule I1). Tier: exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.state.log import Log


@st.composite
def logs(draw: st.DrawFn) -> Log:
    capacity = draw(st.integers(0, 20))
    return Log(capacity, draw(st.integers(1, 12)), draw(st.integers(0, capacity)))


def paths(num_nodes: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Node 0, then some later nodes in order."""
    below = st.sets(st.integers(1, num_nodes - 1)) if num_nodes > 1 else st.just(set())
    return below.map(lambda nodes: (0, *sorted(nodes)))


@dataclass
class Shadow:
    """The same log as lists of tokens: what is in S, and what each entry holds."""

    durable: list[int] = field(default_factory=list)
    entries: dict[int, int] = field(default_factory=dict)

    def read(self, log: Log) -> list[int]:
        """Tokens of the log, in order, through its entry numbers."""
        return [self.entries[entry] for entry in log.entries()]

    def verify(self, log: Log, first: int) -> None:
        """What a verify does with the tensors: fold or move, then write the other bank."""
        pending = self.read(log)
        if log.fold_due:
            self.durable += pending
        else:
            self.entries.update(enumerate(pending))
        for node in range(log.num_nodes):
            self.entries[log.bank_entry(1 - log.bank, node)] = first + node


@given(data=st.data(), log=logs(), rounds=st.integers(1, 12))
def test_rounds(data: st.DataObject, log: Log, rounds: int) -> None:
    """I1, and that the entries name the accepted tokens in order, whatever was accepted."""
    shadow, committed = Shadow(), list[int]()
    for turn in range(rounds):
        shadow.verify(log, first=100 * turn)
        path = data.draw(paths(log.num_nodes))
        log.commit(path)
        committed += [100 * turn + node for node in path]
        assert shadow.durable + shadow.read(log) == committed
        assert log.durable_len == len(shadow.durable)
        assert log.durable_len + log.log_len == log.committed_len == len(committed), "I1"
        assert log.log_len == log.ring_len + len(log.path)
        assert log.ring_len <= log.threshold <= log.capacity, "the ring cannot overflow"


@given(log=logs(), path_lengths=st.lists(st.integers(1, 12), max_size=8))
def test_entries_are_distinct_and_in_range(log: Log, path_lengths: list[int]) -> None:
    for length in path_lengths:
        log.commit(tuple(range(min(length, log.num_nodes))))
        entries = log.entries()
        assert len(set(entries)) == len(entries) == log.log_len
        assert all(0 <= e < log.capacity + 2 * log.num_nodes for e in entries)


@given(data=st.data(), log=logs())
def test_folded(data: st.DataObject, log: Log) -> None:
    for _ in range(data.draw(st.integers(0, 5))):
        log.commit(data.draw(paths(log.num_nodes)))
    committed = log.committed_len
    log.folded()
    assert (log.log_len, log.durable_len, log.entries()) == (0, committed, ())
    assert not log.fold_due


def test_threshold_0_folds_in_every_round() -> None:
    """SpecLA's delayed commit: S is one round behind, never more."""
    log = Log(0, 4, 0)
    assert not log.fold_due, "nothing is pending before the first round"
    for path in [(0,), (0, 2), (0, 1, 3)]:
        log.commit(path)
        assert log.fold_due
        assert log.path == path
    assert (log.durable_len, log.log_len, log.ring_len) == (3, 3, 0)


def test_a_full_ring_folds() -> None:
    """DeltaLog: S is written when the log is longer than R, not before."""
    log, due = Log(4, 1, 4), []
    for _ in range(12):
        log.commit((0,))
        due.append(log.fold_due)
    assert due == [False] * 4 + [True] + [False] * 4 + [True] + [False] * 2


def test_the_bank_flips_in_every_round() -> None:
    """Also in rounds without drafts: a stale bank is what corrupts engines there."""
    log = Log(2, 3, 2)
    banks = []
    for path in [(0,), (0, 1), (0,), (0,)]:
        log.commit(path)
        banks.append(log.bank)
    assert banks == [1, 0, 1, 0]


@pytest.mark.parametrize(("bank", "node", "entry"), [(0, 0, 5), (0, 2, 7), (1, 0, 8), (1, 2, 10)])
def test_bank_entry(bank: int, node: int, entry: int) -> None:
    assert Log(5, 3, 5).bank_entry(bank, node) == entry


@given(logs(), st.data())
def test_following_a_device_is_committing(log: Log, data: st.DataObject) -> None:
    """From its bank, ring_len and path alone."""
    behind = Log(log.capacity, log.num_nodes, log.threshold)
    for _ in range(data.draw(st.integers(1, 8))):
        committed = log.committed_len
        log.commit(data.draw(paths(log.num_nodes)))
        behind.follow(committed, bank=log.bank, ring_len=log.ring_len, path=list(log.path))
        assert behind == log
