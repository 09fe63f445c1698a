# SPDX-License-Identifier: Apache-2.0
"""Trees -> walk lists, on the device: the order in which one program visits a tree's nodes with
one live state, and how it gets from branch to branch.

Light children are visited before the heavy one (largest subtree, the lowest index among equals),
so that on the heavy path nothing above is unfinished and one checkpoint is enough: it is taken at
every branching node of the heavy path. A branch that does not go on from the live state starts
from the checkpoint and replays the recorded factors of the nodes in between, which gives the same
bits as having kept that node's state, and costs half a step per node instead of a state's round
trip through memory (docs/adr/0012).

One int32 word per operation:

    bits 0-7 node;  WALK: compute u and o (else: replay the node's recorded factors);
    RESTORE: start from the checkpoint;  SAVE: the state after this operation is the checkpoint

At most N walks and N^2 / 12 replays: a light subtree has at most half of the nodes, and m nodes
cannot ask for more than (m / 2)^2 replays. `capacity` leaves room for N^2 / 8.

A row's walk may be cut into P parts for P programs, where one program's latency is what counts:
each takes a run of nodes in the order above and their ancestors, and walks these as a tree of
their own, with a heavy path of its own. The first part is two nodes longer: its nodes' ancestors
are its own. A binary tree of 32 in four parts takes 11 operations in each; a chain stays whole.
Nodes that several parts walk get the same bits from each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specla.ops.contract import DeviceRound

WALK, RESTORE, SAVE = 1 << 8, 1 << 9, 1 << 10
NODE_MASK = 255
MAX_NODES = 64
_HEAD = tl.constexpr(2)  # nodes that the first part has more
_WALK, _RESTORE, _SAVE = tl.constexpr(WALK), tl.constexpr(RESTORE), tl.constexpr(SAVE)


def capacity(max_nodes: int) -> int:
    """Most operations of a walk over `max_nodes` nodes, or of one of its parts."""
    return 2 * max_nodes + max_nodes * max_nodes // 8


def compile_walks(rnd: DeviceRound) -> None:
    """Fill rnd.walk [B, P, words] from rnd.parents and rnd.num_nodes; one program per row and
    part, no host work. It lets no dependent launch start before its end: walks read their lists
    before they wait for anything."""
    num_rows, num_nodes = rnd.parents.shape
    block = max(2, triton.next_power_of_2(num_nodes))
    parts = rnd.walk.shape[1]
    _compile_kernel[(num_rows, parts)](
        rnd.parents,
        rnd.num_nodes,
        rnd.walk,
        num_nodes,
        rnd.walk.shape[2],
        PARTS=parts,
        BLOCK=block,
        num_warps=4 if block > 16 else 1,
    )


@triton.jit
def _across(x, row, column):
    """A vector indexed by column, indexed by row."""
    return tl.sum(tl.where(row[:, None] == column[None, :], x[None, :], 0), axis=1)


@triton.jit
def _down(x, row, column):
    """A vector indexed by row, indexed by column."""
    return tl.sum(tl.where(row[:, None] == column[None, :], x[:, None], 0), axis=0)


@triton.jit
def _visits(above, live, live_a, parent, parent_a, i, a):
    """Of live nodes, by column: how many nodes after its parent one is visited, and how many
    siblings come later."""
    size_a = tl.sum(above, axis=0)
    size = _across(size_a, i, a)
    # Matrix [s, a]: sibling s is visited before a.
    siblings = (parent[:, None] == parent_a[None, :]) & (i[:, None] != a[None, :])
    siblings = siblings & live[:, None] & live_a[None, :]
    smaller = (size[:, None] < size_a[None, :]) | (
        (size[:, None] == size_a[None, :]) & (i[:, None] > a[None, :])
    )
    step_a = 1 + tl.sum(tl.where(siblings & smaller, size[:, None], 0), axis=0)
    return step_a, tl.sum((siblings & (smaller == 0)).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_columns", "stride"])
def _compile_kernel(
    parents_ptr,
    num_nodes_ptr,
    walk_ptr,
    num_columns,
    stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, part = tl.program_id(0), tl.program_id(1)
    n = tl.load(num_nodes_ptr + b)
    parents_ptr += b * num_columns
    i = tl.arange(0, BLOCK)  # rows: a node
    a = tl.arange(0, BLOCK)  # columns: one of its ancestors, or another node
    live, live_a = i < n, a < n
    parent = tl.load(parents_ptr + i, mask=live, other=-1)
    parent_a = tl.load(parents_ptr + a, mask=live_a, other=-1)

    # Ancestors and self, and the depth, by climbing from all nodes at once.
    above = ((i[:, None] == a[None, :]) & live[:, None]).to(tl.int32)
    depth = tl.zeros([BLOCK], tl.int32)
    climb = parent
    while tl.max(climb, axis=0) >= 0:
        above = above | (climb[:, None] == a[None, :]).to(tl.int32)
        depth += (climb >= 0).to(tl.int32)
        climb = tl.load(parents_ptr + climb, mask=climb >= 0, other=-1)

    if PARTS > 1:
        # From here on the tree is the part's nodes and their ancestors.
        step_a, _ = _visits(above, live, live_a, parent, parent_a, i, a)
        position = tl.sum(above * step_a[None, :], axis=1) - 1
        beyond = tl.maximum(position - _HEAD, 0)
        # A chain's last node needs all others: it is left to one program.
        beyond = tl.where(tl.max(depth, axis=0) == n - 1, 0, beyond)
        mine = (beyond * PARTS // tl.maximum(n - _HEAD, 1) == part) & live
        live_a = tl.max(above * mine.to(tl.int32)[:, None], axis=0) > 0
        live = _across(live_a.to(tl.int32), i, a) > 0
        above = above * live.to(tl.int32)[:, None]

    step_a, not_last_a = _visits(above, live, live_a, parent, parent_a, i, a)
    position = tl.sum(above * step_a[None, :], axis=1) - 1
    is_heavy = (tl.sum(above * not_last_a[None, :], axis=1) == 0) & live
    is_heavy_a = _down(is_heavy.to(tl.int32), i, a)
    strict = above * (i[:, None] != a[None, :]).to(tl.int32)
    # The checkpoint's depth: of the deepest heavy ancestor.
    base = tl.sum(strict * is_heavy_a[None, :], axis=1) - 1
    goes_on = (_across(step_a, i, a) == 1) | (depth == 0)
    replays = tl.where(goes_on | (live == 0), 0, depth - 1 - base)

    earlier = live_a[None, :] & (_down(position, i, a)[None, :] < position[:, None])
    start = tl.sum(tl.where(earlier, 1 + _down(replays, i, a)[None, :], 0), axis=1)
    walk_ptr += (b * PARTS + part) * stride
    words = walk_ptr + 1
    children_a = tl.sum(((parent[:, None] == a[None, :]) & live[:, None]).to(tl.int32), axis=0)
    save = (is_heavy & (_across(children_a, i, a) > 1)).to(tl.int32) * _SAVE
    restore = ((goes_on == 0) & (replays == 0)).to(tl.int32) * _RESTORE
    tl.store(words + start + replays, i | _WALK | save | restore, mask=live)
    order = _down(depth, i, a)[None, :] - base[:, None] - 1
    begin = (order == 0).to(tl.int32) * _RESTORE
    tl.store(
        words + start[:, None] + order,
        a[None, :] | begin,
        mask=(strict > 0) & (order >= 0) & (replays[:, None] > 0),
    )
    tl.store(walk_ptr, tl.sum(tl.where(live, 1 + replays, 0), axis=0))
