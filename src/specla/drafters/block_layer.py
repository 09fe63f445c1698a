# SPDX-License-Identifier: Apache-2.0
"""What a block drafter launches in a round on the device (`block_device`): a chain of kernels over
buffers at fixed addresses.

    begin, take_features, fc, norm, keys and values, append     what was accepted, into the caches
    embed + norm                                                the anchor and its masks
    q k v, attend, o, residual + norm, gate_up, down, residual + norm      a layer
    what a reader asks the target's states                      before the last layer's gate_up
    head                                                        base logits of all positions

then without a Markov head one tree over all laws (`triton_marginals`)

    top_blocks, best_first

and with one a level of the tree at a time (`triton_grow`)

    correction, top_blocks, extend

Nothing allocates or asks the device anything once the buffers are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters import triton_block as kernels
from specla.drafters import triton_grow as growing
from specla.drafters.block_model import BlockModel, LayerWeights
from specla.drafters.device_chain import Chain, Pool
from specla.drafters.eagle_buffers import Limits
from specla.drafters.reader_device import DeviceReader
from specla.drafters.triton_eagle import take_features
from specla.drafters.triton_marginals import best_first
from specla.ops import rows
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.gemm import PackedLinear, pack_swiglu
from specla.ops.transfer import sent


class _Layer(NamedTuple):
    """The products of a layer."""

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class BlockLayer(Chain):
    """The launches of one drafter.

    Args:
        model: its weights, of which what the kernels want otherwise is packed besides.
        kept: the caches, [layers, 2, slots, room, H, d].
        windows: how far each layer's positions see; None: all the way.
        longest: most tokens of a row that is drafted for.
    """

    def __init__(
        self, model: BlockModel, kept: Tensor, limits: Limits, *, windows: Sequence[int | None],
        longest: int,
    ) -> None:  # fmt: skip
        w, config = model.weights, model.config
        super().__init__(w.fc, config.norm_eps)
        self._w, self._config, self._limits = w, config, limits
        self._kept, self._windows, self._longest = kept, windows, longest
        self._block = config.block_size
        self._first = 0 if config.shift_label else 1
        """The position that predicts the first draft."""
        self._turns = model.reserve(kept.shape[3] + self._block).float()
        self._k_norms = torch.stack([layer.k_norm for layer in w.layers])
        self._norms = [layer.attn_norm for layer in w.layers[1:]] + [w.norm]
        self.reader: DeviceReader | None = None
        """What the last layer asks the target's states, once it is attached to them."""
        self._pack()
        self._make_room()

    # ---- the host's side

    def load(self, lengths: Sequence[int]) -> None:
        """The rows that come, by their committed tokens."""
        columns = torch.zeros(self._cursors.shape, dtype=torch.int32)
        columns[0, : len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
        self._cursors.copy_(sent(columns, self._cursors.device))

    def read(self, num_rows: int) -> list[list[int]]:
        """Cursors of the first rows: the fields of `triton_block.Cursors`."""
        values: list[list[int]] = self._cursors[:, :num_rows].t().tolist()
        return values

    @property
    def round_bytes(self) -> int:
        """Of what a round's launches read once, however deep it drafts."""
        read = sum(x.weight.numel() * x.weight.element_size() for x in self._every)
        return read + (0 if self.reader is None else self.reader.round_bytes)

    @property
    def _every(self) -> list[PackedLinear]:
        """Products that a round launches once."""
        return [self._fc, self._kv, self._head, *(x for layer in self._layers for x in layer)]

    @property
    def level_bytes(self) -> int:
        """Of those that a level reads."""
        weight = None if self._markov is None else self._markov.weight
        return 0 if weight is None else weight.numel() * weight.element_size()

    # ---- launches

    def __call__(self, arrays: RowArrays, rnd: DeviceRound, features: Tensor, depth: int) -> None:
        drafts = min(rnd.tokens.shape[1], self._limits.nodes) - 1
        depth = min(depth, drafts)
        given, cursors = self._begin(rnd, drafts)
        self._append(rnd, given, features, reads=drafts > 0)
        if not drafts:
            return
        h = self._outputs(rnd, given, cursors)
        base = self._take("base", h.shape[0], self._w.head.shape[0])
        self._head(h, base)
        if self._markov is None:
            self._best_first(arrays, rnd, given, base, drafts, depth)
        else:
            self._grow(arrays, rnd, given, base, drafts, depth)

    def _begin(self, rnd: DeviceRound, drafts: int) -> tuple[kernels.Given, kernels.Cursors]:
        num_rows, block = rnd.tokens.shape[0], self._block
        # A row that is alone may have been in a round of more nodes before.
        path = self._limits.path if num_rows == 1 else min(self._limits.path, rnd.tokens.shape[1])
        start, count, size, frontier = self._take("given", 4, num_rows)
        given = kernels.Given(
            start, count, self._take("source", num_rows * path),
            self._take("tokens", num_rows, block), size, frontier,
        )  # fmt: skip
        cursors = kernels.Cursors(*self._cursors[:, :num_rows])
        table = None if self._w.markov is None or not drafts else self._w.markov[0]
        x = None if table is None else self._take("looked_up", num_rows, table.shape[1])
        kernels.begin(
            rnd, cursors, given, table, x,
            mask_id=self._config.mask_token_id, longest=self._longest,
        )  # fmt: skip
        return given, cursors

    def _append(
        self, rnd: DeviceRound, given: kernels.Given, features: Tensor, *, reads: bool
    ) -> None:
        num_flat = given.source.shape[0]
        wide = self._take("features", num_flat, self._fc.weight.shape[1])
        take_features(features, given.count, given.source, None, wide, self._eps)
        if reads and self.reader is not None:
            # Here, as the next product's weights are on their way meanwhile.
            self.reader.read(rnd, given.size, pdl=self._pdl)
        self._fc(wide, self.partials)
        c = self._take("context", num_flat, self._config.hidden_size)
        self._add(None, self._fc, self._w.context_norm, c)
        kv = self._take("kv", num_flat, self._kv.weight.shape[0])
        self._kv(c, kv)
        kernels.append(
            kv, rnd.slot, given.start, given.count, self._k_norms, self._turns, self._kept,
            self._eps, pdl=self._pdl,
        )  # fmt: skip

    def _outputs(self, rnd: DeviceRound, given: kernels.Given, cursors: kernels.Cursors) -> Tensor:
        """Normed outputs [B * block, D] of the blocks."""
        num_flat, width = given.tokens.numel(), self._config.hidden_size
        x, h = self._take("x", num_flat, width), self._take("h", num_flat, width)
        rows.embed_norm(
            given.tokens, given.size, self._w.embeddings, self._w.layers[0].attn_norm, x, h,
            self._eps, pdl=self._pdl, early=self._early(num_flat),
        )  # fmt: skip
        num, config = kernels.num_parts(self._kept.shape[3]), self._config
        size = num_flat, config.num_heads, num
        parts = kernels.Parts(
            self._take("sums", *size, config.head_dim), self._take("scale", *size, 2)
        )
        for i, (layer, w) in enumerate(zip(self._layers, self._w.layers, strict=True)):
            y = self._take("y", num_flat, layer.qkv.weight.shape[0])
            layer.qkv(h, y)
            o = self._take("o", num_flat, layer.o.weight.shape[1])
            kernels.attend(
                y, rnd.slot, cursors.length, given.size, (w.q_norm, w.k_norm), self._turns,
                self._kept[i], parts, o, self._eps, window=self._windows[i],
                causal=self._config.causal(i), pdl=self._pdl,
            )  # fmt: skip
            layer.o(o, self.partials)
            self._add(x, layer.o, w.mlp_norm, h)
            if self.reader is not None and layer is self._layers[-1]:
                self.reader(h, given.size)
            hidden = self._take("hidden", num_flat, layer.down.weight.shape[1])
            self._mlp(x, h, hidden, layer.gate_up, layer.down, self._norms[i])
        return h

    def _best_first(
        self, arrays: RowArrays, rnd: DeviceRound, given: kernels.Given, base: Tensor,
        drafts: int, depth: int,
    ) -> None:  # fmt: skip
        best = self._pool.best(base.shape[0])
        growing.top_blocks(base, given.size, best, pdl=self._pdl)
        best_first(
            best, self._first, depth, arrays.remaining, given.frontier, rnd,
            max_drafts=drafts, tau=self._limits.tau, spine=self._limits.spine, pdl=self._pdl,
        )  # fmt: skip

    def _grow(
        self, arrays: RowArrays, rnd: DeviceRound, given: kernels.Given, base: Tensor,
        drafts: int, depth: int,
    ) -> None:  # fmt: skip
        num_rows, num_nodes = rnd.tokens.shape
        width = min(self._limits.top_k, drafts)
        rules = growing.Rules(width, drafts, self._limits.tau, self._limits.spine)
        grown = [self._pool.grown(i, num_rows, num_nodes, width) for i in range(3)]
        grown[0] = grown[0]._replace(count=given.frontier)
        laws, x = base.unflatten(0, (num_rows, -1)), self._looked_up(num_rows)
        for level, tree, after in growing.levels(rnd, grown, depth):
            best = self._likeliest(x, tree.count, laws[:, self._first + level])
            x = self._looked_up(num_rows * width)
            further = None if level + 1 == depth else growing.Lookup(self._table, x)
            growing.extend(
                best, None, arrays.remaining, rnd.num_nodes, tree, after,
                self._take("best_score", num_rows), rules, further, is_first=level == 0,
                pdl=self._pdl,
            )  # fmt: skip

    def _likeliest(self, x: Tensor, count: Tensor, base: Tensor) -> growing.Best:
        """Of a frontier's nodes, at one position: its base logits [B, vocab], corrected for the
        tokens that were looked up."""
        assert self._markov is not None
        logits, best = self._take("logits", len(x), base.shape[1]), self._pool.best(len(x))
        self._markov(x, logits)
        growing.top_blocks(logits, count, best, base, pdl=self._pdl)
        return best

    def _looked_up(self, num_flat: int) -> Tensor:
        return self._take("looked_up", num_flat, self._table.shape[1])

    @property
    def _table(self) -> Tensor:
        assert self._w.markov is not None
        return self._w.markov[0]

    # ---- once

    def _pack(self) -> None:
        w, pdl = self._w, self._pdl
        self._fc = PackedLinear(w.fc, "partials", pdl=pdl)
        # A context token's keys and values of all layers come from one vector.
        self._kv = PackedLinear(torch.cat([layer.kv for layer in w.layers]), "plain", pdl=pdl)
        self._layers = [self._packed(layer) for layer in w.layers]
        self._head = PackedLinear(w.head, "plain", pdl=pdl)
        self._markov = None if w.markov is None else PackedLinear(w.markov[1], "plain", pdl=pdl)
        self._serve_few([*self._every, *([] if self._markov is None else [self._markov])])

    def _packed(self, w: LayerWeights) -> _Layer:
        return _Layer(
            qkv=PackedLinear(torch.cat([w.q, w.kv]), "plain", pdl=self._pdl),
            o=PackedLinear(w.o, "partials", pdl=self._pdl),
            gate_up=PackedLinear(pack_swiglu(w.gate_up), "swiglu", pdl=self._pdl),
            down=PackedLinear(w.down, "partials", pdl=self._pdl),
        )

    def _make_room(self) -> None:
        w, limits, config, layer = self._w, self._limits, self._config, self._layers[0]
        B, F, dtype, device = limits.rows, limits.frontier, w.fc.dtype, w.fc.device
        block, path, (vocab, D) = B * self._block, B * limits.path, w.head.shape
        grows = self._markov is not None
        self._pool = Pool(
            num_rows=B, num_nodes=limits.nodes, width=F, num_logits=B * F if grows else block,
            vocab=vocab, top_k=limits.top_k, device=device,
        )  # fmt: skip
        self._take = self._pool.take
        self._pool.add(
            dtype,
            features=path * self._fc.weight.shape[1],
            context=path * D,
            kv=path * self._kv.weight.shape[0],
            x=block * D,
            h=block * D,
            y=block * layer.qkv.weight.shape[0],
            o=block * layer.o.weight.shape[1],
            hidden=block * config.intermediate_size,
            looked_up=B * F * config.markov_rank,
        )
        heads = block * config.num_heads * kernels.num_parts(self._kept.shape[3])
        self._pool.add(
            torch.float32, base=block * vocab, logits=B * F * vocab if grows else 0,
            sums=heads * config.head_dim, scale=2 * heads,
        )  # fmt: skip
        self._pool.add(torch.int32, given=4 * B, source=path, tokens=block)
        split = [(self._fc, path), *((x, block) for y in self._layers for x in (y.o, y.down))]
        most = max(linear.workspace_elements(n) for linear, n in split)
        self.partials = torch.zeros(most, device=device)
        self._cursors = torch.zeros(
            len(kernels.Cursors._fields), B, dtype=torch.int32, device=device
        )
