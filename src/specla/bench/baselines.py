# SPDX-License-Identifier: Apache-2.0
"""Our own versions of what others do, run on the same states and inputs as our kernels.

All take prepared inputs and produce the outputs of every node; those that must also advance the
state do it for the case's accepted path. Their outputs are checked against the same reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specla.bench import bytes as traffic
from specla.bench import triton_baselines as kernels
from specla.bench import triton_waves as waves
from specla.bench.bytes import Traffic
from specla.bench.kernel_cases import Case, width_of
from specla.bench.kernel_problem import Problem, error
from specla.bench.methods import TF32, Launch, Method, Runner, bound, poison
from specla.errors import KernelUnavailable
from specla.ops.contract import LayerState
from specla.ops.gdn import Inputs
from specla.ops.gdn import triton as triton_gdn

OnLayer = Callable[[LayerState], None]


def snapshots() -> Method:
    """A full state per node, the parent's loaded back, and the accepted one copied home."""

    def build(problem: Problem) -> Runner:
        case, x, o = problem.case, contiguous(problem.truth.x), empty_output(problem)
        last = torch.full_like(problem.slots, case.accepted[-1])
        saved = [_saved_states(problem) for _ in problem.layers]

        def run(S: Tensor, space: Tensor) -> None:
            kernels.snapshot_tree(S, problem.slots, problem.round.parents, space, x, o)
            kernels.scatter(S, problem.slots, space, last)

        def check() -> float:
            S = live_pool(problem)
            poison(o)
            run(S, saved[0])
            return max(error(o, problem.truth.o), error(S[1], problem.after(case.accepted)))

        pairs = zip(problem.layers, saved, strict=True)
        return Runner(
            [lambda S=layer.S, space=space: run(S, space) for layer, space in pairs],  # type: ignore[misc]
            len(problem.layers),
            check,
            traffic.snapshots(case, commit=True),
        )

    return Method(name="snapshot per node", scope="state, state copy", build=build)


def root_to_leaf() -> Method:
    """Every root-to-leaf path from S again, one launch after another; no commit."""

    def build(problem: Problem) -> Runner:
        n, x, o = problem.case.num_nodes, contiguous(problem.truth.x), empty_output(problem)
        leaves = [_ints(problem, path) for path in problem.case.leaf_paths()]

        def run(S: Tensor) -> None:
            for nodes in leaves:
                kernels.one_path(S, problem.slots, nodes, n, x, o)

        return _stateless(problem, run, o, traffic.paths(problem.case))

    return Method(name="root to leaf", scope="state", build=build)


def hybrid() -> Method:
    """SpecLA's form: heavy-light chains in waves, a launch each, states where a branch begins
    through memory. The log is replayed, and folded where that is due, by the root's chain; what
    is not folded is not moved to the ring. One buffer of states serves all layers."""

    def build(problem: Problem) -> Runner:
        case, x = problem.case, contiguous(problem.truth.x)
        tree = waves.Waves.compile(case.parents, problem.device)
        saved = tree.allocate(case.shape, case.num_rows)
        o, u, entries = empty_output(problem), empty_output(problem), problem.entries()

        def run(layer: LayerState) -> None:
            log = waves.Log(layer.factors, entries, case.fold_due)
            waves.walk(layer.S, problem.slots, log, tree, saved, x, u, o, shape=case.shape)

        def check() -> float:
            layer = problem.fresh_layer()
            for written in (o, u, saved):
                poison(written)
            run(layer)
            found = [error(o, problem.truth.o), error(u, problem.truth.u)]
            if case.fold_due:
                found.append(error(layer.S[problem.slots.long()], problem.truth.live))
            return max(found)

        calls = bound(problem.layers, [run])
        return Runner(calls, len(problem.layers), check, traffic.waves(case))

    return Method(name="hybrid in waves", scope="state", build=build)


