# SPDX-License-Identifier: Apache-2.0
"""Test tools on the device: a drafter whose trees need neither host nor history.

For benchmarks and tests of whole rounds on the device; `specla.testing` has the doubles that run
on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from specla.drafters.base import DrafterInfo, DraftRow, Observation
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.topology.tree import DraftTree

TREE_PURPOSE = 1
"""The noise's purpose for trees; the target's own draws have another."""

_PURPOSE = tl.constexpr(TREE_PURPOSE)


def draft_random_tree(
    seed: Tensor, len_tokens: Tensor, rnd: DeviceRound, *, vocab_size: int, pdl: bool = False
) -> None:
    """Fill every live row with a random tree of exactly N nodes, its node 0 included.

    Node i hangs below any earlier node; its token is one of those that are i modulo N, so that
    siblings are distinct. A function of (seed, len_tokens) of the row alone. Rows whose
    `num_nodes` is 0 are idle and stay so. One program per row.

    Args:
        seed, len_tokens: int64 and int32 [B].
        rnd: tokens [B, N] with N <= vocab_size and N <= N_max; node 0's token is left as it is.
    """
    num_rows, num_nodes = rnd.tokens.shape
    assert num_nodes <= vocab_size
    assert num_nodes <= rnd.path.shape[1], "max_nodes must be a power of two"
    _random_tree_kernel[(num_rows,)](
        seed,
        len_tokens,
        rnd.num_nodes,
        rnd.tokens,
        rnd.parents,
        num_nodes,
        vocab_size,
        NODES=triton.next_power_of_2(num_nodes),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


class DeviceRandomTrees:
    """A drafter of random trees that never needs the host."""

    def __init__(self, *, vocab_size: int) -> None:
        self.info = DrafterInfo(name="random-trees", max_depth=63, may_return_nothing=False)
        self._vocab_size = vocab_size

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """Where the host has to draft, nothing."""
        return [DraftTree.root(row.tokens[-1]) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """As deep as trees of so many nodes can be."""
        return (num_nodes - 1,)

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """See `DeviceDrafter`."""
        draft_random_tree(rows.seed, rows.len_tokens, rnd, vocab_size=self._vocab_size)


@triton.jit(do_not_specialize=["num_columns", "vocab_size"])
def _random_tree_kernel(
    seed_ptr,
    len_tokens_ptr,
    num_nodes_ptr,
    tokens_ptr,
    parents_ptr,
    num_columns,
    vocab_size,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(num_nodes_ptr + b) == 0:
        return
    node = tl.arange(0, NODES)
    position = tl.load(len_tokens_ptr + b)
    words = tl.philox(tl.load(seed_ptr + b), node, position, 0, _PURPOSE)
    # 31 bits, so that the remainders are those of non-negative numbers.
    first, second = (words[0] >> 1).to(tl.int32), (words[1] >> 1).to(tl.int32)
    parent = tl.where(node == 0, -1, first % tl.maximum(node, 1))
    token = second % (vocab_size // num_columns) * num_columns + node
    in_use = node < num_columns
    tl.store(parents_ptr + b * num_columns + node, parent, mask=in_use)
    tl.store(tokens_ptr + b * num_columns + node, token, mask=in_use & (node > 0))
    tl.store(num_nodes_ptr + b, num_columns)
