# SPDX-License-Identifier: Apache-2.0
"""What a drafter that rests has missed, while rows come, end and change places."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specla.engine.resting import Resting

LAYERS, WIDTH, ROOM = 2, 3, 5


class Row:
    """Its tokens as the host has them, those that it has not read, and what it was fed."""

    def __init__(self, rng: random.Random) -> None:
        self.prompt = rng.randrange(1, 9)
        self.tokens, self.unread, self.fed = [0] * self.prompt, list[int](), list[int]()
        self.finish_reason: str | None = None

    def read(self) -> None:
        """All but the round that is under way."""
        self.tokens += self.unread[:-1]
        del self.unread[:-1]


class Rounds:
    """Of one node, on a device that the host is one round behind, with room for five; a token is
    its own features. It is the drafter, too."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.rows, self.done = rng, list[Row](), list[Row]()
        self.resting = Resting(torch.zeros(LAYERS, 1, WIDTH), 8)
        self.resting.most, self.resting.kept = ROOM, self.resting.kept[:ROOM]

    def catch_up(self, tokens: Sequence[Sequence[int]], features: Tensor) -> None:
        flat = [token for part in tokens for token in part]
        assert features.tolist() == [[float(token)] * (LAYERS * WIDTH) for token in flat]
        for row, part in zip(self.rows, tokens, strict=True):
            row.fed += part

    def change(self) -> None:
        """Those that have ended leave, others come."""
        places = [b for b, row in enumerate(self.rows) if row.finish_reason is None]
        joining = [Row(self.rng) for _ in range(self.rng.choice((0, 0, 0, 0, 1, 2)))]
        joining = joining[: 8 - len(places)] or ([] if places else [Row(self.rng)])
        if not places:
            self.resting.begin()
        elif joining or len(places) < len(self.rows):
            self.resting.move(places, len(joining))
        self.rows = [*(self.rows[b] for b in places), *joining]

    def launch(self, step: int) -> None:
        for b, row in enumerate(self.rows):
            at = len(row.tokens) + len(row.unread) - 1
            row.unread.append(1000 * step + b)
            self.resting.kept[at % ROOM, :, b] = row.unread[-1]
        self.resting.count += 1
        if self.resting.is_full:
            self.feed(2)

    def feed(self, left: int) -> None:
        """All but so many rounds, which nobody has read."""
        self.resting.catch_up(self, self.rows, self.resting.count - left)  # type: ignore[arg-type]

    def read(self) -> None:
        for row in self.rows:
            row.read()
        if self.rng.random() < 0.1:
            self.feed(1)
            assert all(row.fed == row.tokens[row.prompt :] for row in self.rows)
        for row in self.rows:
            if self.rng.random() < 0.2:
                row.finish_reason = "stop"
                self.done.append(row)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_fed_what_they_have_missed(seed: int) -> None:
    """Once, in order, with its own features, whenever the others are."""
    rounds = Rounds(random.Random(seed))
    for step in range(120):
        rounds.change()
        rounds.launch(step)
        rounds.read()
    assert len(rounds.done) > 20
    assert sum(len(row.fed) for row in rounds.done) > 100
    for row in rounds.done:
        assert row.fed == row.tokens[row.prompt :][: len(row.fed)]
