# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet decoder as a chain of GPU kernels: one verify, for AR and trees alike.

Per layer: in_proj, prepare, walk, gated norm, o_proj, residual + norm, gate_up + SwiGLU, down,
residual + norm. Nothing here allocates or asks the device anything once it is built, so that a
CUDA graph can hold it. The arithmetic is the CPU decoder's (`models.gdn_decoder`), with float32
logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specla.errors import KernelUnavailable
from specla.models.features import Features
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.ops import gemm, rows
from specla.ops.contract import DeviceRound, RecurrentShape
from specla.ops.gdn import triton as gdn
from specla.ops.gdn import triton_wy as wy
from specla.ops.gdn.triton_wy_form import ClosedForm
from specla.ops.gemm import PROCESSORS, PackedLinear, pack_swiglu
from specla.ops.walk import compile_walks
from specla.state import State
from specla.state.rounds import bucket

HEAD_DIMS = (64, 128, 256)
# The state kernels: what exact mode runs, whatever the round, and what mode fast may run instead.
WALK, CLOSED = "walk", "closed"


@dataclass(frozen=True, slots=True)
class _Layer:
    weights: BlockWeights
    conv_taps: Tensor
    in_proj: PackedLinear
    o_proj: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the chain is launched; with dependent launch on Hopper only. Speed, no bits.

    stream: products by `ops.gemm_stream` and `ops.gemm_wide`. mix: of a few rows, the gated norm
    inside o_proj. early: kernels of one row let their successor start before they wait.
    """

    stream: bool = True
    mix: bool = True
    early: bool = True


class _Buffers:
    """Activations of up to `max_rows` nodes; a call uses the first M rows."""

    def __init__(self, model: FusedDecoder, max_rows: int) -> None:
        w, s, layer = model.weights, model.shape, model.layers[0]
        vocab, width = w.head.shape
        dtype, device = w.head.dtype, w.head.device

        def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.x, self.h = empty(max_rows, width), empty(max_rows, width)
        self.y = empty(max_rows, layer.in_proj.weight.shape[0])
        self.mixed = empty(max_rows, s.num_value_heads * s.value_dim)
        self.hidden = empty(max_rows, layer.down.weight.shape[1])
        partials = max(x.workspace_elements(max_rows) for x in (layer.o_proj, layer.down))
        self.partials = empty(partials, dtype=torch.float32)
        self.logits = empty(max_rows, vocab, dtype=torch.float32)
        self.workspace = gdn.Workspace.allocate(s, max_rows, dtype, device)
        # silu(gate) for the o_proj that mixes, whose programs would each compute it.
        self.gates = self.workspace.o.new_empty(
            min(max_rows, model._mix_rows), s.num_value_heads, s.value_dim
        )


class FusedDecoder:
    """Weights packed for the kernels, and the launches of one verify.

    Args:
        weights: bfloat16 (float32 works, slowly) on one CUDA device.
        pdl: programmatic dependent launch (compute capability 9.0 and later).
        options: for measurements.

    Raises:
        KernelUnavailable: key or value head dimensions the kernels do not have.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        shape: RecurrentShape,
        *,
        eps: float,
        gated: bool,
        beta_scale: float,
        pdl: bool,
        options: Options | None = None,
    ) -> None:
        check_shape(shape)
        self.weights, self.shape, self._eps = _packed(weights), shape, eps
        self._gated, self._beta_scale, self._pdl = gated, beta_scale, pdl
        self.layers = [self._layer(w) for w in self.weights.blocks]
        self.head = PackedLinear(weights.head, "plain", pdl=pdl)
        self._options = options or Options()
        # The largest number of rows that each of these serves; 0: not at all.
        self._stream_rows = self._mix_rows = 0
        if pdl and self._options.stream and is_hopper(weights.head):
            self._stream()
        self.max_rows = 0
        self.buffers: _Buffers
        self._rooms: list[_Buffers] = []  # alive as long as a graph may use them
        self._forms: dict[tuple[int, int, int], ClosedForm] = {}

    @staticmethod
    def default_kernel(rows: int, nodes: int) -> str:
        """Of mode fast: "walk" or "closed", by what an H200 has shown."""
        return CLOSED if wy.pays(rows, nodes) else WALK

    def reserve(self, max_rows: int) -> None:
        """Room for rounds of up to `max_rows` nodes, padding included (rows times nodes of the
        bucket). Graphs captured before keep the room that they were captured with."""
        if max_rows > self.max_rows:
            self.max_rows, self.buffers = max_rows, _Buffers(self, max_rows)
            self._rooms.append(self.buffers)

    def _layer(self, w: BlockWeights) -> _Layer:
        return _Layer(
            weights=w,
            conv_taps=w.conv.t().contiguous(),
            in_proj=PackedLinear(w.in_proj, "plain", pdl=self._pdl),
            o_proj=PackedLinear(w.o_proj, "partials", pdl=self._pdl),
            gate_up=PackedLinear(w.gate_up, "swiglu", pdl=self._pdl),
            down=PackedLinear(w.down, "partials", pdl=self._pdl),
        )

    def _stream(self) -> None:
        """Serve few rows by `ops.gemm_stream`."""
        # Hopper's kernels: imported where they can run.
        from specla.ops import gemm_stream as stream

        width, self._mix_rows = self.shape.value_dim, 0
        for layer in self.layers:
            mixes = self._options.mix and layer.o_proj.tiling.span % width == 0
            stream_linear(layer.o_proj, width if mixes else 0)
            stream_linear(layer.gate_up)
            stream_linear(layer.in_proj)
            stream_linear(layer.down)
            if mixes and layer.o_proj.stream:
                self._mix_rows = stream.MIX_ROWS
        stream_linear(self.head)
        self._stream_rows = max(stream.MAX_ROWS, gemm.WIDE_ROWS)

    def __call__(
        self,
        rnd: DeviceRound,
        state: State,
        features: Features | None = None,
        *,
        kernel: str = WALK,
    ) -> Tensor:
        """Logits [M, vocab] float32 of every node (rows of idle nodes are undefined): a view that
        the next call writes again. features: copies of layers' outputs; without room for them one
        more kernel each.
        kernel: WALK, or CLOSED (not exact)."""
        assert kernel in (WALK, CLOSED), kernel
        num_rows = rnd.tokens.numel()
        assert num_rows <= self.max_rows, "reserve() first"
        buffers = self.buffers
        x, h = buffers.x[:num_rows], buffers.h[:num_rows]
        compile_walks(rnd)
        form = self._closed_form(rnd, state) if kernel == CLOSED else None
        if form is not None:
            wy.compile_masks(rnd, form, log_capacity=state.log_capacity, max_log=state.max_log)
        w = self.weights
        norms = [block.attn_norm for block in w.blocks[1:]] + [w.norm]
        rows.embed_norm(
            rnd.tokens, rnd.num_nodes, w.embeddings, w.blocks[0].attn_norm, x, h, self._eps,
            pdl=self._pdl, early=self._early(num_rows),
        )  # fmt: skip
        for i, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            self._mix(layer, i, rnd, state, h, form)
            self._add(x, layer.o_proj, layer.weights.mlp_norm, h)
            hidden = buffers.hidden[:num_rows]
            layer.gate_up(h, hidden)
            layer.down(hidden, buffers.partials)
            copy = None if features is None else features.written(i, num_rows)
            self._add(x, layer.down, norm, h, copy)
            if features is not None and copy is None:
                features.take(i, x, copy=True)
        logits = buffers.logits[:num_rows]
        self.head(h, logits)
        return logits

    def _closed_form(self, rnd: DeviceRound, state: State) -> ClosedForm:
        """What the closed form works in."""
        nodes = bucket(state.max_nodes)
        sizes = self.max_rows // nodes, nodes, state.max_log
        if sizes not in self._forms:  # before any capture: a bucket's first call is a warm-up
            self._forms[sizes] = ClosedForm.allocate(self.shape, *sizes, rnd.tokens.device)
        return self._forms[sizes]

    def _mix(
        self,
        layer: _Layer,
        index: int,
        rnd: DeviceRound,
        state: State,
        h: Tensor,
        form: ClosedForm | None,
    ) -> None:
        """h [M, D] -> the token mixer's partial sums in buffers.partials."""
        buffers, w, s, num_rows = self.buffers, layer.weights, self.shape, h.shape[0]
        y, mixed = buffers.y[:num_rows], buffers.mixed[:num_rows]
        own = buffers.workspace.of_layer(index, rnd.tokens.shape[0])
        workspace = gdn.Workspace(*(t[:num_rows] for t in own))._replace(arrivals=own.arrivals)
        layer.in_proj(h, y)
        mixes = bool(num_rows <= self._mix_rows and layer.o_proj.stream)
        ready = buffers.gates[:num_rows] if mixes and self._gated else None
        inputs = y, layer.conv_taps, w.A, w.dt_bias, workspace
        if form is None:
            gdn.prepare(
                state.layers[index], rnd, *inputs, shape=s, log_capacity=state.log_capacity,
                beta_scale=self._beta_scale, gate=ready, pdl=self._pdl,
            )  # fmt: skip
            gdn.walk(
                state.layers[index], rnd, workspace, shape=s, log_capacity=state.log_capacity,
                threshold=state.fold_threshold, pdl=self._pdl,
            )  # fmt: skip
        else:
            wy.prepare_and_walk(
                state.layers[index], rnd, *inputs, form, shape=s,
                log_capacity=state.log_capacity, max_log=state.max_log,
                threshold=state.fold_threshold, beta_scale=self._beta_scale, gate=ready,
                pdl=self._pdl,
            )  # fmt: skip
        columns = s.conv_channels
        gate = y[:, columns : columns + mixed.shape[1]] if self._gated else None
        if mixes and layer.o_proj.stream:
            gate = None if ready is None else ready.flatten(1)
            layer.o_proj.stream(mixed, buffers.partials, (workspace.o, gate, w.o_norm, self._eps))
            return
        rows.gated_norm(
            workspace.o, gate, w.o_norm, mixed, self._eps,
            pdl=self._pdl, early=self._early(num_rows),
        )  # fmt: skip
        layer.o_proj(mixed, buffers.partials)

    def _early(self, num_rows: int) -> bool:
        return self._options.early and num_rows <= self._stream_rows

    def _add(
        self, x: Tensor, linear: PackedLinear, norm: Tensor, h: Tensor, copy: Tensor | None = None
    ) -> None:
        rows.add_partials_norm(
            x, self.buffers.partials, norm, h, self._eps,
            num_partials=linear.num_partials(x.shape[0]), max_partials=linear.max_partials,
            copy=copy, pdl=self._pdl, early=self._early(x.shape[0]),
        )  # fmt: skip


