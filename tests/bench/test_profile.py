# SPDX-License-Identifier: Apache-2.0
"""What is measured for a cost table, and what its page says. Times are played; kernels are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch

import specla.models
from specla.bench import profile as module
from specla.bench.graphs import Timing
from specla.bench.kernel_cases import depth_of
from specla.bench.profile import Profile, Size
from specla.bench.profile_page import break_even, hopeless, rounds
from specla.drafters.ngram import NgramDrafter
from specla.engine.cost import Cost, CostTable, Identity
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.toy import write_toy_checkpoint

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    path = write_toy_checkpoint(
        tmp_path_factory.mktemp("toy"), num_layers=1, hidden=64, heads=1, head_dim=64,
        expand_v=1.0, vocab=48, intermediate=48,
    )  # fmt: skip
    return specla.models.load(str(path), device="cpu", dtype=torch.float32)


def profile(target: TargetModel, **options: Any) -> Profile:
    sizes = {"max_batch": 2, "max_nodes": 4, "log_capacity": 0, "budget_s": 0.0}
    return Profile(target, mode="exact", **{**sizes, **options})


def test_every_bucket_and_shape_is_measured_once(target: TargetModel) -> None:
    measuring = profile(target, max_batch=3, drafter=NgramDrafter())
    assert list(measuring.run()) == list(range(1, len(measuring) + 1))
    shapes = {(1, 0), (2, 1), (4, 2), (4, 3)}
    by_part = {
        part: [(c.rows, c.nodes, c.depth) for c in measuring.measured if c.part == part]
        for part in ("verify", "kernel", "accept", "draft")
    }
    every = sorted((b, n, d) for b in (1, 2, 4) for n, d in shapes)
    assert sorted(by_part["verify"]) == sorted(by_part["kernel"]) == every
    assert sorted(by_part["accept"]) == sorted((b, n, n - 1) for b in (1, 2, 4) for n in (1, 2, 4))
    assert by_part["draft"] == [(b, 4, 3) for b in (1, 2, 4)]
    assert all(0 < c.p10 <= c.us <= c.p90 for c in measuring.measured)
    assert {c.kernel for c in measuring.measured} == {
        "reference", "", NgramDrafter().info.priced_as,
    }  # fmt: skip
    table = measuring.table()
    assert table.identity == Identity.of(target, 0)
    assert table.round_us(3, 3) > table.find("verify", 4, 4, kernel="reference").us
    assert table.draft_us(1, 4, NgramDrafter().info.priced_as) > 0
    with pytest.raises(ConfigError, match=r"draft \(ngram .*num_draft_tokens=2\)"):
        table.draft_us(1, 4, NgramDrafter(num_draft_tokens=2).info.priced_as)


def test_the_first_call_of_all_does_not_count(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    verify = target.verify
    monkeypatch.setattr(target, "verify", lambda *args: calls.append(args) or verify(*args))
    measuring = profile(target, max_batch=1, max_nodes=1)
    list(measuring.run())
    # Three passes, each with one verify that counts and one for its logits; one to warm up.
    assert len(calls) == 3 * 2 + 1


@pytest.mark.parametrize("capacity", [0, 16])
def test_rows_have_pending_factors(target: TargetModel, capacity: int) -> None:
    measuring = profile(target, log_capacity=capacity)
    assert list(measuring.run())
    logs = [measuring._state.logs[slot] for slot in measuring._slots]
    assert [log.log_len for log in logs] == [4, 4]  # after trees of four nodes
    assert [log.fold_due for log in logs] == [capacity == 0] * 2


@pytest.mark.parametrize("depth", [1, 4, 5, 6, 20])
def test_trees_of_a_size_are_told_apart_by_depth(target: TargetModel, depth: int) -> None:
    """In mode fast none is deeper than the drafter's; a binary tree may be just as deep."""
    drafter = NgramDrafter(num_draft_tokens=depth)
    measuring = Profile(
        target, mode="fast", max_batch=1, max_nodes=64, log_capacity=0, drafter=drafter
    )
    sizes = [(size.nodes, depth_of(size.parents)) for size in measuring._sizes]
    assert len(set(sizes)) == len(sizes)
    assert max(deep for _, deep in sizes) == max(depth, 6)


@pytest.mark.parametrize(("budget", "samples"), [(0.0, 1), (11e-6, 3)])
def test_wall_time(monkeypatch: pytest.MonkeyPatch, budget: float, samples: int) -> None:
    """The clock ticks when it is read; the call takes two ticks more."""
    clock, ran = count(), []

    def call() -> None:
        ran.append((next(clock), next(clock)))

    monkeypatch.setattr(module.time, "perf_counter", lambda: 1e-6 * next(clock))
    assert module._wall(call, budget) == pytest.approx([3.0] * samples)
    assert len(ran) == samples


