# SPDX-License-Identifier: Apache-2.0
"""On a GPU: what the table says is what is captured, and what results say.

pytest -m gpu tests/engine/test_gpu_kernels.py
"""

from __future__ import annotations

from typing import Any

import pytest

from specla.bench.random_model import gdn_1_3b
from specla.engine.cost import Cost, CostTable, Identity
from specla.engine.engine import Engine
from specla.request import Request, SamplingParams
from specla.state import State
from specla.testing import RandomTreeDrafter

pytestmark = pytest.mark.gpu


def played(mode: str = "fast") -> CostTable:
    """Closed is cheaper at eight nodes, whatever the default says."""
    us = {("walk", 1): 10.0, ("closed", 1): 20.0, ("walk", 8): 20.0, ("closed", 8): 10.0}
    verify = [("verify", kernel, nodes, us[kernel, nodes]) for kernel, nodes in us]
    accept = [("accept", "", nodes, 1.0) for nodes in (1, 8)]
    return CostTable(
        Identity(device="", model="", log_capacity=0, torch="", triton="", specla=""),
        [
            Cost(
                part=part, rows=rows, nodes=nodes, depth=nodes - 1, kernel=kernel, mode=mode,
                us=time, p10=time, p90=time,
            )
            for part, kernel, nodes, time in verify + accept
            for rows in (1, 2)
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "closed"), [("cheapest", {2, 4, 8}), ("walk", set()), ("closed", {1, 2, 4, 8})]
)
def test_the_table_is_what_is_captured(
    kernel: str, closed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specla.models import gdn_fused

    seen: set[int] = set()
    walk_wy = gdn_fused.wy.walk_wy

    def spy(layer: Any, rnd: Any, *args: Any, **options: Any) -> None:
        seen.add(rnd.tokens.shape[1])
        walk_wy(layer, rnd, *args, **options)

    monkeypatch.setattr(gdn_fused.wy, "walk_wy", spy)
    model = gdn_1_3b(layers=2)
    state = State(
        model.info.recurrent, num_slots=2, max_nodes=8, log_capacity=16, dtype=model.dtype,
        device=model.device,
    )  # fmt: skip
    drafter = RandomTreeDrafter(5, model.info.vocab_size, max_depth=4)
    engine = Engine(
        model, state, drafter, mode="fast", prefill_chunk=256, kernel=kernel, costs=played()
    )
    engine.capture()
    assert seen == closed
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add(Request(request_id="r", prompt_token_ids=(1, 2, 3), params=params, seed=0))
    report = None
    while engine.has_work:
        for delta in engine.step():
            report = delta.completion.speculation if delta.completion else None
    assert report is not None
    assert report.costs == "measured"
    assert sum(report.kernels.values()) == report.rounds
    names = {"cheapest": {"walk", "closed"}, "walk": {"walk"}, "closed": {"closed"}}
    assert {*report.kernels} <= names[kernel]


def test_engines_of_two_modes_on_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact one makes its graphs after the fast one, and stays exact."""
    from specla.models import gdn_fused

    model, seen = gdn_1_3b(layers=2), list[str]()
    call = gdn_fused.FusedDecoder.__call__

    def spy(self: Any, *args: Any, kernel: str = "walk") -> Any:
        seen.append(kernel)
        return call(self, *args, kernel=kernel)

    monkeypatch.setattr(gdn_fused.FusedDecoder, "__call__", spy)
    engines = []
    for mode, kernel in (("exact", "walk"), ("fast", "closed")):
        state = State(
            model.info.recurrent, num_slots=1, max_nodes=8, log_capacity=16, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip
        drafter = RandomTreeDrafter(5, model.info.vocab_size, max_depth=4)
        engines.append(Engine(model, state, drafter, mode=mode, prefill_chunk=256, kernel=kernel))
    for engine, kernel in zip(engines, ("walk", "closed"), strict=True):
        seen.clear()
        engine.capture()
        assert {*seen} == {kernel}
