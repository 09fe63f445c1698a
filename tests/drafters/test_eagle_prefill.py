# SPDX-License-Identifier: Apache-2.0
"""An EAGLE drafter's prompts by a GPU's kernels, in Triton's interpreter and with the torch
recurrence, against the eager drafter's. Bits, and fla's: tests/engine/test_gpu_eagle.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle_toy import toy_config, write_drafter
from test_eagle_device import SIZES, needs_interpreter
from torch import Tensor

from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_model import EagleModel
from specla.models.base import TargetModel

pytest.importorskip("triton")
from specla.drafters import eagle_prefill
from specla.drafters.eagle_prefill import EaglePrompts
from specla.models import gdn_prefill_graphs
from specla.ops.gemm import pack_swiglu

pytestmark = needs_interpreter


def played(launch: Callable[[], object]) -> tuple[SimpleNamespace, object]:
    """A graph, played by launching again."""
    return SimpleNamespace(replay=launch), launch()


def bound(folder: Path, target: TargetModel, **changes: object) -> EagleModel:
    write_drafter(folder, toy_config(target.info, **{**SIZES, **changes}))
    drafter = EagleDrafter(path=str(folder))
    drafter.bind(target, num_slots=3, max_nodes=4, exact=True)
    return drafter.model


def of_slot(model: EagleModel, slot: int) -> list[Tensor]:
    """S, tail and last output."""
    assert isinstance(model.mixer, GdnMixer)
    return [*model.mixer.state.committed_state(slot)[0], model.last[slot]]


@pytest.mark.parametrize("graphs", [True, False], ids=["replayed", "launched"])
def test_prompts_are_the_eager_drafters(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Two slots by turns, chunks longer and shorter than the one before, one as long as its
    padding."""
    for module in (eagle_prefill, gdn_prefill_graphs):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(eagle_prefill, "captured", played)
    changes = {} if graphs else {"fc_norm": False}
    eager, device = (bound(tmp_path / name, target, **changes) for name in "ab")
    prompts = EaglePrompts(device, pack_swiglu(device.weights.gate_up), "reference", graphs=graphs)
    generator = torch.Generator().manual_seed(3)
    prompts.compile()
    untouched = [x.clone() for x in of_slot(device, 3)]
    for slot, length in ((1, 6), (2, 4), (1, 3)):
        tokens = [(5 * i + length) % target.info.vocab_size for i in range(length)]
        features = torch.randn(length, eager.weights.fc.shape[1], generator=generator)
        eager.prefill(slot, tokens, features)
        prompts(slot, tokens, features)
    assert len(prompts._graphs) == (2 if graphs else 0)
    assert all(x.isfinite().all() for x in of_slot(device, 0))
    for slot in (1, 2):
        for a, b in zip(of_slot(eager, slot), of_slot(device, slot), strict=True):
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, untouched, of_slot(device, 3)))
    lengths = [[m.mixer.state.logs[s].durable_len for s in (1, 2)] for m in (eager, device)]
    assert lengths == [[9, 4], [9, 4]]
