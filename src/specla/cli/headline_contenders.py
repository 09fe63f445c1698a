# SPDX-License-Identifier: Apache-2.0
"""The ways to decode that `specla bench headline` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A chain of seven drafts fills a round of eight nodes.
MAX_DEPTH = 7
NO_PRUNING = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to decode. trained: the entry of the line-up that it needs."""

    name: str
    drafter: str
    trained: str | None = None
    options: Mapping[str, object] | None = None
    budget: str = "off"


def contenders() -> list[Contender]:
    """All of them, AR first."""
    from specla.bench import headline as h

    depth = {"max_depth": MAX_DEPTH}
    whole = {**depth, "tau": NO_PRUNING}
    return [
        Contender(name=h.AR, drafter="none"),
        Contender(name="ngram", drafter="ngram"),
        Contender(name=h.CHAIN, drafter="eagle", trained="eagle", options={**whole, "top_k": 1}),
        Contender(name=h.TREE, drafter="eagle", trained="eagle", options=whole),
        Contender(name=h.PRUNED, drafter="eagle", trained="eagle", options=depth),
        Contender(name=h.BUDGET, drafter="eagle", trained="eagle", options=depth, budget="auto"),
        Contender(name="block", drafter="block", trained="block"),
        Contender(name=h.BLOCK_MORE, drafter="block", trained="block-more"),
        Contender(name=h.READER, drafter="block", trained="reader-joint"),
    ]
