# SPDX-License-Identifier: Apache-2.0
"""Run the kernel benchmark: each case's methods one after another, checked, then timed.

A method whose output is wrong is not timed. One that cannot run, or breaks, leaves a row that
says why; the others go on.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from specla.bench import graphs
from specla.bench.kernel_cases import Case, depth_of, label
from specla.bench.kernel_problem import Problem
from specla.bench.kernel_rows import OURS, Row
from specla.bench.methods import Method
from specla.errors import KernelUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One case and the methods that run on it. baseline: what ours are compared with: the
    fastest method whose name starts so."""

    suite: str
    case: Case
    methods: Sequence[Method]
    baseline: str = ""
    notes: str = ""


@dataclass(slots=True, kw_only=True)
class Bench:
    """The device, what it can read per second, and a clock for the whole run."""

    device: torch.device
    bandwidth: float
    note: Callable[[str], None]
    budget_s: float
    started: float = field(default_factory=time.monotonic)
    trace: bool = False

    def run(self, jobs: Sequence[Job]) -> Iterator[Row]:
        """Rows of all jobs. Jobs that the budget leaves no time for come out as missing."""
        for i, job in enumerate(jobs):
            if self.seconds > self.budget_s:
                yield from (
                    _row(job, method, missing=f"the budget of {self.budget_s:.0f} s was spent")
                    for method in job.methods
                )
                continue
            self.note(f"[{self.seconds:4.0f} s] {job.suite} {i + 1}/{len(jobs)}: {job.case.name}")
            yield from self._job(job)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def _job(self, job: Job) -> Iterator[Row]:
        try:
            problem = self._problem(job.case)
        except torch.OutOfMemoryError as failure:
            yield from (_row(job, m, missing=_one_line(failure)) for m in job.methods)
            return
        for method in job.methods:
            row = self._measure(job, method, problem)
            self.note(f"          {method.name}: {shown(row)}")
            yield row
            gc.collect()
            torch.cuda.empty_cache()

    def _problem(self, case: Case) -> Problem:
        s = case.shape
        state = 4 * case.num_rows * s.num_value_heads * s.value_dim * s.key_dim
        layers = graphs.cold_layers(state, graphs.l2_bytes(self.device))
        return Problem(case, num_layers=layers, device=self.device)

    def _measure(self, job: Job, method: Method, problem: Problem) -> Row:
        try:
            runner = method.build(problem)
            error = runner.check()
            if not error <= method.tolerance:
                return _row(
                    job,
                    method,
                    missing=f"wrong: error {error:.1e}, allowed {method.tolerance:.0e}",
                    error=error,
                    wrong=True,
                )
            timing = graphs.time_graph(runner.calls, parts=runner.parts)
        except KernelUnavailable as failure:
            return _row(job, method, missing=_one_line(failure))
        # Not ours to narrow: a third party's kernel may fail in any way, and the rest must run.
        except Exception as failure:  # noqa: BLE001
            if self.trace:
                self.note(traceback.format_exc())
            return _row(job, method, missing=f"{type(failure).__name__}: {_one_line(failure)}")
        moved = runner.traffic
        return _row(
            job,
            method,
            us=timing.us,
            p10=timing.p10,
            p90=timing.p90,
            read=moved.read,
            written=moved.written,
            bandwidth=moved.total / (timing.us * 1e-6) / self.bandwidth,
            error=error,
            layers=runner.parts,
        )


def _row(job: Job, method: Method, **found: object) -> Row:
    case = job.case
    return Row(
        suite=job.suite,
        case=case.name,
        shape=label(case.shape),
        rows=case.num_rows,
        nodes=case.num_nodes,
        depth=depth_of(case.parents),
        pending=case.log_len,
        fold=case.fold_due,
        method=method.name,
        kind=method.kind,
        scope=method.scope,
        baseline=job.baseline if method.kind == OURS else "",
        notes=job.notes,
        **found,  # type: ignore[arg-type]
    )


def shown(row: Row) -> str:
    """One row's result in a line of progress."""
    if row.us is None:
        return f"missing, {row.missing}"
    return (
        f"{row.us:.2f} us ({row.p10:.2f} - {row.p90:.2f}), {row.bandwidth:.0%} of bandwidth, "
        f"error {row.error:.0e}"
    )


def _one_line(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return text if len(text) <= 200 else text[:197] + "..."
