# SPDX-License-Identifier: Apache-2.0
"""Heavy-light decomposition: a tree cut into chains that run serially, chains of a wave in
parallel.

A node's heavy child is the one with the most nodes below it, the lowest index winning ties; every
other child starts a chain of its own. Crossing to a light child at least halves the subtree, so
no root path crosses more than floor(log2 N) of them: that bounds the waves.

A pure function of the parents: no hashing, no randomness, no floats.
Source: SpecLA (arXiv 2607.16673) section 4.3; Lucebox's delta_net_specla.cpp, the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specla.topology.tree import check_parents


class Decomposition(NamedTuple):
    """Chains of a tree.

    sizes: nodes in each node's subtree, itself included.
    heavy: each node's heavy child, -1 at leaves.
    chains: node indices from the chain's head down; sorted by wave, then by head.
    waves: the wave of each chain. The root's chain alone is wave 0.
    """

    sizes: tuple[int, ...]
    heavy: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    waves: tuple[int, ...]


def decompose(parents: Sequence[int]) -> Decomposition:
    """Cut the tree with these parents into heavy chains.

    Args:
        parents: N ints, -1 first, parents before children.

    Raises:
        InvalidTree: `parents` is not such a tree.
    """
    check_parents(parents)
    sizes, heavy = _weigh(parents)
    chains, wave_of = [], [0] * len(parents)
    for head, parent in enumerate(parents):
        if parent >= 0 and heavy[parent] == head:
            continue
        wave = wave_of[parent] + 1 if parent >= 0 else 0
        chain = _follow(heavy, head)
        for node in chain:
            wave_of[node] = wave
        chains.append(chain)
    # Stable: heads were met in increasing order and stay so within a wave.
    chains.sort(key=lambda chain: wave_of[chain[0]])
    waves = tuple(wave_of[chain[0]] for chain in chains)
    return Decomposition(tuple(sizes), tuple(heavy), tuple(chains), waves)


def _weigh(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Subtree sizes and heavy children, leaves first."""
    sizes, heavy = [1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        sizes[parent] += sizes[node]
        # Children arrive in decreasing index, so >= lets the lowest index win ties.
        if heavy[parent] < 0 or sizes[node] >= sizes[heavy[parent]]:
            heavy[parent] = node
    return sizes, heavy


def _follow(heavy: Sequence[int], head: int) -> tuple[int, ...]:
    chain = [head]
    while heavy[chain[-1]] >= 0:
        chain.append(heavy[chain[-1]])
    return tuple(chain)
