# SPDX-License-Identifier: Apache-2.0
"""A target of GDN-1.3B's exact shape, trained by the clock: what a small budget of one GPU gives.

Everything is a function of the data and the seconds: the texts become pools in a process of its
own while the model is compiled on random tokens; then the learning rate follows the clock, so that
a training that must end at a deadline ends decayed, however fast the machine is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specla.errors import ConfigError, SpeclaError
from specla.models.files import write_json
from specla.train import prepare
from specla.train.checkpoint import save_checkpoint
from specla.train.gdn import GDNLanguageModel, GDNShape
from specla.train.pack import data_digest
from specla.train.packing import Pool, Sampler
from specla.train.pretrain import Log, Recipe, Trainer, build_model, mean_loss

Tick = Callable[[str, int, int], None]
Note = Callable[[str], None]

GDN_1_3B = GDNShape(
    hidden_size=2048,
    num_hidden_layers=24,
    num_heads=8,
    head_dim=256,
    expand_v=1.0,
    intermediate_size=5632,
    vocab_size=32_000,
    tie_word_embeddings=False,
)
SHARES = {
    "symbolic": 0.17, "gsm8k": 0.12, "generated": 0.28, "arithmetic": 0.03, "python": 0.15,
    "mined": 0.13, "functions": 0.12,
}  # fmt: skip
"""No small talk: a refusal by rote is too easy to draft."""
HELD_OUT = ("gsm8k_test", "symbolic_new_numbers", "symbolic_new_templates")
LEAST_SECONDS = 1.0
SHARD_BYTES = 2 << 30
MADE_OF = "made_of.json"
"""In the folder of pools: what they were made of."""


def gpu_recipe() -> Recipe:
    """For one GPU of 140 GiB and some 20 million tokens: 700 steps or so."""
    return Recipe(
        rows=24, length=1024, chunk=128, low=True, shares=SHARES, muon_lr=0.02, adam_lr=1.5e-3,
        warmup=60,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large it all is. generated: word problems of our own generator; files: of Python, None
    for all; reserve: seconds before the deadline for held-out losses and the checkpoint."""

    shape: GDNShape = GDN_1_3B
    recipe: Recipe = field(default_factory=gpu_recipe)
    generated: int = 80_000
    files: int | None = None
    reserve: float = 25.0


