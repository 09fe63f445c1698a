# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE-GDN drafter launches in a round on the device (`eagle_device`): a chain of kernels
over buffers at fixed addresses.

    begin, take_features, fc, encode_inputs, in_proj, prepare, walk, o_proj, residual + norm,
    gate_up, down, residual + norm, settle          re-encode what was accepted, and commit it
    head, top_blocks, extend                        children of the root
    in_proj, mix, o_proj, residual + norm, gate_up, down, residual + norm, head, top_blocks,
    extend                                          a level more: ten launches

The gated norm is part of o_proj for few rows, else a launch of its own. Nothing allocates or asks
the device anything once the buffers are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters import triton_grow as growing
from specla.drafters.device_chain import Chain
from specla.drafters.eagle_buffers import Buffers, Limits, Linears
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_model import EagleModel
from specla.models.gdn_fused import stream_linear
from specla.models.gdn_weights import BlockWeights
from specla.ops import gemm, rows
from specla.ops.capture import captured
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.gdn import triton as gdn
from specla.ops.gemm import PackedLinear, pack_swiglu, tiling_for
from specla.ops.transfer import ints, send, sent
from specla.state.rounds import bucket

TOLD = 3
"""Words about a row that is given tokens, besides these."""


class EagleLayer(Chain):
    """The launches of one drafter. Its weights are the model's, except gate_up, which is packed
    for the kernels besides; slots and last outputs are shared with it."""

    def __init__(self, model: EagleModel, limits: Limits) -> None:
        w = model.weights
        assert isinstance(model.mixer, GdnMixer)
        assert isinstance(w.mixer, BlockWeights)
        super().__init__(w.fc, model.config.norm_eps)
        self._model, self._w, self._mixer, self._limits = model, w, w.mixer, limits
        self._state, self._shape = model.mixer.state, model.config.recurrent
        s = self._shape
        self._linears = self._pack()
        self._taps = w.mixer.conv.t().contiguous()
        self._mix_rows = 0
        if self._pdl:
            self._stream()
        self._buffers = Buffers(w, s, self._linears, limits)
        self.partials = self._buffers.partials
        self._takes: dict[tuple[int, int], Callable[[], object]] = {}
        assert s.num_layers == 1

    # ---- the host's side

    def load(self, values: Sequence[tuple[int, int, bool]]) -> None:
        """Cursors of the rows that come: bank, path_len and whether there is an output."""
        columns = torch.zeros(len(kernels.Cursors._fields), self._limits.rows, dtype=torch.int32)
        if values:
            columns[:3, : len(values)] = torch.tensor(values, dtype=torch.int32).t()
        self._buffers.cursors.copy_(sent(columns, self._buffers.cursors.device))

    def resume(self) -> None:
        """What the target's last round has accepted is to be taken in by the next launch."""
        self._buffers.cursors[3].fill_(1)

    def read(self, num_rows: int) -> list[list[int]]:
        """Cursors of the first rows: the fields of `Cursors`."""
        values: list[list[int]] = self._buffers.cursors[:, :num_rows].t().tolist()
        return values

    @property
    def gate_up(self) -> Tensor:
        """The MLP's first product [2 I, D], packed."""
        return self._linears.gate_up.weight

    @property
    def level_bytes(self) -> int:
        """Of the weights that a level's launches read: all products but fc."""
        read = [x.weight for x in self._linears if x is not self._linears.fc]
        return sum(x.numel() * x.element_size() for x in read)

    @property
    def max_tokens(self) -> int:
        """Most tokens per row of one `take_in`."""
        return self._limits.chunk

    def compile(self) -> None:
        """What `take_in` launches. A graph takes some milliseconds, which rows would wait for."""
        for count in range(self._limits.rows.bit_length()):
            for width in self._widths:
                self._taking(1 << count, width)

    def take_in(
        self,
        slots: Sequence[int],
        cursors: Sequence[tuple[int, int]] | None,
        tokens: Sequence[Sequence[int]],
        features: Tensor,
    ) -> None:
        """Encode accepted tokens outside a round, as a round that had accepted them, without
        waiting for the device. cursors: bank and path_len; None: as the device has them, whose
        rows these are. features [n, layers * T]: a row per token, end to end."""
        num_rows, longest = bucket(len(slots)), max(map(len, tokens))
        width = next(n for n in self._widths if longest <= n)
        # First: making it launches over idle rows.
        launch = self._taking(num_rows, width)
        told, room = self._given(num_rows, width)
        send(_told(slots, tokens, num_rows, width), told)
        at = [b * width + j for b, row in enumerate(tokens) for j in range(len(row))]
        room[:, ints(at, room.device)] = features.unflatten(-1, (len(room), -1)).transpose(0, 1)
        if cursors is not None:
            self.load([(*one, True) for one in cursors])
        self.resume()
        launch()

    @property
    def _widths(self) -> tuple[int, int]:
        """Tokens per row that `take_in` pads to: two, so that few kernels are compiled."""
        return self._limits.path, self.max_tokens

    def _given(self, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Where `take_in` puts what it was told, and features [layers, num_rows * width, T]."""
        size = self._w.embed_norm.shape[0]
        layers, take = self._w.fc.shape[1] // size, self._buffers.take
        told = take("told", num_rows * (TOLD + width))
        return told, take("given", layers, num_rows * width, size)

    def _taking(self, num_rows: int, width: int) -> Callable[[], object]:
        """The launches of `take_in` over what is given, on a GPU as one graph: there are twenty
        of them, and a text that is alone would wait for the host."""
        key = num_rows, width
        if key not in self._takes:
            told, room = self._given(num_rows, width)
            slot, live, lengths = told[: TOLD * num_rows].view(TOLD, num_rows)
            tokens = told[TOLD * num_rows :].view(num_rows, width)
            enc = self._buffers.encoding(num_rows, width)
            given = enc._replace(slot=slot, num_nodes=live, path_len=lengths, tokens=tokens)
            cursors = kernels.Cursors(*self._buffers.cursors[:, :num_rows])
            launch: Callable[[], object] = partial(self._encode, given, enc, cursors, room)
            if told.is_cuda:
                told.zero_()
                graph, _ = captured(launch)
                launch = graph.replay
            self._takes[key] = launch
        return self._takes[key]

    # ---- launches

    def __call__(self, arrays: RowArrays, rnd: DeviceRound, features: Tensor, depth: int) -> None:
        num_rows, num_nodes = rnd.tokens.shape
        drafts = min(num_nodes, self._limits.nodes) - 1
        depth = min(depth, drafts)
        # A row that is alone may have been in a round of more nodes before.
        most = self._limits.nodes if num_rows == 1 else num_nodes
        enc = self._buffers.encoding(num_rows, min(most, self._limits.depth + 1))
        cursors = kernels.Cursors(*self._buffers.cursors[:, :num_rows])
        root = self._encode(rnd, enc, cursors, features)
        if drafts:
            self._grow(arrays, rnd, cursors, root, drafts, depth)

    def _encode(
        self, rnd: DeviceRound, enc: DeviceRound, cursors: kernels.Cursors, features: Tensor
    ) -> Tensor:
        """Take in what was accepted. Returns the residual rows [B, D] of the roots; their normed
        form is in buffers.h."""
        w, s, make, num_flat = self._w, self._shape, self._buffers.take, enc.tokens.numel()
        source = make("source", num_flat)
        kernels.begin(rnd, cursors, enc, source)
        wide = make("features", num_flat, w.fc.shape[1])
        kernels.take_features(features, enc.num_nodes, source, w.fc_norms, wide, self._eps)
        fc, partials = self._linears.fc, self._buffers.partials
        fc(wide, partials)
        x = make("x", num_flat, self._linears.in_proj.weight.shape[1])
        residual = make("residual", num_flat, w.norm.shape[0])
        kernels.encode_inputs(
            enc.tokens, enc.num_nodes, partials, fc.num_partials(num_flat), fc.max_partials,
            w.embeddings, w.embed_norm, w.feature_norm, x, residual, self._eps, pdl=self._pdl,
        )  # fmt: skip
        y = make("y", num_flat, self._linears.in_proj.weight.shape[0])
        self._linears.in_proj(x, y)
        workspace = self._buffers.workspace(num_flat)
        layer = self._state.layers[0]
        gdn.prepare(
            layer, enc, y, self._taps, self._mixer.A, self._mixer.dt_bias, workspace, shape=s,
            log_capacity=0, pdl=self._pdl,
        )  # fmt: skip
        gdn.walk(
            layer, enc, workspace, shape=s, log_capacity=0, threshold=0, branching=False,
            pdl=self._pdl,
        )  # fmt: skip
        h = self._finish(y, workspace.o, residual)
        num_rows = enc.tokens.shape[0]
        root, top = make("root", num_rows, h.shape[1]), make("h", num_rows, h.shape[1])
        kernels.settle(
            rnd, enc, cursors, residual, self._model.last, w.norm, root, top,
            make("count", 3, self._limits.rows)[0, :num_rows], self._eps, pdl=self._pdl,
        )  # fmt: skip
        return root

    def _grow(
        self, arrays: RowArrays, rnd: DeviceRound, cursors: kernels.Cursors, before: Tensor,
        drafts: int, depth: int,
    ) -> None:  # fmt: skip
        """The tree, from the roots' outputs `before` on."""
        num_rows, num_nodes = rnd.tokens.shape
        width, make = min(self._limits.top_k, drafts), self._buffers.take
        rules = growing.Rules(width, drafts, self._limits.tau, self._limits.spine)
        steps = self._buffers.steps(num_rows, 1 + width * (depth - 1))
        grown = [self._buffers.grown(i, num_rows, num_nodes, width) for i in range(3)]
        best_score, h = make("best_score", num_rows), make("h", num_rows, before.shape[1])
        for level, tree, after in growing.levels(rnd, grown, depth):
            best = self._likeliest(h, tree.count)
            first, reading = 1 + level * width, None
            if level + 1 < depth:
                reading = self._reading(before, steps, num_rows * width, first, level % 2)
            growing.extend(
                best, self._w.d2t, arrays.remaining, rnd.num_nodes, tree, after, best_score,
                rules, reading, is_first=level == 0, pdl=self._pdl,
            )  # fmt: skip
            if reading is not None:
                h = self._step(rnd, cursors, steps, after.count, reading)
                before = reading.residual

    def _reading(
        self, before: Tensor, steps: kernels.Steps, num_flat: int, first: int, turn: int
    ) -> growing.Reading:
        w, make = self._w, self._buffers.take
        return growing.Reading(
            w.embeddings, w.embed_norm, w.feature_norm, before,
            x=make("x", num_flat, self._linears.in_proj.weight.shape[1]),
            residual=make(("residual", "other")[turn], num_flat, before.shape[1]),
            chain=steps.chain, first=first, eps=self._eps,
        )  # fmt: skip

    def _step(
        self, rnd: DeviceRound, cursors: kernels.Cursors, steps: kernels.Steps, count: Tensor,
        reading: growing.Reading,
    ) -> Tensor:  # fmt: skip
        """The layer at a frontier. Leaves its outputs in `reading.residual`; returns them normed
        for the head."""
        num_flat = reading.x.shape[0]
        y = self._buffers.take("y", num_flat, self._linears.in_proj.weight.shape[0])
        self._linears.in_proj(reading.x, y)
        o = self._buffers.workspace(num_flat).o
        kernels.mix(
            self._state.layers[0], rnd, cursors, steps, count, reading.first, y, self._taps,
            self._mixer.A, self._mixer.dt_bias, o, shape=self._shape, pdl=self._pdl,
        )  # fmt: skip
        return self._finish(y, o, reading.residual)

    def _finish(self, y: Tensor, o: Tensor, residual: Tensor) -> Tensor:
        """What comes after the recurrence: o_proj and the MLP, added to `residual`."""
        num_flat, linears, make = y.shape[0], self._linears, self._buffers.take
        heads = self._shape.num_value_heads * self._shape.value_dim
        channels = self._shape.conv_channels
        gate, mixed = y[:, channels : channels + heads], make("mixed", num_flat, heads)
        partials, h = self._buffers.partials, make("h", num_flat, residual.shape[1])
        if num_flat <= self._mix_rows and linears.o_proj.stream:
            mix = o, gate, self._mixer.o_norm, self._eps
            linears.o_proj.stream(mixed, partials, mix)
        else:
            rows.gated_norm(
                o, gate, self._mixer.o_norm, mixed, self._eps, pdl=self._pdl,
                early=self._early(num_flat),
            )  # fmt: skip
            linears.o_proj(mixed, partials)
        self._add(residual, linears.o_proj, self._w.mlp_norm, h)
        hidden = make("hidden", num_flat, linears.down.weight.shape[1])
        self._mlp(residual, h, hidden, linears.gate_up, linears.down, self._w.norm)
        return h

    def _likeliest(self, h: Tensor, count: Tensor) -> growing.Best:
        logits = self._buffers.take("logits", h.shape[0], self._w.head.shape[0])
        self._linears.head(h, logits)
        best = self._buffers.best(h.shape[0])
        growing.top_blocks(logits, count, best, pdl=self._pdl)
        return best

    def _pack(self) -> Linears:
        w, pdl = self._w, self._pdl
        return Linears(
            fc=PackedLinear(w.fc, "partials", pdl=pdl),
            in_proj=PackedLinear(self._mixer.in_proj, "plain", pdl=pdl),
            o_proj=self._by_heads(self._mixer.o_proj),
            gate_up=PackedLinear(pack_swiglu(w.gate_up), "swiglu", pdl=pdl),
            down=PackedLinear(w.down, "partials", pdl=pdl),
            head=PackedLinear(w.head, "plain", pdl=pdl),
        )

    def _by_heads(self, weight: Tensor) -> PackedLinear:
        """o_proj in spans of whole heads, so that it can make its own x (`ops.gemm_stream`)."""
        outputs, inputs = weight.shape
        tiling = tiling_for(outputs, inputs, "partials")
        unit = max(self._shape.value_dim, tiling.block_k)
        tiling = tiling._replace(span=-(-tiling.span // unit) * unit)
        return PackedLinear(weight, "partials", tiling=tiling, pdl=self._pdl)

    def _stream(self) -> None:
        """Serve few rows by `ops.gemm_stream`, as the target does."""
        from specla.ops import gemm_stream as stream

        width, o_proj = self._shape.value_dim, self._linears.o_proj
        mixes = o_proj.tiling.span % width == 0
        for linear in self._linears:
            stream_linear(linear, width if linear is o_proj and mixes else 0)
        if mixes and o_proj.stream:
            self._mix_rows = stream.MIX_ROWS
        self._stream_rows = max(stream.MAX_ROWS, gemm.WIDE_ROWS)


def _told(
    slots: Sequence[int], tokens: Sequence[Sequence[int]], num_rows: int, width: int
) -> Tensor:
    """int32 on the host, a column per row: slot, whether it is live, how many tokens; then by row
    the tokens of nodes 0 .. n - 1, of which node 0's is the last: it is the next tree's root."""
    words = torch.zeros(num_rows, TOLD + width, dtype=torch.int32)
    for b, (slot, row) in enumerate(zip(slots, tokens, strict=True)):
        words[b, : TOLD + len(row)] = torch.tensor([slot, 1, len(row), row[-1], *row[:-1]])
    return torch.cat((words[:, :TOLD].t().flatten(), words[:, TOLD:].flatten()))
