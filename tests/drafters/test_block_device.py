# SPDX-License-Identifier: Apache-2.0
"""A block drafter's rounds on the device, in Triton's interpreter, against the eager drafter: the
same trees round after round, the same contexts when the rows come back. The target is played, as
in `test_eagle_device`; what the host computes for the device's form is launched again instead of
replayed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_toy import DFLASH, block_config, reader_config, write_block
from test_block_graph import played
from test_eagle_device import SLOTS, Game, needs_interpreter

from specla.drafters import DraftRow
from specla.drafters.base import DeviceDrafter, ResidentDrafter
from specla.drafters.block import BlockDrafter
from specla.drafters.block_graph import GraphBlock
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.ops.contract import DeviceRound
from specla.state import State

pytest.importorskip("triton")
import triton.language as tl

from specla.drafters import triton_block
from specla.drafters.block_device import DeviceBlock
from specla.drafters.block_layer import BlockLayer

KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"block_size": 3},
    "dflash": {
        **DFLASH, "block_size": 4, "windows": (6, None), "is_causal": None, "num_kv_heads": 1
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of several tiles, and of several graphs."""
    monkeypatch.setattr("specla.drafters.block_graph.captured", played)
    monkeypatch.setattr("specla.drafters.block_graph.LEAST_CONTEXT", 4)
    monkeypatch.setattr("specla.drafters.triton_block.TILE", 16)


class Blocks(Game):
    """Game of two block drafters."""

    def make(self, path: str, options: dict[str, Any]) -> tuple[BlockDrafter, DeviceBlock]:
        return BlockDrafter(path=path, **options), DeviceBlock(path=path, **options)

    def check_states(self, slots: Any) -> None:
        """Both have the same keys and values of every row."""
        for slot in slots:
            length = len(self.texts[slot]) - 1
            assert self.device._lengths.get(slot, 0) == self.eager._context.length(slot) == length
            for layer, kept in enumerate(self.device._kept):
                want = self.eager._context._slots[slot][layer].view()
                assert want is not None
                for a, b in zip(kept, want, strict=True):
                    torch.testing.assert_close(
                        a[slot, length - len(b) : length], b, rtol=1e-3, atol=1e-4
                    )


def game(
    tmp_path: Path, target: TargetModel, max_nodes: int, /, sizes: dict[str, Any] | None = None,
    **options: Any,
) -> Blocks:  # fmt: skip
    write_block(tmp_path, block_config(target.info, **(sizes or {})))
    return Blocks(tmp_path, target, max_nodes, {"tau": 50.0, "longest": 128, **options})


