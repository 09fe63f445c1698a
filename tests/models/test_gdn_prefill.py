# SPDX-License-Identifier: Apache-2.0
"""The GPU's way through a prompt, in Triton's interpreter with the torch recurrence, against the
CPU decoder. The recurrence by fla: tests/ops/test_fla_chunks.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import specla.models
from specla.models.features import Features
from specla.models.fla_gdn import FlaGDN
from specla.models.toy import write_toy_checkpoint
from specla.ops.contract import RecurrentShape
from specla.state import State

pytest.importorskip("triton")
from specla.models.gdn_fused import _packed
from specla.models.gdn_prefill import ChunkDecoder
from specla.models.gdn_prefill_graphs import LANES, Places, ShortChunks, padded


class Played:
    """A graph, played by launching again into the tensors of the first time."""

    def __init__(self, launch: Callable[[], object]) -> None:
        launch()
        self.replay = launch


def played(launch: Callable[[], object], **options: object) -> tuple[Played, object]:
    return Played(launch), None


class InTurn:
    """Lanes without a device: one after the other."""

    def __init__(self, count: int) -> None:
        self._count, self.runs = count, 0

    def start(self) -> None:
        self.runs = 0

    @contextmanager
    def run(self) -> Iterator[int]:
        self.runs += 1
        yield (self.runs - 1) % self._count

    def stream(self, lane: int) -> int:
        return lane


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and lanes as they can be had here; chunks of 4."""
    for name, made in (("captured", played), ("Lanes", InTurn), ("CHUNK", 4)):
        monkeypatch.setattr(f"specla.models.gdn_prefill_graphs.{name}", made)
    monkeypatch.setattr(ShortChunks, "takes", lambda self, num_tokens: num_tokens <= 512)


def load(folder: Path, **options: object) -> FlaGDN:
    path = write_toy_checkpoint(
        folder, num_layers=2, hidden=32, head_dim=16, vocab=48, intermediate=40, **options
    )
    return specla.models.load(str(path), device="cpu", dtype=torch.float32)  # type: ignore[return-value]


def by_chunks(model: FlaGDN) -> ChunkDecoder:
    return ChunkDecoder(
        _packed(model._weights),
        model.config.recurrent,
        eps=model.config.norm_eps,
        gated=model.config.use_gate,
        beta_scale=2.0 if model.config.allow_neg_eigval else 1.0,
        kernels="reference",
    )


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 1, "num_v_heads": 2, "expand_v": 1.0},
        {"heads": 1, "expand_v": 2.0, "neg_eigval": True, "use_gate": False},
    ],
    ids=["two value heads per key head", "K != V, no gate"],
)
def test_chunks_agree_with_the_cpu_decoder(tmp_path: Path, options: dict[str, object]) -> None:
    model = load(tmp_path, **options)
    chunks = by_chunks(model)
    sizes = {"num_slots": 2, "max_nodes": 1}
    one, two = (State(model.config.recurrent, **sizes) for _ in range(2))  # type: ignore[arg-type]
    slot = one.acquire()
    assert slot == two.acquire()
    for layers, tokens in (((), [5, 9, 13, 2, 7]), ((1, 0), [1, 8]), ((0,), [3, 3])):
        asked = [Features(layers) if layers else None for _ in "ab"]
        model.prefill(tokens, slot, one, asked[0])
        chunks(tokens, slot, two, asked[1])
        if asked[0] and asked[1]:
            assert asked[0].rows().shape == (2, 32 * len(layers))
            torch.testing.assert_close(asked[1].rows(), asked[0].rows(), rtol=1e-4, atol=1e-5)
    assert two.logs[slot].durable_len == 9
    for a, b in zip(one.committed_state(slot), two.committed_state(slot), strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)


def test_padding_follows_from_a_chunks_length() -> None:
    """Multiples of 64 up to 512 tokens, of 128 beyond."""
    sizes = {1: 64, 64: 64, 65: 128, 512: 512, 513: 640, 640: 640, 1023: 1024, 1024: 1024}
    assert {n: padded(n) for n in sizes} == sizes


