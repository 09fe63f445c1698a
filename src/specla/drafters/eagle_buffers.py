# SPDX-License-Identifier: Apache-2.0
"""What `eagle_layer` launches over: sizes, products, and every buffer that a launch writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters.device_chain import Pool
from specla.drafters.eagle_model import EagleWeights
from specla.errors import ConfigError
from specla.ops.contract import DeviceRound, RecurrentShape
from specla.ops.gdn import triton as gdn
from specla.ops.gemm import MAX_ROWS, PackedLinear
from specla.state.rounds import bucket

CHUNK = 64
"""Tokens: a walk takes 0.3 us for each, the launches around it 40."""


class Limits(NamedTuple):
    """Most rows, nodes and depth that a drafter is asked for, and its rules of growing."""

    rows: int
    nodes: int
    depth: int
    top_k: int
    tau: float
    spine: bool

    @property
    def frontier(self) -> int:
        """Most nodes of a level that go on."""
        return min(self.top_k, max(1, self.nodes - 1))

    @property
    def path(self) -> int:
        """Most tokens that a round can have accepted, padded."""
        return bucket(min(bucket(self.nodes), self.depth + 1))

    @property
    def chunk(self) -> int:
        """Most tokens of a row that are encoded at once where many are waiting."""
        return max(self.path, min(CHUNK, MAX_ROWS // self.rows))

    @property
    def room(self) -> int:
        """Tokens per slot that a bank of the drafter's state must hold."""
        return max(self.nodes, self.chunk)


def check_limits(limits: Limits) -> None:
    """Raises ConfigError if a launch would have more rows than the products take."""
    most = max(limits.path, limits.frontier)
    if limits.rows * most > MAX_ROWS:
        raise ConfigError(
            f"drafting on the device takes at most {MAX_ROWS} rows at once, got {limits.rows} "
            f"slots of {most}; use fewer slots, a smaller max_depth or top_k"
        )


class Linears(NamedTuple):
    """The products of a layer."""

    fc: PackedLinear
    in_proj: PackedLinear
    o_proj: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    head: PackedLinear


class Buffers(Pool):
    """Everything that launches write."""

    def __init__(
        self, w: EagleWeights, s: RecurrentShape, linears: Linears, limits: Limits
    ) -> None:
        self._shape, device, dtype = s, w.fc.device, w.fc.dtype
        B, F, path = limits.rows, limits.frontier, limits.chunk
        most = B * max(path, F)
        self._chain = bucket(max(limits.depth, s.conv_width - 1))
        X, D, vocab = 1 + F * max(0, limits.depth - 1), *reversed(w.head.shape)
        super().__init__(
            num_rows=B, num_nodes=limits.nodes, width=F, num_logits=B * F, vocab=vocab,
            top_k=limits.top_k, device=device,
        )  # fmt: skip

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.cursors = zeros(len(kernels.Cursors._fields), B, dtype=torch.int32)
        self.add(
            dtype,
            given=B * path * w.fc.shape[1],
            features=B * path * w.fc.shape[1],
            x=most * linears.in_proj.weight.shape[1],
            y=most * linears.in_proj.weight.shape[0],
            mixed=most * s.num_value_heads * s.value_dim,
            hidden=most * linears.down.weight.shape[1],
            **dict.fromkeys(("residual", "other", "root", "h"), most * D),
            inputs=B * X * s.conv_channels,
        )
        self.add(
            torch.float32,
            logits=B * F * vocab,
            k=B * X * s.num_key_heads * s.key_dim,
            u=B * X * s.num_value_heads * s.value_dim,
            g=B * X * s.num_value_heads,
        )
        self.add(
            torch.int32,
            source=B * path,
            told=3 * B + B * path,
            enc=2 * B + B * path,
            chain=B * X * self._chain,
        )
        split = (linears.fc, linears.o_proj, linears.down)
        self.partials = zeros(max(x.workspace_elements(most) for x in split))
        self._workspace = gdn.Workspace.allocate(s, most, dtype, device)
        chain = torch.arange(-1, path - 1, dtype=torch.int32, device=device)
        self._chains = {n: chain[:n].repeat(B, 1) for n in {bucket(i + 1) for i in range(path)}}
        self._paths = torch.arange(limits.room, dtype=torch.int32, device=device).repeat(B, 1)
        self._walks = kernels.chain_walk(B, path, device)
        self._ring_len = zeros(B, dtype=torch.int32)

    def workspace(self, num_flat: int) -> gdn.Workspace:
        """Of `prepare` and the walk, for so many nodes."""
        return gdn.Workspace(*(x[:num_flat] for x in self._workspace))

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
