# SPDX-License-Identifier: Apache-2.0
"""fla's kernel is called with what it means; a stand-in with its signature takes its place."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from specla.bench import fla_baseline
from specla.bench.bytes import sizes
from specla.bench.kernel_cases import Case, binary, chain
from specla.bench.kernel_problem import Problem
from specla.errors import KernelUnavailable
from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import per_value_head, read, step_
from specla.ops.norm import l2_norm

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=8, conv_width=4
)
CHAIN = Case(
    name="chain", shape=SHAPE, num_rows=2, parents=chain(4), path=(0,), log_capacity=4,
    threshold=4, accepted=(0, 1),
)  # fmt: skip


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    assert use_qk_l2norm_in_kernel
    assert state_v_first
    S, heads = initial_state.clone(), v.shape[2]
    q, k = (per_value_head(l2_norm(x.float()), heads) for x in (q, k))
    o = torch.empty(v.shape)
    for t in range(v.shape[1]):
        step_(S, k[:, t], v[:, t].float(), g[:, t], beta[:, t])
        o[:, t] = read(S, q[:, t]) * scale
    return o.to(v.dtype), S if output_final_state else None


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("fla.ops.gated_delta_rule")
    module.fused_recurrent_gated_delta_rule = recurrent
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fla_baseline, "installed", lambda: "0.6.0")


@pytest.mark.parametrize("rerun", [False, True])
def test_a_chain(fla: None, rerun: bool) -> None:
    method = fla_baseline.fused_recurrent(rerun=rerun)
    assert method.name.startswith("fla 0.6.0 recurrent")
    runner = method.build(Problem(CHAIN, num_layers=2, device=torch.device("cpu")))
    assert runner.check() <= method.tolerance
    assert len(runner.calls) == runner.parts == 2
    for call in runner.calls:
        call()


def test_running_again_reads_states_twice() -> None:
    problem = Problem(CHAIN, num_layers=1, device=torch.device("cpu"))
    once, twice = fla_baseline._traffic(problem, 0), fla_baseline._traffic(problem, 2)
    one = sizes(CHAIN)
    assert twice.read - once.read == one.state + 2 * one.activation
    assert twice.written - once.written == one.node_out


def test_it_takes_no_tree(fla: None) -> None:
    case = Case(name="tree", shape=SHAPE, num_rows=1, parents=binary(3))
    with pytest.raises(KernelUnavailable, match="chains only"):
        fla_baseline.fused_recurrent().build(
            Problem(case, num_layers=1, device=torch.device("cpu"))
        )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla_baseline, "installed", lambda: None)
    with pytest.raises(KernelUnavailable, match="pip install"):
        fla_baseline.fused_recurrent().build(
            Problem(CHAIN, num_layers=1, device=torch.device("cpu"))
        )
