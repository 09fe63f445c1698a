# SPDX-License-Identifier: Apache-2.0
"""The queue and the slots, without a model: only cursors and bookkeeping."""

from __future__ import annotations

import pytest
from engine_harness import Letters, request
from hypothesis import given
from hypothesis import strategies as st

from specla.engine.running import Running
from specla.engine.scheduler import Scheduler, request_fits
from specla.errors import RequestRejected
from specla.ops.contract import RecurrentShape
from specla.state import State

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=1, key_dim=2, value_dim=3, conv_width=4
)


def scheduler(slots: int) -> Scheduler:
    return Scheduler(State(SHAPE, num_slots=slots, max_nodes=2))


def sequence(name: str, prompt: tuple[int, ...] = (5,)) -> Running:
    return Running.start(request(name, prompt), Letters(), (4,))


def names(rows: object) -> list[str]:
    return [row.request.request_id for row in rows]  # type: ignore[attr-defined]


def test_first_come_first_served() -> None:
    s = scheduler(2)
    for name in "abcd":
        s.add(sequence(name))
    s.admit()
    assert (names(s.ready()), names(s.waiting.values())) == (["a", "b"], ["c", "d"])
    s.remove(s.running["a"])
    s.admit()
    assert (names(s.ready()), names(s.waiting.values())) == (["b", "c"], ["d"])
    assert [row.slot for row in s.ready()] == [2, 1]


def test_ready_means_all_but_the_last_prompt_token() -> None:
    s = scheduler(2)
    s.add(sequence("one", (5,)))
    s.add(sequence("three", (5, 6, 7)))
    s.admit()
    assert (names(s.ready()), names(s.prefilling())) == (["one"], ["three"])
    row = s.running["three"]
    assert row.next_chunk(64) == (5, 6)
    assert row.next_chunk(1) == (5,)
    row.num_prefilled = 1
    assert row.next_chunk(64) == (6,)
    row.num_prefilled = 2
    assert row.ready


def test_find_and_remove_in_every_phase() -> None:
    s = scheduler(1)
    s.add(sequence("a"))
    s.add(sequence("b"))
    assert s.find("a") is s.waiting["a"]
    s.admit()
    assert s.find("a") is s.running["a"]
    waiting = s.find("b")
    assert waiting is not None
    s.remove(waiting)
    assert s.find("b") is None
    s.remove(s.running["a"])
    assert s.find("a") is None
    assert not s.running
    assert not s.waiting


def test_ids_are_unique_among_the_living() -> None:
    s = scheduler(1)
    s.add(sequence("a"))
    with pytest.raises(RequestRejected, match="unique"):
        s.add(sequence("a"))
    s.admit()
    with pytest.raises(RequestRejected, match="unique"):
        s.add(sequence("a"))
    s.remove(s.running["a"])
    s.add(sequence("a"))


def prefilled(s: Scheduler, name: str) -> None:
    """As the engine does when the last chunk is in."""
    row = s.running[name]
    s._state.advance(row.slot, len(row.prompt) - 1)
    row.num_prefilled = len(row.prompt) - 1
    s.share_prefill(row)


def test_a_fork_starts_where_the_prefill_ended() -> None:
    s, prompt = scheduler(4), (5, 6, 7)
    for name in "abc":
        s.add(sequence(name, prompt))
    s.add(sequence("d", (9, 9)))
    s.admit()
    assert names(s.running.values()) == ["a", "d"]
    prefilled(s, "a")
    assert names(s.ready()) == ["a", "b", "c"]
    assert {s._state.logs[row.slot].committed_len for row in s.ready()} == {2}
    assert not s.waiting


def test_no_more_forks_than_free_slots() -> None:
    s, prompt = scheduler(2), (5, 6, 7)
    for name in "abc":
        s.add(sequence(name, prompt))
    s.admit()
    prefilled(s, "a")
    assert (names(s.ready()), names(s.waiting.values())) == (["a", "b"], ["c"])
    s.remove(s.running["a"])
    s.admit()
    assert names(s.prefilling()) == ["c"]


def test_short_prompts_need_no_sharing() -> None:
    s = scheduler(3)
    for name in "abc":
        s.add(sequence(name, (5,)))
    s.admit()
    assert names(s.ready()) == ["a", "b", "c"]


@given(st.lists(st.sampled_from(["add", "admit", "prefill", "leave", "drop"]), max_size=40))
def test_slots_are_never_lost_or_shared(actions: list[str]) -> None:
    s, count = scheduler(3), 0
    for action in actions:
        if action == "add":
            count += 1
            s.add(sequence(str(count), (5, 6, 7)[: 1 + count % 3]))
        elif action == "admit":
            s.admit()
        elif action == "prefill" and (rows := list(s.prefilling())):
            prefilled(s, rows[0].request.request_id)
        elif action == "leave" and s.running:
            s.remove(next(iter(s.running.values())))
        elif action == "drop" and s.waiting:
            s.remove(list(s.waiting.values())[-1])
        slots = [row.slot for row in s.running.values()]
        assert len(set(slots)) == len(slots)
        assert 0 not in slots
        assert s._state.pool.num_free == 3 - len(slots)
        s._state.check_integrity()
    while s.waiting or s.running:
        s.admit()
        for row in list(s.running.values()):
            s.remove(row)
    assert s._state.pool.num_free == 3


@pytest.mark.parametrize("prompt", [(0,), (23,), (0, 23)])
def test_prompts_that_fit(prompt: tuple[int, ...]) -> None:
    request_fits(request("a", prompt), 24)


@pytest.mark.parametrize("prompt", [(), (24,), (0, -1), (0.0,)])
def test_prompts_that_do_not_fit(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestRejected, match="got") as refused:
        request_fits(request("a", prompt), 24)
    assert refused.value.param == "prompt"
