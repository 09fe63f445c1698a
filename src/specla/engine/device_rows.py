# SPDX-License-Identifier: Apache-2.0
"""Rows of a round on a GPU, as the device has them: what acceptance and drafters there read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.engine.running import Running
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.transfer import send
from specla.sampling.filters import is_unfiltered
from specla.sampling.triton import VERDICT_HEADER

MAX_ENDS = 16
# As good as no limit, and what an int32 can hold.
MAX_REMAINING = 2**31 - 1


@dataclass(slots=True)
class BucketRound:
    """One bucket: its graphs, by the depth that they draft to, and what they read and write. read,
    read_path: pinned. features: of the round's nodes, where the drafter reads them."""

    rnd: DeviceRound
    rows: RowArrays
    verdicts: Tensor
    read: list[Tensor]
    read_path: Tensor
    graphs: dict[int, torch.cuda.CUDAGraph]
    logits: Tensor
    features: Features | None


def new_rows(num_rows: int, history: int, device: torch.device) -> RowArrays:
    """Zeros. history: tokens that can be looked back on."""

    def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return RowArrays(
        seed=zeros(num_rows, dtype=torch.int64),
        len_tokens=zeros(num_rows),
        remaining=zeros(num_rows),
        temperature=zeros(num_rows, dtype=torch.float64),
        ends=zeros(num_rows, MAX_ENDS),
        history=zeros(num_rows, history),
    )


def new_bucket(rnd: DeviceRound, rows: RowArrays, features: Features | None) -> BucketRound:
    """Without graphs yet."""
    num_rows, num_nodes = rnd.tokens.shape
    words = num_rows, VERDICT_HEADER + num_nodes + 1
    verdicts = torch.zeros(words, dtype=torch.int32, device=rnd.tokens.device)
    return BucketRound(
        rnd=rnd,
        rows=rows,
        verdicts=verdicts,
        read=[torch.zeros(words, dtype=torch.int32).pin_memory() for _ in "ab"],
        read_path=torch.zeros(rnd.path.shape, dtype=torch.int32).pin_memory(),
        graphs={},
        logits=verdicts[:0],
        features=features,
    )


def is_device_row(row: Running) -> bool:
    """Whether the device's acceptance knows this row's law and ends."""
    return is_unfiltered(row.request.params) and len(row.end_token_ids) <= MAX_ENDS


def fill_rows(
    arrays: RowArrays, rows: Sequence[Running], *, first: int = 0, history: bool
) -> None:
    """These rows are at places `first`, `first` + 1, ... Nothing waits for the device."""
    ends = [sorted(row.end_token_ids)[:MAX_ENDS] for row in rows]
    values = {
        "seed": [(row.request.seed + 2**63) % 2**64 - 2**63 for row in rows],
        "len_tokens": [len(row.tokens) for row in rows],
        "remaining": [min(row.remaining, MAX_REMAINING) for row in rows],
        "temperature": [float(row.request.params.temperature) for row in rows],
        "ends": [[*e, *[-1] * (MAX_ENDS - len(e))] for e in ends],
    }
    for name, column in values.items():
        into: Tensor = getattr(arrays, name)[first : first + len(rows)]
        send(torch.tensor(column, dtype=into.dtype), into)
    if history:
        for row, past in zip(rows, arrays.history[first:], strict=False):
            tokens = torch.tensor(row.tokens[: past.shape[0]], dtype=past.dtype)
            # Row by row: a copy of part of a matrix would not stay in pinned memory.
            send(tokens, past[: len(tokens)])
