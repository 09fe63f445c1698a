# SPDX-License-Identifier: Apache-2.0
"""What `eagle_layer` launches over: sizes, products, and every buffer that a launch writes; and
what it asks of a mixer's launches."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specla.drafters import triton_eagle as kernels
from specla.drafters.device_chain import Pool
from specla.drafters.eagle_model import EagleWeights
from specla.errors import ConfigError
from specla.ops.contract import DeviceRound
from specla.ops.gemm import MAX_ROWS, PackedLinear
from specla.state.rounds import bucket

CHUNK = 64
"""Tokens: a walk takes 0.3 us for each, the launches around it 40."""


UNLIMITED = 2**31 - 1
"""Tokens of a row, where the mixer's state is no larger for it."""


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
    def steps(self) -> int:
        """Most nodes of a tree that the layer is asked at, of all rows: its root and frontiers."""
        return self.rows * (1 + self.frontier * max(0, self.depth - 1))

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
    """Everything that launches write, besides what a mixer adds."""

    def __init__(
        self, w: EagleWeights, linears: Linears, mixer: MixerLaunches, limits: Limits
    ) -> None:
        device, dtype = w.fc.device, w.fc.dtype
        B, F, path = limits.rows, limits.frontier, limits.chunk
        self.limits, most = limits, B * max(path, F)
        D, vocab = reversed(w.head.shape)
        super().__init__(
            num_rows=B, num_nodes=limits.nodes, width=F, num_logits=B * F, vocab=vocab,
            top_k=limits.top_k, device=device,
        )  # fmt: skip
        self.cursors = self._zeros(len(kernels.Cursors._fields), B)
        self.add(
            dtype,
            given=B * path * w.fc.shape[1],
            features=B * path * w.fc.shape[1],
            x=most * linears.in_proj.weight.shape[1],
            y=most * linears.in_proj.weight.shape[0],
            mixed=most * linears.o_proj.weight.shape[1],
            hidden=most * linears.down.weight.shape[1],
            **dict.fromkeys(("residual", "other", "root", "h"), most * D),
        )
        self.add(torch.float32, logits=B * F * vocab)
        self._chain = bucket(max(limits.depth, mixer.reach))
        self.add(
            torch.int32,
            source=B * path,
            start=B,
            told=3 * B + B * path,
            enc=2 * B + B * path,
            chain=limits.steps * self._chain,
        )
        split = (linears.fc, linears.o_proj, linears.down)
        self.partials = torch.zeros(max(x.workspace_elements(most) for x in split), device=device)
        chain = torch.arange(-1, path - 1, dtype=torch.int32, device=device)
        self._chains = {n: chain[:n].repeat(B, 1) for n in {bucket(i + 1) for i in range(path)}}
        self._paths = torch.arange(limits.room, dtype=torch.int32, device=device).repeat(B, 1)
        self._walks = kernels.chain_walk(B, path, device)
        self._ring_len = self._zeros(B)
        mixer.make_room(self)

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def chain(self, num_rows: int, count: int) -> Tensor:
        """Of so many steps per row, see `Frontier`."""
        return self.take("chain", num_rows, count, self._chain)

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


class Frontier(NamedTuple):
    """A level's nodes that go on. live int32 [B]: how many; chain int32 [B, X, L]: what is above
    each step, see `triton_grow.Reading`; first: of their steps."""

    live: Tensor
    chain: Tensor
    first: int


class MixerLaunches(Protocol):
    """A mixer's part of `eagle_layer`. y [M, C]: what in_proj made of its inputs; both kinds of
    launch leave o_proj's partial sums in the buffers' `partials`.

    longest: most tokens of a row that it can encode and draft for. reach: steps above a node that
    it looks up, however few there are.
    """

    in_proj: PackedLinear
    o_proj: PackedLinear
    longest: int
    reach: int

    def make_room(self, buffers: Buffers) -> None:
        """Add what its launches write."""
        ...

    def encode(self, enc: DeviceRound, start: Tensor, y: Tensor) -> None:
        """Accepted tokens, which become part of the slots: enc.num_nodes [B] of each row's P,
        from position start [B] on. y [B * P, C]."""
        ...

    def step(self, rnd: DeviceRound, cursors: kernels.Cursors, at: Frontier, y: Tensor) -> None:
        """A frontier of up to F nodes per row, below the slots and the steps before; y [B * F,
        C]."""
        ...
