# SPDX-License-Identifier: Apache-2.0
"""An EAGLE drafter's rounds on the device, in Triton's interpreter, against the eager drafter:
the same trees round after round, the same state when the rows come back. The target is played:
its features are noise, and what it accepts is drawn."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config, write_drafter

from specla.drafters import DraftRow, Observation
from specla.drafters.base import DeviceDrafter, ResidentDrafter
from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_attention import AttentionMixer
from specla.errors import ConfigError, KernelUnavailable
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.state.log import Log
from specla.state.rounds import DeviceRounds, bucket
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.drafters.eagle_device import DeviceEagle
from specla.ops.rows import INTERPRET

needs_interpreter = pytest.mark.skipif(
    not INTERPRET, reason="this target is a CPU's; tests/engine/test_gpu_eagle.py plays another"
)

SLOTS = 3
# K != V, two value heads per key head.
SIZES = {"head_dim": 128, "head_v_dim": 64, "hidden_size": 48, "intermediate_size": 64}
# Two query heads per key head, and heads that are no power of two.
ATTENTION = {
    **{"mixer": "attention", "num_heads": 4, "num_v_heads": 2, "head_dim": 20, "head_v_dim": 20},
    **{"hidden_size": 48, "intermediate_size": 64, "rope_theta": 100.0},
}
each_mixer = pytest.mark.parametrize("sizes", [SIZES, ATTENTION], ids=["gdn", "attention"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of several tiles."""
    monkeypatch.setattr("specla.drafters.triton_block.TILE", 16)


