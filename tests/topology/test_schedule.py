# SPDX-License-Identifier: Apache-2.0
"""Schedules, their packed words and the Python interpreter. Tier: exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import MAX_NODES, relabellings
from random_trees import parents as random_parents

from specla.errors import CapacityExceeded, InvalidTree
from specla.topology.decompose import decompose
from specla.topology.schedule import MAGIC, Layout, Schedule, num_words, unpack, walk

PROPERTY = settings(max_examples=60)

# parents, chains, parent_boundary, node_boundary, wave: worked out by hand from the rules.
GOLDEN = {
    "lucebox-unit": (
        (-1, 0, 1, 1, 3, 0, 5, 5),
        ((0, 1, 3, 4), (2,), (5, 6), (7,)),
        (-1, 0, 1, 2),
        (1, 0, -1, -1, -1, 2, -1, -1),
        (0, 1, 1, 2),
    ),
    "chain": ((-1, 0, 1, 2), ((0, 1, 2, 3),), (-1,), (-1, -1, -1, -1), (0,)),
    "star": (
        (-1, 0, 0, 0, 0),
        ((0, 1), (2,), (3,), (4,)),
        (-1, 0, 0, 0),
        (0, -1, -1, -1, -1),
        (0, 1, 1, 1),
    ),
    "lucebox-ddtree": (
        (-1, 0, 1, 2, 0, 4, 5, 1, 7),
        ((0, 1, 2, 3), (4, 5, 6), (7, 8)),
        (-1, 0, 1),
        (0, 1, -1, -1, -1, -1, -1, -1, -1),
        (0, 1, 1),
    ),
}

Matrix = tuple[int, int, int, int]


def _times(a: Matrix, b: Matrix) -> Matrix:
    return (
        a[0] * b[0] + a[1] * b[2],
        a[0] * b[1] + a[1] * b[3],
        a[2] * b[0] + a[3] * b[2],
        a[2] * b[1] + a[3] * b[3],
    )


def _payload(label: int) -> Matrix:
    """Exact, and does not commute: a wrong order or a missed node changes the product."""
    return (1 + label, 1, label, 1)


def run(schedule: Schedule, labels) -> dict[int, Matrix]:
    """Products along root paths, by the interpreter, with checked boundaries."""
    outputs: dict[int, Matrix] = {}
    boundaries: dict[int, Matrix] = {-1: (3, 1, 2, 5)}

    def step(state: Matrix, node: int) -> Matrix:
        assert node not in outputs, "a node ran twice"
        outputs[node] = _times(state, _payload(labels[node]))
        return outputs[node]

    def store(slot: int, state: Matrix) -> None:
        assert slot not in boundaries, "a boundary was written twice"
        boundaries[slot] = state

    walk(schedule, boundaries.__getitem__, step, store)
    assert len(boundaries) == 1 + schedule.num_boundaries
    return outputs


def replay(parents, labels) -> dict[int, Matrix]:
    """The same products, path by path."""
    outputs = {}
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            at = parents[at]
        state = (3, 1, 2, 5)
        for v in reversed(path):
            state = _times(state, _payload(labels[v]))
        outputs[node] = state
    return outputs


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    parents, chains, parent_boundary, node_boundary, wave = GOLDEN[name]
    schedule = Schedule.from_parents(parents)
    assert tuple(schedule.chain(c) for c in range(schedule.num_chains)) == chains
    assert schedule.order == sum(chains, ())
    assert schedule.chain_offsets[-1] == len(parents)
    assert schedule.parent_boundary == parent_boundary
    assert schedule.node_boundary == node_boundary
    assert schedule.wave == wave


def test_counts():
    schedule = Schedule.from_parents(GOLDEN["lucebox-unit"][0])
    assert schedule.chain_offsets == (0, 4, 5, 7, 8)
    assert (schedule.num_nodes, schedule.num_chains, schedule.num_waves) == (8, 4, 3)
    assert (schedule.num_boundaries, schedule.max_parallel_chains) == (3, 2)
    lone = Schedule.from_parents([-1])
    assert (lone.num_waves, lone.num_boundaries, lone.max_parallel_chains) == (1, 0, 1)


def test_packed_words_follow_the_table():
    words = Schedule.from_parents((-1, 0, 0)).pack(4)
    assert words.dtype == np.int32
    assert words.tolist() == [
        *(MAGIC, 4, 3, 2, 2, 1, 1, 0),
        *(0, 1, 2, 0),
        *(0, 2, 3, 3, 3),
        *(-1, 0, -1, -1),
        *(0, -1, -1, -1),
        *(0, 1, -1, -1),
    ]
    assert Layout.of(4) == (8, 12, 17, 21, 25)
    assert bytes.fromhex(f"{MAGIC:08x}") == b"SPC1"


def test_over_capacity_is_refused():
    with pytest.raises(CapacityExceeded, match="packed for 3 nodes"):
        Schedule.from_parents((-1, 0, 1, 2)).pack(3)


def test_invalid_parents_are_refused():
    with pytest.raises(InvalidTree):
        Schedule.from_parents((-1, 1))


def test_any_damaged_word_is_noticed():
    """Every meaningful word, changed, either fails to unpack or was padding."""
    parents, capacity = GOLDEN["lucebox-unit"][0], 11
    schedule = Schedule.from_parents(parents)
    words = schedule.pack(capacity)
    at, n, c = Layout.of(capacity), schedule.num_nodes, schedule.num_chains
    meant = {*range(8), *range(at.order, at.order + n), *range(at.wave, at.wave + c)}
    meant |= {*range(at.chain_offsets, at.chain_offsets + c + 1)}
    meant |= {*range(at.parent_boundary, at.parent_boundary + c)}
    meant |= {*range(at.node_boundary, at.node_boundary + n)}
    for word in range(len(words)):
        for damage in (-1000, -1, 1, 1000):
            damaged = words.copy()
            damaged[word] += damage
            if word not in meant:
                assert unpack(damaged) == schedule
                continue
            with pytest.raises(InvalidTree, match="not a packed schedule") as error:
                unpack(damaged)
            assert error.value.node == -1
    for length in (0, 5, len(words) - 1):
        with pytest.raises(InvalidTree, match="not a packed schedule"):
            unpack(words[:length])


@PROPERTY
@given(random_parents())
def test_every_boundary_is_stored_in_an_earlier_wave(parents):
    schedule = Schedule.from_parents(parents)
    stored_in = {}
    for c, wave in enumerate(schedule.wave):
        for node in schedule.chain(c):
            if schedule.node_boundary[node] >= 0:
                stored_in[schedule.node_boundary[node]] = wave
    assert sorted(stored_in) == list(range(schedule.num_boundaries))
    assert schedule.parent_boundary[0] == -1
    for slot, wave in list(zip(schedule.parent_boundary, schedule.wave, strict=True))[1:]:
        assert stored_in[slot] < wave
    assert schedule.num_waves <= len(parents).bit_length()


@PROPERTY
@given(random_parents())
def test_interpreter_equals_path_replay(parents):
    labels = range(len(parents))
    assert run(Schedule.from_parents(parents), labels) == replay(parents, labels)


@PROPERTY
@given(st.data())
def test_chains_of_a_wave_run_in_any_order(data):
    parents = data.draw(random_parents())
    schedule = Schedule.from_parents(parents)
    chains = data.draw(st.permutations(range(schedule.num_chains)))
    chains = sorted(chains, key=lambda c: schedule.wave[c])
    offsets = [0]
    for c in chains:
        offsets.append(offsets[-1] + len(schedule.chain(c)))
    shuffled = Schedule(
        order=tuple(node for c in chains for node in schedule.chain(c)),
        chain_offsets=tuple(offsets),
        parent_boundary=tuple(schedule.parent_boundary[c] for c in chains),
        node_boundary=schedule.node_boundary,
        wave=tuple(schedule.wave[c] for c in chains),
    )
    labels = range(len(parents))
    assert run(shuffled, labels) == replay(parents, labels)


@PROPERTY
@given(st.data())
def test_relabelling_siblings_changes_nothing(data):
    parents = data.draw(random_parents())
    new = data.draw(relabellings(parents))
    moved, labels = [-1] * len(parents), [0] * len(parents)
    for node, parent in enumerate(parents):
        moved[new[node]] = new[parent] if parent >= 0 else -1
        labels[new[node]] = node
    before = run(Schedule.from_parents(parents), range(len(parents)))
    after = run(Schedule.from_parents(moved), labels)
    assert {node: after[new[node]] for node in before} == before
    assert sorted(decompose(moved).sizes) == sorted(decompose(parents).sizes)


@PROPERTY
@given(random_parents(), st.integers(0, MAX_NODES), st.integers(0, 2**32 - 1))
def test_padding_is_inert(parents, spare, seed):
    schedule = Schedule.from_parents(parents)
    capacity = len(parents) + spare
    words = schedule.pack(capacity)
    assert len(words) == num_words(capacity)
    assert unpack(words) == schedule
    random = np.random.default_rng(seed)
    at, n, c = Layout.of(capacity), schedule.num_nodes, schedule.num_chains
    ends = [*at[1:], len(words)]
    used = (n, c + 1, c, n, c)
    for start, end, length in zip(at, ends, used, strict=True):
        words[start + length : end] = random.integers(
            -(2**31), 2**31, end - start - length, dtype=np.int32
        )
    assert unpack(words) == schedule
    labels = range(len(parents))
    assert run(unpack(words), labels) == replay(parents, labels)


@PROPERTY
@given(random_parents())
def test_padded_chains_are_empty_and_in_no_wave(parents):
    schedule = Schedule.from_parents(parents)
    capacity = len(parents) + 5
    words, at = schedule.pack(capacity), Layout.of(capacity)
    for chain in range(schedule.num_chains, capacity):
        start, end = words[at.chain_offsets + chain : at.chain_offsets + chain + 2]
        assert start == end == len(parents)
        assert words[at.wave + chain] == -1


@PROPERTY
@given(random_parents())
def test_same_parents_same_bytes(parents):
    first = Schedule.from_parents(parents).pack(64).tobytes()
    again = Schedule.from_parents(np.array(parents)).pack(64).tobytes()
    assert first == again
    assert Schedule.from_parents(list(parents)).parents() == parents
