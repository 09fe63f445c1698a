# SPDX-License-Identifier: Apache-2.0
"""What the kernel for many rows of few nodes computes, on a CPU: the bits of Hopper's walk,
whether copies arrive at once or when they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_inputs import random_parents
from torch import Tensor

pytest.importorskip("triton")
from walk_machine import SHAPE, Noise, noisy_rows, run

from specla.ops.gdn import triton as kernels
from specla.ops.gdn import triton_decode as decode
from specla.ops.gdn import triton_stream as stream
from specla.ops.walk import compile_walks

# Rings and paths of the last round; the second row is idle.
LOGS: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()), (2, (0,)), (5, (0, 2)), (1, (1, 2)))
BUSH, LEFT = (-1, 0, 0, 1), (-1, 0, 1, 0)
TREE = (-1, 0, 0, 1, 1, 2, 2, 3)  # one replay


def chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(-1, num_nodes - 1))


def after(
    trees: list[tuple[int, ...]], tile: Any, threshold: int, *, branching: bool
) -> list[Tensor]:
    """Outputs and state after a walk of a row per tree."""
    rows, nodes = len(trees), max(map(len, trees))
    noise = Noise()
    state, slots, plans = noisy_rows(trees, LOGS, max(nodes, 4), noise)
    layer = state.layers[0]
    logs = [state.logs[slot] for slot in slots]
    rnd = state.rounds.plan(slots, logs, plans, num_nodes=nodes).round
    rnd.num_nodes[1], nodes = 0, rnd.parents.shape[1]
    compile_walks(rnd)
    room = kernels.Workspace.allocate(SHAPE, rows * nodes, torch.bfloat16, "cpu")
    for x in room[:3]:
        noise(x)
        for b, n in enumerate(rnd.num_nodes.tolist()):
            x[b * nodes + n : (b + 1) * nodes] = float("nan")
    room.o.zero_()
    kernels.walk(
        layer, rnd, room, shape=SHAPE, log_capacity=8, threshold=threshold, tile=tile,
        branching=branching,
    )  # fmt: skip
    return [room.o, layer.S, *layer.factors]


class Played:
    """The kernel, on the CPU."""

    def __init__(self, *, eager: bool) -> None:
        self.kernel, self.eager = decode._decode_kernel, eager

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(blocks: Any, *arguments: Any, **meta: Any) -> None:
            blocks.data, blocks.layout = blocks.base, None
            run(self.kernel, grid, (blocks, *arguments), meta, eager=self.eager)

        return launch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(
        grid: tuple[int, int, int], arguments: tuple[Any, ...], meta: dict[str, Any],
        tile: stream.StreamTile, num_nodes: int,
    ) -> None:  # fmt: skip
        nodes = 1 << (num_nodes - 1).bit_length()
        meta |= {"NODES": nodes, "LOG": 2, "TILE": tile.rows, "LATE": tile.late}
        run(stream._stream_kernel, grid, arguments, meta | {"num_warps": tile.warps})

    monkeypatch.setattr(stream, "launch", launch)
    monkeypatch.setattr(decode, "processors", lambda device: 1)


@pytest.mark.parametrize(
    ("trees", "branching", "threshold", "eager", "chunk"),
    [
        ([chain(1)] * 4, False, 8, False, 2),
        ([chain(2), chain(2), chain(1), chain(2)], True, 2, False, 0),
        ([BUSH, LEFT, LEFT, (-1, 0, 0)], True, 8, False, 0),
        ([(-1, 0, 0, 0), BUSH, chain(4), chain(1)], True, 2, True, 2),
        ([TREE, TREE, random_parents(5, 7, 3), random_parents(1, 8, 7)], True, 8, False, 2),
        ([chain(7), chain(7), chain(4), chain(5)], False, 8, True, 0),
    ],
    ids=["one", "two", "four", "stars", "eight", "chains"],
)
def test_the_bits_of_the_walk(
    machine: None, monkeypatch: pytest.MonkeyPatch, trees: list[tuple[int, ...]],
    branching: bool, threshold: int, eager: bool, chunk: int,
) -> None:  # fmt: skip
    """threshold: logs are folded, or what is new in them moves to the ring. Logs of 0, 7 and 3
    entries, of which four or two travel ahead; programs begin and end within a row."""
    want = after(trees, stream.StreamTile(16, 1), threshold, branching=branching)
    monkeypatch.setattr(decode, "_decode_kernel", Played(eager=eager))
    programs, stages, log = (3, 1, 4) if branching else (5, 2, 2)
    tile = decode.DecodeTile(8, 1, 0, programs, stages, log, rest=2, chunk=chunk)
    got = after(trees, tile, threshold, branching=branching)
    assert all(map(torch.equal, want, got))