class Game:
    """Two drafters, one of them on the device, and the rows that both know."""

    def __init__(
        self, folder: Path, target: TargetModel, max_nodes: int, options: dict[str, object]
    ) -> None:
        self.rng, self.max_nodes = random.Random(max_nodes), max_nodes
        self.eager, self.device = self.make(str(folder), options)
        for one in (self.eager, self.device):
            one.bind(target, num_slots=SLOTS, max_nodes=max_nodes, exact=True)
        self.target, self.width = target, target.info.hidden_size
        self.texts: dict[int, list[int]] = {}
        self.logs = Log(0, max_nodes, 0)
        layers = self.device.feature_layers
        size = len(layers), 4 * bucket(max_nodes), self.width
        room = torch.full(size, float("nan"), dtype=target.dtype, device=target.device)
        self.features = Features(layers, room)
        self.rounds = DeviceRounds(max_nodes, target.device)
        self.drafted = self.accepted = 0
        self.depth: int | None = None
        """Of the trees, where it is not as deep as they go."""

    def make(self, path: str, options: dict[str, object]):  # type: ignore[no-untyped-def]
        """The same drafter for the host and for the device."""
        eager = EagleDrafter(path=path, min_survival=0, **options)  # type: ignore[arg-type]
        return eager, DeviceEagle(path=path, **options)  # type: ignore[arg-type]

    def start(self, slot: int, prompt: int, chunk: int = 1024) -> None:
        """A prompt of that many tokens, in the state but for its last one."""
        tokens = [self.rng.randrange(self.target.info.vocab_size) for _ in range(prompt)]
        self.texts[slot] = tokens
        for at in range(1, prompt, chunk):
            part = tokens[at : at + chunk]
            given = self.noise(len(part)).transpose(0, 1).flatten(1)
            for one in (self.eager, self.device):
                one.prefill(slot, part, given)

    def end(self, slot: int) -> None:
        for one in (self.eager, self.device):
            one.reset(slot)

    def noise(self, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**30))
        noise = torch.randn(len(self.features.layers), rows, self.width, generator=generator)
        return noise.to(self.target.device, self.target.dtype)

    def load(
        self, slots: Sequence[int], num_nodes: int, *, enter: bool = True
    ) -> tuple[DeviceRound, RowArrays]:
        """The rows are on the device, one place more than there are rows. enter: the drafter's."""
        trees = [DraftTree.root(self.texts[slot][-1]) for slot in slots]
        rnd = self.rounds.plan(slots, [self.logs] * len(slots), trees, num_nodes=num_nodes).round
        remaining = torch.full_like(rnd.slot, 50)
        if enter:
            self.device.enter(slots)
        return rnd, RowArrays(*[remaining] * 6)

    def round(
        self, slots: Sequence[int], rnd: DeviceRound, arrays: RowArrays, last: Sequence[int] = ()
    ) -> None:
        """Draft with both; accept something; what `last` names has one token to go."""
        for b, slot in enumerate(slots):
            arrays.remaining[b] = 1 if slot in last else 50
        depth = self.device.depths(rnd.tokens.shape[1])[-1] if self.depth is None else self.depth
        self.device.launch(arrays, rnd, self.features, depth=depth)
        self.eager.info = replace(self.eager.info, max_depth=depth)
        want = self.eager.draft([self.row(slot, rnd, slot in last) for slot in slots])
        for b, tree in enumerate(want):
            n = int(rnd.num_nodes[b])
            got = DraftTree(rnd.tokens[b, :n].tolist(), rnd.parents[b, :n].tolist())
            self.compare(got, DraftTree(tree.tokens, tree.parents))
        assert (rnd.num_nodes[len(slots) :] == 0).all()
        self.accept(slots, rnd, want)

    def compare(self, got: DraftTree, want: DraftTree) -> None:
        assert got == want

    def row(self, slot: int, rnd: DeviceRound, is_last: bool) -> DraftRow:
        drafts = 0 if is_last else min(self.max_nodes, rnd.tokens.shape[1]) - 1
        return DraftRow(
            slot=slot, tokens=self.texts[slot], num_prompt_tokens=1, max_drafts=drafts, seed=0
        )

    def accept(self, slots: Sequence[int], rnd: DeviceRound, trees: Sequence[DraftTree]) -> None:
        """As `sampling.triton.accept` leaves a round, with features of every node."""
        for layer, outputs in zip(
            self.features.layers, self.noise(rnd.tokens.numel()), strict=True
        ):
            self.features.take(layer, outputs)
        seen, at = [], []
        for b, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
            path = [0]
            while below := [i for i, p in enumerate(tree.parents) if p == path[-1]]:
                if self.rng.random() < 0.2:
                    break
                path.append(self.rng.choice(below))
            bonus = self.rng.randrange(self.target.info.vocab_size)
            emitted = (*(tree.tokens[node] for node in path[1:]), bonus)
            rnd.path[b, : len(path)] = torch.tensor(path).to(rnd.path)
            rnd.path_len[b], rnd.num_nodes[b], rnd.tokens[b, 0] = len(path), 1, bonus
            self.texts[slot] += emitted
            seen.append(Observation(slot=slot, tree=tree, path=tuple(path), emitted=emitted))
            at += [b * rnd.tokens.shape[1] + node for node in path]
            self.drafted, self.accepted = self.drafted + tree.num_drafts, self.accepted + len(path)
            self.deepest = max(tree.depths())
        self.eager.feed(seen, self.features.rows(at))

    def rest(self, slot: int, count: int) -> None:
        """So many rounds that nobody drafted for, fed at once."""
        vocab = self.target.info.vocab_size
        emitted = tuple(self.rng.randrange(vocab) for _ in range(count))
        given = self.noise(count).transpose(0, 1).flatten(1)
        tree = DraftTree.chain(self.texts[slot][-1], emitted[:-1])
        seen = [Observation(slot=slot, tree=tree, path=tuple(range(count)), emitted=emitted)]
        for one in (self.eager, self.device):
            one.feed(seen, given)
        self.texts[slot] += emitted

    def fork(self, slot: int, to: int) -> None:
        for one in (self.eager, self.device):
            one.fork(slot, to)
        self.texts[to] = [*self.texts[slot]]

    def stay(self, slots: Sequence[int], rnd: DeviceRound, count: int) -> None:
        """So many rounds of one node that nothing was launched for; the last is to be taken in."""
        kept = self.rested(slots, rnd, count)
        tokens = [self.texts[slot][-count:-1] for slot in slots]
        self.device.catch_up(tokens, torch.stack(kept[:-1], dim=1).flatten(0, 1))

    def rested(self, slots: Sequence[int], rnd: DeviceRound, count: int) -> list[torch.Tensor]:
        """So many rounds of one node that nothing was launched for: their features, by place."""
        kept = []
        for _ in range(count):
            self.accept(slots, rnd, [DraftTree.root(self.texts[slot][-1]) for slot in slots])
            at = [b * rnd.tokens.shape[1] for b in range(len(slots))]
            kept.append(self.features.rows(at).clone())
        return kept

    def check_states(self, slots: Sequence[int]) -> None:
        """Both say the same about every row, now that both have encoded all of it."""
        for slot in slots:
            self.eager._encode([slot])
            self.device._encode([slot])
            one, two = (remembered(x, slot) for x in (self.eager, self.device))
            for a, b in zip(one, two, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            assert self.device._mixer.cursor(slot).length == len(self.texts[slot]) - 1


def remembered(drafter: EagleDrafter, slot: int) -> list[torch.Tensor]:
    """Its last output, and what its mixer has of the slot."""
    tips, mixer = drafter.model.roots([slot]), drafter.model.mixer
    kept = mixer._tokens(slot) if isinstance(mixer, AttentionMixer) else ()
    return [tips.y, *tips.memory, *kept]


def game(
    tmp_path: Path, target: TargetModel, max_nodes: int, /, sizes: dict[str, object] = SIZES,
    **options: object,
) -> Game:  # fmt: skip
    write_drafter(tmp_path, toy_config(target.info, **sizes))
    return Game(tmp_path, target, max_nodes, {"tau": 50.0, **options})


@needs_interpreter
@each_mixer
def test_rounds_on_the_device_and_back(
    tmp_path: Path, target: TargetModel, sizes: dict[str, object]
) -> None:
    """Rows that have features, one that has none yet, one with a single token to go, padding;
    then another set of rows in other places, of which one slot is a new row's."""
    play = game(tmp_path, target, 6, {**sizes, "draft_vocab_size": 15}, top_k=2, max_depth=3)
    assert isinstance(play.device, ResidentDrafter)
    play.start(1, 7)
    play.start(3, 1)
    play.start(2, 3)
    slots = [1, 3, 2]
    rnd, arrays = play.load(slots, 8)
    for last in ((), (2,)):
        play.round(slots, rnd, arrays, last)
    rnd.num_nodes[1] = 0
    play.device.leave([1, 3, None], rnd, play.features)
    for slot in (2, 3):
        play.end(slot)
    play.check_states([1])
    play.start(2, 5)
    slots = [2, 1]
    rnd, arrays = play.load(slots, 8)
    play.depth = 2
    play.round(slots, rnd, arrays)
    assert play.deepest == 2
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    assert play.accepted > 8


@needs_interpreter
@each_mixer
def test_a_chain_and_rounds_without_drafts(
    tmp_path: Path, target: TargetModel, sizes: dict[str, object]
) -> None:
    """Rounds of one node still take in what the target makes of them."""
    sizes = {**sizes, "fc_norm": False}
    play = game(tmp_path, target, 8, sizes, top_k=1, max_depth=3, spine=False)
    play.start(1, 4)
    for nodes, rounds in ((8, 1), (1, 2), (4, 1)):
        rnd, arrays = play.load([1], nodes)
        for _ in range(rounds):
            play.round([1], rnd, arrays)
        play.device.leave([1], rnd, play.features)
    play.check_states([1])
    assert play.drafted == 3 + 3


@needs_interpreter
@each_mixer
def test_what_came_while_it_rested(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, object]
) -> None:
    """More tokens than are encoded at once, on top of a path that waits."""
    monkeypatch.setattr("specla.drafters.eagle_buffers.CHUNK", 4)
    play = game(tmp_path, target, 2, sizes, top_k=1, max_depth=1)
    assert play.device._max_tokens == 4
    layer = play.device._layer
    assert layer is not None
    layer.compile()
    play.start(1, 3)
    for count in (6, 1):
        rnd, arrays = play.load([1], 2)
        play.round([1], rnd, arrays)
        play.device.leave([1], rnd, play.features)
        play.rest(1, count)
    play.check_states([1])
    assert play.drafted == 2


