# SPDX-License-Identifier: Apache-2.0
"""The target's recurrent states at chosen places of texts: what a state reader learns from.

A layer's state depends on that layer's inputs alone, which are a feature: the outputs of the layer
before. So its recurrence is run again over a whole batch of packed texts, and the target is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.ops.gdn.reference import Inputs, per_value_head
from specla.ops.transfer import sent
from specla.train.block_batches import BlockBatch
from specla.train.delta_rule import Scan, scan
from specla.train.gdn import Packing, pack_masks

CHUNK = 64


def layers_before(layers: Sequence[int], captured: Sequence[int]) -> tuple[int, ...]:
    """Feature layers that the states of `layers` need besides those captured anyway."""
    return tuple(i - 1 for i in layers if i > 0 and i - 1 not in captured)


class States:
    """Of one target. layers: whose states are wanted. captured: the batches' feature layers, with
    the one before each of `layers` among them."""

    def __init__(self, model: TargetModel, layers: Sequence[int], captured: Sequence[int]) -> None:
        assert not layers_before(layers, captured)
        self._model, self._layers, self._captured = model, tuple(layers), tuple(captured)

    @torch.no_grad()
    def __call__(self, batch: BlockBatch, places: Tensor) -> list[Tensor]:
        """Per layer [A, G, V, K] float32, on the batch's device: the states before the places [A],
        which are on the host and ascend, of rows laid end to end. A place can be that of an
        anchor: it is not in its state."""
        shape, device = self._model.info.recurrent, batch.tokens.device
        packing = pack_masks(batch.segments, shape.conv_width, CHUNK)
        same = packing.taps.flatten(0, 1)
        given = (
            self._model.recurrence_inputs(layer, self._inputs(batch, layer), same)
            for layer in self._layers
        )
        if batch.tokens.is_cuda:
            # Triton is imported where there is a GPU only.
            from specla.train.triton_states import states_at

            documents = _documents(batch.ends, places)
            asked = sent(torch.cat([*documents, places]).int(), device)
            count = len(documents[0])
            return [states_at(x.k, x.v, x.g, x.beta, asked, count) for x in given]
        at, heads = sent(places, device), shape.num_value_heads
        return [_before(_scanned(x, batch, packing, heads), batch, at) for x in given]

    def _inputs(self, batch: BlockBatch, layer: int) -> Tensor:
        """[B * T, D]."""
        if layer == 0:
            return self._model.embeddings[batch.tokens.flatten().clamp(min=0)]
        at, width = self._captured.index(layer - 1), self._model.info.hidden_size
        return batch.features[..., at * width : (at + 1) * width].flatten(0, 1)


def _documents(ends: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the documents that have places: where they start, and which places are theirs, from the
    first to the one past the last. ends [M]: where each token's document ends."""
    starts = torch.cat([torch.ones(1, dtype=torch.bool), ends.diff() != 0]).nonzero().flatten()
    owner = torch.searchsorted(starts, places, right=True) - 1
    owners, counts = owner.unique_consecutive(return_counts=True)
    past = counts.cumsum(0)
    return starts[owners], past - counts, past


def _scanned(x: Inputs, batch: BlockBatch, packing: Packing, heads: int) -> Scan:
    k = per_value_head(x.k, heads)
    k, v, g, beta = (y.unflatten(0, batch.tokens.shape) for y in (k, x.v, x.g, x.beta))
    return scan(k, v, g, beta, packing.chunk)


def _before(states: Scan, batch: BlockBatch, places: Tensor) -> Tensor:
    """The states after the tokens before the places, empty at the start of a document."""
    length, chunk = batch.tokens.shape[1], states.decay.shape[-1]
    row, t = places // length, (places % length - 1).clamp(min=0)
    c, i = t // chunk, t % chunk
    k = states.keys[row, :, c] * states.decay[row, :, c, i, :, None]
    S = states.writes[row, :, c].mT @ k
    S += states.states[row, :, c].mT * states.from_start[row, :, c, i, None, None]
    return S * (batch.positions.flatten()[places] > 0)[:, None, None, None]
