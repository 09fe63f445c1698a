# SPDX-License-Identifier: Apache-2.0
"""What the closed form works in beside a round's workspace (`ops.gdn.triton_wy`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.triton_wy_solve import BLOCK


class ClosedForm(NamedTuple):
    """What the closed form needs beside `Workspace`; flat, laid out for each round's own sizes.
    Shared by all layers; N is padded to 16, 32 or 64, the log to a power of two from 16 on.

    ancestors [B, N] int64: bit j of node i's word: j is i or above it. places [B, log] int32:
    where in the slot's store the log's entries lie. bfloat16, high pieces before low ones: per
    row and key head x [2, 2 N, K], rows 2i and 2i + 1 being q and k of node i, and e
    [2, log, K], the log's keys if they are folded; per row and value head solution [2, 2 N, N],
    whose rows 2i and 2i + 1 are node i's of P T and T, and reads [2, 2 N, log], the same of F
    and E. decay [N + log + 1] float32 per row and value head: e^{C + G}, e^{C - c}, e^C.
    """

    ancestors: Tensor
    places: Tensor
    x: Tensor
    e: Tensor
    solution: Tensor
    reads: Tensor
    decay: Tensor

    @classmethod
    def allocate(
        cls,
        shape: RecurrentShape,
        num_rows: int,
        max_nodes: int,
        max_log: int,
        device: torch.device | str,
    ) -> ClosedForm:
        """Room for num_rows trees of max_nodes nodes and logs of max_log entries; smaller rounds
        use the beginning."""
        heads, nodes = num_rows * shape.num_value_heads, padded(max_nodes)
        key_heads, K = num_rows * shape.num_key_heads, shape.key_dim
        log = padded(max_log)

        def empty(size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            ancestors=empty(num_rows * max_nodes, torch.int64),
            places=empty(num_rows * log, torch.int32),
            x=empty(key_heads * 4 * nodes * K),
            e=empty(key_heads * 2 * log * K),
            solution=empty(heads * 4 * nodes * nodes),
            reads=empty(heads * 4 * nodes * log),
            decay=empty(heads * (nodes + log + 1), torch.float32),
        )


def padded(count: int) -> int:
    """Nodes of a tree, or entries of a log, to a width of matrix products."""
    return max(BLOCK, int(triton.next_power_of_2(count)))
