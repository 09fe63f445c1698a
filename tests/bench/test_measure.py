# SPDX-License-Identifier: Apache-2.0
"""Turns, medians and the loop flag."""

from __future__ import annotations

from completions import completion

from specla.bench.measure import Method, Prompt, interleave
from specla.errors import RequestRejected
from specla.request import Completion, SamplingParams


def test_methods_take_turns_after_one_warm_up() -> None:
    order: list[str] = []

    def method(name: str, times: list[float]) -> Method:
        def run(prompt: str, params: SamplingParams) -> Completion:
            order.append(name + prompt)
            return completion(decode_s=times.pop(0))

        return Method(name=name, run=run)

    # The warm-up's time (9) must not count, nor the slowest run decide.
    methods = [method("x", [9.0, 1.0, 3.0, 2.0]), method("y", [9.0, 5.0, 5.0, 80.0])]
    ticks: list[tuple[int, int]] = []
    samples = interleave(
        methods,
        [Prompt(kind="k", text="1")],
        SamplingParams(),
        repeats=3,
        tick=lambda done, total: ticks.append((done, total)),
    )
    assert order == ["x1", "y1"] * 4
    assert [(s.method, s.decode_s) for s in samples] == [("x", 2.0), ("y", 5.0)]
    assert ticks == [(i, 8) for i in range(8)]


def test_a_failure_is_a_sample_with_an_error() -> None:
    def run(prompt: str, params: SamplingParams) -> Completion:
        raise RequestRejected("too long")

    (sample,) = interleave(
        [Method(name="x", run=run)], [Prompt(kind="k", text="")], SamplingParams(), repeats=2
    )
    assert sample.completion is None
    assert sample.error == "too long"
