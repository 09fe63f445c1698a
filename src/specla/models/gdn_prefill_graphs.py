# SPDX-License-Identifier: Apache-2.0
"""Short chunks of prompts on a GPU, each padded length one CUDA graph.

A chunk is some four hundred launches, which take the host ten times as long as the device. So a
chunk of up to MOST tokens is padded to the recurrence's own chunks, with rows that leave a state
as it is, and replayed: its length alone says which graph it is, so its bits are its own (rule I4).
A graph's addresses are fixed: the slot's state is copied to where the graph has it, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specla.models.features import Features
from specla.ops.capture import captured
from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import CHUNK

MOST = 512
"""Tokens: beyond, the device takes as long as the host."""
FIRST = 4
"""Where tokens begin in what is sent: at 16 bytes, where all of a kernel's tensors do."""
# By layer: S [G, V, K], tail [W-1, C].
Places = Sequence[tuple[Tensor, Tensor]]
Launch = Callable[[Tensor, Places, Features | None], None]


def to_send(tokens: Sequence[int]) -> Tensor:
    """int32 [FIRST + T]: their number, then at FIRST the tokens. One transfer."""
    return torch.tensor([len(tokens), *[0] * (FIRST - 1), *tokens], dtype=torch.int32)


class ShortChunks:
    """Args:
    launch: over what `to_send` gave, S and tails, with outputs of layers where features are asked
        for.
    """

    def __init__(
        self, launch: Launch, shape: RecurrentShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._launch, self._shape, self._dtype, self._device = launch, shape, dtype, device
        # By padded tokens and feature layers.
        self._graphs: dict[tuple[int, tuple[int, ...]], tuple[torch.cuda.CUDAGraph, Features]] = {}
        self._given = torch.zeros(FIRST + MOST, dtype=torch.int32, device=device)
        self._places: list[tuple[Tensor, Tensor]] = []

    def takes(self, num_tokens: int) -> bool:
        """Whether a chunk of so many tokens is a graph's."""
        return self._device.type == "cuda" and num_tokens <= MOST

    def __call__(
        self, tokens: Sequence[int], places: Places, features: Features | None = None
    ) -> None:
        """Advance S and tails by replaying the graph of these tokens' padded length."""
        layers = tuple(sorted(set(features.layers))) if features else ()
        graph, outputs = self._graph(-(-len(tokens) // CHUNK) * CHUNK, layers)
        given = to_send(tokens)
        self._given[: len(given)].copy_(given)
        _copy(self._places, places)
        graph.replay()
        _copy(places, self._places)
        if features is not None:
            for layer in layers:
                features.take(layer, outputs.output(layer)[: len(tokens)], copy=True)

    def _graph(
        self, num_rows: int, layers: tuple[int, ...]
    ) -> tuple[torch.cuda.CUDAGraph, Features]:
        key = num_rows, layers
        if key not in self._graphs:
            self._places = self._places or self._room()
            outputs = Features(layers)
            given = self._given[: FIRST + num_rows]
            given[:FIRST] = torch.tensor([num_rows, *[0] * (FIRST - 1)])
            launch = self._launch
            graph, _ = captured(lambda: launch(given, self._places, outputs if layers else None))
            self._graphs[key] = graph, outputs
        return self._graphs[key]

    def _room(self) -> list[tuple[Tensor, Tensor]]:
        s, device = self._shape, self._device
        S = (s.num_value_heads, s.value_dim, s.key_dim)
        tail = (s.conv_width - 1, s.conv_channels)
        return [
            (
                torch.zeros(S, dtype=torch.float32, device=device),
                torch.zeros(tail, dtype=self._dtype, device=device),
            )
            for _ in range(s.num_layers)
        ]


def _copy(into: Places, places: Places) -> None:
    """S and tails. Lists of one dtype each: of several, torch copies tensor by tensor, which is a
    launch for every one."""
    for kind in (0, 1):
        torch._foreach_copy_([x[kind] for x in into], [x[kind] for x in places])
