# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark runs on: shapes, trees, pending logs. Integers only, no torch.

The workloads of the tables are fixed: a tree has parent(i) = (i - 1) // 2, 4 pending factors and
a fold due; a chain has 8 pending factors, on both sides, and room in its log.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from specla.errors import ConfigError
from specla.ops.contract import RecurrentShape

# Of the fixed workloads, whose log has room left; an engine's is shorter (`config`).
LOG_CAPACITY = 16
# Rows of the throughput cases; accepted lengths of SpecLA's figure 11; DeltaLog's logs and rows.
BATCH = 64
LENGTHS = range(1, 9)
CAPACITIES = (0, 4, 8, 16, 32)
LOG_BATCHES = (1, 4, 16, 64)
# Nodes and rows of trees in waves; nodes of the trees whose memory is counted.
WAVE_NODES, WAVE_BATCHES = (16, 32, 64), (1, 8, 64)
MEMORY_NODES = (8, 16, 32)
# A drafter's chance that the r-th best child is the right one: only orders nodes of test trees.
RANK_COST = (0.5, 1.6, 2.3, 3.0)


def _shape(heads: int, values: int, dim: int, layers: int) -> RecurrentShape:
    return RecurrentShape(
        num_layers=layers,
        num_key_heads=heads,
        num_value_heads=values,
        key_dim=dim,
        value_dim=dim,
        conv_width=4,
    )


SHAPES = {
    "gdn-1.3b": _shape(8, 8, 256, 24),
    "qwen3-next": _shape(16, 32, 128, 36),
    "qwen3.5-27b": _shape(16, 48, 128, 48),
}
WIDTHS = {"gdn-1.3b": 2048, "qwen3-next": 2048, "qwen3.5-27b": 5120}


def label(shape: RecurrentShape) -> str:
    """How tables write a shape: 8x256 is 8 heads of 256 x 256, 16x32x128 has 16 key heads."""
    heads, values = shape.num_key_heads, shape.num_value_heads
    dims = f"{shape.key_dim}" if shape.key_dim == shape.value_dim else (
        f"{shape.key_dim}x{shape.value_dim}"
    )  # fmt: skip
    return f"{values}x{dims}" if heads == values else f"{heads}x{values}x{dims}"


