# SPDX-License-Identifier: Apache-2.0
"""Rows and rounds as the device holds them, built from host records.

The device is the GPU if there is one, else the CPU, where kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specla.ops.contract import DeviceRound
from specla.sampling.accept import RowLaw
from specla.sampling.triton import Choices, RowArrays
from specla.topology.tree import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 10**9  # where nobody may look


def int32(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def garbage(*size: int) -> torch.Tensor:
    return torch.full(size, GARBAGE, dtype=torch.int32, device=DEVICE)


def signed(seed: int) -> int:
    """The int64 with the bits of an unsigned seed."""
    return seed - 2**64 if seed >= 2**63 else seed


def row_arrays(laws: Sequence[RowLaw], max_len: int = 64, max_ends: int = 4) -> RowArrays:
    """One row per record; histories shorter than max_len are followed by garbage."""
    ends = [[*law.end_token_ids, *[-1] * max_ends][:max_ends] for law in laws]
    history = [[*law.history, *[GARBAGE] * max_len][:max_len] for law in laws]
    return RowArrays(
        seed=torch.tensor([signed(law.seed) for law in laws], device=DEVICE),
        len_tokens=int32([len(law.history) for law in laws]),
        remaining=int32([law.remaining for law in laws]),
        temperature=torch.tensor(
            [law.params.temperature for law in laws], dtype=torch.float64, device=DEVICE
        ),
        ends=int32(ends),
        history=int32(history),
    )


def device_round(
    trees: Sequence[DraftTree | None], num_nodes: int, max_nodes: int | None = None
) -> DeviceRound:
    """Trees padded with garbage to N nodes; None is an idle row. Cursors are those of new rows."""
    num_rows, width = len(trees), max_nodes or num_nodes
    tokens, parents = garbage(num_rows, num_nodes), garbage(num_rows, num_nodes)
    for b, tree in enumerate(trees):
        if tree is not None:
            tokens[b, : tree.num_nodes] = int32(tree.tokens)
            parents[b, : tree.num_nodes] = int32(tree.parents)
    zeros = int32([0] * num_rows)
    return DeviceRound(
        slot=int32(range(1, num_rows + 1)),
        num_nodes=int32([0 if tree is None else tree.num_nodes for tree in trees]),
        tokens=tokens,
        parents=parents,
        bank=zeros.clone(),
        ring_len=zeros.clone(),
        path_len=zeros.clone(),
        path=garbage(num_rows, width),
        walk=zeros[:, None],
    )


def chosen(choices: Choices, temperature: torch.Tensor) -> tuple[list[int], list[bool]]:
    """What `accept` makes of the blocks' best: per flat node the token, and whether its maximum
    is finite. temperature: [M], that of each node's row."""
    top = choices.top[: len(temperature)].double()
    score, token = choices.score[: len(top)], choices.token[: len(top)]
    highest = top.amax(-1, keepdim=True)
    base = torch.where(highest.isfinite(), highest, 0.0)
    drawn = score + (top - base) / temperature.where(temperature > 0, 1.0)[:, None]
    score = torch.where(temperature[:, None] > 0, drawn, top)
    tokens = token.where(score == score.amax(-1, keepdim=True), GARBAGE).amin(-1)
    return tokens.tolist(), highest[:, 0].isfinite().tolist()
