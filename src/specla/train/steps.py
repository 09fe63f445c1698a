# SPDX-License-Identifier: Apache-2.0
"""Training steps of any drafter, and what lets a run that was stopped go on as if it had not been.

A kind of drafter brings its net, what a batch of its lessons is, the loss, and held-out figures.
Muon on matrices where it is asked for, AdamW (0.9, 0.95) on the rest, no weight decay, warm-up,
cosine, clipped.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specla.drafters.files import replacing
from specla.errors import ConfigError
from specla.train.batches import fill, order
from specla.train.capture import Text
from specla.train.optim import (
    build_optimizers,
    optimizer_tensors,
    rate,
    restore_optimizers,
    step_all,
)
from specla.train.team import ALONE, Team

STATE = "trainer.safetensors"
B = TypeVar("B")
Pack = Callable[[Sequence[Sequence[Text]]], B]
"""A list of texts per row -> a batch."""


def check_above_zero(record: Any, *, or_zero: Sequence[str] = (), but: Sequence[str] = ()) -> None:
    """Refuse a record with a number that must be above 0 and is not; None is no number.

    Args:
        or_zero: fields that may be 0 as well. but: fields that may be anything.

    Raises:
        ConfigError: such a number; its field is named.
    """
    for name in (field.name for field in fields(record) if field.name not in but):
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        ok = value >= 0 if name in or_zero else value > 0
        if not ok:
            must = "0 or above" if name in or_zero else "above 0"
            raise ConfigError(f"{name} must be {must}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What decides the result of a run, besides texts and target, for every kind of drafter.

    rows, length: tokens of a batch. steps: optimiser steps in all. lr: AdamW's peak rate. muon_lr:
    Muon's; 0: AdamW has the matrices too. warmup: steps.
    """

    rows: int = 4
    length: int = 512
    steps: int = 1000
    lr: float = 1e-4
    muon_lr: float = 0.0
    warmup: int = 40
    clip: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_above_zero(self, or_zero=("muon_lr",), but=("seed",))

    def times(self, processes: int) -> Self:
        """That of one process which does what several with this one do together."""
        return replace(self, rows=processes * self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Held-out acceptance, by depth: first[s], top[s]: how often the text's next token is the
    drafter's first guess, among its first 4, given true tokens before it; tau: tokens per
    round of a chain of that many drafts, the bonus included, simulated at every place."""

    first: tuple[float, ...]
    top: tuple[float, ...]
    tau: float


class Lesson(NamedTuple):
    """What a batch teaches: the weighted mean loss, the sum of its weights (both scalars), and of
    how many lessons."""

    loss: Tensor
    weight: Tensor
    lessons: int


class Steps(ABC, Generic[B]):
    """A drafter in training: saved and restored together with its optimiser and place in the
    texts. `net`'s parameters that need no gradient are not trained. schedule: of the whole team,
    whose processes begin with the same net."""

    def __init__(
        self,
        net: nn.Module,
        pack: Pack[B],
        texts: Sequence[Text],
        schedule: Schedule,
        team: Team = ALONE,
    ) -> None:
        self.schedule, self._net, self._pack, self._texts = schedule, net, pack, texts
        self.team = team
        self.optimizers = build_optimizers(
            net, schedule.muon_lr, schedule.lr, use_muon=schedule.muon_lr > 0
        )
        self.step = self.used = self.tokens = 0
        self.seconds, self.best = 0.0, 0.0

    @abstractmethod
    def loss(self, batch: B) -> Lesson:
        """What one batch teaches."""

    @abstractmethod
    def figures(self, batches: Sequence[B]) -> Figures:
        """Held-out acceptance over some batches."""

    @abstractmethod
    def keep(self, folder: Path) -> None:
        """Write the drafter as it is now, as its loader reads it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Config of the drafter: what a run that is gone on with must agree on."""

    def next_batch(self) -> B:
        """The next texts that fit into the team's rows; this process's rows, packed."""
        s, drawn = self.schedule, list[Text]()

        def lengths() -> Iterator[int]:
            for i in order(len(self._texts), s.seed, self.used):
                drawn.append(self._texts[i])
                yield len(drawn[-1].tokens) - 1

        rows = fill(lengths(), s.rows, s.length)
        self.used += sum(map(len, rows))
        return self._pack([[drawn[i] for i in row] for row in self.team.share(rows)])

    def train_step(self) -> Tensor:
        """One optimiser step of the team; the loss before it, which nothing has waited for."""
        began, team = time.perf_counter(), self.team
        found = self.loss(self.next_batch())
        # Alone: times 1.0.
        loss = found.loss * (found.weight / team.total(found.weight))
        loss.backward()
        team.add_up(self._net.parameters())
        s = self.schedule
        torch.nn.utils.clip_grad_norm_(self._net.parameters(), s.clip)
        step_all(self.optimizers, rate(self.step / s.steps, self.step, s.warmup, floor=0.02))
        self.step += 1
        self.tokens += int(team.total(torch.tensor(found.lessons)))
        before = team.total(loss.detach())
        self.seconds += time.perf_counter() - began
        return before

    def mean(self, losses: Sequence[Tensor]) -> float:
        """Of steps, whose time is over when it is known."""
        began = time.perf_counter()
        found = float(torch.stack(list(losses)).mean())
        self.seconds += time.perf_counter() - began
        return found

    def save(self, folder: Path) -> None:
        """All that `restore` needs, replaced in one rename."""
        tensors = dict(self._net.state_dict()) | optimizer_tensors(self._net, self.optimizers)
        notes = {name: getattr(self, name) for name in self._counters}
        notes |= self._begun_with()
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(folder / STATE) as part:
            save_file(whole, part, {"notes": json.dumps(notes)})

    def _begun_with(self) -> dict[str, object]:
        """What a run that is gone on with must agree on; more steps are fine."""
        recipe = {name: x for name, x in asdict(self.schedule).items() if name != "steps"}
        return {"recipe": recipe, "config": self.settings(), "texts": len(self._texts)}

    def restore(self, folder: Path) -> bool:
        """Go on from a saved run, if there is one.

        Raises:
            ConfigError: it was begun with other settings, or the file is damaged.
        """
        if not (folder / STATE).exists():
            return False
        notes, tensors = _saved(folder / STATE, str(next(self._net.parameters()).device))
        for what, mine in self._begun_with().items():
            if notes[what] != mine:
                raise ConfigError(
                    f"a run goes on with the settings it was begun with, but the {what} in "
                    f"{folder} is {notes[what]}, now {mine}; use another folder"
                )
        self._net.load_state_dict({name: tensors[name] for name in self._net.state_dict()})
        restore_optimizers(self._net, self.optimizers, tensors)
        for name in self._counters:
            setattr(self, name, notes[name])
        return True

    _counters = ("step", "used", "tokens", "seconds", "best")


def _saved(path: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Notes and tensors of what `Steps.save` has written."""
    try:
        with safe_open(path, "pt", device) as file:
            notes: dict[str, Any] = json.loads(file.metadata()["notes"])
            return notes, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} must be what a run goes on from, whole, but cannot be read "
            f"({type(error).__name__}: {error}); delete it to begin again at step 0, with the "
            "answers that are there"
        ) from error
