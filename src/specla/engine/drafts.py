# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of a drafter's answer. A wrong guess is free; what breaks the contract is an
error that names the drafter, never another text."""

from __future__ import annotations

from collections.abc import Sequence

from specla.engine.running import Running
from specla.errors import InvalidTree
from specla.topology.tree import DraftTree


def check_drafts(
    trees: Sequence[DraftTree],
    rows: Sequence[Running],
    lengths: Sequence[int],
    *,
    vocab_size: int,
    drafter: str,
) -> None:
    """lengths: of the rows' tokens before the drafter saw them.

    Raises:
        InvalidTree: not a tree per row, a root that is not the row's last token, a token id
            outside the vocabulary, or a row's tokens that are no longer the engine's.
    """
    if not _is_one_each(trees, len(rows)):
        raise InvalidTree(
            f"a drafter must give one DraftTree for each of {len(rows)} rows, got {trees!r:.80} "
            f"from drafter {drafter}",
            node=0,
        )
    for row, length, tree in zip(rows, lengths, trees, strict=True):
        if len(row.tokens) != length:
            raise InvalidTree(
                f"a drafter must leave the tokens that it is shown as they are, {length} of them; "
                f"drafter {drafter} left {len(row.tokens)}",
                node=0,
            )
        if tree.tokens[0] != row.tokens[-1]:
            raise InvalidTree(
                f"node 0 must be the row's last token, {row.tokens[-1]}, got {tree.tokens[0]} "
                f"from drafter {drafter}",
                node=0,
            )
        if (top := max(tree.tokens)) >= vocab_size:
            raise InvalidTree(
                f"drafts must be token ids in [0, {vocab_size}), got {top} from drafter {drafter}",
                node=tree.tokens.index(top),
            )


def _is_one_each(trees: object, count: int) -> bool:
    if not isinstance(trees, Sequence) or len(trees) != count:
        return False
    return all(isinstance(tree, DraftTree) for tree in trees)
