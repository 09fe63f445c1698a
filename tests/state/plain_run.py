# SPDX-License-Identifier: Apache-2.0
"""What plain autoregressive decoding gives for any continuation of a few fixed prompts.

Rounds of one node, one slot, a state of its own, R = 0: a fold in every round. Results are kept
in a trie, because thousands of histories walk the same contexts; a context is continued from the
kept state of the one before. `fresh` does without the trie: it starts from the prompt each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tiny_decoder import VOCAB
from torch import Tensor

from specla.models.gdn_decoder import Decoder
from specla.ops.contract import RecurrentShape
from specla.state import State
from specla.topology.tree import DraftTree

# Prefill stops one token short: these lengths straddle its chunk of 64 and the conv window.
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 6, 17, 64, 65, 66, 70)
PROMPTS = tuple(
    tuple(random.Random(length).randrange(VOCAB) for _ in range(length))
    for length in PROMPT_LENGTHS
)
MAX_KEPT = 40_000

Committed = list[tuple[Tensor, Tensor]]


class Context(NamedTuple):
    """After a prompt and some tokens: the last token's logits [vocab] (None before the first
    round) and State.committed_state."""

    logits: Tensor | None
    committed: Committed

    @property
    def greedy(self) -> int:
        """The true next token."""
        assert self.logits is not None
        return int(self.logits.argmax())


class PlainRun:
    """`at(prompt, tokens)`: prompt is an index into PROMPTS, tokens start with the prompt's last
    token, as rounds do."""

    def __init__(
        self, decoder: Decoder, shape: RecurrentShape, dtype: torch.dtype = torch.float32
    ) -> None:
        self._decoder, self._shape, self._dtype = decoder, shape, dtype
        self._kept: dict[tuple[int, tuple[int, ...]], Context] = {}
        # Read by mutants: they leave the truth alone.
        self.running = False

    def at(self, prompt: int, tokens: Sequence[int]) -> Context:
        """From the trie, or by one more round."""
        key = (prompt, tuple(tokens))
        known = self._kept.get(key)
        if known is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            with self._truth():
                known = self._kept[key] = self._compute(*key)
        return known

    def fresh(self, prompt: int, tokens: Sequence[int]) -> Context:
        """From the prompt on, nothing reused."""
        with self._truth():
            state, slot = self._prefilled(prompt)
            logits = None
            for token in tokens:
                logits = self._round(state, slot, token)
            return Context(logits, state.committed_state(slot))

    def _compute(self, prompt: int, tokens: tuple[int, ...]) -> Context:
        if not tokens:
            state, slot = self._prefilled(prompt)
            return Context(None, state.committed_state(slot))
        state = self._new_state()
        slot = state.acquire()
        before = self.at(prompt, tokens[:-1]).committed
        for i, (S, tail) in enumerate(before):
            state.layers[i].S[slot] = S
            state.tail(i, slot).copy_(tail)
        logits = self._round(state, slot, tokens[-1])
        return Context(logits, state.committed_state(slot))

    def _new_state(self) -> State:
        return State(self._shape, num_slots=1, max_nodes=1, dtype=self._dtype)

    def _prefilled(self, prompt: int) -> tuple[State, int]:
        state = self._new_state()
        slot = state.acquire()
        if PROMPTS[prompt][:-1]:
            self._decoder.prefill(PROMPTS[prompt][:-1], slot, state)
        return state, slot

    def _round(self, state: State, slot: int, token: int) -> Tensor:
        logits = self._decoder.verify(state.begin([slot], [DraftTree.root(token)]), state)
        state.commit([slot], [[0]])
        return logits[0]

    @contextmanager
    def _truth(self) -> Iterator[None]:
        outer, self.running = self.running, True
        try:
            yield
        finally:
            self.running = outer