class Reads(Blocks):
    """And their target's states, which are noise; a log is folded where it would be."""

    def __init__(self, folder: Path, target: TargetModel, *rest: Any, capacity: int = 5) -> None:
        super().__init__(folder, target, *rest)
        self.state = State(
            target.info.recurrent, num_slots=SLOTS, max_nodes=self.max_nodes,
            log_capacity=capacity, dtype=target.dtype, device=target.device,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(3)
        for layer in self.state.layers:
            for x in (layer.S, layer.factors.k, layer.factors.u):
                x.copy_(torch.randn(x.shape, generator=generator))
            layer.factors.g.copy_(-torch.rand(layer.factors.g.shape, generator=generator))
        for one in (self.eager, self.device):
            one.attach(self.state)
        self.logs_seen = set[tuple[int, int, int]]()

    def load(self, slots: Any, num_nodes: int) -> Any:
        rnd, arrays = super().load(slots, num_nodes)
        self.follow(slots, rnd)
        return rnd, arrays

    def accept(self, slots: Any, rnd: DeviceRound, trees: Any) -> None:
        super().accept(slots, rnd, trees)
        for b, slot in enumerate(slots):
            path = rnd.path[b, : int(rnd.path_len[b])].tolist()
            self.state.logs[slot].commit(tuple(path))
        self.follow(slots, rnd)

    def follow(self, slots: Any, rnd: DeviceRound) -> None:
        """The host's logs, as the device has them."""
        for b, slot in enumerate(slots):
            log = self.state.logs[slot]
            rnd.bank[b], rnd.ring_len[b], rnd.path_len[b] = log.bank, log.ring_len, len(log.path)
            rnd.path[b, : len(log.path)] = torch.tensor(log.path).to(rnd.path)
            self.logs_seen.add((log.bank, log.ring_len, len(log.path)))


@needs_interpreter
def test_states_are_read_as_they_are_committed(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a ring, a path in either bank, both, neither; logs longer than what is on its way
    at a time; and the same trees where the host drafts."""
    monkeypatch.setattr("specla.drafters.triton_reader._AHEAD", tl.constexpr(2))
    write_block(tmp_path, block_config(target.info, **KINDS["dflash"]), reader_config(target.info))
    play = Reads(tmp_path, target, 4, {"tau": 50.0, "longest": 128, "top_k": 2})
    assert play.device.info.name == "block+reader"
    play.start(1, 20)
    play.start(3, 1)
    play.state.logs[1] = replace(play.state.logs[1], ring_len=1, bank=1, path=(0, 2, 3))
    rnd, arrays = play.load([1, 3], 4)
    play.round([1, 3], rnd, arrays)
    play.round([1, 3], rnd, arrays, (3,))
    assert play.drafted == 3 + 3 + 3
    assert len(play.logs_seen) > 4
    play.device.leave([1, 3], rnd, play.features)
    rows = [play.row(slot, rnd, False) for slot in (1, 3)]
    for got, want in zip(play.device.draft(rows), play.eager.draft(rows), strict=True):
        assert (got.tokens, got.parents) == (want.tokens, want.parents)


@needs_interpreter
def test_a_reading_is_the_readers(tmp_path: Path, target: TargetModel) -> None:
    """What the last layer's MLP is given, in numbers; a rank and a bottleneck that are no tile."""
    read = reader_config(target.info, rank=8, bottleneck=13)
    write_block(tmp_path, block_config(target.info), read)
    play = Reads(tmp_path, target, 4, {"tau": 50.0, "longest": 128})
    for slot, length, path in ((1, 4, (0, 2)), (2, 0, ())):
        play.start(slot, 9)
        play.state.logs[slot].ring_len, play.state.logs[slot].path = length, path
    rnd, arrays = play.load([1, 2], 4)
    play.device.launch(arrays, rnd, play.features, depth=1)
    alone = DeviceBlock(path=str(tmp_path), reader=False)
    alone.bind(target, num_slots=SLOTS, max_nodes=4, exact=True)
    assert play.device.info.level_bytes > alone.info.level_bytes > 0
    layer, reader = play.device._layer, play.eager._reader
    assert layer is not None
    assert layer.reader is not None
    assert reader is not None
    want = reader.read(play.state.committed, [1, 2])
    for found, right in zip(layer.reader.read.reading(2), want, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(2 * 5, target.info.hidden_size, generator=generator).to(target.dtype)
    right = h + reader.delta(h, want)
    layer.reader(h, torch.tensor([5, 5], dtype=torch.int32))
    torch.testing.assert_close(h, right, rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_on_the_device_and_back(tmp_path: Path, target: TargetModel, kind: str) -> None:
    """Rows with a context of three tiles, of none, with a single token to go, padding; then
    another set of rows in other places, of which one slot is a new row's and one has rested."""
    play = game(tmp_path, target, 6, KINDS[kind], top_k=2)
    assert isinstance(play.device, ResidentDrafter)
    play.start(1, 40)
    play.start(3, 1)
    play.start(2, 16)
    slots = [1, 3, 2]
    rnd, arrays = play.load(slots, 8)
    for last in ((), (2,)):
        play.round(slots, rnd, arrays, last)
    rnd.num_nodes[1] = 0
    play.device.leave([1, 3, None], rnd, play.features)
    for slot in (2, 3):
        play.end(slot)
    play.check_states([1])
    play.rest(1, 5)
    play.start(2, 5)
    slots = [2, 1]
    rnd, arrays = play.load(slots, 8)
    play.depth = 2
    play.round(slots, rnd, arrays)
    assert play.deepest == 2
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    assert play.drafted > 20
    assert play.accepted > 3 + 3 + 2  # more than the rows' anchors, round by round


@needs_interpreter
@pytest.mark.parametrize(
    ("kind", "options"),
    [("dspark", {"top_k": 1}), ("dflash", {"top_k": 3, "spine": False, "tau": 1.5})],
)
def test_rounds_without_drafts(
    tmp_path: Path, target: TargetModel, kind: str, options: dict[str, Any]
) -> None:
    """They still take in what the target makes of them."""
    play = game(tmp_path, target, 8, KINDS[kind], window=9, **options)
    play.start(1, 30)
    for nodes, rounds in ((8, 1), (1, 2), (4, 1)):
        rnd, arrays = play.load([1], nodes)
        for _ in range(rounds):
            play.round([1], rnd, arrays)
        play.device.leave([1], rnd, play.features)
    play.check_states([1])
    assert play.drafted >= 3 * min(2, options["top_k"])


@needs_interpreter
def test_a_long_context_is_read_in_parts(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts than tiles, and more tiles than parts; a layer with a window and one without."""
    monkeypatch.setattr("specla.drafters.triton_block.UNDIVIDED", 64)
    monkeypatch.setattr("specla.drafters.triton_block.PARTS", 4)
    play = game(tmp_path, target, 4, KINDS["dflash"], top_k=2)
    play.start(1, 100)
    play.start(2, 20)
    rnd, arrays = play.load([1, 2], 4)
    play.round([1, 2], rnd, arrays)
    assert play.drafted == 6
    assert play.device._layer is not None
    assert play.device._layer._take("scale", 8, 4, 4, 2)[..., 1].count_nonzero() > 8 * 4


@needs_interpreter
def test_a_wide_tree_over_marginals(tmp_path: Path, target: TargetModel) -> None:
    """More nodes on a level than a node has children."""
    play = game(tmp_path, target, 32, KINDS["dflash"], top_k=4)
    play.start(1, 9)
    rnd, arrays = play.load([1], 32)
    play.round([1], rnd, arrays)
    assert play.drafted == 31


class Short(Blocks):
    """Its host drafts nothing for rows that are too long, as the device does."""

    longest = 9

    def row(self, slot: int, rnd: DeviceRound, is_last: bool) -> DraftRow:
        return super().row(slot, rnd, is_last or len(self.texts[slot]) - 1 > self.longest)


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_grows_too_long_drafts_nothing(
    tmp_path: Path, target: TargetModel, kind: str
) -> None:
    """There or on the host, when it comes back or comes with a long prompt."""
    write_block(tmp_path, block_config(target.info, **KINDS[kind]))
    play = Short(tmp_path, target, 4, {"tau": 50.0, "top_k": 2, "longest": Short.longest})
    play.start(1, 9)
    rnd, arrays = play.load([1], 4)
    drafted = []
    for _ in range(3):
        play.round([1], rnd, arrays)
        drafted.append(play.drafted)
    assert drafted[0] == 3
    assert drafted[-1] == drafted[-2]
    device = play.device
    device.leave([1], rnd, play.features)
    play.rest(1, 2)
    assert device._lengths[1] == len(play.texts[1]) - 1 > 10
    play.start(2, 14)
    play.start(3, 10)
    assert device._lengths[2] == 13
    rows = [Game.row(play, slot, rnd, False) for slot in (1, 2, 3)]
    assert [tree.num_drafts for tree in device.draft(rows)] == [0, 0, 3]


@needs_interpreter
def test_runs_repeat_and_rows_do_not_see_each_other(tmp_path: Path, target: TargetModel) -> None:
    """The same bits of all logits."""

    def run(name: str, *others: int) -> torch.Tensor:
        play = game(tmp_path / name, target, 2, top_k=2)
        play.start(1, 20)
        for slot in others:
            play.start(slot, 30 + slot)
        rnd, arrays = play.load([1, *others], 2)
        play.device.launch(arrays, rnd, play.features, depth=1)
        layer = play.device._layer
        assert isinstance(layer, BlockLayer)
        assert rnd.num_nodes[0] == 2
        return layer._take("base", 4, target.info.vocab_size).clone()

    alone, again, beside = run("a"), run("b"), run("c", 2)
    assert torch.equal(alone, again)
    assert torch.equal(alone, beside)


@pytest.mark.parametrize(
    ("width", "dtype", "stages"),
    [(256, torch.bfloat16, 3), (128, torch.float32, 3), (256, torch.float32, 1)],
)
def test_wide_heads_are_not_asked_for_ahead(
    width: int, dtype: torch.dtype, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles of them do not fit a multiprocessor."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **meta: launched.append(meta)

    monkeypatch.setattr(triton_block, "_attend_kernel", Kernel())
    ints = torch.zeros(2, dtype=torch.int32)
    parts = triton_block.Parts(torch.zeros(14, 2, 1, width), torch.zeros(14, 2, 1, 2))
    kept, o = (torch.zeros(*size, dtype=dtype) for size in ((2, 3, 8, 2, width), (14, 2 * width)))
    triton_block.attend(
        o, ints, ints, ints, (o, o), o, kept, parts, o, 1e-6, window=None, causal=False
    )
    assert launched[0]["num_stages"] == stages


def test_what_it_is_refused_for(tmp_path: Path, target: TargetModel) -> None:
    def folder(name: str, **sizes: Any) -> str:
        return str(write_block(tmp_path / name, block_config(target.info, **sizes)))

    plain = folder("plain")
    write_block(tmp_path / "reads", block_config(target.info), reader_config(target.info, rank=33))
    cannot: dict[str, tuple[str, dict[str, Any], int]] = {
        "rank of at most 32, got 33; use reader=False": (str(tmp_path / "reads"), {}, 4),
        r"top_k must be an integer in \[1, 8\]": (plain, {"top_k": 9}, 4),
        "min_survival must be 0 with on_device": (plain, {"min_survival": 0.1}, 4),
        "64 positions, got 65": (folder("long", block_size=65), {}, 4),
        "256 numbers, got 258": (folder("wide", head_dim=258), {}, 4),
        "multiples of 8, got 44": (folder("odd", intermediate_size=44), {}, 4),
        "1024 rows at once": (plain, {}, 200),
        "1024 positions of all slots' blocks, got 1280": (plain, {"max_depth": 1}, 200),
    }
    for why, (path, options, slots) in cannot.items():
        asked = BlockDrafter(path=path, on_device=True, **options)
        with pytest.raises(ConfigError, match=why):
            asked.for_gpu(num_slots=slots, max_nodes=16)
        left = BlockDrafter(path=path, on_device=None, **options)
        form = left.for_gpu(num_slots=slots, max_nodes=16)
        assert type(form) is (BlockDrafter if "reader" in why else GraphBlock)
        assert re.search(why, str(form.info.fallback))
    with pytest.raises(ConfigError, match="needs a GPU"):
        BlockDrafter(path=plain, on_device=True).bind(target, num_slots=1, max_nodes=4, exact=True)
    with pytest.raises(ConfigError, match="on_device must be True or False"):
        BlockDrafter(path=plain, on_device="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="longest"):
        BlockDrafter(path=plain, longest=0)


def test_the_form_for_a_gpu(tmp_path: Path, target: TargetModel) -> None:
    """The device's, unless it is not wanted."""
    path = str(write_block(tmp_path, block_config(target.info)))
    options: dict[str, Any] = {"path": path, "top_k": 3, "max_depth": 4, "tau": 2.0}
    form = BlockDrafter(**options, on_device=True, longest=99).for_gpu(num_slots=4, max_nodes=16)
    assert isinstance(form, DeviceBlock)
    assert (form._top_k, form.info.max_depth, form._tau, form._longest) == (3, 4, 2.0, 99)
    assert form.info.priced_as.endswith(" on_device")
    assert form.info.may_return_nothing  # of a row that has grown too long
    assert (form.info.fallback, form.info.longest) == (None, 99)
    assert form.for_gpu(num_slots=4, max_nodes=16) is form
    assert form.depths(16) == (3, 4)
    assert type(BlockDrafter(**options).for_gpu(num_slots=4, max_nodes=16)) is DeviceBlock
    other = BlockDrafter(**options, on_device=False).for_gpu(num_slots=4, max_nodes=16)
    assert type(other) is GraphBlock
    assert not isinstance(other, DeviceDrafter)
    assert other.info.fallback is None
    write_block(tmp_path / "flat", block_config(target.info, **DFLASH))
    flat = BlockDrafter(path=str(tmp_path / "flat"), on_device=True)
    assert flat.for_gpu(num_slots=4, max_nodes=16).depths(16) == (4,)  # type: ignore[attr-defined]