def test_passes_are_pooled(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size measured while the machine was slow is not the dearer for it."""
    order: list[int] = []

    def played(call: Callable[[], object], budget: float) -> list[float]:
        order.append(len(order))
        return [900.0 if len(order) <= 3 else 100.0]  # the first pass: verify, kernel, accept

    monkeypatch.setattr(module, "_wall", played)
    measuring = profile(target, max_batch=1, max_nodes=1)
    assert list(measuring.run()) == [1, 2, 3]
    assert len(order) == 9
    verify = measuring.table().find("verify", 1, 1, kernel="reference")
    assert (verify.us, verify.p90) == (100.0, pytest.approx(740.0))


# ---- what only a GPU runs, in the interpreter


def test_a_replay_accepts_whole_trees_again(target: TargetModel) -> None:
    measuring = profile(target)
    tree = Size(rows=2, parents=(-1, 0, 1, 2)).tree
    logs = [measuring._state.logs[slot] for slot in measuring._slots]
    rnd = measuring._state.rounds.plan(measuring._slots, logs, [tree, tree]).round
    logits = torch.zeros(8, 48)
    logits[torch.arange(8), torch.tensor([1, 2, 3, 4] * 2)] = 9.0  # the chain itself, then 4
    steps = measuring._device_accept(rnd, logits)
    for _ in range(2):
        rnd.tokens.copy_(torch.tensor([tree.tokens] * 2))
        for step in steps[:-1]:
            step()
        assert rnd.num_nodes.tolist() == [4, 4]
        steps[-1]()
        assert rnd.path_len.tolist() == [4, 4]
        assert rnd.num_nodes.tolist() == [1, 1]


@pytest.mark.parametrize("kernel", ["walk", "closed"])
def test_state_kernels_over_cold_layers(
    target: TargetModel, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def once(calls: Sequence[Callable[[], object]], *, parts: int, budget_s: float) -> Timing:
        calls[0]()
        ran.append(len(calls))
        return Timing(us=1.0 / parts, p10=1.0, p90=1.0)

    monkeypatch.setattr(module, "time_graph", once)
    monkeypatch.setattr(module.graphs, "l2_bytes", lambda device: 4 * 64 * 64)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    measuring = profile(target, log_capacity=16)
    monkeypatch.setattr(measuring, "_on_gpu", True)
    timing = measuring._time_kernel(Size(rows=1, parents=(-1, 0)), kernel)
    assert ran == [3]  # three times a cache of one layer
    assert timing.us == pytest.approx(1 / 3)


@pytest.mark.gpu
def test_the_same_numbers_as_bench_round() -> None:
    from specla.bench.random_model import gdn_1_3b
    from specla.bench.rounds import time_round

    model = gdn_1_3b(layers=4)
    measuring = Profile(model, mode="fast", max_batch=8, max_nodes=16, log_capacity=16)
    assert len(list(measuring.run())) == len(measuring)
    table = measuring.table()
    assert table.kernels("fast") == ("walk", "closed")
    for rows, nodes, depth in ((1, 1, 0), (1, 16, 4), (8, 16, 4)):
        ours = table.find("verify", rows, nodes, depth=depth, kernel="walk", mode="fast").us
        assert ours == pytest.approx(time_round(model, rows, nodes).us, rel=0.1)


# ---- the page


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("depth", [1, 3, 15])
def test_break_even_is_where_a_round_emits_its_cost(p: float, depth: int) -> None:
    emitted = (1 - p ** (depth + 1)) / (1 - p)
    assert break_even(emitted, depth) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "depth", "p"),
    [(0.9, 3, 0.0), (1.0, 0, 0.0), (1.0, 3, 0.0), (2.0, 1, None), (2.5, 1, None), (3.99, 3, 1.0)],
)
def test_break_even_at_the_ends(steps: float, depth: int, p: float | None) -> None:
    found = break_even(steps, depth)
    assert found is None if p is None else found == pytest.approx(p, abs=0.01)


def made(part: str, rows: int, nodes: int, depth: int, us: float, kernel: str) -> Cost:
    return Cost(
        part=part, rows=rows, nodes=nodes, depth=depth, kernel=kernel, mode="fast", us=us, p10=us,
        p90=us,
    )  # fmt: skip


def test_the_page_adds_up() -> None:
    table = CostTable(
        Identity(device="d", model="m", log_capacity=0, torch="t", triton="t", specla="s"),
        [
            made("verify", 1, 1, 0, 90, "walk"), made("verify", 1, 1, 0, 95, "closed"),
            made("verify", 1, 4, 2, 390, "walk"), made("verify", 1, 4, 2, 260, "closed"),
            made("verify", 1, 4, 3, 190, "walk"), made("verify", 1, 4, 3, 280, "closed"),
            made("accept", 1, 1, 0, 10, ""), made("accept", 1, 4, 3, 20, ""),
            made("draft", 1, 4, 3, 40, "ngram"),
        ],
    )  # fmt: skip
    plain, tree, chain = rounds(table, "fast", "ngram")
    assert (plain.us, plain.steps, plain.shape, plain.kernel) == (100, 1.0, "plain", "walk")
    # What an engine with this table runs at four nodes, whichever tree it is.
    assert (tree.kernel, chain.kernel) == ("closed", "closed")
    assert (tree.us, tree.steps, tree.shape, tree.break_even) == (320, 3.2, "tree", None)
    assert (chain.us, chain.steps, chain.shape) == (340, 3.4, "chain")
    assert chain.break_even == pytest.approx(break_even(3.4, 3))
    assert rounds(table, "fast")[1].us == 280
    assert hopeless([plain, tree, chain]) == "even a perfect drafter loses with: 1x4 tree"
    assert hopeless([plain, chain]) == ""
    assert rounds(table, "exact") == []
