# SPDX-License-Identifier: Apache-2.0
"""Which slots are free. Tier: exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.errors import CapacityExceeded
from specla.state.slots import SlotPool


@given(num_slots=st.integers(1, 6), moves=st.lists(st.integers(-1, 6), max_size=40))
def test_pool_is_a_set(num_slots: int, moves: list[int]) -> None:
    """-1 acquires, a number releases that slot if it is taken."""
    pool, taken = SlotPool(num_slots), set[int]()
    for move in moves:
        if move < 0 and pool.num_free:
            slot = pool.acquire()
            assert slot == min(set(range(1, num_slots + 1)) - taken), "the lowest free one"
            taken.add(slot)
        elif move in taken:
            pool.release(move)
            taken.remove(move)
        assert pool.num_free == num_slots - len(taken)
        assert {s for s in range(-1, num_slots + 2) if pool.in_use(s)} == taken


def test_padding_slot_is_never_handed_out() -> None:
    pool = SlotPool(3)
    assert [pool.acquire() for _ in range(3)] == [1, 2, 3]
    assert not pool.in_use(0)


def test_no_slot_is_left() -> None:
    pool = SlotPool(2)
    pool.acquire()
    pool.acquire()
    with pytest.raises(CapacityExceeded, match="all 2 are taken"):
        pool.acquire()
    pool.release(1)
    assert pool.acquire() == 1


@pytest.mark.parametrize("slot", [-1, 0, 1, 3])
def test_releasing_what_is_not_taken_is_our_bug(slot: int) -> None:
    pool = SlotPool(2)
    with pytest.raises(AssertionError, match=f"slot {slot} is"):
        pool.release(slot)
