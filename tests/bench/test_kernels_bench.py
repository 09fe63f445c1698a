# SPDX-License-Identifier: Apache-2.0
"""The runner: checked before timed, missing with a reason, a budget, cold layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specla.bench import graphs, kernels
from specla.bench.bytes import Traffic
from specla.bench.graphs import Timing, cold_layers
from specla.bench.kernel_cases import Case, binary
from specla.bench.kernel_problem import Problem
from specla.bench.kernel_rows import Row
from specla.bench.kernel_suites import SUITES, Plan
from specla.bench.kernels import Bench, Job
from specla.bench.methods import Method, Runner
from specla.errors import KernelUnavailable
from specla.ops.contract import RecurrentShape

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=8, conv_width=4
)
CASE = Case(name="tiny", shape=SHAPE, num_rows=2, parents=binary(3), path=(0,))
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: list[graphs.Call], *, parts: int, budget_s: float = 0.25) -> Timing:
        for call in calls:
            call()
        return Timing(us=30.0, p10=27.0, p90=33.0) / parts

    monkeypatch.setattr(graphs, "time_graph", timed)
    monkeypatch.setattr(graphs, "l2_bytes", lambda device: 6 * 2**10)


def method(name: str, error: float = 0.0, problem: Exception | None = None) -> Method:
    def build(built: Problem) -> Runner:
        if problem is not None:
            raise problem
        calls = [lambda: None for _ in built.layers]
        return Runner(calls, len(calls), lambda: error, Traffic(read=3e6, written=1e6))

    return Method(name=name, scope="state", build=build, tolerance=1e-3)


def run(*methods: Method, budget: float = 60.0) -> tuple[list[Row], list[str]]:
    notes: list[str] = []
    bench = Bench(
        device=DEVICE, bandwidth=1e12, note=notes.append, budget_s=budget, trace=budget < 0
    )
    job = Job(suite="tree", case=CASE, methods=methods, baseline="b")
    return list(bench.run([job])), notes


def test_a_row_has_time_bytes_and_bandwidth() -> None:
    (row,), notes = run(method("a", error=1e-5))
    # 3 layers of 4 KiB are three times the cache of 6 KiB, rounded up.
    assert row.layers == 5
    assert (row.us, row.p10, row.p90) == (6.0, 5.4, 6.6)
    assert row.bandwidth == pytest.approx(4e6 / 6e-6 / 1e12)
    assert (row.case, row.shape, row.depth, row.pending, row.fold) == (
        "tiny",
        "1x2x32x8",
        1,
        1,
        True,
    )
    assert any("6.00 us (5.40 - 6.60)" in note for note in notes)


def test_wrong_output_is_never_timed() -> None:
    (wrong, nan), _ = run(method("a", error=0.5), method("b", error=float("nan")))
    assert wrong.us is None
    assert wrong.wrong
    assert wrong.missing == "wrong: error 5.0e-01, allowed 1e-03"
    assert nan.wrong


def test_what_cannot_run_says_why_and_the_rest_goes_on() -> None:
    rows, _ = run(
        method("a", problem=KernelUnavailable("needs a  file")),
        method("b", problem=ZeroDivisionError("x" * 500)),
        method("c"),
    )
    assert rows[0].missing == "needs a file"
    assert (rows[1].missing or "").startswith("ZeroDivisionError: xxx")
    assert len(rows[1].missing or "") < 230
    assert rows[2].us == 6.0
    assert not any(row.wrong for row in rows)


def test_a_spent_budget_leaves_missing_rows() -> None:
    rows, notes = run(method("a"), method("b"), budget=-1.0)
    assert [row.missing for row in rows] == ["the budget of -1 s was spent"] * 2
    assert not notes


def test_a_case_too_large_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> Problem:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kernels, "Problem", full)
    (row,), _ = run(method("a"))
    assert row.missing == "no room"


def test_cold_layers() -> None:
    assert cold_layers(128 * 2**20, 60 * 2**20) == 2
    assert cold_layers(2 * 2**20, 60 * 2**20) == 90
    assert cold_layers(2**20, 60 * 2**20) == 180


def test_every_suite_names_cases_and_methods() -> None:
    plan = Plan(shapes=[SHAPE, replace(SHAPE, value_dim=16)], folder=None)
    jobs = {name: suite(plan) for name, suite in SUITES.items()}
    assert [job.case.name for job in jobs["tree"]] == [
        "tree_n16_b64_1x2x32x8",
        "tree_n16_b64_1x2x32x16",
    ]
    assert len(jobs["commit"]) == 16
    assert len(jobs["log"]) == 20
    assert len(jobs["table1"]) == 6
    assert len(jobs["waves"]) == 9
    for name, listed in jobs.items():
        for job in listed:
            names = [m.name for m in job.methods]
            assert len(set(names)) == len(names)
            assert job.suite == name
            assert not any(n.startswith("SGLang") for n in names)