def _packed(weights: DecoderWeights) -> DecoderWeights:
    """With every gate_up packed; no other tensor is copied."""
    blocks = [replace(block, gate_up=pack_swiglu(block.gate_up)) for block in weights.blocks]
    return replace(weights, blocks=tuple(blocks))


def is_hopper(weight: Tensor) -> bool:
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] == 9


def stream_linear(linear: PackedLinear, block_k: int = 0) -> None:
    """Set `linear.stream` and `linear.wide` where the shape allows. block_k: the stream's; 0 for
    the shape's own."""
    from specla.ops import gemm_stream as stream
    from specla.ops import gemm_wide as wide

    span = linear.tiling.span
    ring = stream.ring_for(linear.weight.shape[0], linear.max_partials, PROCESSORS)
    if block_k:
        ring = ring._replace(block_k=block_k)
    if stream.fits(linear.weight, span, ring):
        linear.stream = stream.StreamLinear(linear.weight, linear.kind, span, ring)
    if wide.fits(linear.weight, span):
        linear.wide = wide.WideLinear(linear.weight, linear.kind, span)


def check_shape(shape: RecurrentShape) -> None:
    for name, size in (("key", shape.key_dim), ("value", shape.value_dim)):
        if size not in HEAD_DIMS:
            raise KernelUnavailable(
                f"{name} head dimension must be one of {HEAD_DIMS} on a GPU, got {size}; "
                "use device cpu"
            )
