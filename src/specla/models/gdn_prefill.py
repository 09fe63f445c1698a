# SPDX-License-Identifier: Apache-2.0
"""Prompts of a Gated DeltaNet model on a GPU: one chunk of one sequence per call.

Products go through cuBLAS, what is between them through Triton kernels, the recurrence through
fla's chunked kernels or the torch reference. A chunk is computed alone and every configuration is
fixed, so its bits depend on its own tokens, their number and the state before it (rule I4); which
chunks a prompt has follows from its length. So does whether a chunk is a graph's: a short one is
padded, and its four hundred launches are one (`gdn_prefill_graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from specla.config import PrefillKernels
from specla.models.features import Features
from specla.models.gdn_prefill_graphs import FIRST, Place, Places, ShortChunks, to_send
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.ops import rows
from specla.ops.contract import RecurrentShape
from specla.ops.gdn import Inputs, prefill, reference
from specla.ops.swiglu import packed_swiglu
from specla.ops.transfer import sent
from specla.state import State

# (S [G, V, K], becomes the state after the tokens; tokens; whether anybody reads o) -> o [T, G, V]
Recur = Callable[[Tensor, Inputs, bool], Tensor]


class Room(NamedTuple):
    """Where a chunk's inputs of the recurrence go, and what takes them."""

    inputs: Inputs
    recur: Recur


class ChunkLayer:
    """What a layer does to a chunk from its raw projections on; decoders' and drafters'.

    Args:
        dtype: of activations.
        kernels: the recurrence, "fla" (bfloat16) or "reference".

    Raises:
        KernelUnavailable: the fla-core that is installed is not the one that is known here.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        *,
        eps: float,
        gated: bool,
        beta_scale: float,
        kernels: PrefillKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape, self._eps, self._gated = shape, eps, gated
        self._beta_scale, self._dtype, self._device = beta_scale, dtype, device
        # What q, k and v are rounded to: fla multiplies in the activation dtype.
        self._operands = dtype if kernels == "fla" else torch.float32
        self._recur_over = self._by_fla() if kernels == "fla" else _by_reference

    def room(self, num_rows: int) -> Room:
        """For one chunk, any layer's, one after the other."""
        inputs = prefill.allocate(self._shape, num_rows, self._operands, self._device)
        return Room(inputs, self._recur_over(num_rows))

    def recur(
        self,
        w: BlockWeights,
        y: Tensor,
        place: Place,
        count: Tensor,
        room: Room,
        *,
        outputs: bool = True,
    ) -> Tensor:
        """Raw projections y [T, C_in] of count [1] tokens -> the recurrence's o [T, G, V], if
        anybody reads it; S and tail become those after the tokens."""
        S, tail = place
        prefill.prepare(
            y, w.conv, w.A, w.dt_bias, tail, count, room.inputs, shape=self._shape,
            beta_scale=self._beta_scale,
        )  # fmt: skip
        return room.recur(S, room.inputs, outputs)

    def finish(
        self, w: BlockWeights, x: Tensor, h: Tensor, y: Tensor, o: Tensor, norm: Tensor
    ) -> None:
        """A layer from the recurrence's outputs o on: x [T, D] becomes its output, h [T, D] that
        normed for the next one. w.gate_up: packed."""
        channels = self._shape.conv_channels
        mixed = torch.empty(len(x), o[0].numel(), dtype=self._dtype, device=self._device)
        gate = y[:, channels : channels + mixed.shape[1]] if self._gated else None
        rows.gated_norm(o, gate, w.o_norm, mixed, self._eps)
        self._add(x, linear(mixed, w.o_proj), w.mlp_norm, h)
        hidden = torch.empty(len(x), w.down.shape[1], dtype=self._dtype, device=self._device)
        packed_swiglu(linear(h, w.gate_up), hidden)
        self._add(x, linear(hidden, w.down), norm, h)

    def _add(self, x: Tensor, delta: Tensor, norm: Tensor, h: Tensor) -> None:
        """x += delta, h = rms_norm(x) * norm: a sum of one part, in the activation dtype."""
        rows.add_partials_norm(x, delta, norm, h, self._eps, num_partials=1, max_partials=1)

    def _by_fla(self) -> Callable[[int], Recur]:
        from specla.ops.gdn.fla_chunks import ChunkedRule, Workspace, shared_memory

        rule = ChunkedRule(self._shape, shared_memory=shared_memory(self._device))

        def over(num_tokens: int) -> Recur:
            space = Workspace.allocate(self._shape, num_tokens, self._dtype, self._device)
            return lambda S, x, outputs: rule(S, x, space, outputs=outputs)

        return over


