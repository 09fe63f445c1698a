# SPDX-License-Identifier: Apache-2.0
"""A drafter whose guesses are right with a given probability, draft by draft: what a round brings
and costs, apart from any real drafter's talent.

The output of plain decoding is known beforehand, and whether the guess at a position is right is
settled once per text and position. A round looks at each position at most once, so that all its
guesses are independent. On a GPU it drafts on the device: the guesses lie there before the text
begins, and rounds need no host, as with the best of real drafters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specla.drafters.base import DrafterInfo, DraftRow, Observation
from specla.errors import ConfigError
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.topology.tree import DraftTree

MOST_TOKENS = 1 << 16
"""Of a prompt and its answer."""


class Guesses:
    """Chains for one row at a time.

    Args:
        depth: drafts per round.
        vocab_size: of the target; a wrong guess is another token of it.
        device: where the target is.
        seed: of what is right.
    """

    def __init__(
        self, depth: int, *, vocab_size: int, device: torch.device | str, seed: int = 0
    ) -> None:
        self.info = DrafterInfo(name="controlled", max_depth=depth, may_return_nothing=True)
        self._vocab_size, self._seed = vocab_size, seed
        self._tokens: list[int] = []
        # At fixed addresses: a CUDA graph reads them.
        self._table = torch.zeros(MOST_TOKENS, dtype=torch.int64, device=device)
        self._steps = torch.arange(depth, device=device)
        self._chain = torch.arange(-1, depth, dtype=torch.int32, device=device)

    def expect(self, prompt: Sequence[int], answer: Sequence[int], p: float) -> None:
        """The next text. The same seed and prompt give nested guesses: what is right with a
        smaller p is right with a larger one, and with 1 all are.

        Raises:
            ConfigError: the text is too long to be kept.
        """
        end = len(prompt) + len(answer) + self.info.max_depth
        if end > MOST_TOKENS:
            raise ConfigError(
                f"a controlled text must have at most {MOST_TOKENS} tokens, drafts included, got "
                f"{end}; use shorter prompts or --max-tokens"
            )
        coin = random.Random(hash((self._seed, *prompt)))
        guesses = [t if coin.random() < p else (t + 1) % self._vocab_size for t in answer]
        self._tokens = [*prompt, *guesses]
        self._table[: len(self._tokens)] = torch.tensor(self._tokens)

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One chain per row, as far as the text is known."""
        return [self._chain_of(row) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to learn."""

    def reset(self, slot: int) -> None:
        """Nothing to forget."""

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """One, whatever there is room for."""
        return (min(self.info.max_depth, num_nodes - 1),)

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """See `DeviceDrafter`. Past the known text it drafts what the table held: those drafts
        are past the row's end."""
        places = rows.len_tokens.unsqueeze(1) + self._steps[:depth]
        rnd.tokens[:, 1 : depth + 1] = self._table[places.clamp(max=MOST_TOKENS - 1)]
        rnd.parents[:, : depth + 1] = self._chain[: depth + 1]
        # A row that may emit one more token has no use for a draft; an idle one stays idle.
        nodes = depth + 1 - depth * (rows.remaining == 1)
        rnd.num_nodes.copy_(nodes * (rnd.num_nodes > 0))

    def _chain_of(self, row: DraftRow) -> DraftTree:
        start, length = len(row.tokens), min(row.max_drafts, self.info.max_depth)
        return DraftTree.chain(row.tokens[-1], self._tokens[start : start + length])