def named_shape(name: str) -> RecurrentShape:
    """A preset.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}; got {name!r}; choose one")
    return SHAPES[name]


def width_of(shape: RecurrentShape) -> int:
    """D of the model a preset's shape comes from; H K for any other shape."""
    widths = {SHAPES[name]: width for name, width in WIDTHS.items()}
    return widths.get(shape, shape.num_key_heads * shape.key_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload: `num_rows` rows with the same tree and the same pending log.

    parents: the tree. ring_len and path: the log (ring entries, then nodes of the bank that the
    last verify wrote). accepted: the path a commit would take after this verify; baselines that
    move states or replay tokens do it for these nodes.
    """

    name: str
    shape: RecurrentShape
    num_rows: int
    parents: tuple[int, ...]
    ring_len: int = 0
    path: tuple[int, ...] = ()
    log_capacity: int = LOG_CAPACITY
    threshold: int = 0
    accepted: tuple[int, ...] = (0,)

    @property
    def num_nodes(self) -> int:
        """N, of every row."""
        return len(self.parents)

    @property
    def max_nodes(self) -> int:
        """Size of one candidate bank: it holds this tree and the one the log came from."""
        return max(self.num_nodes, *(node + 1 for node in self.path), 1)

    @property
    def log_len(self) -> int:
        """Pending factors per row."""
        return self.ring_len + len(self.path)

    @property
    def max_log(self) -> int:
        """Most entries of a log in an engine whose trees are as deep."""
        return self.threshold + max(depth_of(self.parents) + 1, len(self.path))

    @property
    def fold_due(self) -> bool:
        """Whether this verify writes S."""
        return self.log_len > self.threshold

    @property
    def is_chain(self) -> bool:
        """Every node's parent is the node before it."""
        return self.parents == chain(self.num_nodes)

    def leaf_paths(self) -> tuple[tuple[int, ...], ...]:
        """Root-to-leaf paths, in order of the leaves."""
        inner = set(self.parents)
        return tuple(
            path_to(self.parents, node) for node in range(self.num_nodes) if node not in inner
        )


def path_to(parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    """Nodes from node 0 down to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return tuple(reversed(path))


def chain(num_nodes: int) -> tuple[int, ...]:
    """Parents of a chain."""
    return tuple(range(-1, num_nodes - 1))


def binary(num_nodes: int) -> tuple[int, ...]:
    """Parents of the tables' tree: parent(i) = (i - 1) // 2."""
    return (-1, *((node - 1) // 2 for node in range(1, num_nodes)))


def top_k_tree(k: int, depth: int, num_nodes: int) -> tuple[int, ...]:
    """Parents of a best-first tree that reaches `depth`: the chain of best children first, then
    the cheapest of the others, at most k children a node; node 0 is counted."""
    spine = min(depth, num_nodes - 1)
    parents = list(chain(spine + 1))
    costs = [RANK_COST[0] * node for node in range(spine + 1)]
    depths = list(range(spine + 1))
    queue: list[tuple[float, int, int]] = []  # cost of the r-th best child, parent, r

    def offer(parent: int, rank: int) -> None:
        if rank < k and depths[parent] < depth:
            heapq.heappush(queue, (costs[parent] + RANK_COST[rank], parent, rank))

    for node in range(spine + 1):
        offer(node, 1 if node < spine else 0)
    while len(parents) < num_nodes:
        cost, parent, rank = heapq.heappop(queue)
        parents.append(parent)
        costs.append(cost)
        depths.append(depths[parent] + 1)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    return tuple(parents)


def depth_of(parents: tuple[int, ...]) -> int:
    """Depth of the deepest node; node 0 has 0."""
    return max(len(path_to(parents, node)) for node in range(len(parents))) - 1


def tree_case(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Case:
    """The tables' tree row: 4 pending factors, a fold due."""
    accepted = path_to(binary(num_nodes), min(7, num_nodes - 1))[:4]
    return Case(
        name=f"tree_n{num_nodes}_b{num_rows}_{label(shape)}",
        shape=shape,
        num_rows=num_rows,
        parents=binary(num_nodes),
        path=(0, 1, 3, 7),
        threshold=0,
        accepted=accepted,
    )


def wave_case(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Case:
    """The tables' tree row by the suite of waves."""
    name = f"waves_n{num_nodes}_b{num_rows}_{label(shape)}"
    return replace(tree_case(shape, num_rows, num_nodes), name=name)


def chain_case(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Case:
    """The tables' chain row: 8 pending factors, half of them in the ring, and no fold due."""
    return Case(
        name=f"chain_n{num_nodes}_b{num_rows}_{label(shape)}",
        shape=shape,
        num_rows=num_rows,
        parents=chain(num_nodes),
        ring_len=4,
        path=(0, 1, 2, 3),
        threshold=LOG_CAPACITY,
        accepted=(0, 1, 2, 3),
    )


def pending_case(shape: RecurrentShape, num_rows: int, num_nodes: int, pending: int) -> Case:
    """A tree after `pending` accepted tokens, all to be folded now (SpecLA's figure 11)."""
    return Case(
        name=f"pending{pending}_n{num_nodes}_b{num_rows}_{label(shape)}",
        shape=shape,
        num_rows=num_rows,
        parents=binary(num_nodes),
        path=tuple(range(pending)),
        threshold=0,
        accepted=tuple(range(pending)),
    )


def log_cases(shape: RecurrentShape, num_rows: int, capacity: int) -> list[Case]:
    """Plain decoding through one period of a log of `capacity`: the log is 1 .. capacity + 1
    long when a token comes, and folded at the last."""
    return [
        Case(
            name=f"log{capacity}_b{num_rows}_{label(shape)}",
            shape=shape,
            num_rows=num_rows,
            parents=(-1,),
            ring_len=pending - 1,
            path=(0,),
            log_capacity=capacity,
            threshold=capacity,
        )
        for pending in range(1, capacity + 2)
    ]