def toy_scale() -> Scale:
    """A minute of two CPU cores, to try it all."""
    shape = GDNShape(64, 2, 2, 16, 1.0, 96, 1000, tie_word_embeddings=False)
    recipe = Recipe(rows=4, length=128, chunk=32, shares=SHARES, warmup=5, compile=False)
    return Scale(shape=shape, recipe=recipe, generated=0, files=40, reserve=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training came to. held_out: nats per token, by set."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_s: float
    loss: float
    held_out: Mapping[str, float]


def train_target(
    data: Path,
    work: Path,
    deadline: float,
    scale: Scale,
    device: str,
    *,
    tick: Tick | None = None,
    note: Note,
) -> Outcome:
    """Train a target and write it to ``work/target``, as a checkpoint in fla's format.

    Args:
        data: a folder of data, see `prepare`.
        work: pools, log.csv and the checkpoint go there; pools that are there are used.
        deadline: on the clock of time.monotonic, for everything.

    Raises:
        ConfigError: the time left is too short to train in; pools made from other data, or for
            another scale.
        SpeclaError: the data could not be prepared.
    """
    torch.set_float32_matmul_precision("high")
    recipe, child = scale.recipe, _start_pools(data, work / "pools", scale)
    model = build_model(recipe, scale.shape, device)
    began = time.monotonic()
    warm_up(model, recipe)
    note(f"model compiled in {time.monotonic() - began:.0f} s")
    _wait(child, work / "pools")
    trainer = Trainer(recipe, work / "pools", model)
    seconds = deadline - time.monotonic() - scale.reserve
    if seconds < LEAST_SECONDS:
        raise ConfigError(
            f"training a target needs at least {LEAST_SECONDS:g} s after its data, got "
            f"{seconds:.1f}; allow the step more minutes (the data are kept)"
        )
    loss = run_by_clock(trainer, seconds, Log(work / "log.csv", 20, note), tick)
    held_out = held_out_losses(model, work / "pools", recipe)
    _save(model, work)
    return Outcome(
        parameters=sum(p.numel() for p in model.parameters()),
        steps=trainer.step,
        tokens=trainer.tokens,
        seconds=trainer.seconds,
        tokens_per_s=trainer.tokens / trainer.seconds,
        loss=loss,
        held_out=held_out,
    )


def warm_up(model: GDNLanguageModel, recipe: Recipe) -> None:
    """One pass over random tokens of a batch's shape: compiles, and leaves the model as it was."""
    size, device = (recipe.rows, recipe.length), model.head.device
    tokens = torch.randint(model.shape.vocab_size, size, device=device)
    segments = torch.zeros(size, dtype=torch.int32, device=device)
    mean_loss(model, (tokens, segments, torch.ones(size, device=device)), recipe.chunk).backward()
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_by_clock(trainer: Trainer, seconds: float, log: Log, tick: Tick | None = None) -> float:
    """Steps until `seconds` have passed, the learning rate decayed by then; the mean loss of the
    last `log.every` steps."""
    trainer.recipe.minutes, trainer.recipe.steps = seconds / 60, 0
    began, recent = time.monotonic(), list[torch.Tensor]()
    while trainer.progress() < 1:
        recent = [*recent[1 - log.every :], trainer.train_step()]
        trainer.seconds = time.monotonic() - began
        log.add(trainer, recent[-1])
        if tick is not None:
            tick("training", min(int(trainer.seconds), int(seconds)), int(seconds))
    mean = float(torch.stack(recent).mean())
    trainer.seconds = time.monotonic() - began
    return mean


def held_out_losses(model: GDNLanguageModel, pools: Path, recipe: Recipe) -> dict[str, float]:
    """Mean loss of a batch of each held-out set that has problems, nats per token.

    In a training step's shape and with gradients on: anything else would be compiled again.
    """
    sets = json.loads((pools / "heldout.json").read_text())
    prepare.start_worker(str(pools / "tokenizer.json"))
    found = {}
    for name in filter(sets.get, HELD_OUT):
        pool = Pool(name, prepare.encode_problems(sets[name], 0)[""])
        device = str(model.head.device)
        sampler = Sampler([pool], [1.0], recipe.rows, recipe.length, 0, device)
        found[name] = float(mean_loss(model, sampler.batch(), recipe.chunk).detach())
    return found


def _start_pools(data: Path, pools: Path, scale: Scale) -> subprocess.Popen[bytes] | None:
    made_of = {
        "data": data_digest(data), "vocab_size": scale.shape.vocab_size,
        "generated": scale.generated, "files": scale.files,
    }  # fmt: skip
    if (pools / "pools.json").exists():
        _require_made_of(made_of, pools)
        return None
    size = scale.shape.vocab_size
    command = [sys.executable, "-m", "specla.train.prepare", "--data", str(data)]
    command += ["--out", str(pools), "--tokenizer", str(pools / "tokenizer.json")]
    command += ["--vocab-size", str(size), "--generated", str(scale.generated)]
    command += [] if scale.files is None else ["--files", str(scale.files)]
    pools.mkdir(parents=True, exist_ok=True)
    # What an interrupted preparation has left may be of other data.
    for part in pools.glob("*.npy"):
        part.unlink()
    write_json(pools / MADE_OF, made_of)
    with (pools / "prepare.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _require_made_of(wanted: Mapping[str, object], pools: Path) -> None:
    before = json.loads((pools / MADE_OF).read_text()) if (pools / MADE_OF).exists() else {}
    for name, value in wanted.items():
        if name not in before or before[name] != value:
            raise ConfigError(
                f"{pools} must be made with {name} {value}, but was made with "
                f"{before.get(name, 'one that it does not say')}; use another work folder, or "
                "delete it"
            )


def _wait(child: subprocess.Popen[bytes] | None, pools: Path) -> None:
    if child is not None and child.wait():
        log = pools / "prepare.log"
        end = " ".join(log.read_text().split())[-300:]
        raise SpeclaError(f"data could not be prepared; {log} ends: {end}")


def _save(model: GDNLanguageModel, work: Path) -> None:
    """Complete in one rename, so that a folder that is there is a whole checkpoint."""
    part, whole = work / "target.tmp", work / "target"
    for folder in (part, whole):
        shutil.rmtree(folder, ignore_errors=True)
    save_checkpoint(model, part, SHARD_BYTES)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(work / "pools" / name, part / name)
    part.rename(whole)
