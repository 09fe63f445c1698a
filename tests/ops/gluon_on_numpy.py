# SPDX-License-Identifier: Apache-2.0
"""Runs the source of a Gluon kernel as plain Python on numpy, program after program.

Gluon has no interpreter. This has what `ops.gdn.triton_wy_fused` uses: values, pointers, shared
memory, the copy engine and its barriers. Layouts mean nothing here and a program is one thread:
races and missing fences do not show. What shows: wrong sums and addresses, accesses out of bounds,
shared memory that nobody wrote (NaN), waits that would never end, copies over what nobody waited
for. bfloat16 is float32 that was rounded; arithmetic on it is refused, as it would be a mistake.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
F32, BF16, I32, I64, BOOL, POINTER = "f32", "bf16", "i32", "i64", "bool", "pointer"
BYTES = {F32: 4, BF16: 2}
KINDS = {F32: np.float32, BF16: np.float32, I32: np.int32, I64: np.int64, BOOL: np.bool_}
KINDS[POINTER] = np.int64
DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.int32: I32, torch.int64: I64}
ORDER = (POINTER, F32, BF16, I64, I32, BOOL)
OFFSET = 36  # bits of a pointer below the number of its buffer


def rounded(x: Array) -> Array:
    """To bfloat16, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy()


class Value:
    """A Gluon tensor or scalar; of a pointer, `target` says what it points to."""

    def __init__(self, data: Any, kind: str, target: str = "") -> None:
        self.data, self.kind, self.target = np.asarray(data, KINDS[kind]), kind, target

    shape = property(lambda self: self.data.shape)
    type = SimpleNamespace(layout=None)
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    __int__ = __index__

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.kind, self.target)

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.data.reshape(shape), self.kind, self.target)

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.data.transpose(order), self.kind, self.target)

    def split(self) -> tuple[Value, Value]:
        first, second = np.moveaxis(self.data, -1, 0)
        return Value(first, self.kind), Value(second, self.kind)

    def to(self, kind: str, bitcast: bool = False) -> Value:
        if bitcast:
            data = np.ascontiguousarray(self.data)
            return Value(data.view(KINDS[kind]).reshape(self.shape), kind)
        return Value(rounded(self.data) if kind == BF16 else self.data.astype(KINDS[kind]), kind)

    def __neg__(self) -> Value:
        return Value(-self.data, self.kind)


def lift(x: Any, like: Value | None = None) -> Value:
    if isinstance(x, Value):
        return x
    if isinstance(x, bool | float):
        return Value(x, BOOL if isinstance(x, bool) else F32)
    return Value(x, like.kind if like is not None and like.kind in (F32, I64) else I32)


def _binary(function: Callable[[Any, Any], Any], compares: bool, turned: bool) -> Any:
    def method(self: Value, other: Any) -> Value:
        x, y = self, lift(other, self)
        kind = next(k for k in ORDER if k in (x.kind, y.kind))
        assert kind != BF16 or compares, "arithmetic in bfloat16"
        a, b = (v.data.astype(KINDS[kind]) for v in ((y, x) if turned else (x, y)))
        with np.errstate(all="ignore"):
            return Value(function(a, b), BOOL if compares else kind, x.target or y.target)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "rshift", "lshift", "and", "or"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Value, f"__{_name}__", _binary(_function, False, False))
    setattr(Value, f"__r{_name}__", _binary(_function, False, True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name), True, False))


class Memory:
    """Every buffer that a pointer may point into."""

    def __init__(self) -> None:
        self.buffers: list[Array] = []

    def add(self, x: Array, kind: str) -> Value:
        self.buffers.append(x)
        return Value(len(self.buffers) << OFFSET, POINTER, kind)

    def _places(self, at: Array, mask: Array) -> Iterator[tuple[Array, Array, Array]]:
        buffer, place = at >> OFFSET, at & ((1 << OFFSET) - 1)
        for i in np.unique(buffer[mask]):
            assert 0 < i <= len(self.buffers), "a pointer before its buffer"
            chosen = mask & (buffer == i)
            assert (place[chosen] < len(self.buffers[i - 1])).all(), "out of bounds"
            yield self.buffers[i - 1], place[chosen], chosen

    def load(self, at: Value, mask: Any = True, other: Any = np.nan) -> Value:
        where, used = np.broadcast_arrays(at.data, lift(mask).data)
        found = np.full(where.shape, lift(other).data if other == other else 0, KINDS[at.target])
        for buffer, place, chosen in self._places(where, used):
            found[chosen] = buffer[place]
        return Value(found, at.target)

    def store(self, at: Value, x: Any, mask: Any = True) -> None:
        where, used, values = np.broadcast_arrays(at.data, lift(mask).data, lift(x).data)
        assert at.target == lift(x).kind, f"{lift(x).kind} stored as {at.target}"
        for buffer, place, chosen in self._places(where, used):
            buffer[place] = values[chosen]