def test_short_chunks_are_padded_and_replayed(tmp_path: Path, on_a_device: None) -> None:
    """Two slots by turns, features and none, a shorter chunk after a longer one: as chunks of
    their own length."""
    model = load(tmp_path, heads=1, num_v_heads=2, expand_v=1.0)
    short, alone = by_chunks(model), by_chunks(model)
    alone._short.takes = lambda num_tokens: False  # type: ignore[method-assign]
    states = [State(model.config.recurrent, num_slots=2, max_nodes=1) for _ in "ab"]
    slots = [[state.acquire() for _ in "ab"] for state in states]
    rows: list[list[Tensor]] = [[], []]
    for which, length, layers in ((0, 5, (1,)), (1, 4, ()), (0, 3, (1,))):
        tokens = [(7 * i + length) % 48 for i in range(length)]
        for side, chunks in enumerate((short, alone)):
            asked = Features(layers) if layers else None
            chunks(tokens, slots[side][which], states[side], asked)
            if asked is not None:
                rows[side].append(asked.rows())
    (lane,) = short._short._rooms.values()
    assert len(lane._graphs) == 3
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for one, two in zip(*slots, strict=True):
        committed = [
            state.committed_state(slot) for state, slot in zip(states, (one, two), strict=True)
        ]
        for a, b in zip(*committed, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_states_views_are_kept_as_long_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path, heads=1, num_v_heads=2, expand_v=1.0)
    chunks, states = by_chunks(model), [State(model.config.recurrent, num_slots=2, max_nodes=1)]
    states.append(State(model.config.recurrent, num_slots=2, max_nodes=1))
    monkeypatch.setattr(chunks, "launch", add_up)
    for turn in (1, 2):
        for i, state in enumerate(states):
            for slot in (1, 2):
                chunks([10 * i + slot], slot, state)
                assert float(state.layers[1].S[slot].mean()) == turn * (10 * i + slot)
    assert [len(slots) for slots in chunks._kept.values()] == [2, 2]
    del state
    states.pop()
    gc.collect()
    assert len(chunks._kept) == 1


SHAPE = RecurrentShape(
    num_layers=3, num_key_heads=1, num_value_heads=1, key_dim=4, value_dim=2, conv_width=4
)


def add_up(given: Tensor, places: Places, features: Features | None) -> None:
    """A decoder: S gets the tokens' sum, an output is a token times its layer."""
    count, tokens = int(given[0]), given[4:].float()
    for i, (S, tail) in enumerate(places):
        S += tokens[:count].sum()
        tail += 1
        if features is not None:
            features.take(i, i * tokens[:, None].repeat(1, 8).bfloat16(), copy=True)


def add_up_by_graphs() -> ShortChunks:
    return ShortChunks(add_up, SHAPE, 8, torch.bfloat16, torch.device("cpu"))


def test_only_what_can_be_captured_is_replayed() -> None:
    made = partial(ShortChunks, add_up, SHAPE, 8, torch.bfloat16)
    assert made(torch.device("cuda")).takes(1024)
    assert not made(torch.device("cuda")).takes(1025)
    assert not made(torch.device("cpu")).takes(5)


def empty_places() -> Places:
    return [(torch.zeros(1, 2, 4), torch.zeros(3, 10).bfloat16()) for _ in range(3)]


@pytest.mark.parametrize("beside", [False, True], ids=["in turn", "side by side"])
def test_every_prompt_has_its_own_state_and_outputs(on_a_device: None, beside: bool) -> None:
    """Side by side each of LANES has its own rooms, and takes the next when all have had one."""
    short, lengths = add_up_by_graphs(), [1 + (5 * i) % 9 for i in range(9)]
    places = [empty_places() for _ in lengths]
    for turn in (1, 2):
        with short.side_by_side() if beside else nullcontext():
            for i, length in enumerate(lengths):
                tokens = [(7 * i + j) % 30 for j in range(length)]
                features = Features((2, 1))
                short(tokens, places[i], features)
                assert [float(S.mean()) for S, _ in places[i]] == [turn * sum(tokens)] * 3
                assert [float(tail.mean()) for _, tail in places[i]] == [turn] * 3
                wide = torch.tensor(tokens)[:, None].expand(-1, 8)
                assert torch.equal(features.rows().int(), torch.cat([2 * wide, wide], dim=1))
    assert len(short._rooms) == (LANES if beside else 1)


def test_a_state_is_copied_in_lists_of_one_dtype(
    on_a_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several torch copies tensor by tensor, on a GPU a hundred launches for each prompt."""
    lists: list[set[torch.dtype]] = []
    copy = torch._foreach_copy_

    def watched(into: list[Tensor], given: list[Tensor]) -> None:
        lists.append({x.dtype for x in (*into, *given)})
        copy(into, given)

    monkeypatch.setattr(torch, "_foreach_copy_", watched)
    short = add_up_by_graphs()
    places = [
        (torch.full((1, 2, 4), float(i)), torch.full((3, 10), float(i), dtype=torch.bfloat16))
        for i in range(3)
    ]
    short([7, 8, 9, 7, 8], places)
    assert [float(S.mean()) for S, _ in places] == [39, 40, 41]
    assert [float(tail.mean()) for _, tail in places] == [1, 2, 3]
    assert len(lists) == 4
    assert all(len(kinds) == 1 for kinds in lists)
