# SPDX-License-Identifier: Apache-2.0
"""Training block drafters and state readers: losses, one step, held-out figures.

A draft's lessons are weighted e^{-(k-1)/decay} at depth k:

    DFlash     CE on the text's token
    DSpark     0.1 CE + 0.9 |p_draft - p_target|_1 + 1.0 BCE of the confidence against 1 - L1 / 2
    reader     CE + 0.1 |p_draft - p_target|_1

The Markov and the confidence head are given the text's own token before each draft.

Source: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), ReaDy (arXiv 2610.20503).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specla.drafters.block_config import BlockConfig
from specla.drafters.block_model import BlockModel, Inject
from specla.drafters.calibration import calibrate
from specla.models.base import TargetModel
from specla.train.block import BlockNet, ReaderNet
from specla.train.block_batches import BlockBatch, Lessons, known_drafts, lessons, some
from specla.train.capture import Text
from specla.train.states import States
from specla.train.steps import Figures, Lesson, Pack, Schedule, Steps
from specla.train.team import ALONE, Team

TOP = 4
HELD_OUT_ANCHORS = 128
"""Of one batch, evenly spread."""


class Shares(NamedTuple):
    """What a loss is made of; decay: of the weights by depth."""

    ce: float
    l1: float
    confidence: float
    decay: float


READER = Shares(ce=1.0, l1=0.1, confidence=0.0, decay=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecipe(Schedule):
    """Everything that decides the result of a run, besides texts and target.

    anchors: blocks per batch, at most.
    """

    lr: float = 6e-4
    clip: float = 1.0
    anchors: int = 128

    def times(self, processes: int) -> Self:
        """See `Schedule`."""
        return replace(self, rows=processes * self.rows, anchors=processes * self.anchors)


def shares_for(config: BlockConfig) -> Shares:
    """The loss of the paper whose heads a drafter has."""
    if config.markov_rank or config.confidence_head:
        return Shares(ce=0.1, l1=0.9, confidence=float(config.confidence_head), decay=4.0)
    return Shares(ce=1.0, l1=0.0, confidence=0.0, decay=4.0 if config.num_drafts <= 8 else 7.0)


def block_loss(
    logits: Tensor, confidence: Tensor | None, given: Lessons, shares: Shares
) -> Tensor:
    """Weighted mean over drafts. logits [A, n, vocab], with the Markov head's correction;
    confidence [A, n] logits, or None without that head."""
    weights = draft_weights(given.known, shares.decay, logits.dtype)
    entropy = F.cross_entropy(logits.transpose(1, 2), given.labels, reduction="none")
    total = shares.ce * entropy
    if shares.l1 or shares.confidence:
        gap = (torch.softmax(logits, dim=-1) - given.laws).abs().sum(-1)
        total = total + shares.l1 * gap
        if shares.confidence:
            assert confidence is not None
            accepted = (1 - gap.detach() / 2).clamp(0, 1)
            total = total + shares.confidence * F.binary_cross_entropy_with_logits(
                confidence, accepted, reduction="none"
            )
    return (total * weights).sum() / weights.sum().clamp(min=1e-6)


def draft_weights(known: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """[A, n] by depth; 0 past the text's end, where `known` [A, n] is false."""
    depth = torch.arange(known.shape[1], dtype=dtype, device=known.device)
    return known * torch.exp(-depth / decay)


class Guesses(NamedTuple):
    """logits [A, n, vocab] float32 after the text's own tokens; confidence [A, n] or None."""

    logits: Tensor
    confidence: Tensor | None


