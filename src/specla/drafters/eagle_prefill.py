# SPDX-License-Identifier: Apache-2.0
"""Prompts of an EAGLE-GDN drafter on a GPU: `EagleModel.prefill`, a slot after one chunk.

    take_features, fc, encode_inputs, in_proj, prepare, the chunked recurrence, gated norm, o_proj,
    residual + norm, gate_up, SwiGLU, down, residual + norm

Some twenty-five launches in the place of a hundred and fifty, by the kernels that the target's
prompts go through (`models.gdn_prefill`). A chunk is padded to the recurrence's own chunks, with
rows that leave a state as it is; short ones are a CUDA graph per padded length, which finds the
slot by its number. So a chunk's bits depend on its own tokens, their number and what was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from specla.config import PrefillKernels
from specla.drafters import triton_eagle as kernels
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_model import EagleModel
from specla.models.gdn_prefill import ChunkLayer
from specla.models.gdn_prefill_graphs import FIRST, MOST, padded
from specla.models.gdn_weights import BlockWeights
from specla.ops.capture import captured
from specla.ops.gdn.reference import CHUNK
from specla.ops.transfer import send, sent


class EaglePrompts:
    """Of one drafter, with its slots.

    Args:
        gate_up: of its MLP, packed (`ops.gemm.pack_swiglu`).
        recurrence: "fla" (bfloat16) or "reference".
        graphs: short chunks are replayed.
    """

    def __init__(
        self,
        model: EagleModel,
        gate_up: Tensor,
        recurrence: PrefillKernels,
        *,
        graphs: bool = True,
    ) -> None:
        w, mixer = model.weights, model.mixer
        assert isinstance(mixer, GdnMixer)
        assert isinstance(w.mixer, BlockWeights)
        self._w, self._eps, self._last = w, model.config.norm_eps, model.last
        self._state, self._block = mixer.state, replace(w.mixer, gate_up=gate_up)
        self._device, self._most = w.fc.device, MOST if graphs else 0
        self._layer = ChunkLayer(
            model.config.recurrent, eps=self._eps, gated=True, beta_scale=1.0,
            kernels=recurrence, dtype=w.fc.dtype, device=w.fc.device,
        )  # fmt: skip
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        size = w.fc.shape[1] // w.embed_norm.shape[0], self._most, w.embed_norm.shape[0]
        self._given = w.fc.new_zeros(_words(self._most), dtype=torch.int32)
        self._features = w.fc.new_zeros(size)

    def compile(self) -> None:
        """The kernels, the same for every length: the shortest graph, or launches over no token
        of the padding slot."""
        if self._most:
            self._graph(CHUNK)
        else:
            room = self._features.new_zeros(len(self._features), CHUNK, self._features.shape[2])
            self._launch(self._given.new_zeros(_words(CHUNK)), room)

    def __call__(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk: tokens[i] follows the token whose outputs are features[i], [T, layers * D]."""
        num_rows = padded(len(tokens))
        given = self._told(slot, tokens, num_rows)
        parts = features.unflatten(-1, (len(self._features), -1)).transpose(0, 1)
        if num_rows <= self._most:
            graph = self._graph(num_rows)
            send(given, self._given[: len(given)])
            self._features[:, : len(tokens)] = parts
            graph.replay()
        else:
            room = parts.new_zeros(len(parts), num_rows, parts.shape[2])
            room[:, : len(tokens)] = parts
            self._launch(sent(given, self._device), room)
        self._state.advance(slot, len(tokens))

    def _told(self, slot: int, tokens: Sequence[int], num_rows: int) -> Tensor:
        """int32 on the host: number of tokens, slot, the place of its tail, the last token's row;
        at FIRST the tokens; then how many of each run of CHUNK rows are tokens."""
        count = len(tokens)
        words = torch.zeros(_words(num_rows), dtype=torch.int32)
        place = 2 * slot + self._state.logs[slot].bank
        words[: FIRST + count] = torch.tensor([count, slot, place, count - 1, *tokens])
        rest = range(count, count - num_rows, -CHUNK)
        words[FIRST + num_rows :] = torch.tensor([max(0, min(CHUNK, n)) for n in rest])
        return words

    def _graph(self, num_rows: int) -> torch.cuda.CUDAGraph:
        if num_rows not in self._graphs:
            given = self._given[: _words(num_rows)]
            features = self._features[:, :num_rows]
            given.zero_()  # the padding slot, no token
            self._graphs[num_rows], _ = captured(lambda: self._launch(given, features))
        return self._graphs[num_rows]

    def _launch(self, given: Tensor, features: Tensor) -> None:
        """given: see `_told`; features [layers, M, D], M a multiple of CHUNK."""
        count, at = given[:1], given[1:FIRST].long()
        slot, place, end = at[:1], at[1:2], at[2:]
        layer, tails = self._state.layers[0], self._state.layers[0].tail.flatten(0, 1)
        S, tail = layer.S.index_select(0, slot), tails.index_select(0, place)
        x, residual = self._inputs(given, features)
        y, h = linear(x, self._block.in_proj), torch.empty_like(residual)
        room = self._layer.room(len(x))
        o = self._layer.recur(self._block, y, (S[0], tail[0]), count, room)
        self._layer.finish(self._block, residual, h, y, o, self._w.norm)
        layer.S.index_copy_(0, slot, S)
        tails.index_copy_(0, place, tail)
        self._last.index_copy_(0, slot, residual.index_select(0, end))

    def _inputs(self, given: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's inputs x [M, T + D], and residual [M, D]; rows past the tokens are zero."""
        w, num_rows = self._w, features.shape[1]
        tokens, counts = given[FIRST : FIRST + num_rows], given[FIRST + num_rows :]
        rows = torch.arange(num_rows, dtype=torch.int32, device=given.device)
        wide = features.new_empty(num_rows, w.fc.shape[1])
        kernels.take_features(features, counts, rows, w.fc_norms, wide, self._eps)
        g = linear(wide, w.fc)
        x = g.new_zeros(num_rows, w.embed_norm.shape[0] + g.shape[1])
        residual = torch.zeros_like(g)
        kernels.encode_inputs(
            tokens.view(-1, CHUNK), counts, g, 1, 1, w.embeddings, w.embed_norm, w.feature_norm,
            x, residual, self._eps,
        )  # fmt: skip
        return x, residual


def _words(num_rows: int) -> int:
    """Of what is sent."""
    return FIRST + num_rows + num_rows // CHUNK