@needs_interpreter
@each_mixer
def test_rows_that_share_a_prompt_and_rest_on_the_device(
    tmp_path: Path, target: TargetModel, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, object]
) -> None:
    """A prompt in chunks, copied before its text goes on; more rounds missed than are encoded at
    once; then the host drafts for the same rows."""
    monkeypatch.setattr("specla.drafters.eagle_buffers.CHUNK", 4)
    play = game(tmp_path, target, 8, sizes, top_k=2, max_depth=3)
    play.start(1, 20, chunk=7)
    play.fork(1, 3)
    slots = [3, 1]
    rnd, arrays = play.load(slots, 8)
    play.round(slots, rnd, arrays)
    play.device.launch(arrays, rnd, play.features, depth=1)  # takes in what is to be
    play.stay(slots, rnd, 7)
    for _ in range(2):
        play.round(slots, rnd, arrays)
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    rows = [play.row(slot, rnd, False) for slot in slots]
    for got, want in zip(play.device.draft(rows), play.eager.draft(rows), strict=True):
        assert (got.tokens, got.parents) == (want.tokens, want.parents)
        assert got.logprobs == pytest.approx(want.logprobs, rel=1e-3)
    play.end(1)
    assert [tree.num_drafts for tree in play.device.draft(rows)] == [7, 0]


