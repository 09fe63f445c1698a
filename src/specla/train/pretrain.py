# SPDX-License-Identifier: Apache-2.0
"""The training command of the demo model; run it again to continue where it stopped.

``python -m specla.train.pretrain --data POOLS --out DIR --minutes M --stop-after S``

The schedule spans ``--minutes`` of training time, summed over all runs; one run ends after
``--stop-after`` minutes. DIR holds the trainer's state, the loss log (log.csv) and, after every
run,
the checkpoint in bf16. POOLS comes from `specla.train.prepare`.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specla.drafters.files import replacing
from specla.train.checkpoint import save_checkpoint
from specla.train.cross_entropy import cross_entropy
from specla.train.gdn import GDNLanguageModel, GDNShape
from specla.train.optim import (
    build_optimizers,
    optimizer_tensors,
    rate,
    restore_optimizers,
    step_all,
)
from specla.train.packing import Sampler, load_pools

SHARES = {
    "symbolic": 0.14, "gsm8k": 0.03, "generated": 0.24, "arithmetic": 0.04, "talk": 0.04,
    "python": 0.31, "mined": 0.10, "functions": 0.10,
}  # fmt: skip


STATE = "trainer.safetensors"


@dataclass
class Recipe:
    """Everything that decides the result of a run.

    rows, length: tokens of a batch; chunk: of the recurrence. low: on a GPU the recurrence's
    products run in bfloat16 as well (the carried state stays in float32). shares: of the tokens,
    by pool. minutes, or steps if not 0: the schedule. warmup: steps.
    """

    rows: int = 128
    length: int = 1024
    chunk: int = 64
    low: bool = False
    shares: Mapping[str, float] = field(default_factory=lambda: dict(SHARES))
    minutes: float = 20.0
    steps: int = 0
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: int = 200
    clip: float = 1.0
    seed: int = 1
    muon: bool = True
    compile: bool = True


def build_model(recipe: Recipe, shape: GDNShape, device: str) -> GDNLanguageModel:
    """A newly initialised model; with recipe.compile one block, compiled, serves all layers."""
    torch.manual_seed(recipe.seed)
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = GDNLanguageModel(shape, compute, compute if recipe.low else None)
    if recipe.compile:
        torch._dynamo.config.cache_size_limit = 32
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def mean_loss(model: GDNLanguageModel, batch: tuple[Tensor, Tensor, Tensor], chunk: int) -> Tensor:
    """Weighted mean cross-entropy of the next token. batch: see `Sampler.batch`."""
    tokens, segments, weights = batch
    hidden = model.hidden(tokens, segments, chunk).flatten(0, 1).to(model.compute)
    targets = F.pad(tokens[:, 1:], (0, 1)).flatten()
    return cross_entropy(hidden, model.head, targets, weights.flatten()) / weights.sum()


class Trainer:
    """Model, optimisers, sampler and clock of one run, saved and restored together."""

    def __init__(self, recipe: Recipe, pools: Path, model: GDNLanguageModel) -> None:
        self.recipe, self.model = recipe, model
        self.device = str(model.head.device)
        self.optimizers = build_optimizers(
            self.model, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay, recipe.muon
        )
        shares = recipe.shares
        names = sorted(n for n in shares if (pools / f"{n}.npy").exists())
        self.sampler = Sampler(load_pools(pools, names), [shares[n] for n in names], recipe.rows,
                               recipe.length, recipe.seed, self.device)  # fmt: skip
        self.step, self.seconds, self.tokens = 0, 0.0, 0

    def progress(self) -> float:
        """Share of the schedule done: by steps if the recipe counts steps, else by time."""
        if self.recipe.steps:
            return self.step / self.recipe.steps
        return self.seconds / (60 * self.recipe.minutes)

    def train_step(self) -> Tensor:
        """One optimiser step; the mean weighted loss of its batch, still on the device."""
        batch = self.sampler.batch()
        loss = mean_loss(self.model, batch, self.recipe.chunk)
        loss.backward()
        self.update()
        self.step += 1
        self.tokens += batch[0].numel()
        return loss.detach()

    def update(self) -> None:
        """The optimisers' part of a step."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        step_all(self.optimizers, rate(self.progress(), self.step, self.recipe.warmup))

    def save(self, folder: Path) -> None:
        """The trainer (tensors and JSON, replaced in one rename) and the bf16 checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = dict(self.model.state_dict()) | optimizer_tensors(self.model, self.optimizers)
        clock = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens}
        notes = {"recipe": asdict(self.recipe), "sampler": self.sampler.state_dict(), **clock}
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        with replacing(folder / STATE) as part:
            save_file(whole, part, {"notes": json.dumps(notes)})
        save_checkpoint(self.model, folder / "checkpoint")

    def restore(self, folder: Path) -> bool:
        """Continues from a saved trainer, if there is one."""
        if not (folder / STATE).exists():
            return False
        with safe_open(folder / STATE, "pt", self.device) as file:
            notes = json.loads(file.metadata()["notes"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = self.model.state_dict()
        self.model.load_state_dict({name: tensors[name] for name in own})
        restore_optimizers(self.model, self.optimizers, tensors)
        self.sampler.load_state_dict(notes["sampler"])
        self.step, self.seconds, self.tokens = notes["step"], notes["seconds"], notes["tokens"]
        return True


class Log:
    """Loss per interval, printed and appended to log.csv."""

    def __init__(self, path: Path, every: int, say: Callable[[str], None] = typer.echo) -> None:
        self.path, self.every, self.say, self.count = path, every, say, 0
        self.sum: Tensor | float = 0.0

    def add(self, trainer: Trainer, loss: Tensor) -> bool:
        """Counts one step; on every ``every``-th writes a row (and waits for the device)."""
        self.sum, self.count = self.sum + loss, self.count + 1
        if self.count < self.every:
            return False
        row = [
            trainer.step,
            trainer.tokens,
            round(trainer.seconds, 2),
            round(float(self.sum) / self.count, 4),
        ]
        self.say(" ".join(map(str, row)))
        fresh = not self.path.exists()
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows([("step", "tokens", "seconds", "loss")] * fresh + [row])
        self.sum, self.count = 0.0, 0
        return True


def train(trainer: Trainer, out: Path, stop_after: float, every: int = 50) -> None:
    """Runs until the schedule ends or ``stop_after`` minutes of this run have passed."""
    log, began, before = Log(out / "log.csv", every), time.time(), trainer.seconds
    while trainer.progress() < 1 and time.time() - began < 60 * stop_after:
        log.add(trainer, trainer.train_step())
        trainer.seconds = before + time.time() - began
    trainer.save(out)


Given = Annotated[Path, typer.Option()]


def main(data: Given, out: Given, minutes: float = 20.0, stop_after: float = 1e9, steps: int = 0,
         rows: int = 128, length: int = 1024, muon_lr: float = 0.02, adam_lr: float = 3e-3,
         muon: bool = True, compile: bool = True, seed: int = 1, every: int = 50,
         shape: str = "{}") -> None:  # fmt: skip
    """Trains the demo model, or continues its training."""
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Recipe(rows=rows, length=length, minutes=minutes, steps=steps, muon_lr=muon_lr,
                    adam_lr=adam_lr, muon=muon, compile=compile, seed=seed)  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, data, build_model(recipe, GDNShape(**json.loads(shape)), device))
    resumed = trainer.restore(out)
    typer.echo(f"{'resumed at' if resumed else 'starting at'} step {trainer.step}")
    train(trainer, out, stop_after, every)
    typer.echo(f"step {trainer.step}, {trainer.tokens:,} tokens, {trainer.seconds:.0f} s")


if __name__ == "__main__":
    typer.run(main)
