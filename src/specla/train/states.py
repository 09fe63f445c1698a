# SPDX-License-Identifier: Apache-2.0
"""The target's recurrent states at chosen places of a text: what a state reader learns from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.state import State


class States:
    """Runs a target over texts, stopping at places. layers: whose states are wanted."""

    def __init__(self, model: TargetModel, layers: Sequence[int]) -> None:
        self._model, self._layers = model, tuple(layers)
        self._state = State(
            model.info.recurrent, num_slots=1, max_nodes=1, dtype=model.dtype, device=model.device
        )
        self._slot = self._state.acquire()

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], places: Sequence[int]) -> list[Tensor]:
        """Per layer [n, G, V, K]: the state after tokens[:place], for each of n ascending
        places. A place can be that of an anchor: the anchor itself is not in its state."""
        self._state.reset(self._slot)
        found = list[list[Tensor]]()
        at = 0
        for place in places:
            if place > at:
                self._model.prefill(tokens[at:place], self._slot, self._state)
                at = place
            found.append([self._state.layers[i].S[self._slot].clone() for i in self._layers])
        return [torch.stack(layer) for layer in zip(*found, strict=True)]
