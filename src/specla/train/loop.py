# SPDX-License-Identifier: Apache-2.0
"""Training an EAGLE drafter: the loss, one step, held-out figures, and a run that can be stopped.

Loss: sum over steps s of 0.8^s times the cross-entropy against the target's law within the draft
vocabulary, positions where the target's likeliest token is outside it left out, each document's
mean counting the same. AdamW (0.9, 0.95), no weight decay, warm-up, cosine, clipped at 0.5.

Source: EAGLE-3 (arXiv 2503.01840); the mean per document is DeepSpec's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specla.errors import ConfigError
from specla.train.batches import Batch, Packer, fill, order
from specla.train.capture import Text
from specla.train.eagle import EagleNet
from specla.train.optim import optimizer_tensors, rate, restore_optimizers
from specla.train.unroll import valid_steps

STATE = "trainer.safetensors"
DECAY = 0.8
TOP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result of a run, besides texts and target.

    rows, length: pairs of a batch. unroll: steps of the training-time test. steps: optimiser
    steps in all.
    """

    rows: int = 4
    length: int = 512
    unroll: int = 5
    steps: int = 1000
    lr: float = 1e-4
    warmup: int = 40
    clip: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Held-out acceptance, by step ahead: first[s], top[s]: how often the text's next token is
    the drafter's first guess, among its first 4, given true tokens before it; tau: tokens per
    round of a chain of that many drafts, the bonus included, simulated at every token."""

    first: tuple[float, ...]
    top: tuple[float, ...]
    tau: float


def loss_of(net: EagleNet, batch: Batch, steps: int) -> Tensor:
    """The loss of one batch; see the module."""
    documents = batch.documents.max() + 1
    valid = valid_steps(batch.pairs.segments, steps).flatten(1)[:, batch.at] & batch.known
    total = batch.laws.new_zeros(())
    for s, y in enumerate(net.unroll(batch.pairs, steps)):
        here = valid[s]
        logits = net.logits(y.flatten(0, 1)[batch.at[here]]).float()
        entropy = -(batch.laws[here] * torch.log_softmax(logits, dim=-1)).sum(-1)
        total = total + DECAY**s * (entropy * batch.weights[here]).sum()
    return total / documents


@torch.no_grad()
def figures(net: EagleNet, batches: Sequence[Batch], steps: int) -> Figures:
    """Held-out acceptance over some batches."""
    first, top, counts = (torch.zeros(steps) for _ in range(3))
    accepted, places = 0.0, 0
    for batch in batches:
        valid = valid_steps(batch.pairs.segments, steps).flatten(1)[:, batch.at].cpu()
        hits = torch.zeros(steps, len(batch.at), dtype=torch.bool)
        for s, y in enumerate(net.unroll(batch.pairs, steps)):
            guesses = net.d2t[net.logits(y.flatten(0, 1)[batch.at]).topk(TOP, dim=-1).indices]
            right = (guesses == batch.tokens[:, None]).cpu()
            hits[s] = right[:, 0] & valid[s]
            first[s] += hits[s].sum()
            top[s] += (right.any(-1) & valid[s]).sum()
            counts[s] += valid[s].sum()
        accepted += float(_chains(hits, batch.documents.cpu()).sum())
        places += len(batch.at)
    counts.clamp_(min=1)
    return Figures(
        first=tuple((first / counts).tolist()),
        top=tuple((top / counts).tolist()),
        tau=1 + accepted / max(places, 1),
    )


def _chains(hits: Tensor, documents: Tensor) -> Tensor:
    """[n] drafts accepted by a chain that starts at each place: hits [steps, n], step s of the
    chain from place i being at place i + s of the same document."""
    steps, count = hits.shape
    alive = torch.ones(count, dtype=torch.bool)
    total = torch.zeros(count)
    for s in range(min(steps, count)):
        later = torch.zeros(count, dtype=torch.bool)
        same = documents[s:] == documents[: count - s]
        later[: count - s] = hits[s, s:] & same
        alive = alive & later
        total += alive
    return total


class Trainer:
    """A drafter in training: saved and restored together with its optimiser and place in the
    texts."""

    def __init__(
        self, net: EagleNet, packer: Packer, texts: Sequence[Text], recipe: Recipe
    ) -> None:
        self.net, self.recipe, self._packer, self._texts = net, recipe, packer, texts
        self.optimizer = torch.optim.AdamW(
            net.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = self.used = self.tokens = 0
        self.seconds, self.best = 0.0, 0.0

    def next_batch(self) -> Batch:
        """The next texts that fit, packed."""
        recipe = self.recipe
        numbers = order(len(self._texts), recipe.seed, self.used)
        # More than can fit: a pair per token at least.
        drawn = [next(numbers) for _ in range(min(recipe.rows * recipe.length, 4096))]
        texts = [self._texts[i] for i in drawn]
        rows = fill([len(text.tokens) - 1 for text in texts], recipe.rows, recipe.length)
        self.used += sum(map(len, rows))
        return self._packer([[texts[i] for i in row] for row in rows])

    def train_step(self) -> float:
        """One optimiser step; the loss before it."""
        began = time.perf_counter()
        batch = self.next_batch()
        loss = loss_of(self.net, batch, self.recipe.unroll)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        scale = rate(self.step / self.recipe.steps, self.step, self.recipe.warmup, floor=0.02)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * scale
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += len(batch.at)
        self.seconds += time.perf_counter() - began
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        """All that `restore` needs, replaced in one rename."""
        tensors = dict(self.net.state_dict()) | optimizer_tensors(self.net, [self.optimizer])
        notes = {name: getattr(self, name) for name in self._counters}
        notes |= self._begun_with()
        part = folder / "trainer.tmp"
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            part,
            {"notes": json.dumps(notes)},
        )
        part.rename(folder / STATE)

    def _begun_with(self) -> dict[str, object]:
        """What a run that is gone on with must agree on; more steps are fine."""
        recipe = {name: x for name, x in asdict(self.recipe).items() if name != "steps"}
        return {"recipe": recipe, "config": self.net.config.as_dict(), "texts": len(self._texts)}

    def restore(self, folder: Path) -> bool:
        """Go on from a saved run, if there is one.

        Raises:
            ConfigError: it was begun with other settings.
        """
        if not (folder / STATE).exists():
            return False
        device = str(next(self.net.parameters()).device)
        with safe_open(folder / STATE, "pt", device) as file:
            notes = json.loads(file.metadata()["notes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for what, mine in self._begun_with().items():
            if notes[what] != mine:
                raise ConfigError(
                    f"a run goes on with the settings it was begun with, but the {what} in "
                    f"{folder} is {notes[what]}, now {mine}; use another folder"
                )
        self.net.load_state_dict({name: tensors[name] for name in self.net.state_dict()})
        restore_optimizers(self.net, [self.optimizer], tensors)
        for name in self._counters:
            setattr(self, name, notes[name])
        return True

    _counters = ("step", "used", "tokens", "seconds", "best")
