# SPDX-License-Identifier: Apache-2.0
"""Texts packed into rows of places, for block drafters; which places are anchors, what they learn.

Place t of a text has token x_t, the target's outputs over it and the token after it. A block with
its anchor at place t sees the places before it and learns x_{t+1}, x_{t+2}, ..., of the same text;
an anchor's first lesson is a token of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.train.capture import Capture, Text


class Document(NamedTuple):
    """One text in a batch: its tokens (of its places), and where its first place is."""

    tokens: tuple[int, ...]
    start: int


class BlockBatch(NamedTuple):
    """Packed places [B, T, ...].

    features: the target's outputs, side by side; last: its last layer's. tokens: x_t; after:
    x_{t+1}. segments: the document, -1 for none; positions: t. anchors [n] int64: places, in rows
    laid end to end, that can be anchors. documents: in order of place.
    """

    features: Tensor
    last: Tensor
    tokens: Tensor
    after: Tensor
    segments: Tensor
    positions: Tensor
    anchors: Tensor
    documents: tuple[Document, ...]


class Lessons(NamedTuple):
    """Of A anchors, n drafts each: labels [A, n], known [A, n] bool (whether the text goes that
    far), laws [A, n, vocab] (the target's), before [A, n]: the token before each."""

    labels: Tensor
    known: Tensor
    laws: Tensor
    before: Tensor


class BlockPacker:
    """Makes batches of one target's texts. length: places per row."""

    def __init__(self, model: TargetModel, capture: Capture, length: int) -> None:
        self._model, self._capture, self._length = model, capture, length

    def __call__(self, rows: Sequence[Sequence[Text]]) -> BlockBatch:
        """One batch, a list of texts per row."""
        parts, anchors, documents = [], list[Tensor](), list[Document]()
        for b, row in enumerate(rows):
            start, one = b * self._length, list[tuple[Tensor, ...]]()
            for number, text in enumerate(row):
                ids = text.tokens[: self._length + 1]
                one.append(self._places(ids, number))
                first = max(text.num_prompt - 1, 0)
                anchors.append(torch.arange(first, len(ids) - 1) + start)
                documents.append(Document(ids[:-1], start))
                start += len(ids) - 1
            parts.append([torch.cat(x) for x in zip(*one, strict=True)])
        columns = (torch.stack([self._padded(x) for x in c]) for c in zip(*parts, strict=True))
        features, last, tokens, after, segments, positions = columns
        return BlockBatch(
            features=features,
            last=last,
            tokens=tokens,
            after=after,
            segments=segments,
            positions=positions,
            anchors=torch.cat(anchors).to(self._model.device),
            documents=tuple(documents),
        )

    def _places(self, tokens: Sequence[int], number: int) -> tuple[Tensor, ...]:
        """A text's columns of a batch."""
        features, last = self._capture(tokens)
        ids, count = torch.tensor(tokens, device=features.device), len(tokens) - 1
        where = torch.arange(count, device=ids.device)
        segment = torch.full_like(where, number)
        return features[:-1].float(), last[:-1], ids[:-1], ids[1:], segment, where

    def _padded(self, x: Tensor) -> Tensor:
        full = x.new_full((self._length, *x.shape[1:]), -1 if x.dtype == torch.int64 else 0)
        full[: len(x)] = x
        return full


def some(places: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """At most `count` of the places, in order: at random, or evenly spread without a generator."""
    if len(places) <= count:
        return places
    if generator is None:
        at = torch.arange(count) * len(places) // count
    else:
        at = torch.randperm(len(places), generator=generator)[:count].sort().values
    return places[at.to(places.device)]


def lessons(batch: BlockBatch, places: Tensor, count: int, model: TargetModel) -> Lessons:
    """What blocks of `count` drafts with anchors at `places` learn."""
    total = batch.tokens.numel()
    at = places[:, None] + torch.arange(count, device=places.device)
    inside = at < total
    at = at.clamp(max=total - 1)
    length = batch.tokens.shape[1]
    segments = batch.segments.flatten()
    same = (segments[at] == segments[places][:, None]) & (
        at // length == places[:, None] // length
    )
    laws = torch.softmax(model.logits(batch.last.flatten(0, 1)[at.flatten()]), dim=-1)
    return Lessons(
        labels=batch.after.flatten()[at].clamp(min=0),
        known=inside & same,
        laws=laws.unflatten(0, at.shape),
        before=batch.tokens.flatten()[at].clamp(min=0),
    )
