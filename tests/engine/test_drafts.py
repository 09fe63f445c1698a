# SPDX-License-Identifier: Apache-2.0
"""What a drafter answers is checked: its bugs are errors that name it and leave nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from engine_harness import VOCAB, check_whole, make_engine, request
from engine_requests import WALK

from specla.drafters.base import DraftRow
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.errors import CapacityExceeded, ConfigError, InvalidTree
from specla.models.base import TargetModel
from specla.state import State
from specla.testing import RandomTreeDrafter
from specla.topology.tree import DraftTree


class Saying(NoDrafter):
    """Offers the same tree to everyone."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def draft(self, rows: list[DraftRow]) -> list[DraftTree]:
        return [DraftTree.chain(self.tokens[0], self.tokens[1:]) for _ in rows]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (range(WALK[-1], VOCAB), CapacityExceeded, "max_nodes"),
        ((WALK[-1] + 1, 5), InvalidTree, "node 0 must be the row's last token"),
        ((WALK[-1], 5, VOCAB), InvalidTree, r"in \[0, 24\), got 24"),
    ],
)
def test_a_drafter_that_breaks_its_contract(
    target: TargetModel, tokens: tuple[int, ...], error: type[Exception], message: str
) -> None:
    """Its bugs are errors, never another text."""
    engine = make_engine(target, Saying(*tokens), nodes=4)
    engine.add(request("a", WALK))
    with pytest.raises(error, match=message):
        engine.step()
    check_whole(engine)


def test_a_drafter_deeper_than_logs_allow(target: TargetModel) -> None:
    """Drafts made on the device are seen by nobody before their factors are written."""

    def engine(max_path: int, max_nodes: int, depth: int) -> Engine:
        shape, dtype = target.info.recurrent, target.dtype
        state = State(shape, num_slots=1, max_nodes=max_nodes, max_path=max_path, dtype=dtype)
        drafter = RandomTreeDrafter(0, VOCAB, max_depth=depth)
        return Engine(target, state, drafter, mode="exact", prefill_chunk=64)

    engine(4, 8, 3)
    engine(4, 4, 9)  # trees have no more nodes than that
    with pytest.raises(ConfigError, match=r"max_path must hold the drafter's paths of 5 nodes"):
        engine(4, 8, 4)


class Answering(NoDrafter):
    """Answers in a way of its own."""

    def __init__(self, answer: Callable[[list[DraftRow]], Any]) -> None:
        super().__init__()
        self.draft = answer  # type: ignore[method-assign]


def pushing(rows: list[DraftRow]) -> list[DraftTree]:
    cast(list[int], rows[0].tokens).append(5)
    return [DraftTree.root(row.tokens[-1]) for row in rows]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rows: None, "one DraftTree for each of 2 rows, got None from drafter none"),
        (lambda rows: [None] * 2, r"got \[None, None\]"),
        (lambda rows: [DraftTree.root(WALK[-1])] * 3, "for each of 2 rows"),
        (pushing, f"as they are, {len(WALK)} of them; drafter none left {len(WALK) + 1}"),
    ],
)
def test_a_drafter_whose_answer_is_none(
    target: TargetModel, answer: Callable[[list[DraftRow]], Any], message: str
) -> None:
    engine = make_engine(target, Answering(answer), nodes=4)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(request(name, WALK, seed=seed))
    with pytest.raises(InvalidTree, match=message):
        engine.step()
    check_whole(engine)


def test_a_drafter_that_cannot_forget(target: TargetModel) -> None:
    """Every row of a round that failed is gone all the same."""
    drafter = Answering(lambda rows: 1 / 0)
    drafter.reset = lambda slot: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    engine = make_engine(target, drafter, nodes=4)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(request(name, WALK, seed=seed))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    check_whole(engine)
