# SPDX-License-Identifier: Apache-2.0
"""Texts packed into rows of pairs, with the target's features and its own law as the lesson.

A text of n tokens has the pairs t = 0 .. n - 2 (see `unroll`). Pair t guesses x_{t+2}; it counts
where that is a token of the answer, so that the drafter learns what it will be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.train.capture import Capture, Text
from specla.train.eagle import Pairs


class Batch(NamedTuple):
    """Packed pairs and their lessons.

    pairs: [B, T, ...]. at [n] int64: places, in rows laid end to end, of the pairs that count, in
    order of documents and pairs. laws [n, draft vocabulary]: the target's probabilities there,
    within the draft vocabulary. known [n] bool: whether the target's likeliest token is in it.
    tokens [n]: x_{t+2}. weights [n]: their sum over a document is 1. documents [n].
    """

    pairs: Pairs
    at: Tensor
    laws: Tensor
    known: Tensor
    tokens: Tensor
    weights: Tensor
    documents: Tensor


def order(count: int, seed: int, start: int) -> Iterator[int]:
    """Which text comes next, from the `start`-th on, epoch after epoch without end."""
    epoch, at = divmod(start, count)
    while True:
        yield from np.random.default_rng((seed, epoch)).permutation(count)[at:].tolist()
        epoch, at = epoch + 1, 0


def fill(lengths: Iterable[int], rows: int, length: int) -> list[list[int]]:
    """How many of the texts, in order, fit into `rows` rows of `length` pairs: their numbers by
    row. A text starts a new row where it does not fit; a longer one is cut. As many lengths are
    drawn as fit, and one more."""
    placed: list[list[int]] = [[]]
    room = length
    for i, count in enumerate(lengths):
        need = min(count, length)
        if need > room:
            if len(placed) == rows:
                break
            placed.append([])
            room = length
        placed[-1].append(i)
        room -= need
    return placed


class Packer:
    """Makes batches of one target's texts for one draft vocabulary.

    d2t [draft vocabulary] target ids. length: pairs per row.
    """

    def __init__(self, model: TargetModel, capture: Capture, d2t: Tensor, length: int) -> None:
        self._model, self._capture, self._length = model, capture, length
        self._d2t = d2t.to(model.device)

    def __call__(self, rows: Sequence[Sequence[Text]]) -> Batch:
        """One batch, a list of texts per row."""
        parts = [
            [self._document(text, b, number) for number, text in enumerate(row)]
            for b, row in enumerate(rows)
        ]
        pairs = Pairs(*(_rows(parts, i, self._length) for i in range(3)))
        return self._lesson(pairs, [part for row in parts for part in row], parts)

    def _document(self, text: Text, row: int, number: int) -> _Document:
        tokens = text.tokens[: self._length + 1]
        ids = torch.tensor(tokens, device=self._model.device)
        features, last = self._capture(tokens)
        count, first = len(tokens) - 1, max(text.num_prompt - 2, 0)
        return _Document(
            embeds=self._model.embeddings[ids[1:]].float(),
            features=features[:count].float(),
            segments=torch.full((count,), number, device=ids.device),
            # Pair t guesses x_{t+2}, which the target's output at t + 1 is about.
            last=last[first + 1 : count],
            tokens=ids[first + 2 :],
            first=first,
        )

    def _lesson(
        self, pairs: Pairs, flat: Sequence[_Document], parts: Sequence[Sequence[_Document]]
    ) -> Batch:
        logits = self._model.logits(torch.cat([one.last for one in flat]))
        best = logits.argmax(-1)
        at, weights, documents = list[Tensor](), list[Tensor](), list[Tensor]()
        for b, row in enumerate(parts):
            start = b * self._length
            for one in row:
                count = len(one.tokens)
                at.append(torch.arange(count) + (start + one.first))
                weights.append(torch.full((count,), 1 / max(count, 1)))
                documents.append(torch.full((count,), len(documents)))
                start += len(one.segments)
        device = logits.device
        return Batch(
            pairs=pairs,
            at=torch.cat(at).to(device),
            laws=torch.softmax(logits[:, self._d2t], dim=-1),
            known=torch.isin(best, self._d2t),
            tokens=torch.cat([one.tokens for one in flat]),
            weights=torch.cat(weights).to(device),
            documents=torch.cat(documents).to(device),
        )


class _Document(NamedTuple):
    """One text. embeds, features, segments by pair; last, tokens from pair `first` on."""

    embeds: Tensor
    features: Tensor
    segments: Tensor
    last: Tensor
    tokens: Tensor
    first: int


def _rows(parts: Sequence[Sequence[_Document]], field: int, length: int) -> Tensor:
    """One field of all documents as rows [B, T, ...]; what is left over is of no document."""
    rows = []
    for row in parts:
        x = torch.cat([part[field] for part in row])  # type: ignore[misc]
        full = x.new_full((length, *x.shape[1:]), -1 if x.dtype == torch.int64 else 0)
        full[: len(x)] = x
        rows.append(full)
    return torch.stack(rows)


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> Tensor:
    """[size] int64, ascending: the tokens that answers use most, then the lowest ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        answer = torch.tensor(text.tokens[text.num_prompt :], dtype=torch.int64)
        counts += torch.bincount(answer, minlength=vocab_size)
    ranked = counts.argsort(descending=True, stable=True)
    return ranked[:size].sort().values