class Shared:
    """A buffer in shared memory, or barriers. memory: by kind, what lies in the same place; what
    is stored as one kind is lost as another."""

    def __init__(
        self,
        data: Array,
        kind: str,
        barriers: list[Barrier] | None = None,
        memory: dict[str, Array] | None = None,
    ) -> None:
        self.data, self.kind, self.barriers = data, kind, barriers or []
        self.memory = {kind: data} if memory is None else memory

    shape = property(lambda self: self.data.shape)
    layout = None

    def index(self, i: Any) -> Shared:
        one = self.barriers[int(i) : int(i) + 1]
        return Shared(self.data[int(i)], self.kind, one, self.memory)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order), self.kind, memory=self.memory)

    def reinterpret(self, kind: str, shape: Sequence[int], layout: object) -> Shared:
        data = self.data
        if kind != self.kind:
            whole = self.memory[self.kind]
            assert whole.size == data.size, "a part, as another kind"
            count = whole.size * BYTES[self.kind] // BYTES[kind]
            data = self.memory.setdefault(kind, np.full(count, np.nan, np.float32))
        data = data.view()
        data.shape = tuple(shape)  # fails where it would copy
        return Shared(data, kind, memory=self.memory)

    def load(self, layout: object) -> Value:
        return Value(self.data.copy(), self.kind)

    def store(self, x: Value) -> None:
        assert (x.kind, x.shape) == (self.kind, self.shape)
        self.data[...] = x.data
        for kind, other in self.memory.items():
            if kind != self.kind:
                other[...] = np.nan


class Barrier:
    def __init__(self) -> None:
        self.expected = self.done = self.waited = 0


def _expect(bar: Shared, size: int, pred: Any = True) -> None:
    bar.barriers[0].expected += size * bool(lift(pred))


def _wait(bar: Shared, phase: Any) -> None:
    b = bar.barriers[0]
    assert b.done > 0, "waits for what nobody asked for"
    assert (b.done - 1) % 2 == int(phase), "waits for a phase that does not come"
    b.waited = b.done


def _load_block(matrix: Any, at: Any, bar: Shared, out: Shared, pred: Any = True) -> None:
    if lift(pred):
        b, (row, column), (rows, columns) = bar.barriers[0], map(int, at), out.shape
        b.expected -= 4 * rows * columns
        assert b.expected >= 0, "more bytes than a barrier expects"
        assert b.done == b.waited, "copied over what nobody waited for"
        b.done += b.expected == 0
        out.data[...] = matrix.data[row : row + rows, column : column + columns]


def _store_block(matrix: Any, at: Any, x: Shared) -> None:
    (row, column), (rows, columns) = map(int, at), x.shape
    matrix.data[row : row + rows, column : column + columns] = x.data


def _allocate(kind: str, shape: Sequence[int], layout: object) -> Shared:
    barriers = [Barrier() for _ in range(shape[0])] if kind == I64 else None
    return Shared(np.full(shape, np.nan, np.float32), kind, barriers)


def _product(x: Value, y: Any, acc: Value, **_: Any) -> Value:
    assert x.kind == y.kind == BF16
    return Value(x.data.astype(np.float64) @ y.data.astype(np.float64) + acc.data, F32)


def _where(condition: Any, x: Any, y: Any) -> Value:
    x, y = (
        lift(x, y if isinstance(y, Value) else None),
        lift(y, x if isinstance(x, Value) else None),
    )
    kind = next(k for k in ORDER if k in (x.kind, y.kind))
    return Value(np.where(lift(condition).data, x.data, y.data), kind, x.target or y.target)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _range(*bounds: Any) -> Iterator[Value]:
    return (Value(i, I32) for i in range(*map(int, bounds)))


