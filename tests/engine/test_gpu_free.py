# SPDX-License-Identifier: Apache-2.0
"""Rounds without the host on a GPU, for every drafter that has them: tokens and folded state are
the bytes of each row's own plain decoding, alone (rule I4), and no round waits. GDN-1.3B's shape
with random weights; in four layers for trained drafters, whose untrained drafts are mostly wrong;
and the demo model with its own drafter, whose drafts are not.

    pytest -m gpu tests/engine/test_gpu_free.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu_drafters import made
from gpu_rows import DEMO, GDN, TOKENS, Remembering, Rows

from specla.bench.random_model import gdn_1_3b
from specla.drafters.base import Drafter
from specla.drafters.eagle import EagleDrafter
from specla.models.resolve import resolve
from specla.state import State

pytestmark = pytest.mark.gpu
TARGETS = {"gdn-1.3b": GDN, "four layers": Rows(lambda: gdn_1_3b(layers=4)), "demo": DEMO}
NODES, BY_TURNS = 16, (16, 1, 4, 2, 8)
# Targets, drafters, and numbers of nodes that their rounds have by turns.
CASES: list[tuple[str, str, tuple[int, ...]]] = [
    *(("gdn-1.3b", name, ()) for name in ("none", "ngram")),
    ("gdn-1.3b", "ngram", BY_TURNS),
    *(("four layers", name, ()) for name in ("eagle", "block", "dflash", "block+reader")),
    ("four layers", "eagle", BY_TURNS),
    *(("demo", name, ()) for name in ("none", "ngram", "eagle")),
    ("demo", "eagle", BY_TURNS),
]
New = Callable[[str, str], Drafter]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> New:
    """A drafter of that name for that target."""
    folder = tmp_path_factory.mktemp("drafters")

    def make(target: str, name: str) -> Drafter:
        if target == "demo" and name == "eagle":
            return EagleDrafter(path=str(resolve("demo") / "eagle"), on_device=True)
        return made(name, TARGETS[target].model.info, folder / target)

    return make


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("target", "name", "turns"),
    CASES,
    ids=lambda x: x if isinstance(x, str) else "by turns" if x else "one shape",
)
def test_they_give_the_bytes_of_plain_decoding(
    target: str, name: str, turns: tuple[int, ...], batch: int, new: New
) -> None:
    """Rows join three at a time, and leave one by one."""
    rows, bench = range(batch), TARGETS[target]
    drafter, nodes = new(target, name), 1 if name == "none" else NODES
    got = bench.decode(rows, drafter, max_nodes=nodes, at_once=3, turns=turns)
    bench.check(rows, got)
    if name == "none":
        assert {one.rounds for one in got} == {TOKENS}
    if target == "demo" and name == "eagle":
        assert all(one.accepted > TOKENS // 8 for one in got)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises, but for events, which torch does not count: those by
    which the host reads the round before the one under way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("gdn-1.3b", name) for name in ("none", "ngram")),
        *(("four layers", name) for name in ("eagle", "block", "dflash", "block+reader")),
    ],
)
def test_nothing_waits(target: str, name: str, new: New) -> None:
    """Rounds as the engine takes them, and their graph by itself."""
    bench, nodes = TARGETS[target], 1 if name == "none" else NODES
    engine, _ = bench.engine(new(target, name), slots=4, max_nodes=nodes)
    for row in range(4):
        engine.add(bench.request(str(row), row, TOKENS))
    for _ in range(4):
        engine.step()
    replay = engine.last_graph()
    with no_waiting():
        emitted = sum(len(delta.token_ids) for _ in range(8) for delta in engine.step())
        for _ in range(8):
            replay()
    assert emitted >= 4 * 8
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("target", "name"), [("gdn-1.3b", "ngram"), ("four layers", "eagle"), ("demo", "eagle")]
)
def test_a_row_alone_changes_shape_without_waiting(target: str, name: str, new: New) -> None:
    """It rests and drafts again where it is; what it missed meanwhile it has when it drafts."""
    bench = TARGETS[target]
    engine, _ = bench.engine(new(target, name), slots=1, max_nodes=NODES, turns=BY_TURNS)
    engine.add(bench.request("0", 0, TOKENS))
    for _ in range(4):
        engine.step()
    rounds, shapes = engine._graphs, list[tuple[int, int]]()
    assert rounds is not None
    rounds._load = None  # type: ignore[method-assign, assignment]
    with no_waiting():
        for _ in range(8 * len(BY_TURNS)):
            engine.step()
            shapes.append((rounds.size[1], rounds.depth))
    assert {nodes for nodes, _ in shapes} == set(BY_TURNS)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("gdn-1.3b", name) for name in ("none", "ngram")),
        ("four layers", "eagle"),
        ("demo", "eagle"),
    ],
)
def test_rows_are_moved_without_waiting(
    target: str, name: str, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To other shapes, and closer together where some have ended."""
    bench, draws = TARGETS[target], name != "none"
    turns, nodes = (BY_TURNS, NODES) if draws else ((), 1)
    engine, _ = bench.engine(new(target, name), slots=5, max_nodes=nodes, turns=turns)
    # What it keeps of a row that ends is for other tests, and waits.
    monkeypatch.setattr(Remembering, "release", State.release)
    for row, count in enumerate((30, TOKENS, 20, 40, TOKENS)):
        engine.add(bench.request(str(row), row, count))
    engine.step()
    while not all(row.output for row in engine.scheduler.running.values()):
        engine.step()
    rounds, sizes = engine._graphs, set[tuple[int, int]]()
    assert rounds is not None
    rounds._load = None  # type: ignore[method-assign, assignment]
    with no_waiting():
        while engine.has_work:
            engine.step()
            sizes.add(rounds.size)
    assert {rows for rows, _ in sizes} >= {8, 4, 2}
    assert {nodes for _, nodes in sizes} == set(turns or (1,))
    torch.cuda.synchronize()


def test_what_waits_is_noticed() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.zeros(1, device="cuda").item()
