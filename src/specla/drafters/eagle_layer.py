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

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters import triton_grow as growing
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_model import EagleModel
from specla.models.gdn_fused import is_hopper, stream_linear
from specla.models.gdn_weights import BlockWeights
from specla.ops import rows
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.gdn import triton as gdn
from specla.ops.gemm import MAX_ROWS, PackedLinear, pack_swiglu
from specla.state.rounds import bucket


class Limits(NamedTuple):
    """Most rows, nodes and depth that a drafter is asked for, and its rules of growing."""

    rows: int
    nodes: int
    depth: int
    top_k: int
    tau: float
    spine: bool


class _Linears(NamedTuple):
    fc: PackedLinear
    in_proj: PackedLinear
    o_proj: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    head: PackedLinear


class EagleLayer:
    """The launches of one drafter. Its weights are the model's, except gate_up, which is packed
    for the kernels besides; slots and last outputs are shared with it."""

    def __init__(self, model: EagleModel, limits: Limits) -> None:
        w = model.weights
        assert isinstance(model.mixer, GdnMixer)
        assert isinstance(w.mixer, BlockWeights)
        self._model, self._w, self._mixer, self._limits = model, w, w.mixer, limits
        self._state, self._eps = model.mixer.state, model.config.norm_eps
        self._shape = s = model.config.recurrent
        self._pdl = is_hopper(w.fc)
        self._linears = self._pack()
        self._taps = w.mixer.conv.t().contiguous()
        self._mix_rows = self._stream_rows = 0
        if self._pdl:
            self._stream()
        self._buffers = _Buffers(self, limits)
        assert self._buffers.max_rows <= MAX_ROWS, "fewer slots or a smaller top_k"
        self._target_ids = w.d2t
        assert s.num_layers == 1

    # ---- the host's side

    def load(self, values: Sequence[tuple[int, int, bool]]) -> None:
        """Cursors of the rows that come: bank, path_len and whether there is an output."""
        columns = torch.zeros(len(kernels.Cursors._fields), self._limits.rows, dtype=torch.int32)
        columns[:3, : len(values)] = torch.tensor(values, dtype=torch.int32).t()
        self._buffers.cursors.copy_(columns)

    def read(self, num_rows: int) -> list[list[int]]:
        """Cursors of the first rows: the fields of `Cursors`."""
        values: list[list[int]] = self._buffers.cursors[:, :num_rows].t().tolist()
        return values

    # ---- launches

    def __call__(self, arrays: RowArrays, rnd: DeviceRound, features: Tensor) -> None:
        num_rows, num_nodes = rnd.tokens.shape
        drafts = min(num_nodes, self._limits.nodes) - 1
        depth = min(self._limits.depth, drafts)
        enc = self._buffers.encoding(num_rows, min(num_nodes, self._limits.depth + 1))
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
        kernels.take_features(features, enc, source, w.fc_norms, wide, self._eps)
        fc, partials = self._linears.fc, self._buffers.partials
        fc(wide, partials)
        x = make("x", num_flat, self._linears.in_proj.weight.shape[1])
        residual = make("residual", num_flat, w.norm.shape[0])
        kernels.encode_inputs(
            enc, partials, fc.num_partials(num_flat), fc.max_partials, w.embeddings, w.embed_norm,
            w.feature_norm, x, residual, self._eps, pdl=self._pdl,
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
        grown[0] = grown[0]._replace(tokens=rnd.tokens)
        best_score = make("best_score", num_rows)
        tree, h = grown[0], make("h", num_rows, before.shape[1])
        for level in range(depth):
            best = self._likeliest(h, tree.count)
            is_last, first = level + 1 == depth, 1 + level * width
            after, reading = grown[1 + level % 2], None
            if is_last:
                after = after._replace(
                    tokens=rnd.tokens, parents=rnd.parents, num_nodes=rnd.num_nodes
                )
            else:
                reading = self._reading(before, steps, num_rows * width, first, level % 2)
            growing.extend(
                best, self._target_ids, arrays.remaining, rnd.num_nodes, tree, after, best_score,
                rules, reading, is_first=level == 0, pdl=self._pdl,
            )  # fmt: skip
            tree = after
            if reading is not None:
                h = self._step(rnd, cursors, steps, tree.count, reading)
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
        linears.gate_up(h, hidden)
        linears.down(hidden, partials)
        self._add(residual, linears.down, self._w.norm, h)
        return h

    def _add(self, x: Tensor, linear: PackedLinear, norm: Tensor, h: Tensor) -> None:
        rows.add_partials_norm(
            x, self._buffers.partials, norm, h, self._eps,
            num_partials=linear.num_partials(x.shape[0]), max_partials=linear.max_partials,
            pdl=self._pdl, early=self._early(x.shape[0]),
        )  # fmt: skip

    def _likeliest(self, h: Tensor, count: Tensor) -> growing.Best:
        logits = self._buffers.take("logits", h.shape[0], self._w.head.shape[0])
        self._linears.head(h, logits)
        best = self._buffers.best(h.shape[0])
        growing.top_blocks(logits, count, best, pdl=self._pdl)
        return best

    def _early(self, num_flat: int) -> bool:
        return num_flat <= self._stream_rows

    def _pack(self) -> _Linears:
        w, pdl = self._w, self._pdl
        return _Linears(
            fc=PackedLinear(w.fc, "partials", pdl=pdl),
            in_proj=PackedLinear(self._mixer.in_proj, "plain", pdl=pdl),
            o_proj=PackedLinear(self._mixer.o_proj, "partials", pdl=pdl),
            gate_up=PackedLinear(pack_swiglu(w.gate_up), "swiglu", pdl=pdl),
            down=PackedLinear(w.down, "partials", pdl=pdl),
            head=PackedLinear(w.head, "plain", pdl=pdl),
        )

    def _stream(self) -> None:
        """Serve few rows by `ops.gemm_stream`, as the target does."""
        from specla.ops import gemm_stream as stream

        width, o_proj = self._shape.value_dim, self._linears.o_proj
        mixes = o_proj.tiling.span % width == 0
        for linear in self._linears:
            stream_linear(linear, width if linear is o_proj and mixes else 0)
        if mixes and o_proj.stream:
            self._mix_rows = stream.MAX_MIX_ROWS
        self._stream_rows = stream.MAX_ROWS


class _Buffers:
    """Everything that launches write, allocated once. A buffer is a flat run of elements; each
    use takes its first ones in the shape it needs."""

    def __init__(self, layer: EagleLayer, limits: Limits) -> None:
        w, s, linears = layer._w, layer._shape, layer._linears
        self._limits, self._shape, device, dtype = limits, s, w.fc.device, w.fc.dtype
        B, N, F = limits.rows, bucket(limits.nodes), min(limits.top_k, max(1, limits.nodes - 1))
        path = bucket(min(N, limits.depth + 1))
        self.max_rows = most = B * max(path, F)
        self._chain = bucket(max(limits.depth, s.conv_width - 1))
        X, D, vocab = 1 + F * max(0, limits.depth - 1), *reversed(w.head.shape)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.cursors = zeros(len(kernels.Cursors._fields), B, dtype=torch.int32)
        self._flat = {
            "features": zeros(B * path * w.fc.shape[1], dtype=dtype),
            "x": zeros(most * linears.in_proj.weight.shape[1], dtype=dtype),
            "y": zeros(most * linears.in_proj.weight.shape[0], dtype=dtype),
            "mixed": zeros(most * s.num_value_heads * s.value_dim, dtype=dtype),
            "hidden": zeros(most * linears.down.weight.shape[1], dtype=dtype),
            **{name: zeros(most * D, dtype=dtype) for name in ("residual", "other", "root", "h")},
            "logits": zeros(B * F * vocab),
            "best_score": zeros(B, dtype=torch.float64),
            "source": zeros(B * path, dtype=torch.int32),
            "count": zeros(3 * B, dtype=torch.int32),
            "enc": zeros(2 * B + B * path, dtype=torch.int32),
            **{f"tree{i}": zeros(B * (3 * N + F + 1), dtype=torch.int32) for i in range(3)},
            **{f"score{i}": zeros(B * N, dtype=torch.float64) for i in range(3)},
            "k": zeros(B * X * s.num_key_heads * s.key_dim),
            "u": zeros(B * X * s.num_value_heads * s.value_dim),
            "g": zeros(B * X * s.num_value_heads),
            "inputs": zeros(B * X * s.conv_channels, dtype=dtype),
            "chain": zeros(B * X * self._chain, dtype=torch.int32),
        }
        split = (linears.fc, linears.o_proj, linears.down)
        self.partials = zeros(max(x.workspace_elements(most) for x in split))
        self._workspace = gdn.Workspace.allocate(s, most, dtype, device)
        self._best = growing.Best.allocate(B * F, vocab, min(limits.top_k, vocab), device)
        chain = torch.arange(-1, path - 1, dtype=torch.int32, device=device)
        self._chains = {n: chain[:n].repeat(B, 1) for n in {bucket(i + 1) for i in range(path)}}
        self._paths = torch.arange(limits.nodes, dtype=torch.int32, device=device).repeat(B, 1)
        self._walks = kernels.chain_walk(B, path, device)
        self._ring_len = zeros(B, dtype=torch.int32)

    def take(self, name: str, *size: int) -> Tensor:
        """A buffer's first elements."""
        return self._flat[name][: torch.Size(size).numel()].view(size)

    def workspace(self, num_flat: int) -> gdn.Workspace:
        """Of `prepare` and the walk, for so many nodes."""
        return gdn.Workspace(*(x[:num_flat] for x in self._workspace))

    def best(self, num_flat: int) -> growing.Best:
        """For so many rows of logits."""
        return growing.Best(*(x[:num_flat] for x in self._best))

    def encoding(self, num_rows: int, nodes: int) -> DeviceRound:
        """The round of re-encoding: chains of up to `nodes` nodes."""
        width = bucket(nodes)
        integers = self.take("enc", 2 * num_rows + num_rows * width)
        return DeviceRound(
            slot=integers[:num_rows],
            num_nodes=integers[num_rows : 2 * num_rows],
            tokens=integers[2 * num_rows :].view(num_rows, width),
            parents=self._chains[width][:num_rows],
            bank=self.cursors[0, :num_rows],
            ring_len=self._ring_len[:num_rows],
            path_len=self.cursors[1, :num_rows],
            path=self._paths[:num_rows],
            walk=self._walks[:num_rows],
        )

    def steps(self, num_rows: int, count: int) -> kernels.Steps:
        """Draft-time factors of so many steps per row."""
        s = self._shape
        return kernels.Steps(
            k=self.take("k", num_rows, count, s.num_key_heads, s.key_dim),
            u=self.take("u", num_rows, count, s.num_value_heads, s.value_dim),
            g=self.take("g", num_rows, count, s.num_value_heads),
            inputs=self.take("inputs", num_rows, count, s.conv_channels),
            chain=self.take("chain", num_rows, count, self._chain),
        )

    def grown(self, i: int, num_rows: int, num_nodes: int, width: int) -> growing.Grown:
        """One of three results of a level; the first is the root's alone."""
        size = num_rows * num_nodes
        words = self.take(f"tree{i}", 3 * size + num_rows * (width + 1))
        tokens, parents, spine = words[: 3 * size].view(3, num_rows, num_nodes)
        return growing.Grown(
            tokens=tokens,
            parents=parents,
            num_nodes=words[3 * size : 3 * size + num_rows],
            score=self.take(f"score{i}", num_rows, num_nodes),
            spine=spine,
            place=words[3 * size + num_rows :].view(num_rows, width),
            count=self.take("count", 3, self._limits.rows)[i, :num_rows],
        )
