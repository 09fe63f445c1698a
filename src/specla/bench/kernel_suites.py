# SPDX-License-Identifier: Apache-2.0
"""Which cases and methods each part of `specla bench kernels` runs, in the order of worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specla.bench import baselines, sglang
from specla.bench.fla_baseline import fused_recurrent
from specla.bench.kernel_cases import (
    BATCH,
    CAPACITIES,
    LENGTHS,
    LOG_BATCHES,
    LOG_CAPACITY,
    WAVE_BATCHES,
    WAVE_NODES,
    Case,
    chain_case,
    label,
    log_cases,
    pending_case,
    top_k_tree,
    tree_case,
    wave_case,
)
from specla.bench.kernels import Job
from specla.bench.methods import Method, exact, fast, log_period
from specla.bench.papers import TABLE_1
from specla.ops.contract import RecurrentShape

RING_LENGTHS = (16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. shapes: the presets to run; the reproductions run on the first."""

    shapes: Sequence[RecurrentShape]
    folder: sglang.Folder | None
    pdl: bool = True


def tree(plan: Plan) -> list[Job]:
    """16 nodes, 64 rows, 4 pending factors, a fold due: against SGLang's tree and scatter."""
    return [_tree_job("tree", plan, shape, BATCH) for shape in plan.shapes]


def single(plan: Plan) -> list[Job]:
    """The same tree for one row: latency."""
    return [_tree_job("single", plan, shape, 1) for shape in plan.shapes]


def chain(plan: Plan) -> list[Job]:
    """A chain of 8, 64 rows, 8 pending factors, no fold: against ReplaySSM."""
    return [
        Job(
            suite="chain",
            case=chain_case(shape, BATCH, 8),
            methods=[
                *_ours(plan),
                *_from(plan, *(lambda f, n=n: sglang.ring_verify(f, n) for n in RING_LENGTHS)),
                *_from(plan, sglang.fold_verify),
                baselines.chain_wy(),
                fused_recurrent(),
                fused_recurrent(rerun=True),
                baselines.snapshots(),
            ],
            baseline="SGLang" if plan.folder else "chain WY",
        )
        for shape in plan.shapes
    ]


def commit(plan: Plan) -> list[Job]:
    """SpecLA's figure 11b: fold and verify in one launch against two, 1 to 8 pending factors."""
    return [
        Job(
            suite="commit",
            case=pending_case(plan.shapes[0], rows, 16, pending),
            methods=[exact(pdl=False, with_prepare=False), baselines.separate_commit()],
            baseline="separate commit",
        )
        for rows in (1, BATCH)
        for pending in LENGTHS
    ]


def log(plan: Plan) -> list[Job]:
    """DeltaLog's: plain decoding with a log of R, over its whole period, against folding every
    token."""
    jobs = []
    for rows in LOG_BATCHES:
        for capacity in CAPACITIES:
            methods = [log_period(capacity)]
            if capacity == 0:
                methods += [baselines.decode_in_place(), fused_recurrent()]
            case = log_cases(plan.shapes[0], rows, capacity)[0]
            jobs.append(Job(suite="log", case=case, methods=methods, baseline="log of 0"))
    return jobs


def table1(plan: Plan) -> list[Job]:
    """SpecLA's table 1: one row, trees by top-k, depth and nodes, nothing pending."""
    return [
        Job(
            suite="table1",
            case=Case(
                name=f"top{k}_depth{depth}_n{nodes}_{label(plan.shapes[0])}",
                shape=plan.shapes[0],
                num_rows=1,
                parents=top_k_tree(k, depth, nodes),
                threshold=LOG_CAPACITY,
            ),
            methods=[
                exact(pdl=False, with_prepare=False),
                fast(pdl=False, with_prepare=False),
                baselines.hybrid(),
                baselines.root_to_leaf(),
                baselines.snapshots(),
            ],
            baseline="root to leaf",
        )
        for k, depth, nodes in TABLE_1
    ]


def waves(plan: Plan) -> list[Job]:
    """Branches from a checkpoint in registers against branches from stored states (ADR 0012):
    with the engine's kernel, and with the one that has the hybrid's layout and tiles."""
    return [
        Job(
            suite="waves",
            case=wave_case(plan.shapes[0], rows, nodes),
            methods=[
                exact(pdl=False, with_prepare=False),
                baselines.portable_walk(),
                baselines.hybrid(),
            ],
            baseline="hybrid",
        )
        for rows in WAVE_BATCHES
        for nodes in WAVE_NODES
    ]


def recovery(plan: Plan) -> list[Job]:
    """SpecLA's figure 11a: the state after 1 to 8 accepted tokens, from factors or from tokens."""
    return [
        Job(
            suite="recovery",
            case=pending_case(plan.shapes[0], 1, 16, pending),
            methods=[
                baselines.recovery("factors"),
                baselines.recovery("tokens"),
                baselines.recovery("tokens and projections"),
            ],
        )
        for pending in LENGTHS
    ]


SUITES: dict[str, Callable[[Plan], list[Job]]] = {
    "tree": tree,
    "chain": chain,
    "single": single,
    "commit": commit,
    "log": log,
    "table1": table1,
    "recovery": recovery,
    "waves": waves,
}


def _ours(plan: Plan) -> list[Method]:
    """With the engine's overlap of launches, exact also without, and the state kernel alone."""
    overlap = [exact(pdl=True)] if plan.pdl else []
    return [
        *overlap,
        exact(pdl=False),
        exact(pdl=False, with_prepare=False),
        fast(pdl=plan.pdl),
    ]


def _tree_job(suite: str, plan: Plan, shape: RecurrentShape, rows: int) -> Job:
    return Job(
        suite=suite,
        case=tree_case(shape, rows, 16),
        methods=[
            *_ours(plan),
            *_from(plan, sglang.tree_verify, lambda f: sglang.tree_verify(f, packed=False)),
            baselines.snapshots(),
            baselines.root_to_leaf(),
            baselines.separate_commit(),
            baselines.separate_commit(replay=True),
        ],
        baseline="SGLang" if plan.folder else "snapshot",
    )


def _from(plan: Plan, *methods: Callable[[sglang.Folder], Method]) -> list[Method]:
    """SGLang's methods, if its folder was given."""
    return [method(plan.folder) for method in methods] if plan.folder else []
