# SPDX-License-Identifier: Apache-2.0
"""Short chunks of prompts on a GPU, each padded length one CUDA graph.

A chunk is some four hundred launches, which take the host ten times as long as the device. So a
chunk of up to MOST tokens is padded to the recurrence's own chunks, with rows that leave a state
as it is, and replayed: its length alone says which graph it is, so its bits are its own (rule I4).
A graph's addresses are fixed: the slot's state is copied to where the graph has it, and back.

One short chunk leaves most of a GPU idle most of the time. Of several, LANES are on their way at
once, each with tokens, state and graphs of its own: the same kernels over the same numbers, so
that a chunk's bits do not depend on its company either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from specla.models.features import Features
from specla.ops.capture import captured
from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import CHUNK
from specla.ops.lanes import Lanes
from specla.ops.transfer import send

FINE, MOST = 512, 1024
"""Tokens. Up to FINE a chunk is padded to multiples of CHUNK, then of twice that; beyond MOST the
device takes as long as the host."""
LANES = 4
"""Chunks at once. One reads all weights; four of them are through in the time of two or less."""
FIRST = 4
"""Where tokens begin in what is sent: at 16 bytes, where all of a kernel's tensors do."""
Place = tuple[Tensor, Tensor]
"""S [G, V, K], tail [W-1, C]."""
Places = Sequence[Place]
"""By layer."""
Launch = Callable[[Tensor, Places, Features | None], None]


def to_send(tokens: Sequence[int]) -> Tensor:
    """int32 [FIRST + T]: their number, then at FIRST the tokens. One transfer."""
    return torch.tensor([len(tokens), *[0] * (FIRST - 1), *tokens], dtype=torch.int32)


def padded(num_tokens: int) -> int:
    """Rows of the graph for a chunk of so many tokens."""
    unit = CHUNK if num_tokens <= FINE else 2 * CHUNK
    return -(-num_tokens // unit) * unit


class ShortChunks:
    """Args:
    launch: over what `to_send` gave, S and tails, with outputs of layers where features are asked
        for.
    width: of a layer's outputs.
    """

    def __init__(
        self,
        launch: Launch,
        shape: RecurrentShape,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._lane = partial(_Lane, launch, shape, width, dtype, device)
        self.graphs = device.type == "cuda"
        self._rooms: dict[int, _Lane] = {}
        self._lanes: Lanes | None = None
        self._beside = False

    def takes(self, num_tokens: int) -> bool:
        """Whether a chunk of so many tokens is a graph's."""
        return self.graphs and num_tokens <= MOST

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Chunks inside need not wait for each other; of a state that has one, no second."""
        self._streams().start()
        self._beside = True
        try:
            yield
        finally:
            self._beside = False

    def __call__(
        self, tokens: Sequence[int], places: Places, features: Features | None = None
    ) -> None:
        """Advance S and tails by replaying the graph of these tokens' padded length. Outputs lie
        where the graph has put them, until it or another one is replayed there."""
        layers = tuple(sorted(set(features.layers))) if features else ()
        with self._turn() as number:
            if number not in self._rooms:
                self._rooms[number] = self._lane(self._streams().stream(number))
            room = self._rooms[number](tokens, places, layers)
        if features is not None:
            for layer, outputs in zip(layers, room, strict=True):
                features.take(layer, outputs[: len(tokens)])

    def _turn(self) -> AbstractContextManager[int]:
        """The lane of the next chunk."""
        return self._streams().run() if self._beside else nullcontext(0)

    def _streams(self) -> Lanes:
        self._lanes = self._lanes or Lanes(LANES)
        return self._lanes


class _Lane:
    """Where one chunk at a time is computed: tokens, S and tails, outputs of layers, and the
    graphs that know where these are. stream: what they are captured on."""

    def __init__(
        self,
        launch: Launch,
        shape: RecurrentShape,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        self._launch, self._width, self._dtype, self._device = launch, width, dtype, device
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._given = torch.zeros(FIRST + MOST, dtype=torch.int32, device=device)
        self._states = self._room(shape)
        # By padded tokens and feature layers; and the layers' outputs.
        self._graphs: dict[tuple[int, tuple[int, ...]], torch.cuda.CUDAGraph] = {}
        self._outputs: dict[tuple[int, ...], Features] = {}

    def __call__(self, tokens: Sequence[int], places: Places, layers: tuple[int, ...]) -> Tensor:
        """Advance S and tails. Returns outputs of the layers [layers, MOST, width], of which the
        tokens' rows are new."""
        graph = self._graph(padded(len(tokens)), layers)
        given = to_send(tokens)
        send(given, self._given[: len(given)])
        _copy(self._states, places)
        graph.replay()
        _copy(places, self._states)
        return self._outputs[layers].room

    def _graph(self, num_rows: int, layers: tuple[int, ...]) -> torch.cuda.CUDAGraph:
        key = num_rows, layers
        if layers not in self._outputs:
            self._outputs[layers] = self._features(layers)
        if key not in self._graphs:
            outputs = self._outputs[layers] if layers else None
            given = self._given[: FIRST + num_rows]
            given[:FIRST] = torch.tensor([num_rows, *[0] * (FIRST - 1)])
            self._graphs[key], _ = captured(
                lambda: self._launch(given, self._states, outputs),
                stream=self._stream, pool=self._pool,
            )  # fmt: skip
        return self._graphs[key]

    def _features(self, layers: tuple[int, ...]) -> Features:
        size = len(layers), MOST, self._width
        return Features(layers, torch.zeros(size, dtype=self._dtype, device=self._device))

    def _room(self, s: RecurrentShape) -> list[tuple[Tensor, Tensor]]:
        S = (s.num_value_heads, s.value_dim, s.key_dim)
        tail = (s.conv_width - 1, s.conv_channels)
        return [
            (
                torch.zeros(S, dtype=torch.float32, device=self._device),
                torch.zeros(tail, dtype=self._dtype, device=self._device),
            )
            for _ in range(s.num_layers)
        ]


def _copy(into: Places, places: Places) -> None:
    """S and tails. Lists of one dtype each: of several, torch copies tensor by tensor, which is a
    launch for every one."""
    for kind in (0, 1):
        torch._foreach_copy_([x[kind] for x in into], [x[kind] for x in places])
