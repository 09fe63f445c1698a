# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels' decoder in Triton's interpreter, against the CPU decoder, over rounds with
trees, acceptances and folds. Bits are compared on a GPU (tests/engine/test_gpu.py); here the
formulas, indices and roundings are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import specla.models
from specla.models.fla_gdn import FlaGDN
from specla.models.toy import write_toy_checkpoint
from specla.state import State
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.models.gdn_fused import FusedDecoder


def load(folder: Path, **options: object) -> FlaGDN:
    path = write_toy_checkpoint(
        folder, num_layers=1, hidden=64, head_dim=64, vocab=48, intermediate=48, **options
    )
    return specla.models.load(str(path), device="cpu", dtype=torch.float32)  # type: ignore[return-value]


def fused(model: FlaGDN) -> FusedDecoder:
    made = FusedDecoder(
        model._weights,
        model.config.recurrent,
        eps=model.config.norm_eps,
        gated=model.config.use_gate,
        beta_scale=2.0 if model.config.allow_neg_eigval else 1.0,
        pdl=False,
    )
    made.reserve(16)
    return made


def random_tree(rng: random.Random, max_nodes: int) -> DraftTree:
    count = rng.randint(1, max_nodes)
    parents = (-1, *(rng.randrange(i) for i in range(1, count)))
    tokens = tuple(rng.sample(range(48), count))
    return DraftTree(tokens, parents)


def random_path(rng: random.Random, tree: DraftTree) -> list[int]:
    path = [0]
    while children := [i for i, p in enumerate(tree.parents) if p == path[-1]]:
        if rng.random() < 0.3:
            break
        path.append(rng.choice(children))
    return path


GROUPED = {"heads": 1, "num_v_heads": 2, "expand_v": 1.0}
WIDE = {"heads": 1, "expand_v": 2.0, "neg_eigval": True, "use_gate": False}


@pytest.mark.parametrize(
    ("options", "fast"),
    [(GROUPED, False), (WIDE, False), (GROUPED, True)],
    ids=["two value heads per key head", "K != V, no gate", "closed form"],
)
def test_rounds_agree_with_the_cpu_decoder(
    tmp_path: Path, options: dict[str, object], fast: bool
) -> None:
    model = load(tmp_path, **options)
    decoder = fused(model)
    rng = random.Random(0)
    shape = model.config.recurrent
    sizes = {"num_slots": 2, "max_nodes": 4, "log_capacity": 3}
    one, two = State(shape, **sizes), State(shape, **sizes)  # type: ignore[arg-type]
    slots = [one.acquire(), one.acquire()]
    assert slots == [two.acquire(), two.acquire()]
    for state in (one, two):
        model.prefill([5, 9, 13], slots[1], state)
    for _ in range(3):
        trees = [random_tree(rng, 4) for _ in slots]
        plan = one.begin(slots, trees)
        want = model.verify(plan, one)
        device = two.rounds.plan(slots, [two.logs[slot] for slot in slots], trees)
        got = decoder(device.round, two, kernel="closed" if fast else "walk")
        for b, tree in enumerate(trees):
            a, c = plan.offsets[b], device.offsets[b]
            torch.testing.assert_close(
                got[c : c + tree.num_nodes], want[a : a + tree.num_nodes], rtol=1e-4, atol=1e-4
            )
        paths = [random_path(rng, tree) for tree in trees]
        for state in (one, two):
            state.commit(slots, paths)
    for slot in slots:
        for (S, tail), (S2, tail2) in zip(
            one.committed_state(slot), two.committed_state(slot), strict=True
        ):
            torch.testing.assert_close(S2, S, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(tail2, tail, rtol=1e-4, atol=1e-5)


def test_ready_gates_take_the_room_of_rows_that_mix(tmp_path: Path) -> None:
    """Not of every node of the largest round, as outputs do."""
    decoder = fused(load(tmp_path))
    for mix_rows, max_rows, room in ((0, 16, 0), (16, 256, 16), (16, 257, 16)):
        decoder._mix_rows = mix_rows
        decoder.reserve(max_rows)
        assert len(decoder.buffers.gates) == room
        assert decoder.buffers.gates.shape[1:] == decoder.buffers.workspace.o.shape[1:]


def test_the_kernel_is_each_rounds_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of two modes on one model: neither decides for the other."""
    model = load(tmp_path, **GROUPED)
    model._fused = decoder = fused(model)
    ran: list[str] = []
    monkeypatch.setattr(
        decoder, "_mix", lambda *args: ran.append("walk" if args[5] is None else "closed")
    )
    state = State(model.config.recurrent, num_slots=1, max_nodes=4, log_capacity=3)
    slot = state.acquire()
    plan = state.rounds.plan([slot], [state.logs[slot]], [DraftTree.chain(5, [9, 13, 1])])
    for kernel in ("closed", None, "walk", "closed"):
        model.reserve(4)
        model.verify(plan._replace(kernel=kernel), state)
    assert ran == ["closed", "walk", "walk", "closed"]
    with pytest.raises(AssertionError, match="open"):
        model.verify(plan._replace(kernel="open"), state)
