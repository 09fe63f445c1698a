# SPDX-License-Identifier: Apache-2.0
"""What a way of verifying looks like to the kernel benchmark, and our own two.

A method builds a Runner for a Problem: the launches to time, a check that they compute what the
reference computes, and the bytes they must move. It raises KernelUnavailable where it cannot run;
a missing row is reported as missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specla.bench import bytes as traffic
from specla.bench.bytes import Traffic
from specla.bench.graphs import Call
from specla.bench.kernel_problem import Problem, error
from specla.errors import KernelUnavailable
from specla.ops.contract import LayerState
from specla.ops.gdn import Inputs

if TYPE_CHECKING:
    from specla.ops.gdn.triton import Workspace

OURS, BASELINE = "ours", "baseline"
# Largest error of what has been rounded to bf16: a few of its ulps.
HALF_PRECISION = 2e-2


class Runner(NamedTuple):
    """calls: launches in order; parts: how many layers they amount to; check(): the largest
    relative error of what they compute on layer 0 (run before anything is timed)."""

    calls: list[Call]
    parts: int
    check: Callable[[], float]
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to do the work of a case.

    scope: what its time includes. tolerance: the largest error the check may find; bf16 outputs
    allow 2e-2, tf32 products 5e-3, float32 in another order 1e-4.
    """

    name: str
    scope: str
    build: Callable[[Problem], Runner]
    kind: str = BASELINE
    tolerance: float = 1e-4


@dataclass(frozen=True, slots=True)
class Launch:
    """Our launches for one layer, with everything but the layer bound."""

    problem: Problem
    workspace: Workspace
    pdl: bool

    @classmethod
    def bind(cls, problem: Problem, *, pdl: bool) -> Launch:
        from specla.ops.gdn.triton import Workspace

        s = problem.shape
        workspace = Workspace.allocate(s, problem.num_nodes, problem.dtype, problem.device)
        return cls(problem, workspace, pdl)

    def prepare(self, layer: LayerState) -> None:
        from specla.ops.gdn.triton import prepare

        p, w = self.problem, self.problem.weights
        prepare(
            layer,
            p.round,
            p.y,
            w.conv,
            w.A,
            w.dt_bias,
            self.workspace,
            shape=p.shape,
            log_capacity=p.case.log_capacity,
            pdl=self.pdl,
        )

    def walk(self, layer: LayerState) -> None:
        from specla.ops.gdn.triton import walk

        case = self.problem.case
        walk(
            layer,
            self.problem.round,
            self.workspace,
            shape=case.shape,
            log_capacity=case.log_capacity,
            threshold=case.threshold,
            branching=not case.is_chain,
            pdl=self.pdl,
        )

    def check(
        self, verify: Callable[[LayerState], None], layer: LayerState | None = None
    ) -> float:
        """Worst error of o, u and (where it is folded) S, on memory that held NaN; `layer` is
        layer 0 as it was made, or its equal."""
        p, layer = self.problem, layer or self.problem.fresh_layer()
        poison(self.workspace.o)
        written = written_entries(p)
        for store in layer.factors:
            poison(store[:, written])
        self.prepare(layer)
        verify(layer)
        return max(self._errors(layer, written))

    def _errors(self, layer: LayerState, written: slice) -> list[float]:
        """The state kernel against the reference on the very inputs that `prepare` made, and
        those against the reference's: an ulp of bf16 is not the state kernel's error."""
        p, truth, slots = self.problem, self.problem.truth, self.problem.slots.long()
        k, u, g = (store[slots, written].flatten(0, 1) for store in layer.factors)
        x = Inputs(self.workspace.q, k, self.workspace.v.to(g.dtype), g, self.workspace.beta)
        if max(map(error, x, truth.x)) > HALF_PRECISION:
            return [float("inf")]
        o, expected_u = p.verify(x)
        found = [error(self.workspace.o, o), error(u, expected_u)]
        if p.case.fold_due:
            found.append(error(layer.S[slots], truth.live))
        return found


def written_entries(problem: Problem) -> slice:
    """Log entries of the nodes that this round writes (bank 1)."""
    case = problem.case
    first = case.log_capacity + case.max_nodes
    return slice(first, first + case.num_nodes)


def poison(x: Tensor) -> None:
    """NaN everywhere: reading what nobody wrote shows."""
    x.fill_(float("nan"))


def exact(*, pdl: bool = True, with_prepare: bool = True) -> Method:
    """Our exact kernels; without prepare: the state kernel alone."""

    def build(problem: Problem) -> Runner:
        launch = Launch.bind(problem, pdl=pdl)
        per_layer = [launch.prepare, launch.walk] if with_prepare else [launch.walk]
        for layer in problem.layers:
            launch.prepare(layer)
        moved = traffic.walk(problem.case)
        return Runner(
            calls=bound(problem.layers, per_layer),
            parts=len(problem.layers),
            check=lambda: launch.check(launch.walk),
            traffic=moved + traffic.prepare(problem.case) if with_prepare else moved,
        )

    scope = "conv, gates, state" if with_prepare else "state"
    name = "exact" if with_prepare else "exact, state only"
    return Method(name=name if pdl else f"{name}, no overlap", scope=scope, build=build, kind=OURS)


def bound(
    layers: Sequence[LayerState], functions: Sequence[Callable[[LayerState], None]]
) -> list[Call]:
    """Calls of every function on every layer, layer by layer."""
    return [lambda f=f, x=x: f(x) for x in layers for f in functions]  # type: ignore[misc]


def require_cuda(device: torch.device, what: str) -> None:
    """Raise KernelUnavailable unless there is a CUDA device."""
    if device.type != "cuda":
        raise KernelUnavailable(f"{what} needs a CUDA device, got {device}; run it on a GPU")
