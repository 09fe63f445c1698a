# SPDX-License-Identifier: Apache-2.0
"""DraftTree: guessed tokens with parents, parents before children.

Node 0 is the last emitted token (not in the state yet); drafts hang below it. A chain is a tree;
no draft is a tree of one node. Children of one node carry distinct tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specla.errors import InvalidTree


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`tokens[N]`, `parents[N]` with `parents[0] == -1`; optional `logprobs[N]`, the drafter's
    log-probability of each node given its parent (`logprobs[0] == 0`).

    Raises:
        InvalidTree: empty, more than one root, a parent at or after its child, duplicate sibling
            tokens, lengths that differ. `.node` names the first offending node.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
