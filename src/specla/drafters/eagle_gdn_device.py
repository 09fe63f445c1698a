# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet mixer's launches in a round on the device (`eagle_layer`).

    prepare, walk, o_proj         accepted tokens: a verify of one chain per row
    mix, o_proj                   a frontier

The gated norm is part of o_proj for few rows, else a launch of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters.device_chain import Chain
from specla.drafters.eagle_buffers import UNLIMITED, Buffers, Frontier
from specla.drafters.eagle_gdn import GdnMixer
from specla.models.gdn_fused import stream_linear
from specla.models.gdn_weights import BlockWeights
from specla.ops import gemm, rows
from specla.ops.contract import DeviceRound, RecurrentShape
from specla.ops.gdn import triton as gdn
from specla.ops.gemm import PackedLinear, tiling_for


class GdnLaunches(Chain):
    """See `eagle_buffers.MixerLaunches`."""

    longest = UNLIMITED

    def __init__(
        self, w: BlockWeights, mixer: GdnMixer, shape: RecurrentShape, eps: float
    ) -> None:
        super().__init__(w.in_proj, eps)
        self._w, self._shape, self.reach = w, shape, shape.conv_width - 1
        (self._layer,) = mixer.state.layers
        self._taps = w.conv.t().contiguous()
        self.in_proj = PackedLinear(w.in_proj, "plain", pdl=self._pdl)
        self.o_proj = self._by_heads(w.o_proj)
        self._mix_rows = 0
        if self._pdl:
            self._stream()

    def make_room(self, buffers: Buffers) -> None:
        """Of draft-time factors, and of the state kernels."""
        s, limits, w = self._shape, buffers.limits, self._w.in_proj
        self._take, self.partials, steps = buffers.take, buffers.partials, limits.steps
        buffers.add(w.dtype, inputs=steps * s.conv_channels)
        buffers.add(
            torch.float32,
            k=steps * s.num_key_heads * s.key_dim,
            u=steps * s.num_value_heads * s.value_dim,
            g=steps * s.num_value_heads,
        )
        most = limits.rows * max(limits.chunk, limits.frontier)
        self._workspace = gdn.Workspace.allocate(s, most, w.dtype, w.device)

    def encode(self, enc: DeviceRound, start: Tensor, y: Tensor) -> None:
        """See `MixerLaunches`."""
        workspace = gdn.Workspace(*(x[: len(y)] for x in self._workspace))
        gdn.prepare(
            self._layer, enc, y, self._taps, self._w.A, self._w.dt_bias, workspace,
            shape=self._shape, log_capacity=0, pdl=self._pdl,
        )  # fmt: skip
        gdn.walk(
            self._layer, enc, workspace, shape=self._shape, log_capacity=0, threshold=0,
            branching=False, pdl=self._pdl,
        )  # fmt: skip
        self._project(y, workspace.o)

    def step(self, rnd: DeviceRound, cursors: kernels.Cursors, at: Frontier, y: Tensor) -> None:
        """See `MixerLaunches`."""
        o = self._workspace.o[: len(y)]
        kernels.mix(
            self._layer, rnd, cursors, self._steps(at.chain), at.live, at.first, y, self._taps,
            self._w.A, self._w.dt_bias, o, shape=self._shape, pdl=self._pdl,
        )  # fmt: skip
        self._project(y, o)

    def _steps(self, chain: Tensor) -> kernels.Steps:
        """A tree's draft-time factors."""
        s, take, (rows, count, _) = self._shape, self._take, chain.shape
        return kernels.Steps(
            k=take("k", rows, count, s.num_key_heads, s.key_dim),
            u=take("u", rows, count, s.num_value_heads, s.value_dim),
            g=take("g", rows, count, s.num_value_heads),
            inputs=take("inputs", rows, count, s.conv_channels),
            chain=chain,
        )

    def _project(self, y: Tensor, o: Tensor) -> None:
        """Gated norm and o_proj."""
        num_flat, channels = len(y), self._shape.conv_channels
        heads = self._shape.num_value_heads * self._shape.value_dim
        gate, mixed = y[:, channels : channels + heads], self._take("mixed", num_flat, heads)
        if num_flat <= self._mix_rows and self.o_proj.stream:
            mix = o, gate, self._w.o_norm, self._eps
            self.o_proj.stream(mixed, self.partials, mix)
        else:
            rows.gated_norm(
                o, gate, self._w.o_norm, mixed, self._eps, pdl=self._pdl,
                early=self._early(num_flat),
            )  # fmt: skip
            self.o_proj(mixed, self.partials)

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

        width = self._shape.value_dim
        mixes = self.o_proj.tiling.span % width == 0
        stream_linear(self.in_proj)
        stream_linear(self.o_proj, width if mixes else 0)
        if mixes and self.o_proj.stream:
            self._mix_rows = stream.MIX_ROWS
        self._stream_rows = max(stream.MAX_ROWS, gemm.WIDE_ROWS)
