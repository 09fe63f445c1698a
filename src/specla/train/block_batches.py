# SPDX-License-Identifier: Apache-2.0
"""Texts packed into rows of places, for block drafters; which places are anchors, what they learn.

Place t of a text has token x_t, the target's outputs over it and the token after it. A block with
its anchor at place t sees the places before it and learns x_{t+1}, x_{t+2}, ..., of the same text;
an anchor's first lesson is a token of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specla.models.base import TargetModel
from specla.ops.transfer import sent
from specla.train.batches import in_rows
from specla.train.capture import Capture, Text


class BlockBatch(NamedTuple):
    """Packed places [B, T, ...].

    features: the target's outputs, side by side; last: its last layer's. tokens: x_t; after:
    x_{t+1}. segments: the document, -1 for none; positions: t.

    On the host, of places in rows laid end to end: anchors [n] int64, those that can be anchors;
    ends [B * T] int64, where a place's document ends.
    """

    features: Tensor
    last: Tensor
    tokens: Tensor
    after: Tensor
    segments: Tensor
    positions: Tensor
    anchors: Tensor
    ends: Tensor


class Lessons(NamedTuple):
    """Of A anchors, n drafts each: labels [A, n], known [A, n] bool (whether the text goes that
    far), laws [A, n, vocab] (the target's), before [A, n]: the token before each."""

    labels: Tensor
    known: Tensor
    laws: Tensor
    before: Tensor


class BlockPacker:
    """Makes batches of texts. capture: of their target. length: places per row."""

    def __init__(self, capture: Capture, length: int) -> None:
        self._capture, self._length = capture, length

    def __call__(self, rows: Sequence[Sequence[Text]]) -> BlockBatch:
        """One batch, a list of texts per row."""
        texts = [[text.tokens[: self._length + 1] for text in row] for row in rows]
        outputs = [[self._capture(tokens) for tokens in row] for row in texts]
        features, last = (
            in_rows([[one[i][:-1] for one in row] for row in outputs], self._length)
            for i in range(2)
        )
        # Tokens, those after them, documents and positions.
        columns = np.full((4, len(rows), self._length), -1, dtype=np.int64)
        ends, anchors = np.zeros((len(rows), self._length), dtype=np.int64), list[Tensor]()
        for b, row in enumerate(texts):
            start, first = 0, b * self._length
            for number, tokens in enumerate(row):
                end = start + len(tokens) - 1
                columns[:2, b, start:end] = tokens[:-1], tokens[1:]
                columns[2, b, start:end], columns[3, b, start:end] = number, range(end - start)
                ends[b, start:end] = first + end
                asked = max(rows[b][number].num_prompt - 1, 0)
                anchors.append(torch.arange(first + start + asked, first + end))
                start = end
        tokens, after, segments, positions = sent(torch.from_numpy(columns), last.device)
        return BlockBatch(
            features=features,
            last=last,
            tokens=tokens,
            after=after,
            segments=segments,
            positions=positions,
            anchors=torch.cat(anchors),
            ends=torch.from_numpy(ends).flatten(),
        )


def some(places: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """At most `count` of the places [n], in order: at random, or evenly spread where there is no
    generator."""
    if len(places) <= count:
        return places
    if generator is None:
        at = torch.arange(count) * len(places) // count
    else:
        at = torch.randperm(len(places), generator=generator)[:count].sort().values
    return places[at]


def known_drafts(batch: BlockBatch, places: Tensor, count: int) -> Tensor:
    """[A, count] bool, on the host: whether the document of an anchor goes that far."""
    return torch.arange(count) < (batch.ends[places] - places)[:, None]


def lessons(batch: BlockBatch, places: Tensor, count: int, model: TargetModel) -> Lessons:
    """What blocks of `count` drafts learn; their anchors' places [A] are on the host."""
    at = (places[:, None] + torch.arange(count)).clamp(max=batch.tokens.numel() - 1)
    at, known = sent(
        torch.stack([at, known_drafts(batch, places, count)]), batch.last.device
    ).unbind()
    laws = torch.softmax(model.logits(batch.last.flatten(0, 1)[at.flatten()]), dim=-1)
    return Lessons(
        labels=batch.after.flatten()[at].clamp(min=0),
        known=known > 0,
        laws=laws.unflatten(0, at.shape),
        before=batch.tokens.flatten()[at].clamp(min=0),
    )
