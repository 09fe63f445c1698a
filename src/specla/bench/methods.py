# SPDX-License-Identifier: Apache-2.0
"""What a way of verifying looks like to the kernel benchmark, and our own two.

A method builds a Runner for a Problem: the launches to time, a check that they compute what the
reference computes, and the bytes they must move. It raises KernelUnavailable where it cannot run;
a missing row is reported as missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from specla.bench import bytes as traffic
from specla.bench.bytes import Traffic
from specla.bench.graphs import Call
from specla.bench.kernel_cases import Case, log_cases
from specla.bench.kernel_problem import Problem, error
from specla.bench.kernel_rows import BASELINE, OURS
from specla.ops.contract import DeviceRound, LayerState
from specla.ops.gdn import Inputs, triton_wy
from specla.ops.gdn import triton as triton_gdn
from specla.ops.gdn.triton import Workspace
from specla.ops.gdn.triton_wy_form import ClosedForm

# Largest error of what has been rounded to bf16: a few of its ulps.
HALF_PRECISION = 2e-2
# Largest error of products whose operands are cut to tf32's 10 bits.
TF32 = 5e-3


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

    scope: what its time includes. tolerance: the largest error the check may find; float32 in
    another order allows 1e-4.
    """

    name: str
    scope: str
    build: Callable[[Problem], Runner]
    kind: str = BASELINE
    tolerance: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Our launches for one layer, with everything but the layer bound.

    case and round are the problem's, or others over the same states.
    """

    problem: Problem
    case: Case
    round: DeviceRound
    workspace: Workspace
    pdl: bool

    @classmethod
    def bind(cls, problem: Problem, *, pdl: bool) -> Launch:
        workspace = Workspace.allocate(
            problem.shape, problem.num_nodes, problem.dtype, problem.device
        )
        return cls(
            problem=problem,
            case=problem.case,
            round=problem.round,
            workspace=workspace,
            pdl=pdl,
        )

    def over(self, case: Case, rnd: DeviceRound) -> Launch:
        """The same buffers, another round."""
        return replace(self, case=case, round=rnd)

    def prepare(self, layer: LayerState) -> None:
        """Convolution, norms, gates."""
        weights = self.problem.weights
        triton_gdn.prepare(
            layer,
            self.round,
            self.problem.y,
            weights.taps,
            weights.A,
            weights.dt_bias,
            self.workspace,
            shape=self.case.shape,
            log_capacity=self.case.log_capacity,
            pdl=self.pdl,
        )

    def walk(self, layer: LayerState) -> None:
        """The state kernel."""
        layers = self.problem.layers
        index = next((i for i, other in enumerate(layers) if other is layer), 0)
        triton_gdn.walk(
            layer,
            self.round,
            self.workspace.of_layer(index, self.case.num_rows),
            shape=self.case.shape,
            log_capacity=self.case.log_capacity,
            threshold=self.case.threshold,
            branching=not self.case.is_chain,
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


def fast(*, pdl: bool = True, with_prepare: bool = True) -> Method:
    """Our closed form on tensor cores; without prepare: the state kernels alone. Masks are
    compiled once per round, like the walk lists, and are not in a layer's time."""

    def build(problem: Problem) -> Runner:
        launch, case = Launch.bind(problem, pdl=pdl), problem.case
        form = ClosedForm.allocate(
            case.shape, case.num_rows, case.max_nodes, case.max_log, problem.device
        )
        triton_wy.compile_masks(
            problem.round, form, log_capacity=case.log_capacity, max_log=case.max_log
        )

        def verify(layer: LayerState) -> None:
            triton_wy.walk_wy(
                layer,
                problem.round,
                launch.workspace,
                form,
                shape=case.shape,
                log_capacity=case.log_capacity,
                max_log=case.max_log,
                threshold=case.threshold,
                pdl=pdl,
            )

        def whole(layer: LayerState) -> None:
            w = problem.weights
            triton_wy.prepare_and_walk(
                layer,
                problem.round,
                problem.y,
                w.taps,
                w.A,
                w.dt_bias,
                launch.workspace,
                form,
                shape=case.shape,
                log_capacity=case.log_capacity,
                max_log=case.max_log,
                threshold=case.threshold,
                pdl=pdl,
            )

        timed = whole if with_prepare else verify
        for layer in problem.layers:
            launch.prepare(layer)
        moved = traffic.walk(case)
        return Runner(
            calls=bound(problem.layers, [timed]),
            parts=len(problem.layers),
            check=lambda: launch.check(timed),
            traffic=moved + traffic.prepare(case) if with_prepare else moved,
        )

    name = "fast" if with_prepare else "fast, state only"
    return Method(
        name=name if pdl else f"{name}, no overlap",
        scope="conv, gates, state" if with_prepare else "state",
        build=build,
        kind=OURS,
    )


def log_period(capacity: int) -> Method:
    """Plain decoding through one period of a log of `capacity`: capacity tokens that append and
    one that folds, every one on every layer; time is per token and layer."""

    def build(problem: Problem) -> Runner:
        first = Launch.bind(problem, pdl=False)
        cases = log_cases(problem.shape, problem.case.num_rows, capacity)
        rounds = [first.over(case, problem.round_of(case)) for case in cases]
        for layer in problem.layers:
            first.prepare(layer)
        calls = [call for launch in rounds for call in bound(problem.layers, [launch.walk])]
        moved = [traffic.walk(case) for case in cases]

        def check() -> float:
            folding = Launch.bind(
                Problem(cases[-1], num_layers=1, device=problem.device, dtype=problem.dtype),
                pdl=False,
            )
            return max(first.check(first.walk), folding.check(folding.walk))

        return Runner(
            calls,
            len(calls),
            check,
            Traffic(
                read=sum(m.read for m in moved) / len(moved),
                written=sum(m.written for m in moved) / len(moved),
            ),
        )

    return Method(name=f"log of {capacity}", scope="state", build=build, kind=OURS)


def bound(
    layers: Sequence[LayerState], functions: Sequence[Callable[[LayerState], None]]
) -> list[Call]:
    """Calls of every function on every layer, layer by layer."""
    return [lambda f=f, x=x: f(x) for x in layers for f in functions]  # type: ignore[misc]