def test_what_it_is_refused_for(tmp_path: Path, target: TargetModel) -> None:
    wide = {**ATTENTION, "head_dim": 258, "head_v_dim": 258}
    with pytest.raises(ConfigError, match="256 numbers, got 258"):
        DeviceEagle(path=str(write_drafter(tmp_path / "wide", toy_config(target.info, **wide))))
    attention = write_drafter(tmp_path / "a", toy_config(target.info, **ATTENTION))
    deep = DeviceEagle(path=str(attention), max_depth=80)
    with pytest.raises(ConfigError, match="64 tokens of an accepted path, got 128"):
        deep.bind(target, num_slots=1, max_nodes=100, exact=True)
    with pytest.raises(ConfigError, match="longest"):
        DeviceEagle(path=str(attention), longest=0)
    small = write_drafter(tmp_path / "b", toy_config(target.info))
    drafter = DeviceEagle(path=str(small))
    with pytest.raises(KernelUnavailable, match="got 8"):
        drafter.bind(target, num_slots=1, max_nodes=4, exact=True)
    with pytest.raises(ConfigError, match="top_k"):
        DeviceEagle(path=str(small), top_k=9)
    large = write_drafter(tmp_path / "c", toy_config(target.info, **SIZES))
    drafter = DeviceEagle(path=str(large), max_depth=7)
    with pytest.raises(ConfigError, match="1024 rows at once, got 256 slots of 8"):
        drafter.bind(target, num_slots=200, max_nodes=8, exact=True)
    assert not isinstance(EagleDrafter(path=str(small)), DeviceDrafter)


def test_the_form_for_a_gpu(tmp_path: Path, target: TargetModel) -> None:
    """The device's wherever it can be; where it cannot, the eager one says why, or refuses."""
    large = str(write_drafter(tmp_path / "large", toy_config(target.info, **SIZES)))
    options: dict[str, object] = {"top_k": 3, "max_depth": 5, "tau": 2.0, "spine": False}
    form = EagleDrafter(path=large, **options).for_gpu(num_slots=4, max_nodes=16)  # type: ignore[arg-type]
    assert isinstance(form, DeviceEagle)
    assert (form._top_k, form.info.max_depth, form._tau, form._spine) == (3, 5, 2.0, False)
    assert form.info.fallback is None
    assert form.info.priced_as.endswith(" on_device")
    assert form.for_gpu(num_slots=4, max_nodes=16) is form
    nothing_cut = EagleDrafter(path=large, min_survival=0)
    assert isinstance(nothing_cut.for_gpu(num_slots=4, max_nodes=16), DeviceEagle)
    small = str(write_drafter(tmp_path / "small", toy_config(target.info)))
    cannot = {
        "got 8": (small, {}, 4),
        r"top_k must be an integer in \[1, 8\]": (large, {"top_k": 9}, 4),
        "1024 rows at once": (large, {"max_depth": 7}, 200),
        "min_survival is for drafting on the host": (large, {"min_survival": 0.1}, 4),
    }
    for why, (path, more, slots) in cannot.items():
        eager = EagleDrafter(path=path, **more)  # type: ignore[arg-type]
        assert eager.for_gpu(num_slots=slots, max_nodes=16) is eager
        assert eager.info.fallback is not None
        assert re.search(f"^drafted on the host: .*{why}", eager.info.fallback)
        asked = EagleDrafter(path=path, on_device=True, **more)  # type: ignore[arg-type]
        with pytest.raises((ConfigError, KernelUnavailable), match=why):
            asked.for_gpu(num_slots=slots, max_nodes=16)


def test_attention_drafts_on_the_device_too(tmp_path: Path, target: TargetModel) -> None:
    path = str(write_drafter(tmp_path, toy_config(target.info, **ATTENTION)))
    form = EagleDrafter(path=path, longest=99).for_gpu(num_slots=4, max_nodes=16)
    assert isinstance(form, DeviceEagle)
    assert (form.info.fallback, form.info.longest) == (None, 99)
    assert form.info.priced_as.endswith(" on_device")
    wide = {**ATTENTION, "head_dim": 264, "head_v_dim": 264}
    path = str(write_drafter(tmp_path / "wide", toy_config(target.info, **wide)))
    eager = EagleDrafter(path=path)
    assert eager.for_gpu(num_slots=4, max_nodes=16) is eager
    assert re.search("^drafted on the host: .*heads of at most 256", str(eager.info.fallback))


def test_either_form_can_be_asked_for(tmp_path: Path, target: TargetModel) -> None:
    path = str(write_drafter(tmp_path, toy_config(target.info, **SIZES)))
    eager = EagleDrafter(path=path, on_device=False)
    assert eager.for_gpu(num_slots=1, max_nodes=4) is eager
    assert eager.info.fallback is None
    with pytest.raises(ConfigError, match="needs a GPU"):
        EagleDrafter(path=path, on_device=True).bind(target, num_slots=1, max_nodes=4, exact=True)
    with pytest.raises(ConfigError, match="on_device must be True or False"):
        EagleDrafter(path=path, on_device="yes")  # type: ignore[arg-type]