def portable_walk() -> Method:
    """Our state kernel as it is anywhere but on Hopper: the hybrid's arithmetic and layout, with
    branches from a checkpoint, hence smaller tiles, and with a tree cut into runs for few rows."""

    def build(problem: Problem) -> Runner:
        launch, case = Launch.bind(problem, pdl=False), problem.case
        branching = not case.is_chain
        programs = case.num_rows * problem.round.walk.shape[1]
        tile = triton_gdn.tile_for(case.shape, programs, branching=branching)

        def verify(layer: LayerState) -> None:
            triton_gdn.walk(
                layer,
                launch.round,
                launch.workspace,
                shape=case.shape,
                log_capacity=case.log_capacity,
                threshold=case.threshold,
                tile=tile,
                branching=branching,
            )

        for layer in problem.layers:
            launch.prepare(layer)
        calls = bound(problem.layers, [verify])
        moved = traffic.walk(case)
        return Runner(calls, len(problem.layers), lambda: launch.check(verify), moved)

    return Method(name="portable walk", scope="state", build=build)


def decode_in_place() -> Method:
    """Plain decoding: one token, S read and written."""

    def build(problem: Problem) -> Runner:
        x, o = contiguous(problem.truth.x), empty_output(problem)

        def run(S: Tensor) -> None:
            kernels.decode_in_place(S, problem.slots, x, o)

        return _stateless(problem, run, o, traffic.decode(problem.case))

    return Method(name="decode in place", scope="state", build=build)


def separate_commit(*, replay: bool = False) -> Method:
    """Commit in a launch of its own, then our state kernel with an empty log.

    replay: the commit runs the accepted tokens' recurrence again instead of folding factors.
    """

    def build(problem: Problem) -> Runner:
        launch, case = Launch.bind(problem, pdl=False), problem.case
        verify = _verify_empty(launch)
        commit = _replay(problem) if replay else _commit(problem)
        for layer in problem.layers:
            launch.prepare(layer)

        def both(layer: LayerState) -> None:
            commit(layer)
            verify(layer)

        moved = traffic.token_replay(case) if replay else traffic.commit(case)
        return Runner(
            bound(problem.layers, [commit, verify]),
            len(problem.layers),
            lambda: _check_replayed(problem, launch, verify) if replay else launch.check(both),
            moved + traffic.read_only_verify(case),
        )

    name = "token replay" if replay else "separate commit"
    return Method(name=name, scope="state", build=build)


def recovery(source: str) -> Method:
    """Only the commit: "factors" folds the log, "tokens" runs the accepted tokens' recurrence
    again, "tokens and projections" the product that made their projections too."""

    def build(problem: Problem) -> Runner:
        from_factors = source == "factors"
        step = _commit(problem) if from_factors else _replay(problem)
        case = problem.case
        moved = traffic.commit(case) if from_factors else traffic.token_replay(case)
        functions = [step]
        if source == "tokens and projections":
            functions = [_project(problem), step]
            moved = moved + _projection_traffic(case)
        return Runner(
            bound(problem.layers, functions),
            len(problem.layers),
            lambda: _check_commit(problem, step, from_factors=from_factors),
            moved,
        )

    return Method(name=f"recover from {source}", scope="commit", build=build)


def chain_wy() -> Method:
    """A chain in closed form on tensor cores, S only read."""

    def build(problem: Problem) -> Runner:
        case = problem.case
        if not case.is_chain or case.num_nodes > kernels.WY_NODES:
            raise KernelUnavailable(f"it takes chains of at most {kernels.WY_NODES} nodes")
        x, o, u = contiguous(problem.truth.x), empty_output(problem), empty_output(problem)
        entries, n = problem.entries(), case.num_nodes

        def run(layer: LayerState) -> None:
            kernels.chain_wy(layer.S, problem.slots, layer.factors, entries, x, u, o, n)

        def check() -> float:
            run(problem.fresh_layer())
            return max(error(o, problem.truth.o), error(u, problem.truth.u))

        one = traffic.sizes(case)
        kept = Traffic(read=case.log_len * one.factor, written=n * one.node_u)
        moved = traffic.read_only_verify(case) + kept
        return Runner(bound(problem.layers, [run]), len(problem.layers), check, moved)

    return Method(name="chain WY, tf32", scope="state", build=build, tolerance=TF32)


