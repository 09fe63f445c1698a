# SPDX-License-Identifier: Apache-2.0
"""DraftTree: guessed tokens with parents, parents before children.

Node 0 is the last emitted token (not in the state yet); drafts hang below it. A chain is a tree;
no draft is a tree of one node. Children of one node carry distinct tokens, so the pair
(parent, token) names a node: that index is built once, during validation, and answers
`child_with` in constant time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import NoReturn

from specla.errors import InvalidTree


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`tokens[N]`, `parents[N]` with `parents[0] == -1`; optional `logprobs[N]`, the drafter's
    log-probability of each node given its parent (`logprobs[0] == 0`).

    Any sequences of integers are accepted and stored as tuples of Python ints.

    Raises:
        InvalidTree: empty, more than one root, a parent at or after its child, duplicate sibling
            tokens, lengths that differ. `.node` names the first offending node.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    _index: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tokens, parents = _integers("tokens", self.tokens), _integers("parents", self.parents)
        if len(tokens) != len(parents):
            raise InvalidTree(
                f"tokens and parents must have one entry per node, got {len(tokens)} tokens and "
                f"{len(parents)} parents; give both for every node, node 0 included",
                node=min(len(tokens), len(parents)),
            )
        check_parents(parents)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "_index", _index_children(tokens, parents))
        if self.logprobs is not None:
            logprobs = tuple(float(x) for x in self.logprobs)
            _check_logprobs(logprobs, len(tokens))
            object.__setattr__(self, "logprobs", logprobs)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree of one node: plain autoregressive decoding, no draft."""
        return cls((token,), (-1,))

    @classmethod
    def chain(
        cls, token: int, drafts: Iterable[int], logprobs: Iterable[float] | None = None
    ) -> DraftTree:
        """A chain below node 0. `logprobs`, one per draft, leaves node 0 out."""
        tokens = (token, *drafts)
        parents = tuple(range(-1, len(tokens) - 1))
        return cls(tokens, parents, None if logprobs is None else (0.0, *logprobs))

    @classmethod
    def from_paths(cls, token: int, paths: Iterable[Iterable[int]]) -> DraftTree:
        """Merge draft paths (tokens below node 0) that share prefixes; nodes are numbered in
        order of first appearance."""
        tokens, parents = [token], [-1]
        known: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for draft in path:
                child = known.get((node, draft))
                if child is None:
                    child = known[node, draft] = len(tokens)
                    tokens.append(draft)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    @property
    def num_nodes(self) -> int:
        """N: all nodes, node 0 included."""
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        """Nodes below node 0; what a budget counts."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        """Every node's parent is the node before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(self.depths())

    def depths(self) -> tuple[int, ...]:
        """Depth of every node; node 0 has depth 0."""
        depths = [0] * len(self.parents)
        for node in range(1, len(depths)):
            depths[node] = depths[self.parents[node]] + 1
        return tuple(depths)

    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in increasing node index."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]].append(node)
        return tuple(map(tuple, children))

    def child_with(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`, or None. Constant time."""
        return self._index.get((node, token))

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node indices from node 0 down to `node`, both included."""
        if not 0 <= node < len(self.parents):
            raise InvalidTree(
                f"a node must be in [0, {len(self.parents)}), got {node}; ask for a node of this "
                "tree",
                node=node,
            )
        path = [node]
        while node:
            node = self.parents[node]
            path.append(node)
        return tuple(reversed(path))


def check_parents(parents: Sequence[int]) -> None:
    """Check that `parents` is one tree rooted at node 0, with parents before children.

    Raises:
        InvalidTree: names the first node that breaks the rule.
    """
    if not parents:
        raise InvalidTree(
            "a tree must have at least node 0, got no nodes; use DraftTree.root(token) for a "
            "round without drafts",
            node=0,
        )
    if parents[0] != -1:
        raise InvalidTree(
            f"node 0 must be the root (parent -1), got parent {parents[0]}; put the last emitted "
            "token first",
            node=0,
        )
    for node in range(1, len(parents)):
        if not 0 <= parents[node] < node:
            _raise_bad_parent(node, parents[node], len(parents))


def _raise_bad_parent(node: int, parent: int, num_nodes: int) -> NoReturn:
    if parent == -1:
        wrong, cure = "a second root", "hang it below node 0"
    elif not 0 <= parent < num_nodes:
        wrong, cure = f"outside the tree of {num_nodes} nodes", "give an earlier node's index"
    elif parent == node:
        wrong, cure = "the node itself", "give an earlier node's index"
    else:
        wrong, cure = "a later node or a cycle", "number the nodes so that parents come first"
    raise InvalidTree(
        f"the parent of node {node} must be in [0, {node}), got {parent}, {wrong}; {cure}",
        node=node,
    )


def _index_children(
    tokens: tuple[int, ...], parents: tuple[int, ...]
) -> dict[tuple[int, int], int]:
    """(parent, token) -> node, checking that tokens are valid and siblings distinct."""
    if tokens[0] < 0:
        _raise_negative(0, tokens[0])
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        if tokens[node] < 0:
            _raise_negative(node, tokens[node])
        first = children.setdefault((parents[node], tokens[node]), node)
        if first != node:
            raise InvalidTree(
                f"children of one node must carry distinct tokens, got token {tokens[node]} at "
                f"nodes {first} and {node}, both below node {parents[node]}; merge them",
                node=node,
            )
    return children


def _raise_negative(node: int, token: int) -> NoReturn:
    raise InvalidTree(
        f"the token of node {node} must be a token id >= 0, got {token}; leave padding out of "
        "the tree",
        node=node,
    )


def _check_logprobs(logprobs: tuple[float, ...], num_nodes: int) -> None:
    if len(logprobs) != num_nodes:
        raise InvalidTree(
            f"logprobs must have one entry per node ({num_nodes}), got {len(logprobs)}; give 0 "
            "for node 0",
            node=min(len(logprobs), num_nodes),
        )
    if logprobs[0] != 0:
        raise InvalidTree(
            f"the log-probability of node 0 must be 0 (it is given), got {logprobs[0]}", node=0
        )
    for node, value in enumerate(logprobs):
        # Written so that NaN fails too.
        if not value <= 0:
            raise InvalidTree(
                f"the log-probability of node {node} must be <= 0, got {value}; pass the "
                "drafter's log-softmax, or no logprobs at all",
                node=node,
            )


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """A tuple of Python ints; numpy and torch integers are converted, floats refused."""
    values = tuple(values)
    try:
        return tuple(map(index, values))
    except TypeError:
        node = next(i for i, value in enumerate(values) if not _is_integer(value))
    raise InvalidTree(
        f"{name} must be integers, got {values[node]!r} at node {node}; round nothing, pass "
        "token ids and node indices",
        node=node,
    )


def _is_integer(value: object) -> bool:
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
