# SPDX-License-Identifier: Apache-2.0
"""What `eagle_layer` launches over: sizes, products, and every buffer that a launch writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters import triton_grow as growing
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


class Buffers:
    """Everything that launches write, allocated once. A buffer is a flat run of elements; each
    use takes its first ones in the shape it needs."""

    def __init__(
        self, w: EagleWeights, s: RecurrentShape, linears: Linears, limits: Limits
    ) -> None:
        self._limits, self._shape, device, dtype = limits, s, w.fc.device, w.fc.dtype
        B, N, F, path = limits.rows, bucket(limits.nodes), limits.frontier, limits.chunk
        most = B * max(path, F)
        self._chain = bucket(max(limits.depth, s.conv_width - 1))
        X, D, vocab = 1 + F * max(0, limits.depth - 1), *reversed(w.head.shape)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.cursors = zeros(len(kernels.Cursors._fields), B, dtype=torch.int32)
        self._flat = {
            "given": zeros(B * path * w.fc.shape[1], dtype=dtype),
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
        self._paths = torch.arange(limits.room, dtype=torch.int32, device=device).repeat(B, 1)
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