def contiguous(x: Inputs) -> Inputs:
    """The same, each tensor without gaps."""
    return Inputs(*(t.contiguous() for t in x))


def empty_output(problem: Problem) -> Tensor:
    """[M, G, V] float32, NaN."""
    return torch.full_like(problem.truth.o, float("nan"))


def live_pool(problem: Problem) -> Tensor:
    """[slots, G, V, K]: states with the log already folded in, for methods that keep no log."""
    S = problem.fresh_layer().S
    S[problem.slots.long()] = problem.truth.live
    return S


def _stateless(
    problem: Problem, run: Callable[[Tensor], None], o: Tensor, moved: Traffic
) -> Runner:
    """A method that takes states without a log; only its outputs are checked."""

    def check() -> float:
        poison(o)
        run(live_pool(problem))
        return error(o, problem.truth.o)

    calls = bound(problem.layers, [lambda layer: run(layer.S)])
    return Runner(calls, len(problem.layers), check, moved)


def _verify_empty(launch: Launch) -> OnLayer:
    """Our state kernel on a round whose log is empty."""
    nothing = torch.zeros_like(launch.round.ring_len)
    rnd = launch.round._replace(ring_len=nothing, path_len=nothing)
    return launch.over(launch.case, rnd).walk


def _commit(problem: Problem) -> OnLayer:
    entries = problem.entries()
    return lambda layer: kernels.commit(layer.S, problem.slots, layer.factors, entries)


def _replay(problem: Problem) -> OnLayer:
    nodes, x = _ints(problem, problem.case.accepted), contiguous(problem.truth.x)
    n = problem.case.num_nodes
    return lambda layer: kernels.replay_tokens(layer.S, problem.slots, nodes, n, x)


def _project(problem: Problem) -> OnLayer:
    """The product that makes the accepted tokens' projections; one weight per layer, so that it
    comes from memory, as in a model."""
    case, width = problem.case, width_of(problem.shape)
    columns = problem.y.shape[1]
    x = problem.y.new_ones(case.num_rows * len(case.accepted), width)
    y = problem.y.new_empty(x.shape[0], columns)
    weights = {x.S.data_ptr(): problem.y.new_ones(width, columns) for x in problem.layers}

    def project(layer: LayerState) -> None:
        torch.mm(x, weights[layer.S.data_ptr()], out=y)

    return project


def _projection_traffic(case: Case) -> Traffic:
    s = case.shape
    columns = s.conv_channels + s.num_value_heads * (s.value_dim + 2)
    return Traffic(read=width_of(s) * columns * traffic.HALF, written=0.0)


def _check_replayed(problem: Problem, launch: Launch, verify: OnLayer) -> float:
    """The verify of a token-replay round reads a state that the last replay made durable."""
    layer = problem.fresh_layer()
    layer.S[problem.slots.long()] = problem.truth.live
    replayed = _check_commit(problem, _replay(problem), from_factors=False)
    return max(launch.check(verify, layer), replayed)


def _check_commit(problem: Problem, step: OnLayer, *, from_factors: bool) -> float:
    """From factors S becomes the live state; from tokens the live state moves on."""
    layer, slots = problem.fresh_layer(), problem.slots.long()
    if from_factors:
        step(layer)
        return error(layer.S[slots], problem.truth.live)
    layer.S[slots] = problem.truth.live
    step(layer)
    return error(layer.S[1], problem.after(problem.case.accepted))


def _saved_states(problem: Problem) -> Tensor:
    s, case = problem.shape, problem.case
    size = (case.num_rows, case.num_nodes, s.num_value_heads, s.value_dim, s.key_dim)
    return torch.empty(size, dtype=torch.float32, device=problem.device)


def _ints(problem: Problem, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=problem.device)
