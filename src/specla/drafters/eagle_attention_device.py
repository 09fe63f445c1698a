# SPDX-License-Identifier: Apache-2.0
"""Attention's launches in a round on the device (`eagle_layer`), over `KeptAttention`'s tokens.

    attend, append, o_proj        accepted tokens: causal, over what was there before
    branch, o_proj                a frontier

`attend` and `branch` are a launch more where there may be a long context to be read in parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.drafters import triton_block as kernels
from specla.drafters.block_model import Turns
from specla.drafters.device_chain import Chain
from specla.drafters.eagle_attention import KeptAttention
from specla.drafters.eagle_buffers import Buffers, Frontier
from specla.drafters.eagle_config import EagleConfig
from specla.drafters.triton_branch import Steps, branch
from specla.drafters.triton_eagle import Cursors
from specla.ops.contract import DeviceRound
from specla.ops.gemm import PackedLinear


class AttentionLaunches(Chain):
    """See `eagle_buffers.MixerLaunches`. q, k and v are packed into one product."""

    reach = 1

    def __init__(self, w: dict[str, Tensor], mixer: KeptAttention, config: EagleConfig) -> None:
        super().__init__(w["q"], config.norm_eps)
        self._config, self._kept, self.longest = config, mixer.kept, mixer.longest
        self.in_proj = PackedLinear(torch.cat([w[name] for name in "qkv"]), "plain", pdl=self._pdl)
        self.o_proj = PackedLinear(w["o"], "partials", pdl=self._pdl)
        self._queries = self.o_proj.weight.shape[1]
        self._serve_few([self.in_proj, self.o_proj])

    def make_room(self, buffers: Buffers) -> None:
        """Of draft-time keys and values, and of a context's parts."""
        config, limits, kept = self._config, buffers.limits, self._kept
        self._take, self.partials = buffers.take, buffers.partials
        self._path = limits.path
        turns = Turns(config.rope_theta, config.head_dim, kept.device)
        self._turns = turns.reserve(self.longest + limits.depth).float()
        each = config.num_v_heads * config.head_dim
        buffers.add(kept.dtype, **dict.fromkeys(("step_k", "step_v"), limits.steps * each))
        self._num_parts = kernels.num_parts(self.longest)
        # Chunks have programs enough without being divided.
        most = max(max(limits.path, limits.frontier) * self._num_parts, limits.chunk)
        most *= limits.rows
        buffers.add(torch.float32, sums=most * self._queries, scale=2 * most * config.num_heads)

    def encode(self, enc: DeviceRound, start: Tensor, y: Tensor) -> None:
        """See `MixerLaunches`."""
        o = self._take("mixed", len(y), self._queries)
        num = self._num_parts if enc.tokens.shape[1] <= self._path else 1
        kernels.attend(
            y, enc.slot, start, enc.num_nodes, None, self._turns, self._kept,
            self._parts(len(y), num), o, 0.0, window=None, causal=True, pdl=self._pdl,
        )  # fmt: skip
        kernels.append(
            y[:, self._queries :], enc.slot, start, enc.num_nodes, None, self._turns,
            self._kept[None], 0.0, pdl=self._pdl,
        )  # fmt: skip
        self.o_proj(o, self.partials)

    def step(self, rnd: DeviceRound, cursors: Cursors, at: Frontier, y: Tensor) -> None:
        """See `MixerLaunches`."""
        o = self._take("mixed", len(y), self._queries)
        size = *at.chain.shape[:2], self._config.num_v_heads, self._config.head_dim
        steps = Steps(self._take("step_k", *size), self._take("step_v", *size), at.chain)
        branch(
            y, rnd.slot, cursors.length, steps, at.live, at.first, self._turns, self._kept,
            self._parts(len(y), self._num_parts), o, pdl=self._pdl,
        )  # fmt: skip
        self.o_proj(o, self.partials)

    def _parts(self, num_flat: int, num: int) -> kernels.Parts:
        size = num_flat, self._config.num_heads, num
        sums = self._take("sums", *size, self._config.head_dim)
        return kernels.Parts(sums, self._take("scale", *size, 2))
