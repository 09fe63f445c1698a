# SPDX-License-Identifier: Apache-2.0
"""Schedule: a tree compiled to chains and waves, as int32 data with two interpreters.

The kernels read the packed words on the device; `walk` below reads the same schedule in Python
with any step function. Both run: for each wave, for each chain of the wave (in any order, or all
at once), load the parent's boundary state, step through the chain's nodes, and store the state
after every node that a later wave starts from.

Invariant: a chain's boundary is stored in an earlier wave than the chain's own, and each node is
stepped exactly once, right after its parent's state. Same parents, same bytes.

The packed form is one int32 array whose layout depends on the node capacity M alone, so that all
offsets are compile-time constants of a kernel built for M:

    | words            | field             | meaning                           | padding     |
    |------------------|-------------------|-----------------------------------|-------------|
    | 0                | magic             | 0x53504331, "SPC1"                |             |
    | 1                | capacity          | M                                 |             |
    | 2                | num_nodes         | N <= M                            |             |
    | 3                | num_chains        | C <= N                            |             |
    | 4                | num_waves         | W <= floor(log2 N) + 1            |             |
    | 5                | num_boundaries    | B < N, or 0                       |             |
    | 6                | max_parallel      | chains of the widest wave         |             |
    | 7                | reserved          | 0                                 |             |
    | 8          + M   | order             | node indices, chain after chain   | 0           |
    | 8 +  M     + M+1 | chain_offsets     | into order, C + 1 of them         | N           |
    | 9 + 2M     + M   | parent_boundary   | slot to start from, -1 = durable  | -1          |
    | 9 + 3M     + M   | node_boundary     | by node: slot to store, -1 = none | -1          |
    | 9 + 4M     + M   | wave              | of each chain                     | -1          |

Padding is inert twice over: nothing reads past the counts, and a kernel that launches all M
chains finds the padded ones empty and in no wave. Rows of a batch stack to [B, 9 + 5M].

Source: SpecLA (arXiv 2607.16673) section 4.3; Megakernels for "the schedule is data".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specla.errors import CapacityExceeded, InvalidTree
from specla.topology.decompose import Decomposition, decompose

MAGIC = 0x53504331
NUM_HEADER_WORDS = 8

State = TypeVar("State")
Words = NDArray[np.int32]


def num_words(max_nodes: int) -> int:
    """Length of the packed array for a node capacity."""
    return NUM_HEADER_WORDS + 5 * max_nodes + 1


class Layout(NamedTuple):
    """First word of each field in an array packed for a node capacity."""

    order: int
    chain_offsets: int
    parent_boundary: int
    node_boundary: int
    wave: int

    @classmethod
    def of(cls, max_nodes: int) -> Layout:
        """The layout for a node capacity: the table in the module docstring."""
        order = NUM_HEADER_WORDS
        first = order + 2 * max_nodes + 1
        return cls(order, order + max_nodes, *(first + i * max_nodes for i in range(3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What to run and in which order. Chains are sorted by wave, then by head node.

    Attributes:
        order: [N] node indices, chain after chain.
        chain_offsets: [C + 1]; chain c is `order[chain_offsets[c] : chain_offsets[c + 1]]`.
        parent_boundary: [C] boundary slot the chain starts from; -1 is the durable state.
        node_boundary: [N] by node index: slot to store the state after this node; -1 is none.
            One slot per branching node, shared by all chains below it, numbered by first use.
        wave: [C] wave of each chain, from 0 without gaps.
    """

    order: tuple[int, ...]
    chain_offsets: tuple[int, ...]
    parent_boundary: tuple[int, ...]
    node_boundary: tuple[int, ...]
    wave: tuple[int, ...]

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> Schedule:
        """Compile the tree with these parents (N ints, -1 first, parents before children).

        Trees of the same shape recur round after round: recent results are kept.

        Raises:
            InvalidTree: `parents` is not one tree rooted at node 0.
        """
        return _compile(tuple(parents))

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.order)

    @property
    def num_chains(self) -> int:
        """C."""
        return len(self.wave)

    @property
    def num_waves(self) -> int:
        """At most floor(log2 N) + 1."""
        return self.wave[-1] + 1

    @property
    def num_boundaries(self) -> int:
        """Boundary slots in use."""
        return max(self.node_boundary) + 1

    @property
    def max_parallel_chains(self) -> int:
        """Chains of the widest wave."""
        return max(self.wave.count(wave) for wave in range(self.num_waves))

    def chain(self, index: int) -> tuple[int, ...]:
        """Node indices of one chain, head first."""
        return self.order[self.chain_offsets[index] : self.chain_offsets[index + 1]]

    def parents(self) -> tuple[int, ...]:
        """The parents this schedule was compiled from."""
        parents = [-1] * self.num_nodes
        branch = {slot: node for node, slot in enumerate(self.node_boundary) if slot >= 0}
        for index, slot in enumerate(self.parent_boundary):
            before = branch[slot] if slot >= 0 else -1
            for node in self.chain(index):
                parents[node], before = before, node
        return tuple(parents)

    def pack(self, max_nodes: int) -> Words:
        """Lay the schedule out for a node capacity.

        Returns:
            int32 [9 + 5 * max_nodes], a new array laid out as in the module docstring.

        Raises:
            CapacityExceeded: the schedule has more than `max_nodes` nodes.
        """
        num_nodes = self.num_nodes
        if num_nodes > max_nodes:
            raise CapacityExceeded(
                f"a schedule packed for {max_nodes} nodes must have at most as many, got "
                f"{num_nodes}; draft fewer nodes or raise the node capacity"
            )
        words = np.concatenate(
            (
                _header(self, max_nodes),
                _padded(self.order, max_nodes, 0),
                _padded(self.chain_offsets, max_nodes + 1, num_nodes),
                _padded(self.parent_boundary, max_nodes, -1),
                _padded(self.node_boundary, max_nodes, -1),
                _padded(self.wave, max_nodes, -1),
            )
        )
        assert words.shape == (num_words(max_nodes),)
        return words


