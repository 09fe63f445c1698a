# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution of width W along tree paths, then SiLU.

A node's window is its own raw input and those of its W - 1 nearest *ancestors*, falling into
the slot's tail above the root; never its neighbour in node order, which may be a sibling. One
accumulation order (oldest tap first) serves one token and many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specla.ops.contract import LayerState, Places, RoundPlan
from specla.ops.norm import cast, compute_dtype
from specla.ops.pointwise import silu


def _weighted(taps: list[Tensor], weight: Tensor, dtype: torch.dtype) -> Tensor:
    """silu(sum_j w[:, j] * taps[j]), accumulated in compute dtype, oldest tap first."""
    wide = compute_dtype(dtype)
    columns = cast(weight, wide).unbind(1)
    y = cast(taps[0], wide) * columns[0]
    for tap, column in zip(taps[1:], columns[1:], strict=True):
        y.addcmul_(cast(tap, wide), column)
    return cast(silu(y), dtype)


def prefill(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, C] raw inputs, weight [C, W] (last column on the current token), tail [W-1, C].

    Returns (y [T, C], new tail [W-1, C]).
    """
    length, width = x.shape[0], weight.shape[1]
    history = torch.cat([tail, x])
    taps = [history[j : j + length] for j in range(width)]
    return _weighted(taps, weight, x.dtype), history[length:].clone()


def packed(x: Tensor, weight: Tensor, same: Tensor) -> Tensor:
    """Texts from their starts, end to end: x [M, C] raw inputs, weight [C, W], same [M, W] bool:
    whether the token W - 1 - j places before is of the same text. Returns y [M, C]."""
    if x.is_cuda:
        # Triton is imported where there is a GPU only.
        from specla.ops import triton_conv

        return triton_conv.packed(x, weight, same)
    width = weight.shape[1]
    history = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    taps = [history[j : j + len(x)] * same[:, j, None] for j in range(width)]
    return _weighted(taps, weight, x.dtype)


def runs(
    x: Tensor, lengths: Sequence[int], weight: Tensor, tails: Tensor
) -> tuple[Tensor, Tensor]:
    """A run of tokens of each of B sequences: x [M, C] raw inputs, run by run, lengths[b] of each,
    weight [C, W], tails [B, W-1, C]. Returns (y [M, C], new tails [B, W-1, C])."""
    before = weight.shape[1] - 1
    starts = accumulate(lengths, lambda at, length: at + before + length, initial=0)
    parts = [part for run in zip(tails, x.split(list(lengths)), strict=True) for part in run]
    history, begins = torch.cat(parts), list(starts)

    def rows(first: int) -> Tensor:
        places = [b + first + i for b, n in zip(begins, lengths, strict=False) for i in range(n)]
        return history.index_select(0, torch.tensor(places, device=x.device))

    ends = [end - before + i for end in begins[1:] for i in range(before)]
    last = history.index_select(0, torch.tensor(ends, dtype=torch.int64, device=x.device))
    taps = [rows(j) for j in range(weight.shape[1])]
    return _weighted(taps, weight, x.dtype), last.view_as(tails)


def step(window: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of n paths: window [n, W-1, C] the raw inputs above it, oldest first, x
    [n, C], weight [C, W]. Returns (y [n, C], the window below [n, W-1, C])."""
    full = torch.cat([window, x.unsqueeze(1)], dim=1)
    return _weighted(list(full.unbind(1)), weight, x.dtype), full[:, 1:]


def verify(layer: LayerState, plan: RoundPlan, x: Tensor, weight: Tensor) -> Tensor:
    """x [M, C] raw inputs of every node, weight [C, W] -> y [M, C].

    Also advances the tail over the committed path and records x in the candidate bank.
    """
    old = torch.cat(
        [layer.tail[plan.slots, plan.read_bank], layer.inputs[plan.slots, plan.read_bank]], dim=1
    )
    tail = old[plan.rows, plan.tail_source]
    layer.tail[plan.slots, 1 - plan.read_bank] = tail
    layer.inputs[plan.node_slot, plan.write_bank, plan.node_index] = x
    history = torch.cat([tail.flatten(0, 1), x])
    return _weighted([_rows(history, tap) for tap in plan.taps], weight, x.dtype)


def _rows(x: Tensor, places: Places) -> Tensor:
    return x[places] if isinstance(places, slice) else x.index_select(0, places)
