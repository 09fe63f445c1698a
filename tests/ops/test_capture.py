# SPDX-License-Identifier: Apache-2.0
"""Launches as one CUDA graph: what must not happen while they are captured."""

from __future__ import annotations

import gc

import pytest
import torch

from specla.ops.capture import captured, without_collection


def test_garbage_waits_and_what_was_off_stays_off() -> None:
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_graph_that_nobody_has_any_more_does_not_break_a_capture() -> None:
    """An engine that was dropped is in a cycle; to destroy its graphs is not allowed while any
    stream captures."""
    x = torch.zeros(8, device="cuda")
    held = [captured(lambda: x.add_(1))[0]]

    def launch() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [held.pop()]
            cycle.append(cycle)
            del cycle
            [[object()] for _ in range(1000)]  # enough for a collection

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found, _ = captured(launch)
    finally:
        gc.set_threshold(*before)
    found.replay()
    torch.cuda.synchronize()
    assert x[0] == 3  # each was run once before its capture
