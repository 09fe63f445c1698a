# SPDX-License-Identifier: Apache-2.0
"""Runs `ops.gdn.triton_stream` and `triton_decode` on a CPU, which Triton's interpreter does not:
one program after the other, layouts not looked at.

Sums over an axis add its halves, then theirs, as a butterfly over lanes does: whether trades of
rows for lanes keep the pairs can be told from bits. Copies arrive at once (`eager`) or when they
are waited for: what is overwritten or read too early gives wrong bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.ops.gdn import triton_decode as decode
from specla.ops.gdn import triton_decode_parts as parts
from specla.ops.gdn import triton_stream as stream
from specla.ops.walk import NODE_MASK, RESTORE, SAVE, WALK
from specla.state import State
from specla.topology.tree import DraftTree

MODULES = stream, parts, decode
SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=16, conv_width=4
)


class Noise:
    """Fills tensors, one after the other."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, x: Tensor) -> None:
        x.copy_(0.3 * torch.randn(x.shape, generator=self._generator))


def noisy_rows(
    trees: Sequence[tuple[int, ...]],
    logs: Sequence[tuple[int, tuple[int, ...]]],
    max_nodes: int,
    noise: Noise,
) -> tuple[State, list[int], list[DraftTree]]:
    """A state of noise, a slot and a draft for each tree. logs: of each row, the entries in the
    ring and the path of the last round."""
    state = State(SHAPE, num_slots=len(trees), max_nodes=max_nodes, log_capacity=8)
    layer = state.layers[0]
    for x in (layer.S, *layer.factors):
        noise(x)
    layer.factors.g.abs_().neg_()
    slots = [state.acquire() for _ in trees]
    for slot, (ring, path) in zip(slots, logs, strict=True):
        state.logs[slot].ring_len, state.logs[slot].path = ring, path
    return state, slots, [DraftTree(tuple(range(len(p))), p) for p in trees]


class Block(Tensor):
    """A tensor with Gluon's methods."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def expand_dims(self, axis: int) -> Tensor:
        return self.unsqueeze(axis)

    def split(self) -> Any:  # type: ignore[override]
        return self.unbind(-1)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def block(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(Block)


class Pointer:
    """Into a flat tensor."""

    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(
            element_ty=SimpleNamespace(
                primitive_bitwidth=8 * data.dtype.itemsize, dtype=data.dtype
            )
        )

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)


class Shared:
    """A buffer of shared memory; floats are NaN until they are written."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: self.data.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def load(self, layout: Any) -> Any:
        assert not self.data.isnan().any(), "read before it was written"
        return block(self.data.clone())

    def store(self, value: Tensor) -> None:
        self.data.copy_(value.as_subclass(Tensor))


def load(ptr: Pointer, mask: Any = True, other: Any = 0) -> Any:
    at = torch.as_tensor(ptr.at).as_subclass(Tensor)
    mask = torch.as_tensor(mask).as_subclass(Tensor).expand(at.shape)
    value = ptr.data[torch.where(mask, at, 0)]
    return block(torch.where(mask, value, torch.as_tensor(other, dtype=value.dtype)))


def store(ptr: Pointer, value: Any, mask: Any = True) -> None:
    at = torch.as_tensor(ptr.at).as_subclass(Tensor)
    mask = torch.as_tensor(mask).as_subclass(Tensor).expand(at.shape)
    value = torch.as_tensor(value, dtype=ptr.data.dtype).as_subclass(Tensor).expand(at.shape)
    ptr.data[at[mask]] = value[mask]


class Barrier:
    """Of one slot of a ring, which one tile at a time is asked into."""

    def __init__(self) -> None:
        self.expected, self.jobs, self.phase = 0, [], 1  # type: ignore[var-annotated]


