# SPDX-License-Identifier: Apache-2.0
"""One run of `specla train --kind eagle`: answers, then steps, with figures on held-out texts.

A folder holds all of it: answers.jsonl and held-out.jsonl (texts), trainer.safetensors (to go on
from), log.csv, and checkpoint/, the drafter with the best held-out tau so far. The same command
again goes on where it stopped.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.drafters.eagle_config import EagleConfig
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.train.batches import Batch, Packer, draft_vocabulary, fill
from specla.train.capture import Answers, Capture, Text, agreed, answer
from specla.train.eagle import EagleNet
from specla.train.loop import Figures, Recipe, Trainer, figures

Tick = Callable[[str, int, int], None]
CHECKPOINT, LOG = "checkpoint", "log.csv"
HELD_OUT_DEPTH = 6
KEEP_BYTES = 3 << 30
"""Features kept of texts that come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of a prompt, and of an answer that is known, if one is."""

    tokens: tuple[int, ...]
    known: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a drafter for a target looks like; None: see `config_for`."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    head_v_dim: int | None = None
    draft_vocab_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None


def config_for(model: TargetModel, sizes: Sizes, tokenizer_hash: str | None) -> EagleConfig:
    """Sizes for a target: its own width and one of its own layers, all of its vocabulary, layers
    1, L / 2 - 1 and L - 4 unless said otherwise.

    Raises:
        ConfigError: a size that the target does not allow.
    """
    info, shape = model.info, model.info.recurrent
    layers = sizes.target_layer_ids or _layers(shape.num_layers)
    if len(set(layers)) < len(layers) or not all(0 <= i < shape.num_layers for i in layers):
        raise ConfigError(
            f"feature layers must be different ids below {shape.num_layers}, got {list(layers)}"
        )
    width = sizes.hidden_size or info.hidden_size
    heads = sizes.num_heads or shape.num_key_heads
    return EagleConfig(
        hidden_size=width,
        intermediate_size=sizes.intermediate_size or 8 * round(width * 8 / 3 / 8),
        num_heads=heads,
        num_v_heads=heads,
        head_dim=sizes.head_dim or shape.key_dim,
        head_v_dim=sizes.head_v_dim or shape.value_dim,
        conv_size=shape.conv_width,
        norm_eps=1e-6,
        mixer="gdn",
        target_hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        target_layer_ids=layers,
        draft_vocab_size=min(sizes.draft_vocab_size or info.vocab_size, info.vocab_size),
        fc_norm=True,
        target_fingerprint=info.fingerprint,
        tokenizer_hash=tokenizer_hash,
    )


def _layers(count: int) -> tuple[int, ...]:
    return tuple(sorted({min(1, count - 1), max(count // 2 - 1, 0), max(count - 4, 0)}))


def texts_of(
    engine: Engine,
    capture: Capture,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    path: Path,
    tick: Tick | None = None,
) -> list[Text]:
    """The target's answers to all prompts, in order of the prompts; kept in `path`. capture: of
    the engine's model; reads known answers, and may keep what it has read.

    Raises:
        ConfigError: known answers, and a temperature at which the target would say others; a
            file of answers to other prompts.
    """
    answers = Answers(path)
    for i, text in answers.texts.items():
        if i >= len(prompts) or text.tokens[: text.num_prompt] != prompts[i].tokens:
            raise ConfigError(
                f"{path} must hold answers to these prompts, but its number {i} is to another; "
                "use another folder, or delete the file"
            )
    todo = answers.missing(len(prompts))
    known = [i for i in todo if prompts[i].known is not None]
    if known and params.temperature:
        raise ConfigError(
            f"prompts with answers are for temperature 0, got {params.temperature:g}: what the "
            "target would sample is not known; leave the answers out"
        )
    done = len(prompts) - len(todo)
    for i in known:
        given = prompts[i].known
        assert given is not None
        answers.add(i, agreed(capture, engine.model, prompts[i].tokens, given))
        done = _count(tick, "answers", done, len(prompts))
    rest = [i for i in todo if prompts[i].known is None]
    for number, text in answer(engine, [prompts[i].tokens for i in rest], params):
        answers.add(rest[number], text)
        done = _count(tick, "answers", done, len(prompts))
    return [answers.texts[i] for i in sorted(answers.texts)]


def _count(tick: Tick | None, label: str, done: int, total: int) -> int:
    if tick is not None:
        tick(label, done + 1, total)
    return done + 1


class Run:
    """A drafter in training in a folder.

    Args:
        capture: of the model, for the configuration's layers.
        texts, held_out: the target's answers.
        compute: of matrix products outside the recurrence.
    """

    def __init__(
        self,
        folder: Path,
        model: TargetModel,
        capture: Capture,
        config: EagleConfig,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        recipe: Recipe,
        *,
        compute: torch.dtype,
    ) -> None:
        texts, held_out = _teaching(texts, recipe), _teaching(held_out, recipe)
        if not texts or not held_out:
            raise ConfigError(
                f"training needs texts and held-out texts whose prompts have fewer than "
                f"{recipe.length} tokens, got {len(texts)} and {len(held_out)}"
            )
        self.folder, self.recipe = folder, recipe
        d2t = draft_vocabulary(texts, config.draft_vocab_size or 0, config.vocab_size)
        torch.manual_seed(recipe.seed)
        net = EagleNet(config, d2t, compute).to(model.device)
        net.start_from(model.head_weight, model.final_norm)
        packer = Packer(model, capture, d2t, recipe.length)
        self.trainer = Trainer(net, packer, texts, recipe)
        self._held_out = _all_batches(packer, held_out, recipe)
        self.resumed = self.trainer.restore(folder)

    def __call__(
        self, *, every: int, minutes: float, tick: Tick | None = None, note: Callable[[str], None]
    ) -> Figures:
        """Train to the end of the schedule, or for `minutes`; held-out figures and a checkpoint
        every so many steps."""
        trainer, began, losses = self.trainer, time.monotonic(), list[float]()
        found = self.look(float("nan"), note)
        while trainer.step < self.recipe.steps and time.monotonic() - began < 60 * minutes:
            losses.append(trainer.train_step())
            if tick is not None:
                tick(f"training (tau {found.tau:.2f})", trainer.step, self.recipe.steps)
            if trainer.step % every == 0 or trainer.step == self.recipe.steps:
                found, losses = self.look(sum(losses) / len(losses), note), []
        trainer.save(self.folder)
        return found

    def look(self, loss: float, note: Callable[[str], None]) -> Figures:
        """Held-out figures; keeps the drafter if it is the best so far."""
        trainer = self.trainer
        found = figures(trainer.net, self._held_out, HELD_OUT_DEPTH)
        if found.tau > trainer.best:
            trainer.best = found.tau
            trainer.net.save(self.folder / CHECKPOINT)
        trainer.save(self.folder)
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


def _teaching(texts: Sequence[Text], recipe: Recipe) -> list[Text]:
    """Those that have a token of the answer within a row: others teach nothing."""
    ends = ((text, min(len(text.tokens), recipe.length + 1)) for text in texts)
    return [text for text, end in ends if max(text.num_prompt, 2) < end]


def _append(path: Path, row: dict[str, float]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows([list(row)] * fresh + [list(row.values())])


def _all_batches(packer: Packer, texts: Sequence[Text], recipe: Recipe) -> list[Batch]:
    batches, left = [], list(texts)
    while left:
        rows = fill([len(text.tokens) - 1 for text in left], recipe.rows, recipe.length)
        batches.append(packer([[left[i] for i in row] for row in rows]))
        left = left[sum(map(len, rows)) :]
    return batches
