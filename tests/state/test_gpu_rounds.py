# SPDX-License-Identifier: Apache-2.0
"""Rounds whose results nobody reads before the next one."""

from __future__ import annotations

import pytest
import torch

from specla.ops.contract import DevicePlan, RecurrentShape
from specla.state import State
from specla.topology.tree import DraftTree

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=1, key_dim=64, value_dim=64, conv_width=4
)


@pytest.mark.gpu
def test_a_device_far_behind_gets_every_round() -> None:
    """One staging buffer serves all rounds of a bucket."""
    state = State(SHAPE, num_slots=1, max_nodes=4, device="cuda")
    slot, tokens = state.acquire(), []
    state.begin([slot], [DraftTree.root(0)])  # makes the buffers, which may wait
    state.commit([slot], [(0,)])
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)  # half a second
    asleep = torch.cuda.Event()
    asleep.record()
    for token in range(20):
        plan = state.begin([slot], [DraftTree.root(token)])
        assert isinstance(plan, DevicePlan)
        tokens.append(plan.round.tokens.clone())
        state.commit([slot], [(0,)])
        assert token or not asleep.query(), "it was to be behind"
    assert [int(x) for x in tokens] == list(range(20))
