# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""`drafters.marginals` on the device: the best nodes over one law per depth, node for node.

What is kept has two candidates each, the first child and the next sibling, as on the host's heap;
here they are two lanes of a vector, and the best of all lanes is taken until there are enough. A
tree of 16 nodes is 15 steps of one program, where growing by level would be a launch per level
with a frontier as wide as the tree.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.drafters.triton_grow import Best, children
from specla.ops.contract import DeviceRound

_INF = tl.constexpr(float("inf"))
_MANY = tl.constexpr(2**31 - 1)
_MOST = tl.constexpr(2**63 - 1)


def best_first(
    best: Best,
    first: int,
    depth: int,
    remaining: Tensor,
    count: Tensor,
    rnd: DeviceRound,
    *,
    max_drafts: int,
    tau: float,
    spine: bool,
    pdl: bool = False,
) -> None:
    """Write tokens, parents and num_nodes of the live rows of rnd.

    best: from `triton_grow.top_blocks`, of E positions per row; `first` .. first + depth - 1 are
    the laws of depths 1, 2, ... remaining int32 [B]: with 1 nothing is drafted. count int32 [B]: 0
    where nothing is. max_drafts, tau, spine: see `marginals.best_first`.
    """
    num_rows, num_columns = rnd.tokens.shape
    blocks, top_k = best.key.shape[1:]
    per_row = best.key.shape[0] // num_rows
    _best_first_kernel[(num_rows,)](
        *best,
        remaining,
        rnd.num_nodes,
        count,
        rnd.tokens,
        rnd.parents,
        num_columns,
        max_drafts,
        first,
        depth,
        tau,
        E=per_row,
        EXPANDED=triton.next_power_of_2(per_row),
        TOP=top_k,
        PARTS=blocks,
        KEYS=triton.next_power_of_2(blocks * top_k),
        LAWS=triton.next_power_of_2(per_row * top_k),
        NODES=triton.next_power_of_2(num_columns),
        SPINE=spine,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def _law(logprob, exists, i, at, among):
    """(log-probability, whether there is one) of entry `at`."""
    here = tl.where((i == at) & (among > 0), 1, 0)
    there = tl.sum(tl.where(here > 0, exists, 0), axis=0)
    return tl.sum(tl.where(here > 0, logprob, 0.0), axis=0), there


@triton.jit(do_not_specialize=["num_columns", "max_drafts", "first", "depth", "tau"])
def _best_first_kernel(
    key_ptr, top_ptr, total_ptr, remaining_ptr, num_nodes_ptr, count_ptr, tokens_ptr, parents_ptr,
    num_columns, max_drafts, first, depth, tau,
    E: tl.constexpr, EXPANDED: tl.constexpr, TOP: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr, LAWS: tl.constexpr, NODES: tl.constexpr, SPINE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(num_nodes_ptr + b) == 0:
        return
    used = tl.where(tl.load(count_ptr + b) > 0, E, 0)
    i = tl.arange(0, LAWS)
    tokens, laws, exists = children(
        key_ptr, top_ptr, total_ptr, key_ptr, b, used, first + i // TOP, i % TOP,
        E, EXPANDED, TOP, PARTS, KEYS, False,
    )  # fmt: skip
    exists = tl.where(exists & (i // TOP < depth), 1, 0)
    laws = tl.where(exists > 0, laws, 0.0).to(tl.float64)
    start, is_open = _law(laws, exists, i, 0, 1)
    least = start - tau

    # Lane n: the first child of node n; lane NODES + n: its next sibling.
    c = tl.arange(0, 2 * NODES)
    score = tl.where(c == 0, start, -_INF)
    waits = tl.where(c == 0, is_open, 0)
    level = tl.where(c == 0, 1, 0)
    rank = c * 0
    ranks = c.to(tl.int64) * 0
    above = tl.zeros([2 * NODES], tl.float64)
    parent = c * 0
    spine = tl.where(c == 0, 1, 0)

    row = b * num_columns
    tl.store(parents_ptr + row, -1)
    allowed = tl.where(tl.load(remaining_ptr + b) > 1, max_drafts, 0)
    n = 1
    going = is_open
    while (n <= allowed) & (going > 0):
        good = tl.where((waits > 0) & (score >= least), 1, 0)
        if SPINE:
            wanted = tl.max(good * spine, axis=0)
            good = tl.where(spine == wanted, good, 0)
        going = tl.max(good, axis=0)
        # The best score; of equals the shallowest, then the lowest ranks from the root down.
        high = tl.max(tl.where(good > 0, score, -_INF), axis=0)
        good = tl.where(score == high, good, 0)
        shallow = tl.min(tl.where(good > 0, level, _MANY), axis=0)
        good = tl.where(level == shallow, good, 0)
        low = tl.min(tl.where(good > 0, ranks, _MOST), axis=0)
        good = tl.where(ranks == low, good, 0)
        lane = tl.min(tl.where(good > 0, c, _MANY), axis=0)
        taken = tl.where(c == lane, going, 0)

        its_level = tl.sum(taken * level, axis=0)
        its_rank = tl.sum(taken * rank, axis=0)
        its_ranks = tl.sum(tl.where(taken > 0, ranks, 0), axis=0)
        its_score = tl.sum(tl.where(taken > 0, score, 0.0), axis=0)
        its_above = tl.sum(tl.where(taken > 0, above, 0.0), axis=0)
        its_parent = tl.sum(taken * parent, axis=0)
        its_spine = tl.sum(taken * spine, axis=0)
        place = (its_level - 1) * TOP + its_rank
        token = tl.sum(tl.where(i == place, tokens, 0), axis=0)
        tl.store(tokens_ptr + row + n, token, mask=going > 0)
        tl.store(parents_ptr + row + n, its_parent, mask=going > 0)

        child, has_child = _law(laws, exists, i, its_level * TOP, 1)
        sibling, has_sibling = _law(laws, exists, i, place + 1, tl.where(its_rank + 1 < TOP, 1, 0))
        is_child, is_sibling = c == n, c == NODES + n
        waits = tl.where(taken > 0, 0, waits)
        waits = tl.where(is_child, has_child * going, waits)
        waits = tl.where(is_sibling, has_sibling * going, waits)
        score = tl.where(is_child, its_score + child, score)
        score = tl.where(is_sibling, its_above + sibling, score)
        level = tl.where(is_child, its_level + 1, tl.where(is_sibling, its_level, level))
        rank = tl.where(is_child, 0, tl.where(is_sibling, its_rank + 1, rank))
        ranks = tl.where(is_child, its_ranks * TOP, tl.where(is_sibling, its_ranks + 1, ranks))
        above = tl.where(is_child, its_score, tl.where(is_sibling, its_above, above))
        parent = tl.where(is_child, n, tl.where(is_sibling, its_parent, parent))
        spine = tl.where(is_child, its_spine, tl.where(is_sibling, 0, spine))
        n += going
    tl.store(num_nodes_ptr + b, n)
