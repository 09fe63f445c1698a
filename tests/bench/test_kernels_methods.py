# SPDX-License-Identifier: Apache-2.0
"""Every method of the kernel benchmark computes what the reference computes (interpreted)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from specla.bench import baselines, methods, triton_baselines, triton_waves
from specla.bench.kernel_cases import Case, binary, chain, path_to
from specla.bench.kernel_problem import Problem, error
from specla.bench.methods import Method
from specla.errors import KernelUnavailable
from specla.ops.contract import RecurrentShape
from specla.topology.schedule import Schedule

# Two of the state kernel's tiles per head; K != V.
SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=128, value_dim=16, conv_width=4
)
TREE = Case(
    name="tree",
    shape=SHAPE,
    num_rows=2,
    parents=binary(5),
    path=(0, 1, 3),
    log_capacity=4,
    accepted=path_to(binary(5), 4),
)
CHAIN = Case(
    name="chain",
    shape=SHAPE,
    num_rows=2,
    parents=chain(3),
    ring_len=1,
    path=(0, 1),
    log_capacity=4,
    threshold=4,
    accepted=(0, 1),
)
DECODE = replace(CHAIN, name="decode", parents=(-1,), accepted=(0,))
# The state kernel is slow to interpret and has tests of its own.
OURS = [
    (replace(TREE, num_rows=1), methods.exact(pdl=False)),
    pytest.param(CHAIN, baselines.separate_commit(replay=True), marks=pytest.mark.slow),
    pytest.param(TREE, baselines.separate_commit(), marks=pytest.mark.slow),
    pytest.param(CHAIN, methods.exact(pdl=False, with_prepare=False), marks=pytest.mark.slow),
    pytest.param(TREE, methods.fast(pdl=False), marks=pytest.mark.slow),
    pytest.param(TREE, baselines.portable_walk(), marks=pytest.mark.slow),
    pytest.param(CHAIN, baselines.portable_walk(), marks=pytest.mark.slow),
]
BASELINES = [
    baselines.snapshots(),
    baselines.root_to_leaf(),
    baselines.hybrid(),
    baselines.recovery("factors"),
    baselines.recovery("tokens"),
    baselines.recovery("tokens and projections"),
]


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Several tiles per head, although states are small here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_baselines, "TILE_ELEMENTS", 8 * SHAPE.key_dim)
        patch.setattr(triton_baselines, "WY_COLUMNS", SHAPE.key_dim // 2)
        yield


def problem(case: Case) -> Problem:
    return Problem(case, num_layers=2, device=torch.device("cpu"))


@pytest.fixture(scope="module", params=[TREE, CHAIN], ids=lambda case: case.name)
def built(request: pytest.FixtureRequest) -> Problem:
    return problem(request.param)


def test_the_reference_agrees_with_the_oracle(built: Problem) -> None:
    n = built.case.num_nodes
    for row in range(built.case.num_rows):
        assert error(built.truth.o[row * n : (row + 1) * n], built.oracle(row)) < 1e-5


@pytest.mark.parametrize("method", BASELINES, ids=lambda method: method.name)
def test_baselines_are_right(built: Problem, method: Method) -> None:
    runner = method.build(built)
    assert runner.parts == 2
    for call in runner.calls:
        call()
    # Running it changed nothing that the check reads.
    assert runner.check() <= method.tolerance


@pytest.mark.parametrize(("case", "method"), OURS)
def test_our_kernels_are_right(case: Case, method: Method) -> None:
    runner = method.build(problem(case))
    assert runner.check() <= method.tolerance
    assert len(runner.calls) % runner.parts == 0


@pytest.mark.parametrize("case", [CHAIN, DECODE], ids=lambda case: case.name)
def test_chain_wy(case: Case) -> None:
    method = baselines.chain_wy()
    assert method.build(problem(case)).check() <= 1e-4  # the interpreter has no tf32


def test_chain_wy_takes_no_tree(built: Problem) -> None:
    if not built.case.is_chain:
        with pytest.raises(KernelUnavailable, match="chains"):
            baselines.chain_wy().build(built)


def test_decode_in_place() -> None:
    method = baselines.decode_in_place()
    assert method.build(problem(DECODE)).check() <= method.tolerance


def test_the_hybrid_stores_a_state_per_branching_node(
    built: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What later waves start from is the reference's state after the node above them."""
    kept: list[torch.Tensor] = []
    allocate = triton_waves.Waves.allocate

    def remembered(self: triton_waves.Waves, *size: Any) -> torch.Tensor:
        kept.append(allocate(self, *size))
        return kept[-1]

    monkeypatch.setattr(triton_waves.Waves, "allocate", remembered)
    assert baselines.hybrid().build(built).check() < 1e-6
    parents = built.case.parents
    schedule = Schedule.from_parents(parents)
    stored = [(node, i) for node, i in enumerate(schedule.node_boundary) if i >= 0]
    assert len(stored) == kept[0].shape[1] == (0 if built.case.is_chain else 2)
    for node, i in stored:
        assert error(kept[0][0, i], built.after(path_to(parents, node))) < 1e-6


def test_hybrid_of_a_deep_tree() -> None:
    """Three waves; a light chain that stores a state itself; a row with a log of its own."""
    parents = (-1, 0, 0, 1, 1, 1, 2, 2, 3, 6)
    case = replace(TREE, num_rows=1, parents=parents, path=(), ring_len=2, accepted=(0,))
    schedule = Schedule.from_parents(parents)
    assert schedule.num_waves == 3
    assert baselines.hybrid().build(problem(case)).check() < 1e-6


def test_a_hybrid_that_forgets_the_log_is_caught(
    built: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = torch.empty(built.case.num_rows, 0, dtype=torch.int32)
    monkeypatch.setattr(built, "entries", lambda: nothing)
    assert baselines.hybrid().build(built).check() > 1e-2


def test_a_wrong_method_is_caught(built: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_baselines.one_path

    def forgets_the_last_node(S, slot, nodes, *rest):  # type: ignore[no-untyped-def]
        right(S, slot, nodes[:-1].contiguous(), *rest)

    monkeypatch.setattr(triton_baselines, "one_path", forgets_the_last_node)
    assert baselines.root_to_leaf().build(built).check() == float("inf")


def test_the_read_kernel_reads_everything() -> None:
    tile = triton_baselines.ReadTile(block=16, steps=2, warps=1)
    x, sums = torch.arange(128.0), torch.empty(4)
    triton_baselines.read_only(x, sums, tile)
    assert sums.tolist() == x.view(4, 32).sum(1).tolist()