class Copies:
    """By threads, in groups, and by the copy engine, one barrier for each slot."""

    def __init__(self, eager: bool) -> None:
        self.eager, self.asked, self.groups = eager, [], []  # type: ignore[var-annotated]

    def copy(self, buffer: Shared, ptr: Pointer, mask: Tensor) -> None:
        if self.eager:
            buffer.store(load(ptr, mask))
        else:
            self.asked.append(lambda: buffer.store(load(ptr, mask)))

    def commit(self) -> None:
        self.groups.append(self.asked)
        self.asked = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for job in self.groups.pop(0):
                job()

    def expect(self, barrier: Barrier, size: int, pred: Any) -> None:
        if pred:
            assert barrier.expected == 0, "asked for before the last tile was waited for"
            barrier.expected = size

    def load(self, matrix: Any, at: Any, barrier: Barrier, slot: Shared, pred: Any) -> None:
        if not pred:
            return
        tile = matrix.data.view(-1, slot.shape[1])[int(at[0]) :][: slot.shape[0]]
        assert tile.shape == slot.shape
        assert tile.nbytes == barrier.expected
        if self.eager:
            slot.store(tile)
        else:
            barrier.jobs = [lambda: slot.store(tile)]

    def wait_barrier(self, barrier: Barrier, phase: Any) -> None:
        assert barrier.expected, "waits for what nobody asked for"
        barrier.phase ^= 1
        assert barrier.phase == int(phase), "waits for a phase that does not come"
        for job in barrier.jobs:
            job()
        barrier.expected, barrier.jobs = 0, []


def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[int(i)])
    dtype = getattr(dtype, "dtype", dtype)
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


def add(ptr: Pointer, value: int) -> Any:
    before = load(ptr)
    store(ptr, before + value)
    return before


def fma(a: Tensor, b: Tensor, c: Tensor) -> Any:
    """Rounded once (from float64, which has room for the product)."""
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def halves(x: Tensor, axis: int) -> Tensor:
    while x.shape[axis] > 1:
        a, b = x.tensor_split(2, axis)
        x = a + b
    return x.squeeze(axis)


def language(program: tuple[int, ...], grid: tuple[int, ...]) -> Any:
    def nothing(*_: Any) -> None:
        return None

    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("float32", "int32", "int64", "exp")},
        program_id=lambda axis: block(program[axis]),
        num_programs=lambda axis: grid[axis],
        arange=lambda a, b, layout: block(torch.arange(a, b)),
        zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: block(torch.full(shape, int(value))),
        where=lambda c, a, b: block(torch.where(c, torch.as_tensor(a), torch.as_tensor(b))),
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        gather=lambda x, at, axis: block(torch.gather(x, axis, at)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        allocate_shared_memory=allocate,
        load=load,
        store=store,
        fma=fma,
        atomic_add=add,
        static_range=range,
        static_assert=nothing,
        BlockedLayout=nothing,
        DistributedLinearLayout=nothing,
        SliceLayout=nothing,
        SwizzledSharedLayout=nothing,
    )


def run(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any],
    *, eager: bool = True,
) -> None:  # fmt: skip
    """All programs of one launch of a kernel of MODULES; meta as its constants."""
    given = [Pointer(x.view(-1)) if isinstance(x, Tensor) else x for x in arguments]
    for program in product(*map(range, grid)):
        copies = Copies(eager)
        barriers = SimpleNamespace(
            init=lambda b, count: None, expect=copies.expect, wait=copies.wait_barrier,
            MBarrierLayout=lambda: None,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": language(program, grid),
            "async_copy": SimpleNamespace(commit_group=copies.commit, wait_group=copies.wait),
            "mbarrier": barriers,
            "fence_async_shared": lambda: None,
            "gdc_wait": lambda: None,
            "gdc_launch_dependents": lambda: None,
            "_copy": copies.copy,
            "_load_block": copies.load,
            "_barrier": lambda: None,
            "_stay": lambda: None,
            "_another": lambda x: x,
            "_sum": halves,
            "_scalar": lambda cell, warps: cell.load(None).reshape(()),
            "_rows": lambda buffer, shape: Shared(buffer.data.view(shape)),
            "_log2": lambda n: n.bit_length() - 1,
            "_copied": lambda *_: None,
            "_traded": lambda *_: None,
            "_state_matrix": lambda *_: None,
            "_WALK": WALK,
            "_RESTORE": RESTORE,
            "_SAVE": SAVE,
            "_NODE": NODE_MASK,
            "_WIDTH": parts.WIDTH,
        }
        for module in MODULES:
            for name, value in vars(module).items():
                if name not in names and hasattr(value, "fn"):
                    names[name] = FunctionType(value.fn.__code__, names)
        FunctionType(kernel.fn.__code__, names)(*given, **meta)
