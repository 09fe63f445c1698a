# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE drafter launches in a round on the device (`eagle_device`): a chain of kernels
over buffers at fixed addresses.

    begin, take_features, fc, encode_inputs, in_proj, the mixer's, o_proj, residual + norm,
    gate_up, down, residual + norm, settle          re-encode what was accepted, and commit it
    head, top_blocks, extend                        children of the root
    in_proj, the mixer's, o_proj, residual + norm, gate_up, down, residual + norm, head,
    top_blocks, extend                              a level more: ten launches

The mixer's: `eagle_gdn_device` or `eagle_attention_device`. Nothing allocates or asks the device
anything once the buffers are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters import triton_grow as growing
from specla.drafters.device_chain import Chain
from specla.drafters.eagle_attention import KeptAttention
from specla.drafters.eagle_attention_device import AttentionLaunches
from specla.drafters.eagle_buffers import Buffers, Frontier, Limits, Linears, MixerLaunches
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_gdn_device import GdnLaunches
from specla.drafters.eagle_mixer import Cursor
from specla.drafters.eagle_model import EagleModel
from specla.models.gdn_weights import BlockWeights
from specla.ops.capture import captured
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.gemm import PackedLinear, pack_swiglu
from specla.ops.transfer import ints, send, sent
from specla.state.rounds import bucket

TOLD = 3
"""Words about a row that is given tokens, besides these."""


