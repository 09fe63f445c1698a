# SPDX-License-Identifier: Apache-2.0
"""Training an EAGLE drafter: the loss and held-out figures.

Loss: sum over steps s of 0.8^s times the cross-entropy against the target's law within the draft
vocabulary, positions where the target's likeliest token is outside it left out, each document's
mean counting the same.

Source: EAGLE-3 (arXiv 2503.01840); the mean per document is DeepSpec's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specla.train.batches import Batch, Packer
from specla.train.capture import Text
from specla.train.cross_entropy import law_entropy
from specla.train.eagle import EagleNet
from specla.train.steps import Figures, Lesson, Schedule, Steps
from specla.train.team import ALONE, Team
from specla.train.unroll import valid_steps

DECAY = 0.8
TOP = 4
HELD_OUT_DEPTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Schedule):
    """Everything that decides the result of a run, besides texts and target.

    rows, length: pairs of a batch. unroll: steps of the training-time test.
    """

    lr: float = 2e-3
    muon_lr: float = 0.02
    unroll: int = 5


def loss_of(net: EagleNet, batch: Batch, steps: int) -> Tensor:
    """The loss of one batch; see the module."""
    valid = valid_steps(batch.pairs.segments, steps).flatten(1)[:, batch.at] & batch.known
    outputs = net.unroll(batch.pairs, steps)
    y = torch.stack([y.flatten(0, 1).index_select(0, batch.at) for y in outputs])
    decays = DECAY ** torch.arange(steps, device=y.device)
    weights = torch.where(valid, batch.weights, 0) * decays[:, None]
    hidden = net.norm(y).to(net.compute)
    return law_entropy(hidden, net.lm_head.weight, batch.laws, weights) / batch.num_documents


@torch.no_grad()
def figures(net: EagleNet, batches: Sequence[Batch], steps: int) -> Figures:
    """Held-out acceptance over some batches."""
    sums, accepted = torch.zeros(3, steps), 0.0
    for batch in batches:
        valid = valid_steps(batch.pairs.segments, steps).flatten(1)[:, batch.at]
        right = torch.stack(
            [
                net.d2t[net.logits(y.flatten(0, 1)[batch.at]).topk(TOP, dim=-1).indices]
                == batch.tokens[:, None]
                for y in net.unroll(batch.pairs, steps)
            ]
        )
        hits, found = right[..., 0] & valid, right.any(-1) & valid
        accepted += float(_chains(hits, batch.documents).sum())
        sums += torch.stack([hits, found, valid]).sum(-1).cpu()
    first, top = (x / sums[2].clamp(min=1) for x in sums[:2])
    return Figures(
        first=tuple(first.tolist()),
        top=tuple(top.tolist()),
        tau=1 + accepted / max(sum(len(batch.at) for batch in batches), 1),
    )


def _chains(hits: Tensor, documents: Tensor) -> Tensor:
    """[n] drafts accepted by a chain that starts at each place: hits [steps, n], step s of the
    chain from place i being at place i + s of the same document."""
    steps, count = hits.shape
    alive = hits.new_ones(count)
    total = torch.zeros(count, device=hits.device)
    for s in range(min(steps, count)):
        later = hits.new_zeros(count)
        same = documents[s:] == documents[: count - s]
        later[: count - s] = hits[s, s:] & same
        alive = alive & later
        total += alive
    return total


class Trainer(Steps[Batch]):
    """An EAGLE drafter in training."""

    def __init__(
        self,
        net: EagleNet,
        packer: Packer,
        texts: Sequence[Text],
        recipe: Recipe,
        team: Team = ALONE,
    ) -> None:
        super().__init__(net, packer, texts, recipe, team)
        self.net, self.recipe = net, recipe

    def loss(self, batch: Batch) -> Lesson:
        """See the module; a document weighs 1."""
        loss = loss_of(self.net, batch, self.recipe.unroll)
        return Lesson(loss, torch.tensor(batch.num_documents), len(batch.at))

    def figures(self, batches: Sequence[Batch]) -> Figures:
        """Held-out acceptance over some batches."""
        return figures(self.net, batches, HELD_OUT_DEPTH)

    def keep(self, folder: Path) -> None:
        """Write the drafter."""
        self.net.save(folder)

    def settings(self) -> dict[str, Any]:
        """The drafter's config."""
        return self.net.config.as_dict()
