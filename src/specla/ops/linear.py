# SPDX-License-Identifier: Apache-2.0
"""y = x W^T whose bits do not depend on how many rows ride along (rule I4).

A BLAS picks another kernel, hence another order of additions, for another number of rows. So
each weight shape is tried at start-up: a call form (rows at once, operand order, output split)
is usable where a row gets the bits of the *canonical* form, the 64-row product, at every
position. Which usable form serves n rows is then only a question of speed and is settled by
timing them. Where no usable form exists, exact mode is refused.

Measured on 2 cores (AMD EPYC, AVX2, torch 2.13.0): one row alone takes the GEMV kernel and gets
other bits; 4 rows or more (12 or more with W as the first operand) get the canonical ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specla.errors import ExactnessUnavailable

MAX_ROWS = 64
# Bytes. Where an operand starts and how far its rows lie apart can change its bits.
ALIGNMENT = 64
ROWS = (1, 2, 4, 8, 16, 32, 64)
SPLITS = (0, 256, 1024)


class Form(NamedTuple):
    """One way to call the BLAS: `rows` at once, weights first or second, outputs `split`."""

    rows: int
    weights_first: bool
    split: int

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [rows, I] -> [rows, O], contiguous: what is summed over the outputs of a row next
        must not add in another order because of how they lie."""
        if not self.split or self.split >= weight.shape[0]:
            return self._product(x, weight)
        return torch.cat([self._product(x, w) for w in weight.split(self.split)], dim=1)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return (weight @ x.t()).t().contiguous() if self.weights_first else F.linear(x, weight)


CANONICAL = Form(MAX_ROWS, False, 0)


class Linear:
    """A weight [O, I] and the calls that apply it.

    Until `check` has run, and always in plain mode, the call is one F.linear over all rows.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._plan: tuple[tuple[Form, ...], ...] | None = None

    def check(self, name: str) -> None:
        """Switch to row-invariant calls.

        Raises:
            ExactnessUnavailable: no form gives one row the same bits at every count and place.
        """
        w = self.weight
        if w.device.type != "cpu":
            raise ExactnessUnavailable(
                f"exact mode needs row-invariant products; {name} is on {w.device}, where only "
                "the CPU forms are checked; use device cpu"
            )
        key = (tuple(w.shape), w.dtype, torch.get_num_threads())
        plan = _plan_for(*key)
        if plan is None:
            raise ExactnessUnavailable(
                f"exact mode needs a product whose bits do not depend on row count; none was "
                f"found for {name} {list(w.shape)} {w.dtype}; use mode plain without a drafter"
            )
        self.weight = w if _is_aligned(w) else w.clone(memory_format=torch.contiguous_format)
        self._plan = plan

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, I] -> [M, O], in the weight's dtype."""
        if self._plan is None:
            return F.linear(x, self.weight)
        if x.shape[0] <= MAX_ROWS:
            return self._rows(x)
        return torch.cat([self._rows(part) for part in x.split(MAX_ROWS)])

    def _rows(self, x: Tensor) -> Tensor:
        assert self._plan is not None
        forms = self._plan[x.shape[0]]
        if len(forms) == 1:
            return _padded(forms[0], x, self.weight)
        parts, start = [], 0
        for form in forms:
            part = x[start : start + form.rows]
            parts.append(_padded(form, part, self.weight))
            start += form.rows
        return torch.cat(parts)


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def _padded(form: Form, x: Tensor, weight: Tensor) -> Tensor:
    count = x.shape[0]
    if count == form.rows and _is_aligned(x):
        return form(x, weight)
    full = x.new_zeros(form.rows, x.shape[1])
    full[:count] = x
    return form(full, weight)[:count]


@cache
def _plan_for(
    shape: tuple[int, int], dtype: torch.dtype, threads: int
) -> tuple[tuple[Form, ...], ...] | None:
    """For each row count 0..64 the cheapest sequence of usable forms, or None if there is none.

    Bits are a property of the kernel, chosen by shape, dtype and thread count, not by values:
    random operands stand in for the weight.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    x = torch.randn(2 * MAX_ROWS, shape[1], generator=generator, dtype=torch.float64).to(dtype)
    want = torch.cat([CANONICAL(part, weight) for part in x.split(MAX_ROWS)])
    costs = {}
    for form in _candidates(shape[0]):
        seconds = _cost_if_same_bits(form, x, weight, want)
        if seconds is not None:
            costs[form] = seconds
    return _cheapest(costs) if costs else None


def _candidates(outputs: int) -> Iterator[Form]:
    for split in SPLITS:
        if split < outputs:
            for rows in ROWS:
                yield Form(rows, False, split)
                yield Form(rows, True, split)


def _cost_if_same_bits(form: Form, x: Tensor, weight: Tensor, want: Tensor) -> float | None:
    """Seconds per call if rows get `want`'s bits at several offsets, reversed, and beside
    padding; None if they do not. The least of the calls is the cost: other work on the machine
    only ever adds time."""
    rows = form.rows
    lone = x.new_zeros(rows, x.shape[1])
    lone[-1] = x[5]
    if not torch.equal(form(lone, weight)[-1], want[5]):
        return None
    seconds = []
    for start in (0, 1, rows, MAX_ROWS - rows // 2):
        order = torch.arange(start, start + rows).flip(0)
        block = x[order]
        begin = time.perf_counter()
        y = form(block, weight)
        seconds.append(time.perf_counter() - begin)
        if not torch.equal(y, want[order]):
            return None
    return min(seconds)


def _cheapest(costs: dict[Form, float]) -> tuple[tuple[Form, ...], ...]:
    """Shortest path over row counts: pad one form up to `rows`, or run it and go on."""
    best: list[tuple[float, tuple[Form, ...]]] = [(0.0, ())]
    for count in range(1, MAX_ROWS + 1):
        options = []
        for form, cost in costs.items():
            rest, tail = best[max(0, count - form.rows)]
            options.append((cost + rest, (form, *tail)))
        best.append(min(options))
    return tuple(forms for _, forms in best)
