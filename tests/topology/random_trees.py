# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for trees: any shape, parents before children, distinct siblings."""

from __future__ import annotations

from hypothesis import strategies as st

MAX_NODES = 48


@st.composite
def parents(draw: st.DrawFn, max_nodes: int = MAX_NODES) -> tuple[int, ...]:
    """Parents of a random tree. `reach` moves the shape from chains to bushes."""
    num_nodes = draw(st.integers(1, max_nodes))
    reach = draw(st.integers(1, num_nodes))
    return (
        -1,
        *(draw(st.integers(max(0, node - reach), node - 1)) for node in range(1, num_nodes)),
    )


@st.composite
def relabellings(draw: st.DrawFn, of: tuple[int, ...]) -> list[int]:
    """A random topological renumbering: old node -> new node, parents still first."""
    new = [0] * len(of)
    ready = [0]
    for label in range(len(of)):
        node = ready.pop(draw(st.integers(0, len(ready) - 1)))
        new[node] = label
        ready += [child for child, parent in enumerate(of) if parent == node]
    return new