class BlockSteps(Steps[BlockBatch]):
    """A block drafter in training, with a state reader or without.

    Args:
        net: the drafter. reader: its state reader. captured: feature layers of the batches: the
            drafter's, and what else `states` needs.
        shares: of the loss.
        joint: train the drafter too where there is a reader.
    """

    def __init__(
        self,
        target: TargetModel,
        net: BlockNet,
        pack: Pack[BlockBatch],
        texts: Sequence[Text],
        recipe: BlockRecipe,
        *,
        shares: Shares,
        reader: ReaderNet | None = None,
        captured: Sequence[int] = (),
        joint: bool = False,
        team: Team = ALONE,
    ) -> None:
        self.net, self.reader, self.recipe = net, reader, recipe
        self._target, self._shares, self._joint = target, shares, joint
        self._temperatures = net.config.confidence_temperatures
        parts = nn.ModuleDict({"drafter": net})
        self._states: States | None = None
        if reader is not None:
            parts["reader"] = reader
            net.requires_grad_(joint)
            self._states = States(target, reader.config.state_layers, captured)
        super().__init__(parts, pack, texts, recipe, team)

    def loss(self, batch: BlockBatch) -> Lesson:
        """See the module; anchors are drawn anew for each step and process."""
        team, recipe = self.team, self.recipe
        seed = (recipe.seed << 32) + self.step * team.count + team.number
        generator = torch.Generator().manual_seed(seed)
        places = some(batch.anchors, recipe.anchors // team.count, generator)
        count = self.net.config.num_drafts
        given = lessons(batch, places, count, self._target)
        guesses = self.guesses(batch, places, given)
        found = block_loss(guesses.logits, guesses.confidence, given, self._shares)
        weight = draft_weights(given.known, self._shares.decay, found.dtype).sum()
        return Lesson(found, weight, int(known_drafts(batch, places, count).sum()))

    def guesses(self, batch: BlockBatch, places: Tensor, given: Lessons) -> Guesses:
        """The drafter's laws and confidences at some anchors; their places are on the host."""
        model, inject = self.net.model(), self._inject(batch, places)
        with self.net.casting():
            h = self.net.outputs(model, batch, places, inject)
            logits = model.logits(h)
            if self.net.config.markov_rank:
                logits = logits + _corrections(model, given.before)
            confident = self.net.config.confidence_head
            confidence = model.confidence(h, given.before) if confident else None
        return Guesses(logits.float(), None if confidence is None else confidence.float())

    def _inject(self, batch: BlockBatch, places: Tensor) -> Inject | None:
        if self.reader is None:
            return None
        assert self._states is not None
        reader = self.reader.reader()
        reading = reader.read_folded(self._states(batch, places))
        return lambda h: reader.delta(h, reading)

    @torch.no_grad()
    def figures(self, batches: Sequence[BlockBatch]) -> Figures:
        """Held-out acceptance over some batches; calibrates the confidence head on them."""
        seen = [self._look(batch) for batch in batches]
        right, known = (torch.cat([one[i] for one in seen]) for i in (0, 1))
        # As long as a chain is right, the tokens before its drafts are the text's own.
        survived = right[..., 0].int().cumprod(-1)
        if self.net.config.confidence_head:
            whole = known.all(-1)
            logits = torch.cat([one[2] for one in seen])[whole]
            self._temperatures = calibrate(logits, survived[whole]) if len(logits) else None
        counts = known.sum(0).clamp(min=1)
        return Figures(
            first=tuple((right[..., 0].sum(0) / counts).tolist()),
            top=tuple((right.any(-1).sum(0) / counts).tolist()),
            tau=1 + float(survived.sum()) / max(len(right), 1),
        )

    def _look(self, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Of one batch's anchors: whether each of the first guesses is right [A, n, TOP], whether
        the text goes that far [A, n], confidences' logits [A, n] (zeros without the head)."""
        places = some(batch.anchors, HELD_OUT_ANCHORS, None)
        given = lessons(batch, places, self.net.config.num_drafts, self._target)
        guesses = self.guesses(batch, places, given)
        tokens = guesses.logits.topk(TOP, dim=-1).indices
        right = (tokens == given.labels[..., None]) & given.known[..., None]
        confidence = guesses.confidence
        logits = torch.zeros(right.shape[:2]) if confidence is None else confidence.cpu()
        return right.cpu(), given.known.cpu(), logits

    def keep(self, folder: Path) -> None:
        """Write the drafter, and its reader if it has one."""
        self.net.save(folder, self._temperatures)
        if self.reader is not None:
            self.reader.save(folder)

    def settings(self) -> dict[str, Any]:
        """Configs, and what is trained."""
        reader = None if self.reader is None else self.reader.config.as_dict()
        return {
            "drafter": self.net.config.as_dict(),
            "reader": reader,
            "joint": self._joint,
            "loss": list(self._shares),
        }


def _corrections(model: BlockModel, before: Tensor) -> Tensor:
    found: Tensor = model.correction(before.flatten()).unflatten(0, before.shape)
    return found
