# SPDX-License-Identifier: Apache-2.0
"""Texts packed into rows of pairs, with the target's features and its own law as the lesson.

A text of n tokens has the pairs t = 0 .. n - 2 (see `unroll`). Pair t guesses x_{t+2}; it counts
where that is a token of the answer, so that the drafter learns what it will be asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.ops.transfer import sent
from specla.train.capture import Capture, Text
from specla.train.eagle import Pairs


class Batch(NamedTuple):
    """Packed pairs and their lessons.

    pairs: [B, T, ...]. at [n] int64: places, in rows laid end to end, of the pairs that count, in
    order of documents and pairs. laws [n, draft vocabulary]: the target's probabilities there,
    within the draft vocabulary. known [n] bool: whether the target's likeliest token is in it.
    tokens [n]: x_{t+2}. weights [n]: their sum over a document is 1. documents [n]: whose, of
    num_documents.
    """

    pairs: Pairs
    at: Tensor
    laws: Tensor
    known: Tensor
    tokens: Tensor
    weights: Tensor
    documents: Tensor
    num_documents: int


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
        self._drafted = torch.zeros(model.info.vocab_size, dtype=torch.bool, device=model.device)
        self._drafted[self._d2t] = True

    def __call__(self, rows: Sequence[Sequence[Text]]) -> Batch:
        """One batch, a list of texts per row."""
        texts = [[text.tokens[: self._length + 1] for text in row] for row in rows]
        outputs = [[self._capture(tokens) for tokens in row] for row in texts]
        features = in_rows([[found[:-1] for found, _ in row] for row in outputs], self._length)
        # x_{t+1} of every pair, and the document in its row.
        pairs = np.full((2, len(rows), self._length), [[[0]], [[-1]]], dtype=np.int64)
        lessons, last = list[_Lessons](), list[Tensor]()
        for b, row in enumerate(texts):
            start = 0
            for segment, tokens in enumerate(row):
                end, first = start + len(tokens) - 1, max(rows[b][segment].num_prompt - 2, 0)
                pairs[0, b, start:end], pairs[1, b, start:end] = tokens[1:], segment
                place = b * self._length + start + first
                lessons.append(_Lessons.of(place, tokens[first + 2 :], len(lessons)))
                # Pair t guesses x_{t+2}, which the target's output at t + 1 is about.
                last.append(outputs[b][segment][1][first + 1 : -1])
                start = end
        return self._batch(features, torch.from_numpy(pairs), torch.cat(last), lessons)

    def _batch(
        self, features: Tensor, pairs: Tensor, last: Tensor, lessons: Sequence[_Lessons]
    ) -> Batch:
        device = last.device
        ids, segments = sent(pairs, device)
        parts = (torch.from_numpy(np.concatenate(x, axis=-1)) for x in zip(*lessons, strict=True))
        columns, weights = (sent(x, device) for x in parts)
        logits = self._model.logits(last)
        whole = len(self._d2t) == logits.shape[1]
        at, tokens, documents = columns
        return Batch(
            pairs=Pairs(self._model.embeddings[ids].float(), features.float(), segments),
            at=at,
            laws=torch.softmax(logits if whole else logits[:, self._d2t], dim=-1),
            known=self._drafted[logits.argmax(-1)],
            tokens=tokens,
            weights=weights,
            documents=documents,
            num_documents=len(lessons),
        )


class _Lessons(NamedTuple):
    """Of one document, on the host: columns [3, n], places, x_{t+2} and the document; weights."""

    columns: np.ndarray
    weights: np.ndarray

    @classmethod
    def of(cls, place: int, tokens: Sequence[int], document: int) -> Self:
        """Those of pairs that lie from `place` on."""
        count = len(tokens)
        columns = np.array([range(place, place + count), tokens, [document] * count], np.int64)
        return cls(columns, np.full(count, 1 / max(count, 1), np.float32))


def in_rows(rows: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    """Documents [n, D], a list per row, as rows [B, length, D]; what is left over is 0."""
    gaps = [length - sum(map(len, row)) for row in rows]
    one = rows[0][0]
    blank = one.new_zeros(max(gaps), *one.shape[1:])
    parts = [x for row, gap in zip(rows, gaps, strict=True) for x in (*row, blank[:gap])]
    found: Tensor = torch.cat(parts).unflatten(0, (len(rows), length))
    return found


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int) -> Tensor:
    """[size] int64, ascending: the tokens that answers use most, then the lowest ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        answer = torch.tensor(text.tokens[text.num_prompt :], dtype=torch.int64)
        counts += torch.bincount(answer, minlength=vocab_size)
    ranked = counts.argsort(descending=True, stable=True)
    return ranked[:size].sort().values
