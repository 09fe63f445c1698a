# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter does not do: runs a Hopper kernel of `ops.gemm_*` on a CPU, one
program after the other, to find what its loops ask of memory, when and in which slot.

Copies arrive as early as they may (`eager`) or when somebody waits for them; a tensor-core product
reads its operands as late as it may. So a slot asked for anew too early, or read too early, gives
wrong sums, and a phase nobody completes is a `Deadlock`. Layouts are not looked at.
"""

from __future__ import annotations

from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Deadlock(AssertionError):
    """A program waits for what nobody has asked for."""


class Block(Tensor):
    """A tensor with Gluon's `split` and `to`."""

    def split(self) -> Any:  # type: ignore[override]
        return self.unbind(-1)

    def to(self, dtype: Any) -> Any:  # type: ignore[override]
        return super().to(getattr(dtype, "dtype", dtype))


def block(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(Block)


class Element:
    """An element type, as a pointer's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


class Pointer:
    """Into a flat tensor."""

    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(element_ty=Element(data.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)


class Tiles:
    """A matrix as the memory system cuts it; late: another kernel makes it."""

    def __init__(self, matrix: Tensor, rows: int, columns: int, *, late: bool) -> None:
        self.matrix, self.late, self.size = matrix, late, (rows, columns)
        self.dtype, self.layout = matrix.dtype, None

    def read(self, at: list[Any]) -> Tensor:
        rows, columns = self.size
        tile = torch.zeros(rows, columns, dtype=self.dtype)
        part = self.matrix[int(at[0]) :, int(at[1]) :][:rows, :columns]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile


class Barrier:
    """An mbarrier with one arrival a phase."""

    def __init__(self) -> None:
        self.phase, self.arrivals, self.bytes = 0, 1, 0
        self.jobs: list[Any] = []

    def settle(self) -> None:
        if self.arrivals == 0 and self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, 1

    def arrive(self, jobs: list[Any]) -> None:
        for job in jobs:
            self.bytes -= job()
        self.settle()


class Shared:
    """Slots of shared memory, filled with NaN; or one of them."""

    def __init__(self, dtype: Any, shape: list[int]) -> None:
        self.slots = torch.full(shape, float("nan"), dtype=dtype)

    def index(self, slot: Any) -> Any:
        return _Slot(self.slots[int(slot)])


class _Slot:
    def __init__(self, data: Tensor) -> None:
        self.data = data

    def permute(self, axes: tuple[int, int]) -> _Slot:
        return _Slot(self.data.permute(axes))


class Sum:
    """An accumulator, and how many of its products have been made."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Machine:
    """One program's memory and tensor cores, and the names that a kernel's text means."""

    def __init__(self, program: tuple[int, int], grid: tuple[int, int], *, eager: bool) -> None:
        self.program, self.grid, self.eager = program, grid, eager
        self.waited = False
        self.products: list[Any] = []

    def names(self) -> dict[str, Any]:
        barrier = SimpleNamespace(
            init=lambda b, count: None,
            expect=self.expect,
            wait=self.wait,
            MBarrierLayout=lambda: None,
        )
        return {
            "gl": self.language(),
            "mbarrier": barrier,
            "_load": self.load,
            "_barrier": lambda: None,
            "fence_async_shared": lambda: None,
            "gdc_launch_dependents": lambda: None,
            "gdc_wait": self.see_what_came_before,
            "warpgroup_mma": self.product,
            "warpgroup_mma_init": lambda value: value,
            "warpgroup_mma_wait": self.wait_for_products,
        }

    def language(self) -> Any:
        def nothing(*_: Any) -> None:
            return None

        return SimpleNamespace(
            float32=torch.float32,
            int64=torch.int64,
            program_id=lambda axis: block(self.program[axis]),
            num_programs=lambda axis: self.grid[axis],
            static_range=range,
            zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
            arange=lambda a, b, layout: block(torch.arange(a, b)),
            where=lambda condition, a, b: a if condition else b,
            exp=torch.exp,
            convert_layout=lambda value, layout: value,
            allocate_shared_memory=self.allocate,
            store=self.store,
            BlockedLayout=nothing,
            SliceLayout=nothing,
            NVMMADistributedLayout=nothing,
        )

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda slot: barriers[int(slot)])
        return Shared(dtype, shape)

    def see_what_came_before(self) -> None:
        self.waited = True

    def expect(self, barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
        if pred:
            assert barrier.arrivals == 1, "two phases at once"
            barrier.arrivals, barrier.bytes = 0, barrier.bytes + num_bytes

    def load(self, tiles: Tiles, at: Any, barrier: Barrier, slot: _Slot, pred: Any = True) -> None:
        if not pred:
            return
        assert self.waited or not tiles.late, "read before the kernel that makes it has ended"
        assert slot.data.shape == tiles.size

        def job() -> int:
            slot.data.copy_(tiles.read(at))
            return slot.data.nbytes

        if self.eager:
            barrier.arrive([job])
        else:
            barrier.jobs.append(job)

    def wait(self, barrier: Barrier, phase: int) -> None:
        jobs, barrier.jobs = barrier.jobs, []
        barrier.arrive(jobs)
        if barrier.phase % 2 == phase:
            raise Deadlock(f"phase {barrier.phase}: {barrier.bytes} bytes missing")

    def product(self, a: _Slot, b: _Slot, acc: Any, *, is_async: bool) -> Sum:
        assert is_async
        total = acc if isinstance(acc, Sum) else Sum(acc)

        def job() -> None:
            total.value = total.value + a.data.float() @ b.data.float()

        self.products.append(job)
        return total

    def wait_for_products(self, left: int, deps: tuple[Sum]) -> Any:
        while len(self.products) > left:
            self.products.pop(0)()
        return deps[0].value if isinstance(deps[0], Sum) and not left else deps[0]

    def store(self, ptr: Pointer, value: Tensor, mask: Tensor) -> None:
        mask = mask.expand(value.shape)
        at = ptr.at[mask].as_subclass(Tensor)
        assert at.unique().numel() == at.numel()
        assert ptr.data[at].isnan().all(), "stored twice"
        ptr.data[at] = value[mask].as_subclass(Tensor)


def run(
    modules: tuple[ModuleType, ...],
    kernel: Any,
    grid: tuple[int, int],
    *args: Any,
    eager: bool,
    **meta: Any,
) -> None:
    """All programs of a grid. args: Tiles, Pointers and numbers."""
    for program in product(*map(range, grid)):
        space = Machine(program, grid, eager=eager).names()
        names = dict(space)
        for module in modules:
            for name, value in vars(module).items():
                if name not in space and hasattr(value, "fn"):
                    names[name] = _function(value.fn, names)
        _function(kernel.fn, names)(*args, **meta)


def _function(function: Any, names: dict[str, Any]) -> FunctionType:
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)