class EagleLayer(Chain):
    """The launches of one drafter. Its weights are the model's, except those that are packed for
    the kernels besides; slots and last outputs are shared with it."""

    def __init__(self, model: EagleModel, limits: Limits) -> None:
        w = model.weights
        super().__init__(w.fc, model.config.norm_eps)
        self._model, self._w, self._limits = model, w, limits
        self._mixer = _launches(model)
        self._linears = self._pack()
        self._buffers = Buffers(w, self._linears, self._mixer, limits)
        self.partials = self._buffers.partials
        self._takes: dict[tuple[int, int], Callable[[], object]] = {}

    # ---- the host's side

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """The rows that come: cursors, and whether there is an output."""
        self.move((), rows)

    def resume(self) -> None:
        """What the target's last round has accepted is to be taken in by the next launch."""
        self._buffers.cursors[4].fill_(1)

    def move(self, places: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Only the rows at these places are left, and behind them others that come. Nothing of
        theirs waits to be encoded."""
        cursors, count = self._buffers.cursors, len(places)
        left = cursors[:4].index_select(1, ints(places, cursors.device)) if count else None
        columns = torch.zeros(cursors.shape, dtype=torch.int32)
        if rows:
            columns[:4, count : count + len(rows)] = torch.tensor(rows, dtype=torch.int32).t()
        cursors.copy_(sent(columns, cursors.device))
        if left is not None:
            cursors[:4, :count] = left

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
        cursors: Sequence[Cursor] | None,
        tokens: Sequence[Sequence[int]],
        features: Tensor,
    ) -> None:
        """Encode accepted tokens outside a round, as a round that had accepted them, without
        waiting for the device. cursors: None: as the device has them, whose rows these are.
        features [n, layers * T]: a row per token, end to end."""
        num_rows, longest = bucket(len(slots)), max(map(len, tokens))
        width = next(n for n in self._widths if longest <= n)
        # First: making it launches over idle rows.
        launch = self._taking(num_rows, width)
        told, room = self._given(num_rows, width)
        send(_told(slots, tokens, num_rows, width), told)
        at = [b * width + j for b, row in enumerate(tokens) for j in range(len(row))]
        room[:, ints(at, room.device)] = features.unflatten(-1, (len(room), -1)).transpose(0, 1)
        if cursors is not None:
            self.load([(*cursor, 1) for cursor in cursors])
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
        if depth:
            self._grow(arrays, rnd, cursors, root, drafts, depth)

    def _encode(
        self, rnd: DeviceRound, enc: DeviceRound, cursors: kernels.Cursors, features: Tensor
    ) -> Tensor:
        """Take in what was accepted. Returns the residual rows [B, D] of the roots; their normed
        form is in buffers.h."""
        w, make, num_flat = self._w, self._buffers.take, enc.tokens.numel()
        num_rows, longest = enc.tokens.shape[0], self._mixer.longest
        source, start = make("source", num_flat), make("start", num_rows)
        kernels.begin(rnd, cursors, enc, source, start, longest)
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
        self._mixer.encode(enc, start, y)
        h = self._finish(residual)
        root, top = make("root", num_rows, h.shape[1]), make("h", num_rows, h.shape[1])
        kernels.settle(
            rnd, enc, cursors, residual, self._model.last, w.norm, root, top,
            make("count", 3, self._limits.rows)[0, :num_rows], longest, self._eps, pdl=self._pdl,
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
        chain = self._buffers.chain(num_rows, 1 + width * (depth - 1))
        grown = [self._buffers.grown(i, num_rows, num_nodes, width) for i in range(3)]
        best_score, h = make("best_score", num_rows), make("h", num_rows, before.shape[1])
        for level, tree, after in growing.levels(rnd, grown, depth):
            best = self._likeliest(h, tree.count)
            first, reading = 1 + level * width, None
            if level + 1 < depth:
                reading = self._reading(before, chain, num_rows * width, first, level % 2)
            growing.extend(
                best, self._w.d2t, arrays.remaining, rnd.num_nodes, tree, after, best_score,
                rules, reading, is_first=level == 0, pdl=self._pdl,
            )  # fmt: skip
            if reading is not None:
                h = self._step(rnd, cursors, Frontier(after.count, chain, first), reading)
                before = reading.residual

    def _reading(
        self, before: Tensor, chain: Tensor, num_flat: int, first: int, turn: int
    ) -> growing.Reading:
        w, make = self._w, self._buffers.take
        return growing.Reading(
            w.embeddings, w.embed_norm, w.feature_norm, before,
            x=make("x", num_flat, self._linears.in_proj.weight.shape[1]),
            residual=make(("residual", "other")[turn], num_flat, before.shape[1]),
            chain=chain, first=first, eps=self._eps,
        )  # fmt: skip

    def _step(
        self, rnd: DeviceRound, cursors: kernels.Cursors, at: Frontier, reading: growing.Reading
    ) -> Tensor:
        """The layer at a frontier. Leaves its outputs in `reading.residual`; returns them normed
        for the head."""
        num_flat = reading.x.shape[0]
        y = self._buffers.take("y", num_flat, self._linears.in_proj.weight.shape[0])
        self._linears.in_proj(reading.x, y)
        self._mixer.step(rnd, cursors, at, y)
        return self._finish(reading.residual)

    def _finish(self, residual: Tensor) -> Tensor:
        """What comes after the mixer: its output and the MLP's, added to `residual`."""
        linears, make = self._linears, self._buffers.take
        h = make("h", *residual.shape)
        self._add(residual, linears.o_proj, self._w.mlp_norm, h)
        hidden = make("hidden", len(h), linears.down.weight.shape[1])
        self._mlp(residual, h, hidden, linears.gate_up, linears.down, self._w.norm)
        return h

    def _likeliest(self, h: Tensor, count: Tensor) -> growing.Best:
        logits = self._buffers.take("logits", h.shape[0], self._w.head.shape[0])
        self._linears.head(h, logits)
        best = self._buffers.best(h.shape[0])
        growing.top_blocks(logits, count, best, pdl=self._pdl)
        return best

    def _pack(self) -> Linears:
        w, pdl, mixer = self._w, self._pdl, self._mixer
        linears = Linears(
            fc=PackedLinear(w.fc, "partials", pdl=pdl),
            in_proj=mixer.in_proj,
            o_proj=mixer.o_proj,
            gate_up=PackedLinear(pack_swiglu(w.gate_up), "swiglu", pdl=pdl),
            down=PackedLinear(w.down, "partials", pdl=pdl),
            head=PackedLinear(w.head, "plain", pdl=pdl),
        )
        self._serve_few(x for x in linears if x not in (mixer.in_proj, mixer.o_proj))
        return linears


def _launches(model: EagleModel) -> MixerLaunches:
    """Those of the model's mixer."""
    mixer, w, config = model.mixer, model.weights.mixer, model.config
    if isinstance(w, BlockWeights):
        assert isinstance(mixer, GdnMixer)
        return GdnLaunches(w, mixer, config.recurrent, config.norm_eps)
    assert isinstance(mixer, KeptAttention)
    return AttentionLaunches(w, mixer, config)


def _told(
    slots: Sequence[int], tokens: Sequence[Sequence[int]], num_rows: int, width: int
) -> Tensor:
    """int32 on the host, a column per row: slot, whether it is live, how many tokens; then by row
    the tokens of nodes 0 .. n - 1, of which node 0's is the last: it is the next tree's root."""
    words = torch.zeros(num_rows, TOLD + width, dtype=torch.int32)
    for b, (slot, row) in enumerate(zip(slots, tokens, strict=True)):
        if row:
            words[b, : TOLD + len(row)] = torch.tensor([slot, 1, len(row), row[-1], *row[:-1]])
    return torch.cat((words[:, :TOLD].t().flatten(), words[:, TOLD:].flatten()))
