# SPDX-License-Identifier: Apache-2.0
"""What Hopper's walk computes, on a CPU: the recurrence, and the same bits however a value head
and a tree are cut and whenever an output is summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_inputs import random_parents
from torch import Tensor

pytest.importorskip("triton")
from walk_machine import SHAPE, Noise, noisy_rows, run

from specla.ops.gdn import triton as kernels
from specla.ops.gdn import triton_stream as stream
from specla.ops.gdn.triton_stream import StreamTile
from specla.ops.walk import compile_walks

NODES = 8
TREES = [random_parents(0, NODES, 2), random_parents(1, NODES - 1, 5)]


def after(tile: StreamTile | kernels.Tile, parts: int, threshold: int) -> list[Tensor]:
    """Outputs and state after a walk of two rows with logs of 5 and 3 factors."""
    noise = Noise()
    state, slots, trees = noisy_rows(TREES, ((4, (0,)), (1, (0, 2))), NODES, noise)
    layer = state.layers[0]
    rnd = state.rounds.plan(slots, [state.logs[s] for s in slots], trees).round
    rnd = rnd._replace(walk=rnd.walk.new_zeros(len(TREES), parts, rnd.walk.shape[2]))
    compile_walks(rnd)
    room = kernels.Workspace.allocate(SHAPE, 2 * NODES, torch.float32, "cpu")
    for x in room[:3]:
        noise(x)
    room.o.zero_()
    kernels.walk(
        layer, rnd, room, shape=SHAPE, log_capacity=8, threshold=threshold, tile=tile,
    )  # fmt: skip
    assert not room.arrivals.any()
    return [room.o, layer.S, *layer.factors]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(
        grid: tuple[int, int, int], arguments: tuple[Any, ...], meta: dict[str, Any],
        tile: StreamTile, num_nodes: int,
    ) -> None:  # fmt: skip
        more = {"NODES": num_nodes, "LOG": 2, "TILE": tile.rows, "LATE": tile.late}
        meta |= more | {"num_warps": tile.warps}
        run(stream._stream_kernel, grid, arguments, meta)

    monkeypatch.setattr(stream, "launch", launch)


@pytest.mark.parametrize("threshold", [2, 8])
def test_every_form_has_the_bits_of_the_others(machine: None, threshold: int) -> None:
    """threshold: logs are folded, or what is new in them moves to the ring."""
    want = after(StreamTile(16, 1), 1, threshold)
    close = after(kernels.Tile(4, 1), 1, threshold)
    for x, y in zip(want, close, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    for rows, warps, late, parts in ((8, 1, False, 2), (16, 1, True, 2), (16, 2, True, 1)):
        got = after(StreamTile(rows, warps, late=late), parts, threshold)
        assert all(map(torch.equal, got, want)), (rows, warps, late, parts)


def test_layers_count_parts_in_cells_of_their_own() -> None:
    """Of two rows' trees those of 16 layers in a row; wherever there is room for the round."""
    room = kernels.Workspace.allocate(SHAPE, 16, torch.float32, "cpu")
    places = [room.of_layer(i, 2).arrivals.data_ptr() for i in range(17)]
    assert len(set(places[:16])) == 16
    assert places[16] == places[0]
    for trees in (1, 2, 3, 16, 32):
        for layer in range(40):
            room.of_layer(layer, trees).check(trees, 16 // trees)
