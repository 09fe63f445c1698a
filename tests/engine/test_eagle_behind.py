# SPDX-License-Identifier: Apache-2.0
"""An EAGLE drafter on a device that the host is one round behind: rows that join, end, are stopped
and share prompts, by turns with rounds that the host drafts for. The same rounds as on the host.
What the drafter launches is played by its eager form; `slow`: by its kernels, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from behind import Behind, Place
from eagle_toy import toy_config, write_drafter
from engine_harness import Run, drive, make_engine, outcome, plain, request
from engine_requests import LONG, LOOP, WALK
from test_free_rounds import run_behind
from torch import Tensor

from specla.drafters.base import DraftRow
from specla.drafters.eagle import EagleDrafter
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.request import Request
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.drafters.eagle_device import DeviceEagle
from specla.ops.rows import INTERPRET

OPTIONS: dict[str, object] = {"tau": 50.0, "top_k": 2, "max_depth": 3}
FREE = [
    request("stop", WALK, seed=1, max_tokens=30, temperature=1.0, stop=("ab", "d", "x")),
    request("loop", LOOP, seed=2, max_tokens=25),
    request("one token", (11,), seed=3, max_tokens=9),
    request("long", LONG, seed=4, max_tokens=9, temperature=0.8),
    request("ends", (23, 5), seed=5, max_tokens=40, stop_token_ids=(9, 11, 20)),
    *(request(f"n{i}", LONG[:65], seed=60 + i, temperature=1.1, max_tokens=7) for i in range(2)),
    request("host's", WALK, seed=8, top_k=3, max_tokens=6),
    request("two", LOOP[:3], seed=7, max_tokens=2),
]


class EagerLayer:
    """`eagle_layer.EagleLayer` by the eager drafter's own means, over what a device has."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self._drafter, self._info = drafter, drafter.info
        self.load([])

    level_bytes = 0

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        self._started, self._fed = [bool(row[-1]) for row in rows], [0] * len(rows)

    def read(self, num_rows: int) -> list[list[int]]:
        """The eager drafter has moved its slots by itself; said as a device would."""
        slots, mixer = self._drafter._entered, self._drafter._mixer  # type: ignore[attr-defined]
        return [
            [*mixer.cursor(slot), self._started[b], self._fed[b]] for b, slot in enumerate(slots)
        ]

    def resume(self) -> None:
        self._fed = [1] * len(self._started)

    def take_in(
        self, slots: Sequence[int], cursors: None, tokens: Sequence[Sequence[int]], given: Tensor
    ) -> None:
        """On top of what the device has."""
        assert len(given) == sum(map(len, tokens))
        some = [(slot, row) for slot, row in zip(slots, tokens, strict=True) if row]
        if some:
            self._drafter.model.encode(*map(list, zip(*some, strict=True)), given)
        self._started = [bool(row) or self._started[b] for b, row in enumerate(tokens)]

    def move(self, places: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        before = self._started
        self.load([*([before[b]] for b in places), *rows])

    def __call__(self, arrays: RowArrays, rnd: DeviceRound, features: Tensor, depth: int) -> None:
        drafter, slots = self._drafter, rnd.slot.tolist()[: len(self._started)]
        live = [b for b in range(len(slots)) if rnd.num_nodes[b]]
        if not live:
            return
        lengths = [
            int(rnd.path_len[b]) if self._fed[b] and b in live else 0 for b in range(len(slots))
        ]
        for b in live:
            if lengths[b]:
                path = rnd.path[b, : lengths[b]].tolist()
                # Of a row that is alone the last round may have been wider.
                row = rnd.tokens[b].as_strided((max(path) + 1,), (1,))
                tokens = [*(int(row[node]) for node in path[1:]), int(row[0])]
                at = [b * rnd.tokens.shape[1] + node for node in path]
                room = [x.as_strided((max(at) + 1, x.shape[1]), x.stride()) for x in features]
                given = torch.cat([layer[at] for layer in room], dim=-1)
                drafter.model.encode([slots[b]], [tokens], given)
                self._started[b] = True
        self._fed = [int(bool(rnd.num_nodes[b]) or self._fed[b]) for b in range(len(slots))]
        wanted = [b for b in live if depth and self._started[b] and arrays.remaining[b] > 1]
        rows = [
            DraftRow(
                slot=slots[b], tokens=[int(rnd.tokens[b, 0])], num_prompt_tokens=1, seed=0,
                max_drafts=rnd.tokens.shape[1] - 1,
            )
            for b in wanted
        ]  # fmt: skip
        drafter.info = replace(drafter.info, max_depth=depth)
        trees, drafter.info = drafter._grow(rows), self._info
        for b, tree in zip(wanted, trees, strict=True):
            n = rnd.num_nodes[b] = tree.num_nodes
            rnd.tokens[b, :n] = torch.tensor(tree.tokens)
            rnd.parents[b, :n] = torch.tensor(tree.parents)


class Played(DeviceEagle):
    """Of any head dimensions."""

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        EagleDrafter.bind(self, model, num_slots=num_slots, max_nodes=max_nodes, exact=exact)
        self._layer = EagerLayer(self)  # type: ignore[assignment]

    @property
    def _max_tokens(self) -> int:
        return 3

    _take_in = EagleDrafter._take_in


class Resident(Behind):
    """Also has the arrays that a resident drafter reads and writes."""

    def _load(self, rows):  # type: ignore[no-untyped-def]
        super()._load(rows)
        trees = [DraftTree.root(row.tokens[-1]) for row in rows]
        logs = [place.log for place in self._places]
        slots = [place.slot for place in self._places]
        plan = self._state.rounds.plan(slots, logs, trees, num_nodes=self._key[1])
        self._rnd = plan.round
        self._arrays = RowArrays(*[torch.zeros(self._rnd.slot.shape[0], dtype=torch.int32)] * 6)
        width, layers = self._model.info.hidden_size, self._drafter.feature_layers
        room = torch.full((len(layers), self._rnd.tokens.numel(), width), float("nan"))
        self._padded = Features(layers, room)

    def _last_round(self) -> tuple[DeviceRound, Features]:
        return self._rnd, self._padded

    def _draft(self, live: Sequence[int], places: Sequence[Place]) -> list[DraftTree]:
        if not self._depth:
            return super()._draft(live, places)
        for b, place in zip(live, places, strict=True):
            self._arrays.remaining[b] = place.law.remaining
        self._drafter.launch(self._arrays, self._rnd, self._padded, depth=self._depth)
        return [
            DraftTree(self._rnd.tokens[b, :n].tolist(), self._rnd.parents[b, :n].tolist())
            for b, n in ((b, int(self._rnd.num_nodes[b])) for b in live)
        ]

    def _round(self):  # type: ignore[no-untyped-def]
        """As `sampling.triton.accept` leaves it."""
        words, rnd = super()._round(), self._rnd
        if not self._depth:
            return words
        sizes = [int(rnd.num_nodes[b]) for b in self._live]
        rows = iter(self.features.rows().split(sizes)) if self._live else iter(())
        for b, size, given in zip(self._live, sizes, rows, strict=False):
            place, start = self._places[b], b * rnd.tokens.shape[1]
            for layer, part in zip(
                self._padded.room, given.chunk(len(self._padded.room), -1), strict=True
            ):
                layer[start : start + size] = part
            path = torch.tensor(place.log.path)
            rnd.path[b, : len(path)], rnd.path_len[b] = path, len(path)
            rnd.num_nodes[b] = int(place.live)
            if words[b][0]:
                rnd.tokens[b, 0] = words[b][4 + words[b][0]]
        for layer in self._padded.layers:
            self._padded.take(layer, self._padded.room[self._padded.layers.index(layer)].clone())
        return words


def resident(engine: Engine) -> Resident:
    engine._graphs = made = Resident(engine)
    return made


def folder(tmp_path: Path, target: TargetModel, **sizes: object) -> str:
    config = toy_config(target.info, target_fingerprint=None, **sizes)
    return str(write_drafter(tmp_path, config))


def check(
    run: Run, host: Run, target: TargetModel, requests: Sequence[Request], accepted: int = 10
) -> None:
    """Nothing changes, and every row's rounds are those that the host's drafter brings."""
    assert run.outcomes() == {n: outcome(c) for n, c in plain(target, requests).items()}
    for name, done in run.completions.items():
        want = host.completions[name].speculation
        assert done.speculation.acceptance_histogram == want.acceptance_histogram
        assert done.speculation.drafted == want.drafted
    assert sum(c.speculation.accepted for c in run.completions.values()) >= accepted


@pytest.mark.parametrize(("slots", "every"), [(1, 1), (3, 2), (8, 1)])
def test_rounds_on_the_device_are_the_host_drafters(
    tmp_path: Path, target: TargetModel, slots: int, every: int
) -> None:
    path = folder(tmp_path, target)
    engine = make_engine(target, Played(path=path, **OPTIONS), slots=slots, log=4)  # type: ignore[arg-type]
    rounds = resident(engine)
    run = run_behind(engine, rounds, FREE, every=every)
    host = drive(
        make_engine(target, EagleDrafter(path=path, min_survival=0, **OPTIONS), slots=3), FREE
    )  # type: ignore[arg-type]
    check(run, host, target, FREE)
    assert rounds.launches > 10


def test_an_abort_while_a_round_is_under_way(tmp_path: Path, target: TargetModel) -> None:
    """The drafter's slot is the next row's at once, and none of the old row comes back into it."""
    path = folder(tmp_path, target)
    engine = make_engine(target, Played(path=path, **OPTIONS), slots=2, log=3)  # type: ignore[arg-type]
    rounds = resident(engine)
    doomed = [request(f"doomed{i}", LOOP[i:], seed=i, max_tokens=50) for i in range(3)]
    aborted: list[str] = []

    def abort(step: int) -> None:
        for name, row in list(engine.scheduler.running.items()):
            if rounds._flight.unread and name.startswith("doomed") and len(row.output) > 2:
                assert engine.abort(name) is not None
                aborted.append(name)

    good = FREE[:4]
    run = run_behind(
        engine, rounds, [x for pair in zip(doomed, good, strict=False) for x in pair] + good[3:],
        abort,
    )  # fmt: skip
    assert len(aborted) == 3
    host = drive(
        make_engine(target, EagleDrafter(path=path, min_survival=0, **OPTIONS), slots=2), good
    )  # type: ignore[arg-type]
    check(run, host, target, good, accepted=4)


def test_another_drafter_gets_its_own_graphs(tmp_path: Path, target: TargetModel) -> None:
    """The old one's would draft with what that one knows of its rows."""
    path = folder(tmp_path, target)
    engine = make_engine(target, Played(path=path, **OPTIONS), slots=2)  # type: ignore[arg-type]
    rounds = resident(engine)
    graphs = {3: "drafts", 2: "drafts", 0: "does not"}
    one = SimpleNamespace(graphs=graphs)
    rounds._buckets._made[1, 8] = one  # type: ignore[assignment]
    again = Played(path=path, **OPTIONS)  # type: ignore[arg-type]
    engine.use(again)
    assert rounds._drafter is again
    assert one.graphs == {0: "does not"}


def test_the_same_drafter_keeps_its_graphs(tmp_path: Path, target: TargetModel) -> None:
    """A measurement starts anew with another budget, not by loading and capturing again."""
    played = Played(path=folder(tmp_path, target), **OPTIONS)  # type: ignore[arg-type]
    engine = make_engine(target, played, slots=2, budget="paying")
    rounds, model, before = resident(engine), played.model, engine.spending
    one = SimpleNamespace(graphs={3: "drafts"})
    rounds._buckets._made[1, 8] = one  # type: ignore[assignment]
    engine.use(engine.drafter)
    assert one.graphs == {3: "drafts"}
    assert played.model is model
    assert engine.spending is not before


@pytest.mark.parametrize(
    ("sizes", "why"), [({"head_dim": 64, "head_v_dim": 128}, None), ({}, "got 8")]
)
def test_the_engine_takes_the_form_that_its_device_has(
    tmp_path: Path, target: TargetModel, sizes: dict[str, object], why: str | None
) -> None:
    """And a result says where drafts came from, if not from there."""
    engine = make_engine(target, slots=1)
    engine._on_gpu = True
    engine.use(EagleDrafter(path=folder(tmp_path, target, **sizes)))
    assert isinstance(engine.drafter, DeviceEagle) == (why is None)
    engine._on_gpu = False
    done = drive(engine, [request("a", LOOP, max_tokens=4)]).completions["a"].speculation
    assert done.drafter == "eagle"
    assert done.fallback == engine.drafter.info.fallback
    assert (done.fallback is None) if why is None else (why in str(done.fallback))


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="its target is a CPU's")
@pytest.mark.parametrize(
    "sizes",
    [{"head_dim": 64, "head_v_dim": 128}, {"mixer": "attention", "num_heads": 4, "head_dim": 32}],
    ids=["gdn", "attention"],
)
def test_the_kernels_rounds(tmp_path: Path, target: TargetModel, sizes: dict[str, object]) -> None:
    path = folder(tmp_path, target, **sizes)
    engine = make_engine(target, DeviceEagle(path=path, **OPTIONS), slots=2, nodes=4)  # type: ignore[arg-type]
    rounds = resident(engine)
    requests = [request("loop", LOOP, seed=2, max_tokens=12), FREE[2], FREE[7]]
    run = run_behind(engine, rounds, requests, every=3)
    drafter = EagleDrafter(path=path, min_survival=0, **OPTIONS)  # type: ignore[arg-type]
    host = drive(make_engine(target, drafter, slots=3, nodes=4), requests)
    check(run, host, target, requests, accepted=1)
    assert rounds.launches > 5
