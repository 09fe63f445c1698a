# SPDX-License-Identifier: Apache-2.0
"""A round's integers on the device: one set of tensors per bucket of rows and nodes.

Rows and nodes are padded to powers of two, so that few CUDA graphs serve every round; the
tensors of a bucket never move. What the host writes goes over in one copy. Buckets of as many rows
share their memory, so that a row that is alone can go on in a round of another width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from specla.ops.contract import DevicePlan, DeviceRound, Factors, LayerState, RecurrentShape
from specla.state.log import Log
from specla.topology.tree import DraftTree

MAX_PARTS = 4
"""Most programs that share the walk of one row's tree; a power of two."""


def walk_shape(num_rows: int, num_nodes: int) -> tuple[int, int, int]:
    """[rows, parts, words] of a bucket's compiled walks (see ops.walk): few rows leave a GPU idle,
    so their trees are cut up; speed only, never bits (H200; docs/adr/0012)."""
    parts = min(MAX_PARTS // num_rows, max(2, num_nodes // 8)) if num_nodes >= 8 * num_rows else 1
    return num_rows, max(1, parts), 1 + 2 * num_nodes + num_nodes * num_nodes // 8


def bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _fields(rows: int, nodes: int, max_nodes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what the host writes, in the order in which it lies there."""
    return {
        "slot": (rows,),
        "num_nodes": (rows,),
        "bank": (rows,),
        "ring_len": (rows,),
        "path_len": (rows,),
        "tokens": (rows, nodes),
        "parents": (rows, nodes),
        "path": (rows, max_nodes),
    }


class _Memory:
    """Of the buckets of so many rows: a staging buffer, and its copy on the device."""

    def __init__(self, rows: int, max_nodes: int, device: torch.device) -> None:
        self.max_nodes = max_nodes
        self.sizes = [prod(x) for x in _fields(rows, bucket(max_nodes), max_nodes).values()]
        self.staging = torch.zeros(sum(self.sizes), dtype=torch.int32)
        self.words = torch.zeros(sum(self.sizes), dtype=torch.int32, device=device)
        self.sent: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.staging, self.sent = self.staging.pin_memory(), torch.cuda.Event()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write the staging buffer, then send it. The device may be rounds behind a host that asks
        it for nothing: what was sent last has arrived before it is written over."""
        if self.sent is not None:
            self.sent.synchronize()
        self.staging.zero_()
        yield
        self.words.copy_(self.staging, non_blocking=True)
        if self.sent is not None:
            self.sent.record(torch.cuda.current_stream(self.words.device))


class _Bucket:
    """Tensors of one bucket, all but the walks in its rows' memory."""

    def __init__(self, rows: int, nodes: int, memory: _Memory) -> None:
        self._memory, fields = memory, _fields(rows, nodes, memory.max_nodes)
        device = memory.words.device
        self.host = _views(memory.staging, fields, memory.sizes)
        walk = torch.zeros(walk_shape(rows, nodes), dtype=torch.int32, device=device)
        self.round = DeviceRound(**_views(memory.words, fields, memory.sizes), walk=walk)

    def fill(self, slots: Sequence[int], logs: Sequence[Log], trees: Sequence[DraftTree]) -> None:
        """Lay one round out and send it; rows that are not there become idle."""
        host = {name: view.numpy() for name, view in self.host.items()}
        with self._memory.writing():
            for b, (slot, log, tree) in enumerate(zip(slots, logs, trees, strict=True)):
                host["slot"][b], host["num_nodes"][b] = slot, tree.num_nodes
                host["bank"][b], host["ring_len"][b] = log.bank, log.ring_len
                host["path_len"][b] = len(log.path)
                host["tokens"][b, : tree.num_nodes] = tree.tokens
                host["parents"][b, : tree.num_nodes] = tree.parents
                host["path"][b, : len(log.path)] = log.path


def folded(layer: LayerState, slot: int, log: Log, shape: RecurrentShape) -> Tensor:
    """S [G, V, K] of a slot with its log replayed, by the kernel that would fold it: a copy."""
    # Triton is imported where there is a GPU only.
    from specla.ops.gdn import triton as gdn

    S = layer.S[slot : slot + 1].clone()
    one = LayerState(S, Factors(*(x[slot : slot + 1] for x in layer.factors)), *layer[2:])
    capacity, num_nodes = log.capacity, max(log.num_nodes, len(log.path))

    def row(*values: int, width: int = 1) -> Tensor:
        padded = [*values, *[0] * (width - len(values))]
        return torch.tensor([padded], dtype=torch.int32, device=S.device)

    rnd = DeviceRound(
        slot=row(0)[0],
        num_nodes=row(1)[0],
        tokens=row(0),
        parents=row(-1),
        bank=row(log.bank)[0],
        ring_len=row(log.ring_len)[0],
        path_len=row(len(log.path))[0],
        path=row(*log.path, width=num_nodes),
        walk=row(0, 0).unsqueeze(1),
    )
    workspace = gdn.Workspace.allocate(shape, 1, layer.tail.dtype, S.device)
    gdn.walk(one, rnd, workspace, shape=shape, log_capacity=capacity, threshold=-1)
    return S[0]


def _views(
    words: Tensor, fields: Mapping[str, tuple[int, ...]], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Each at the start of its part, which may have room for more."""
    parts = words.split(list(sizes))
    return {
        name: part[: prod(shape)].view(shape)
        for (name, shape), part in zip(fields.items(), parts, strict=True)
    }


class DeviceRounds:
    """The buckets of one State, made when first used."""

    def __init__(self, max_nodes: int, device: torch.device) -> None:
        self._max_nodes, self._device = max_nodes, device
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._memory: dict[int, _Memory] = {}

    def round(self, rows: int, nodes: int) -> DeviceRound:
        """The tensors of a bucket (both sizes powers of two)."""
        return self._bucket(rows, nodes).round

    def plan(
        self,
        slots: Sequence[int],
        logs: Sequence[Log],
        trees: Sequence[DraftTree],
        *,
        num_nodes: int = 1,
    ) -> DevicePlan:
        """One round over rows (slots[b], logs[b], trees[b]), on its way to the device. num_nodes:
        room for trees of as many, a power of two.
        """
        widest = max(tree.num_nodes for tree in trees)
        assert widest <= self._max_nodes, f"room for {self._max_nodes} nodes, got {widest}"
        nodes = max(num_nodes, bucket(widest))
        made = self._bucket(bucket(len(slots)), nodes)
        made.fill(slots, logs, trees)
        return DevicePlan(made.round, tuple(b * nodes for b in range(len(slots))))

    def _bucket(self, rows: int, nodes: int) -> _Bucket:
        key = (rows, nodes)
        if key not in self._buckets:
            # Whoever counts on another size would have buffers that kernels write past the end of.
            assert key == (bucket(rows), bucket(nodes)), f"must be powers of two, got {key}"
            if rows not in self._memory:
                self._memory[rows] = _Memory(rows, self._max_nodes, self._device)
            self._buckets[key] = _Bucket(rows, nodes, self._memory[rows])
        return self._buckets[key]