def _language(memory: Memory, program: list[int]) -> SimpleNamespace:
    """`gl`."""
    layouts = (
        "BlockedLayout SliceLayout NVMMADistributedLayout DotOperandLayout "
        "DistributedLinearLayout SwizzledSharedLayout"
    )
    shared = SimpleNamespace(get_default_for=_nothing)
    return SimpleNamespace(
        **dict.fromkeys(layouts.split(), _nothing), NVMMASharedLayout=shared,
        constexpr=_same, convert_layout=_same, allocate_shared_memory=_allocate, where=_where,
        float32=F32, bfloat16=BF16, int32=I32, int64=I64, load=memory.load, store=memory.store,
        static_range=lambda *bounds: range(*bounds),
        program_id=lambda _: Value(program[0], I32), num_programs=lambda _: Value(program[1], I32),
        arange=lambda first, last, layout: Value(np.arange(first, last), I32),
        zeros=lambda shape, kind, layout: Value(np.zeros(shape), kind),
        exp=lambda x: Value(np.exp(x.data), F32), sqrt=lambda x: Value(np.sqrt(x.data), F32),
        log=lambda x: Value(np.log(x.data), F32),
        reduce=lambda x, axis, add: Value(x.data.sum(axis), x.kind),
        minimum=lambda x, y: Value(np.minimum(x.data, y), x.kind),
        join=lambda x, y: Value(np.stack([x.data, y.data], -1), x.kind),
    )  # fmt: skip


def _source(path: Path) -> str:
    """Without imports and decorators."""
    text = path.read_text()
    text = re.sub(r"@gluon\.jit\((?:.|\n)*?\n\)[^\n]*\n|@gluon\.\w+\n", "", text)
    text = re.sub(r"^from [\w.]+ import \((?:.|\n)*?\)\n", "", text, flags=re.M)
    text = re.sub(r"^ *(from [\w.]+ )?import .*\n", "    pass\n", text, flags=re.M)
    text = re.sub(r"^ {4}pass\n(?=\S|\n|    pass)", "", text, flags=re.M)
    text = re.sub(r"^(if TYPE_CHECKING:)\n", r"\1 pass\n", text, flags=re.M)
    text = re.sub(r"^(load_block|store_block|barrier|_view|viewed) = .*\n", "", text, flags=re.M)
    return "from __future__ import annotations\n" + text


def run(
    files: Sequence[Path],
    kernel: str,
    programs: int,
    matrix: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[float],
    meta: dict[str, Any],
    replaced: dict[str, Callable[..., Any]],
) -> None:
    """Launch; everything is written in place.

    files: modules that define it, what is imported first. matrix: the first argument, which
    blocks are cut from. replaced: functions of inline assembly, over arrays.
    """
    memory, program = Memory(), [0, programs]
    arrays = [
        (t.float() if t.dtype == torch.bfloat16 else t).contiguous().view(-1).numpy()
        for t in tensors
    ]
    found: dict[str, Any] = {
        "gl": _language(memory, program), "tma": SimpleNamespace(store_wait=_nothing),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=_nothing, init=_nothing, expect=_expect, wait=_wait
        ),
        "load_block": _load_block, "store_block": _store_block, "warpgroup_mma": _product,
        "mma_v2": _product, "viewed": Shared.reinterpret,
        "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else deps,
        "BLOCK": 16, "TYPE_CHECKING": False, "range": _range,
        "passes": lambda *bounds, disable_licm: _range(*bounds),
    }  # fmt: skip
    for name in ("barrier", "fence_async_shared", "gdc_wait", "gdc_launch_dependents"):
        found[name] = _nothing
    for path in files:
        exec(compile(_source(path), str(path), "exec"), found)
    for name, function in replaced.items():
        found[name] = lambda x, *_, f=function: Value(f(x.data), F32 if x.kind == BF16 else x.kind)
    arguments = [memory.add(x, DTYPES[t.dtype]) for x, t in zip(arrays, tensors, strict=True)]
    blocks = SimpleNamespace(data=matrix.numpy(), layout=None)
    for program[0] in range(programs):
        found[kernel](blocks, *arguments, *map(lift, scalars), **meta)
    for tensor, x in zip(tensors, arrays, strict=True):
        tensor.copy_(torch.from_numpy(x).view_as(tensor))
