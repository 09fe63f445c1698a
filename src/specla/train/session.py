# SPDX-License-Identifier: Apache-2.0
"""One run in a folder: steps, with figures on held-out texts between them.

trainer.safetensors is what it goes on from (it has every weight three times over, so it is not
written at every look), log.csv has the figures, checkpoint/ is the drafter with the best held-out
tau so far, of equals the last. In a team, the main process looks and writes.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from specla.drafters.files import replacing
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.train.batches import fill
from specla.train.capture import Text
from specla.train.steps import B, Figures, Pack, Schedule, Steps

Tick = Callable[[str, int, int], None]
CHECKPOINT, LOG = "checkpoint", "log.csv"
SAVE_SECONDS = 60.0
"""Between two times that a run writes what it goes on from; it does so at its end as well."""
HOLD_OUT = 50
"""Every so many answers one is kept for the figures, where there are no held-out prompts."""


class Session(Generic[B]):
    """A drafter in training in a folder. held_out: batches that it does not learn from; only the
    main process's are looked at.

    Raises:
        ConfigError: a folder that not all processes see, a run begun with other settings, or a
            damaged file of it.
    """

    def __init__(self, folder: Path, trainer: Steps[B], held_out: Sequence[B]) -> None:
        self.folder, self._steps, self._held_out = folder, trainer, held_out
        self.resumed = trainer.restore(folder)
        self._looked: tuple[int, Figures] | None = None
        self.look_seconds = 0.0
        """Of the last look."""
        if (step := trainer.team.of_main(lambda: trainer.step)) != trainer.step:
            raise ConfigError(
                f"all processes must see one {folder}, got step {step} in the main process and "
                f"{trainer.step} in number {trainer.team.number}; use a folder that they share"
            )
        # Before anything is written there.
        trainer.team.wait()
        if self.resumed and trainer.team.main:
            _forget_after(trainer.step, folder / LOG)
        elif trainer.team.main:
            # Of a run that died before it was saved.
            (folder / LOG).unlink(missing_ok=True)

    def __call__(
        self,
        *,
        every: int,
        minutes: float,
        tick: Tick | None = None,
        note: Callable[[str], None],
        saves: bool = True,
        until: int | None = None,
    ) -> Figures:
        """Train to the end of the schedule, or for `minutes`; held-out figures and a checkpoint
        every so many steps and at the end, so that both are of the last step. saves: whether it
        can be gone on with by another process. until: a step of the schedule at which to stop.

        Raises:
            ConfigError: `every` is not above 0.
        """
        if every < 1:
            raise ConfigError(f"steps between figures (every) must be above 0, got {every}")
        trainer, began, losses = self._steps, time.monotonic(), list[Tensor]()
        saved, last = began, trainer.schedule.steps
        last = last if until is None else min(until, last)
        found = self.look([], note)

        def in_time() -> bool:
            return time.monotonic() - began < 60 * minutes

        while trainer.step < last and trainer.team.of_main(in_time):
            losses.append(trainer.train_step())
            if tick is not None:
                tick(f"training (tau {found.tau:.2f})", trainer.step, last)
            if trainer.step % every == 0:
                found, losses = self.look(losses, note), []
                if saves and trainer.team.main and time.monotonic() - saved > SAVE_SECONDS:
                    trainer.save(self.folder)
                    saved = time.monotonic()
        if losses:
            found = self.look(losses, note)
        if saves:
            trainer.team.of_main(lambda: trainer.save(self.folder))
        return found

    def lengthen(self, steps: int) -> None:
        """To so many steps in all: the rate falls accordingly from here on."""
        self._steps.schedule = replace(self._steps.schedule, steps=steps)

    @property
    def step(self) -> int:
        """Steps done, in all runs."""
        return self._steps.step

    @property
    def seconds(self) -> float:
        """What they took, looks aside."""
        return self._steps.seconds

    def look(self, losses: Sequence[Tensor], note: Callable[[str], None]) -> Figures:
        """Held-out figures after steps with these losses; keeps the drafter if it is the best so
        far. Without a step since the last look they are known."""
        if self._looked is None or self._looked[0] != self.step:
            loss = self._steps.mean(losses) if losses else float("nan")
            began = time.monotonic()
            found = self._steps.team.of_main(lambda: self._look(loss, note))
            self.look_seconds = time.monotonic() - began
            self._looked = self.step, found
        return self._looked[1]

    def _look(self, loss: float, note: Callable[[str], None]) -> Figures:
        trainer = self._steps
        found = trainer.figures(self._held_out)
        # Of equals the one that has learned more: figures of few texts do not show all of it.
        if found.tau >= trainer.best:
            trainer.best = found.tau
            trainer.keep(self.folder / CHECKPOINT)
        row = {
            "step": trainer.step,
            "tokens": trainer.tokens,
            "seconds": round(trainer.seconds, 1),
            "loss": round(loss, 4),
            "tau": round(found.tau, 4),
            **{f"first{s + 1}": round(x, 4) for s, x in enumerate(found.first)},
            **{f"top{s + 1}": round(x, 4) for s, x in enumerate(found.top)},
        }
        _append(self.folder / LOG, row)
        note(" ".join(f"{name} {value}" for name, value in row.items()))
        return found


def held_apart(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """(those to learn from, those for the figures)."""
    return [text for i, text in enumerate(texts) if i % HOLD_OUT], list(texts[::HOLD_OUT])


def compute_for(model: TargetModel) -> torch.dtype:
    """Of a drafter's matrix products in training."""
    return torch.float32 if model.device.type == "cpu" else torch.bfloat16


