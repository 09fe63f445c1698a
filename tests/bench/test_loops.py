# SPDX-License-Identifier: Apache-2.0
"""Looping text: one definition, for every report."""

from __future__ import annotations

import pytest

from specla.bench.loops import has_loop


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([5] * 64, True),
        ([1, 2, 3] * 30, True),
        ([*range(100), *([7, 8] * 32)], True),
        (list(range(16)) * 5, True),
        (list(range(17)) * 5, True),
        (list(range(64)) * 3, True),
        (list(range(65)) * 3, False),
        ([5] * 63, False),
        (list(range(200)), False),
        ([5] * 100 + [6], True),
    ],
)
def test_has_loop(tokens: list[int], looping: bool) -> None:
    assert has_loop(tokens) is looping


def test_loops_are_found_wherever_they_stand() -> None:
    text = list(range(100, 200))
    loop = [1, 2, 3] * 40
    assert not has_loop(text)
    assert not has_loop([])
    for ids in (loop, text + loop, loop + text, text[:50] + loop + text[:50]):
        assert has_loop(ids)
    for start in range(16):
        assert has_loop(text[:start] + loop[:64] + text)
        assert not has_loop(text[:start] + loop[:63] + text)


def test_a_sentence_said_three_times_is_a_loop() -> None:
    sentence = list(range(1000, 1040))
    assert has_loop([7, *sentence * 3, 8])
    assert not has_loop([7, *sentence * 2, *sentence[:-1], 8])
    assert not has_loop([1, 2, 3] * 21)  # too short to tell