class ChunkDecoder:
    """The decoder over one chunk of a prompt.

    Args:
        weights: with gate_up packed (`ops.gemm.pack_swiglu`), shared with the decode path.
        kernels: see `ChunkLayer`.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        shape: RecurrentShape,
        *,
        eps: float,
        gated: bool,
        beta_scale: float,
        kernels: PrefillKernels,
    ) -> None:
        self._weights, self._shape, self._eps = weights, shape, eps
        self._device, self._dtype = weights.embeddings.device, weights.embeddings.dtype
        self._layer = ChunkLayer(
            shape, eps=eps, gated=gated, beta_scale=beta_scale, kernels=kernels,
            dtype=self._dtype, device=self._device,
        )  # fmt: skip
        self._kept = WeakKeyDictionary[State, dict[tuple[int, int], Places]]()
        width = weights.embeddings.shape[1]
        self._short = ShortChunks(self.launch, shape, width, self._dtype, self._device)

    def side_by_side(self) -> AbstractContextManager[None]:
        """See `TargetModel.side_by_side`."""
        return self._short.side_by_side()

    def __call__(
        self, tokens: Sequence[int], slot: int, state: State, features: Features | None = None
    ) -> None:
        """Advance `slot` over `tokens`: S and tail of every layer, and the count."""
        places = self._places(slot, state)
        if self._short.takes(len(tokens)):
            self._short(tokens, places, features)
        else:
            self.launch(sent(to_send(tokens), self._device), places, features)
        state.advance(slot, len(tokens))

    def _places(self, slot: int, state: State) -> Places:
        """Views, kept: to make them takes as long as half of a prompt's launches."""
        kept = self._kept.setdefault(state, {})
        key = slot, state.logs[slot].bank
        if key not in kept:
            layers = range(self._shape.num_layers)
            kept[key] = [(state.layers[i].S[slot], state.tail(i, slot)) for i in layers]
        return kept[key]

    def launch(self, given: Tensor, places: Places, features: Features | None) -> None:
        """Advance S and tail of every layer over the tokens of `given` (see `to_send`)."""
        x, h = self._embed(given)
        w, room = self._weights, self._layer.room(len(x))
        norms = [*(block.attn_norm for block in w.blocks[1:]), w.norm]
        # Nobody reads what the last layer would put out, unless features are asked for.
        end = len(norms) if features and len(norms) - 1 in features.layers else len(norms) - 1
        for i, block in enumerate(w.blocks):
            y = linear(h, block.in_proj)
            o = self._layer.recur(block, y, places[i], given[:1], room, outputs=i < end)
            if i < end:
                self._layer.finish(block, x, h, y, o, norms[i])
                if features is not None:
                    features.take(i, x, copy=True)

    def _embed(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """x, h [T, D]: the embeddings, and those normed for the first layer."""
        w, num_rows = self._weights, len(given) - FIRST
        x = torch.empty(num_rows, w.embeddings.shape[1], dtype=self._dtype, device=self._device)
        h = torch.empty_like(x)
        rows.embed_norm(
            given[FIRST:].view(1, num_rows), given[:1], w.embeddings, w.blocks[0].attn_norm, x, h,
            self._eps,
        )  # fmt: skip
        return x, h


def _by_reference(num_tokens: int) -> Recur:
    def recur(S: Tensor, x: Inputs, outputs: bool) -> Tensor:
        o, S[:] = reference.prefill(S, x)
        return o.contiguous()

    return recur
