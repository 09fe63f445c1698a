# SPDX-License-Identifier: Apache-2.0
"""An EAGLE drafter inside the round's graph, on a GPU: it changes no token, its runs repeat, and
its trees are the eager drafter's. GDN-1.3B's shape in a few layers, random weights. States:
test_gpu_free.py.

    pytest -m gpu tests/engine/test_gpu_eagle.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from behind import Turns
from eagle_toy import toy_config, write_drafter
from test_eagle_device import Game, remembered
from test_gpu_free import no_waiting

from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.drafters.base import DeviceDrafter, Drafter, Shape
from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_device import DeviceEagle
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.engine.graphs import GraphRounds
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.request import Completion, Request, SamplingParams
from specla.state import State
from specla.topology.tree import DraftTree

pytestmark = pytest.mark.gpu
# Half as wide as the target.
SIZES = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_heads": 4, "num_v_heads": 4},
    **{"head_dim": 256, "head_v_dim": 256, "draft_vocab_size": 8192, "target_fingerprint": None},
}


@cache
def target(layers: int, dtype: torch.dtype) -> RandomGDN:
    return gdn_1_3b(layers=layers, dtype=dtype)


# Four query heads per key head.
ATTENTION = {
    **SIZES,
    **{"mixer": "attention", "num_heads": 8, "num_v_heads": 2},
    **{"head_dim": 128, "head_v_dim": 128},
}
each_mixer = pytest.mark.parametrize("sizes", [SIZES, ATTENTION], ids=["gdn", "attention"])


def folder(tmp_path: Path, model: RandomGDN, sizes: dict[str, object] = SIZES) -> str:
    return str(write_drafter(tmp_path, toy_config(model.info, **sizes)))


class Counting(Game):
    """Counts what the two trees of a row have in common."""

    shared = most = 0

    def compare(self, got: DraftTree, want: DraftTree) -> None:
        paths = [
            {tuple(t.tokens[n] for n in t.path_to(i)) for i in range(1, t.num_nodes)}
            for t in (got, want)
        ]
        self.shared += len(paths[0] & paths[1])
        self.most += max(map(len, paths))


@each_mixer
def test_the_trees_are_the_eager_drafters(tmp_path: Path, sizes: dict[str, object]) -> None:
    """In float32; sums in another order may settle a near tie otherwise."""
    model = target(2, torch.float32)
    options: dict[str, object] = {"tau": 50.0, "top_k": 4, "max_depth": 5}
    play = Counting(Path(folder(tmp_path, model, sizes)), model, 16, options)
    slots = [1, 2, 3]
    for slot, prompt in zip(slots, (70, 1, 9), strict=True):
        play.start(slot, prompt)
    rnd, arrays = play.load(slots, 16)
    for last in ((), (), (2,), ()):
        play.round(slots, rnd, arrays, last)
    play.device.leave(slots, rnd, play.features)
    play.check_states(slots)
    for slot, rested in zip(slots, (1, 70, 200), strict=True):
        play.rest(slot, rested)
    play.check_states(slots)
    assert play.most > 100
    assert play.shared / play.most > 0.95


def test_prompts_are_the_eager_drafters_and_their_own(tmp_path: Path) -> None:
    """By fla's chunked kernels, replayed or launched: within rounding of the torch recurrence;
    the same bits in another slot, after other prompts."""
    model, lengths = target(2, torch.bfloat16), (1, 63, 64, 65, 200, 513, 1025)
    path = folder(tmp_path, model)
    eager, device = EagleDrafter(path=path), DeviceEagle(path=path)
    for one in (eager, device):
        one.bind(model, num_slots=2 * len(lengths), max_nodes=16, exact=True)
    generator = torch.Generator().manual_seed(0)
    width = model.info.hidden_size * len(device.feature_layers)
    features = torch.randn(1025, width, generator=generator).to("cuda", torch.bfloat16)

    def read(drafter: EagleDrafter, slot: int, length: int) -> list[torch.Tensor]:
        tokens = [(37 * length + 11 * i) % 31000 + 5 for i in range(length)]
        drafter.prefill(slot, tokens, features[:length])
        tips = drafter.model.roots([slot])
        return [x.clone() for x in (tips.y, *tips.memory)]

    first = [read(device, 1 + i, n) for i, n in enumerate(lengths)]
    for i, n in enumerate(lengths):
        for a, b in zip(first[i], read(eager, 1 + i, n), strict=True):
            far = (a.float() - b.float()).abs().max() / b.float().abs().max()
            assert far < 0.05, (n, float(far))
    for i, n in reversed(list(enumerate(lengths))):
        assert all(map(torch.equal, first[i], read(device, 1 + len(lengths) + i, n))), n


class Launched(NamedTuple):
    """In place of a graph."""

    replay: Callable[[], None]


@each_mixer
def test_what_is_taken_in_at_once_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, object]
) -> None:
    """Graphs over other rows and tokens each time leave the bytes of their launches."""
    model = target(2, torch.bfloat16)
    path = folder(tmp_path, model, sizes)
    width = len(EagleDrafter(path=path).feature_layers) * model.info.hidden_size
    generator = torch.Generator("cuda").manual_seed(0)
    features = torch.randn(64, width, generator=generator, device="cuda").bfloat16()
    rounds = ((1,), (1,)), ((1, 2, 3), (3, 60, 1)), ((2,), (40,)), ((3, 1), (2, 64)), ((1,), (7,))

    def left() -> list[torch.Tensor]:
        drafter = DeviceEagle(path=path)
        drafter.bind(model, num_slots=4, max_nodes=16, exact=True)
        for slot in (1, 2, 3):
            drafter.prefill(slot, [7 + slot] * 30, features[:30])
        for slots, counts in rounds:
            tokens = [[3 * n + i for i in range(n)] for n in counts]
            drafter._take_in(slots, tokens, torch.cat([features[:n] for n in counts]))
        return [x.clone() for slot in (1, 2, 3) for x in remembered(drafter, slot)]

    replayed = left()
    monkeypatch.setattr(
        "specla.drafters.eagle_layer.captured", lambda launch: (Launched(launch), None)
    )
    assert all(map(torch.equal, replayed, left()))


def decode(
    drafter: Drafter, max_nodes: int, turns: Sequence[Shape] = ()
) -> tuple[dict[str, tuple[int, ...]], object]:
    model = target(6, torch.bfloat16)
    state = State(
        model.info.recurrent, num_slots=4, max_nodes=max_nodes, log_capacity=16,
        dtype=model.dtype, device=model.device,
    )  # fmt: skip
    budget = "paying" if turns else "off"
    engine = Engine(model, state, drafter, mode="exact", prefill_chunk=256, budget=budget)
    assert isinstance(engine.drafter, DeviceDrafter)
    if turns:
        assert engine.spending is not None
        engine.spending.free = Turns(turns, every=5)  # type: ignore[assignment]
    engine.capture()
    for i in range(7):
        params = SamplingParams(
            temperature=0.8 * (i % 3 == 2), max_tokens=40 + 7 * i, ignore_eos=True
        )
        prompt = tuple((37 * i + 11 * j) % 31000 + 5 for j in range(1 + 9 * i))
        engine.add(
            Request(request_id=str(i), prompt=None, prompt_token_ids=prompt, params=params, seed=i)
        )
    done = {}
    while engine.has_work:
        done |= {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    tokens = {name: completion.token_ids for name, completion in done.items()}
    return tokens, {name: c.speculation for name, c in done.items()}


@each_mixer
def test_no_token_changes_and_runs_repeat(tmp_path: Path, sizes: dict[str, object]) -> None:
    plain, _ = decode(NoDrafter(), 1)
    path = folder(tmp_path, target(6, torch.bfloat16), sizes)
    one, two = (decode(EagleDrafter(path=path), 16) for _ in "ab")
    assert one[0] == plain
    assert one == two


@each_mixer
def test_shapes_and_rest_by_turns_change_no_token(
    tmp_path: Path, sizes: dict[str, object]
) -> None:
    plain, _ = decode(NoDrafter(), 1)
    path = folder(tmp_path, target(6, torch.bfloat16), sizes)
    turns = Shape(16, 6), Shape(1, 0), Shape(8, 4), Shape(2, 1), Shape(1, 0), Shape(16, 4)
    one, two = (decode(EagleDrafter(path=path), 16, turns) for _ in "ab")
    assert one[0] == plain
    assert one == two


class Right(DeviceEagle):
    """Its likeliest first draft is the truth: tokens [1, positions], by position."""

    truth: torch.Tensor

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        super().launch(rows, rnd, features, depth=depth)
        if depth:
            rnd.tokens[:, 1:2].copy_(self.truth.gather(1, rows.len_tokens.long().unsqueeze(1)))


def test_a_row_alone_goes_on_in_another_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded once, and what it accepted in one shape is taken in by the next one's, or
    where it rests in between by itself."""
    model = target(6, torch.bfloat16)
    state = State(
        model.info.recurrent, num_slots=1, max_nodes=16, log_capacity=16, dtype=model.dtype,
        device=model.device,
    )  # fmt: skip
    prompt, params = (*range(5, 45),), SamplingParams(max_tokens=80, ignore_eos=True)
    one = Request(request_id="a", prompt=None, prompt_token_ids=prompt, params=params, seed=0)

    def run(drafter: Drafter, turns: Sequence[Shape] = ()) -> Completion:
        engine = Engine(
            model, state, drafter, mode="exact", prefill_chunk=256,
            budget="paying" if turns else "off",
        )  # fmt: skip
        engine.capture()
        if engine.spending is not None:
            engine.spending.free = Turns(turns, every=3)  # type: ignore[assignment]
        loads, load = list[int](), GraphRounds._load
        monkeypatch.setattr(
            GraphRounds, "_load", lambda self, rows: (loads.append(1), load(self, rows))[1]
        )
        engine.add(one)
        deltas = [delta for _ in iter(lambda: engine.has_work, False) for delta in engine.step()]
        monkeypatch.setattr(GraphRounds, "_load", load)
        assert len(loads) == 1
        return next(d.completion for d in deltas if d.completion is not None)

    plain = run(NoDrafter()).token_ids
    Right.truth = torch.tensor([[*prompt, *plain, *[0] * 16]], dtype=torch.int32, device="cuda")
    turns = Shape(16, 6), Shape(2, 1), Shape(8, 4), Shape(1, 0), Shape(16, 4), Shape(4, 3)
    path = folder(tmp_path, model)
    first, again = (run(Right(path=path, max_depth=6), turns) for _ in "ab")
    assert first.token_ids == again.token_ids == plain
    assert first.speculation == again.speculation
    assert first.speculation.tokens_per_round > 1.8


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (DeviceEagle, SIZES),
        (EagleDrafter, SIZES),
        (DeviceEagle, ATTENTION),
        (EagleDrafter, ATTENTION),
    ],
    ids=["device", "host", "device-attention", "host-attention"],
)
def test_no_prompt_waits(
    kind: type[EagleDrafter], sizes: dict[str, object], tmp_path: Path
) -> None:
    """Not even on the host, or prompts of a batch would not be side by side in the target."""
    model = target(2, torch.bfloat16)
    drafter = kind(path=folder(tmp_path, model, sizes))
    drafter.bind(model, num_slots=4, max_nodes=16, exact=True)
    width = model.info.hidden_size * len(drafter.feature_layers)
    features = torch.zeros(1025, width, dtype=torch.bfloat16, device="cuda")
    for first, context in ((1, nullcontext), (3, no_waiting)):
        with context():
            for slot, length in ((first, 100), (first + 1, 1025)):
                drafter.prefill(slot, [7] * length, features[:length])
        torch.cuda.synchronize()
