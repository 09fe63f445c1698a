# SPDX-License-Identifier: Apache-2.0
"""Heavy-light decomposition. Tier: exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from random_trees import parents as random_parents

from specla.errors import InvalidTree
from specla.topology.decompose import decompose

PROPERTY = settings(max_examples=100)


def test_lowest_index_child_wins_ties():
    assert decompose((-1, 0, 0)).heavy == (1, -1, -1)
    assert decompose((-1, 0, 0, 2)).heavy == (2, -1, 3, -1)
    assert decompose((-1, 0, 0, 2, 1)).heavy == (1, 4, 3, -1, -1)


def test_sizes():
    assert decompose((-1, 0, 1, 1, 3, 0, 5, 5)).sizes == (8, 4, 1, 2, 1, 3, 1, 1)


def test_invalid_parents_are_refused():
    with pytest.raises(InvalidTree):
        decompose((-1, 0, 2))
    with pytest.raises(InvalidTree):
        decompose(())


@PROPERTY
@given(random_parents())
def test_chains_partition_the_nodes_downwards(parents):
    chains = decompose(parents).chains
    assert sorted(node for chain in chains for node in chain) == list(range(len(parents)))
    for chain in chains:
        for above, below in itertools.pairwise(chain):
            assert parents[below] == above
    assert chains[0][0] == 0


@PROPERTY
@given(random_parents())
def test_a_chain_runs_one_wave_after_its_parent(parents):
    parts = decompose(parents)
    wave_of = {n: w for c, w in zip(parts.chains, parts.waves, strict=True) for n in c}
    assert parts.waves[0] == 0
    for chain, wave in zip(parts.chains[1:], parts.waves[1:], strict=True):
        assert wave == wave_of[parents[chain[0]]] + 1
    heads = [chain[0] for chain in parts.chains]
    assert list(zip(parts.waves, heads, strict=True)) == sorted(
        zip(parts.waves, heads, strict=True)
    )


@PROPERTY
@given(random_parents())
def test_few_light_edges_on_any_root_path(parents):
    heavy = decompose(parents).heavy
    light = [0] * len(parents)
    for node, parent in enumerate(parents[1:], start=1):
        light[node] = light[parent] + (heavy[parent] != node)
    # floor(log2 N) without floats.
    assert max(light) <= len(parents).bit_length() - 1