def walk(
    schedule: Schedule,
    load: Callable[[int], State],
    step: Callable[[State, int], State],
    store: Callable[[int, State], None],
) -> None:
    """Run a schedule in Python: the reference for what a kernel does with the packed words.

    Args:
        load: boundary slot -> state; slot -1 is the durable state. The state returned may be
            changed by `step` only if `load` hands out copies.
        step: (state, node) -> state after the node. Side effects (outputs) are its business.
        store: (boundary slot, state), called once per slot.
    """
    for index, slot in enumerate(schedule.parent_boundary):
        state = load(slot)
        for node in schedule.chain(index):
            state = step(state, node)
            if schedule.node_boundary[node] >= 0:
                store(schedule.node_boundary[node], state)


def unpack(words: Words) -> Schedule:
    """Read a packed schedule back; padding is never looked at.

    Raises:
        InvalidTree: not the output of `pack`: wrong magic, wrong length, or fields that do not
            form the schedule of any tree (`.node` is -1, no single node is at fault).
    """
    if words.ndim != 1 or len(words) < num_words(1) or int(words[0]) != MAGIC:
        raise _damaged(f"it must start with {MAGIC:#x} and have at least {num_words(1)} words")
    capacity, num_nodes, num_chains = (int(word) for word in words[1:4])
    if len(words) != num_words(capacity) or not 1 <= num_chains <= num_nodes <= capacity:
        raise _damaged("counts and length must agree with the capacity")
    at = Layout.of(capacity)

    def field(start: int, length: int) -> tuple[int, ...]:
        return tuple(words[start : start + length].tolist())

    schedule = Schedule(
        order=field(at.order, num_nodes),
        chain_offsets=field(at.chain_offsets, num_chains + 1),
        parent_boundary=field(at.parent_boundary, num_chains),
        node_boundary=field(at.node_boundary, num_nodes),
        wave=field(at.wave, num_chains),
    )
    _check_is_compiled(schedule, words)
    return schedule


@lru_cache(maxsize=1024)
def _compile(parents: tuple[int, ...]) -> Schedule:
    parts = decompose(parents)
    node_boundary, parent_boundary = _number_boundaries(parents, parts)
    offsets = [0]
    for chain in parts.chains:
        offsets.append(offsets[-1] + len(chain))
    return Schedule(
        order=tuple(node for chain in parts.chains for node in chain),
        chain_offsets=tuple(offsets),
        parent_boundary=tuple(parent_boundary),
        node_boundary=tuple(node_boundary),
        wave=parts.waves,
    )


def _number_boundaries(
    parents: Sequence[int], parts: Decomposition
) -> tuple[list[int], list[int]]:
    """One slot per branching node, numbered by first use in chain order."""
    node_boundary = [-1] * len(parents)
    parent_boundary = []
    num_slots = 0
    for chain in parts.chains:
        parent = parents[chain[0]]
        if parent >= 0 and node_boundary[parent] < 0:
            node_boundary[parent] = num_slots
            num_slots += 1
        parent_boundary.append(node_boundary[parent] if parent >= 0 else -1)
    return node_boundary, parent_boundary


def _check_is_compiled(schedule: Schedule, words: Words) -> None:
    """A schedule is a pure function of its parents: compiling them again must give it back."""
    try:
        again = Schedule.from_parents(schedule.parents())
    except (IndexError, KeyError, InvalidTree) as error:
        raise _damaged("its chains must form one tree") from error
    header = _header(schedule, int(words[1])) if again == schedule else None
    if header is None or not np.array_equal(header, words[:NUM_HEADER_WORDS]):
        raise _damaged("its fields must be those compiled from its tree")


def _header(schedule: Schedule, max_nodes: int) -> Words:
    counts = (schedule.num_nodes, schedule.num_chains, schedule.num_waves)
    widths = (schedule.num_boundaries, schedule.max_parallel_chains)
    return np.array((MAGIC, max_nodes, *counts, *widths, 0), dtype=np.int32)


def _padded(values: Sequence[int], length: int, fill: int) -> Words:
    padded = np.full(length, fill, dtype=np.int32)
    padded[: len(values)] = values
    return padded


def _damaged(must: str) -> InvalidTree:
    return InvalidTree(f"not a packed schedule: {must}; pack the schedule again", node=-1)
