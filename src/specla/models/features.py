# SPDX-License-Identifier: Apache-2.0
"""Features: outputs of chosen layers of a target, on request. What trained drafters read.

One convention, everywhere in specla: layer id i, counted from 0, means the OUTPUT of layer i, the
residual stream after its MLP. Files with another convention (EAGLE-3 counts a layer's input) are
converted where they are loaded, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.ops.transfer import ints


class Features:
    """Filled by one `prefill` or `verify` that is given it; the next one fills it anew.

    layers: ids in the order in which `rows` puts them side by side. room [layers, M, D]: where
    outputs of up to M rows are copied to, for readers that need them at fixed addresses.
    """

    def __init__(self, layers: Sequence[int], room: Tensor | None = None) -> None:
        self.layers = tuple(layers)
        self._room = room
        self._outputs: dict[int, Tensor] = {}

    def take(self, layer: int, x: Tensor, *, copy: bool = False) -> None:
        """Called by the model with every layer's output x [M, D]; keeps what is wanted. copy:
        where the model goes on in the same buffer."""
        if layer not in self.layers:
            return
        if self._room is not None:
            x = self._room[self.layers.index(layer), : len(x)].copy_(x)
        elif copy:
            x = x.clone()
        self._outputs[layer] = x

    def written(self, layer: int, num_rows: int) -> Tensor | None:
        """Where the model writes this layer's output of so many rows by itself, [num_rows, D],
        instead of `take`; None: it is not wanted, or there is no room."""
        if self._room is None or layer not in self.layers:
            return None
        self._outputs[layer] = x = self._room[self.layers.index(layer), :num_rows]
        return x

    def output(self, layer: int) -> Tensor:
        """[M, D] of one layer."""
        return self._outputs[layer]

    @property
    def room(self) -> Tensor:
        """The room it was given."""
        assert self._room is not None, "no room was given"
        return self._room

    def rows(self, at: Sequence[int] | None = None) -> Tensor:
        """[n, layers * D] of the rows `at` (None: all), in the model's dtype."""
        outputs = [self._outputs[layer] for layer in self.layers]
        # A round of one node per row, the usual one where nobody drafts, wants all.
        if at is not None and list(at) != list(range(len(outputs[0]))):
            index = ints(at, outputs[0].device)
            outputs = [x.index_select(0, index) for x in outputs]
        return torch.cat(outputs, dim=-1)
