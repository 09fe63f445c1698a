# SPDX-License-Identifier: Apache-2.0
"""Forms of a round that differ in speed only: every byte that a round leaves behind is the same,
with and without a fold, for plain steps and for trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from specla.bench.random_model import RandomGDN, gdn_1_3b
from specla.bench.rounds import binary_tree, pend
from specla.models.gdn_fused import Options
from specla.ops import gemm, gemm_stream
from specla.state import State

pytestmark = pytest.mark.gpu

# And what is set in `ops.gemm_stream`.
FORMS: dict[str, tuple[Options, dict[str, int]]] = {
    "norms in a kernel of their own": (Options(mix=False), {}),
    "norms in o_proj": (Options(), {"MIX_ROWS": gemm_stream.MAX_MIX_ROWS}),
    "kernels that wait first": (Options(early=False), {}),
    "another product": (Options(stream=False), {}),
}


@pytest.fixture(scope="module")
def model() -> RandomGDN:
    made = gdn_1_3b(layers=2)
    made.reserve(32)
    return made


def left_behind(
    model: RandomGDN, num_nodes: int, threshold: int, num_rows: int = 1
) -> list[Tensor]:
    """Logits and state after one round over a state of noise."""
    state = State(
        model.info.recurrent, num_slots=num_rows, max_nodes=max(num_nodes, 4), log_capacity=16,
        fold_threshold=threshold, dtype=model.dtype, device=model.device,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(num_nodes)
    kept = [x for layer in state.layers for x in (layer.S, *layer.factors, *layer[2:])]
    for x in kept:
        x.copy_(0.3 * torch.randn(x.shape, generator=generator, device="cuda"))
    for layer in state.layers:
        layer.factors.g.abs_().neg_()
    slots = [state.acquire() for _ in range(num_rows)]
    for slot in slots:
        pend(state.logs[slot], num_nodes)
    logits = model.verify(state.begin(slots, [binary_tree(num_nodes)] * num_rows), state)
    return [x.clone() for x in (logits, *kept)]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_bits_of_the_others(
    model: RandomGDN, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for compute capability 9.0")
    sizes = [(nodes, threshold) for nodes in (1, 8, 16, 32) for threshold in (3, 16)]
    want = [left_behind(model, *size) for size in sizes]
    options, switches = FORMS[form]
    for name, value in switches.items():
        monkeypatch.setattr(gemm_stream, name, value)
    again = gdn_1_3b(layers=2)
    decoder = again._fused
    assert decoder is not None
    decoder._options = options
    decoder._stream()
    again.reserve(32)
    for size, left in zip(sizes, want, strict=True):
        assert all(map(torch.equal, left_behind(again, *size), left)), size


@pytest.mark.parametrize("num_rows", [8, 64])
def test_products_of_many_rows_have_the_bits_of_the_others(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their chain: with partial sums that the next kernel adds, and added by the product."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for compute capability 9.0")
    model = gdn_1_3b(layers=2)
    assert model._fused is not None
    layer = model._fused.layers[0]
    assert all(x.wide for x in (layer.in_proj, layer.o_proj, layer.gate_up, layer.down))
    model.reserve(16 * num_rows)
    want = left_behind(model, 16, 3, num_rows)
    monkeypatch.setattr(gemm, "WIDE_ROWS", 0)
    assert all(map(torch.equal, left_behind(model, 16, 3, num_rows), want))