def teaching(
    texts: Sequence[Text], held_out: Sequence[Text], schedule: Schedule
) -> tuple[list[Text], list[Text]]:
    """Those that have a token of the answer within a row: others teach nothing.

    Raises:
        ConfigError: none does.
    """
    found = [[t for t in given if _teaches(t, schedule.length)] for given in (texts, held_out)]
    if not all(found):
        raise ConfigError(
            f"training needs texts and held-out texts whose prompts have fewer than "
            f"{schedule.length} tokens, got {len(found[0])} and {len(found[1])}"
        )
    return found[0], found[1]


def _teaches(text: Text, length: int) -> bool:
    return max(text.num_prompt, 2) < min(len(text.tokens), length + 1)


def all_batches(pack: Pack[B], texts: Sequence[Text], schedule: Schedule) -> list[B]:
    """All texts, in order, packed as a step's are."""
    batches, left = [], list(texts)
    while left:
        lengths = [len(text.tokens) - 1 for text in left]
        rows = fill(lengths, schedule.rows, schedule.length)
        batches.append(pack([[left[i] for i in row] for row in rows]))
        left = left[sum(map(len, rows)) :]
    return batches


def _forget_after(step: int, path: Path) -> None:
    """Drop the rows of steps that will be done again, and one that was being written.

    Raises:
        ConfigError: a line that is not of a step.
    """
    if path.exists():
        lines = [x for x in path.read_bytes().splitlines(keepends=True) if x.endswith(b"\n")]
        rows = enumerate(lines[1:], start=2)
        kept = [row for i, row in rows if _step_of(row, f"{path}, line {i},") <= step]
        with replacing(path) as part:
            part.write_bytes(b"".join([*lines[:1], *kept]))


def _step_of(row: bytes, where: str) -> int:
    try:
        return int(row.split(b",")[0])
    except ValueError:
        raise ConfigError(
            f"{where} must be the figures of a step, got {row.decode('utf-8', 'replace')!r:.80}; "
            "delete the line, or the file: nothing else is made of it"
        ) from None


def _append(path: Path, row: dict[str, float]) -> None:
    """A row, unless the last one is of that step: a run that goes on looks again where the one
    before it has ended."""
    fresh = not path.exists() or not path.stat().st_size
    if not fresh and path.read_text().splitlines()[-1].split(",")[0] == str(row["step"]):
        return
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([list(row)] * fresh + [list(row.values())])
