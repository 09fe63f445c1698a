# SPDX-License-Identifier: Apache-2.0
"""One run of `specla train --kind eagle`: answers, then steps, with figures on held-out texts.

The folder also holds answers.jsonl and held-out.jsonl, the texts (for the rest see `session`). The
same command again goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.drafters.eagle_config import ARCHITECTURES, EagleConfig
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.train.batches import Batch, Packer, draft_vocabulary
from specla.train.capture import Answers, Capture, Text, agreed, answer
from specla.train.eagle import EagleNet
from specla.train.loop import Recipe, Trainer
from specla.train.session import Session, Tick, all_batches, teaching
from specla.train.steps import check_above_zero

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
    mixer: str = "gdn"
    draft_vocab_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_above_zero(self)


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
    heads, head_dim = sizes.num_heads or shape.num_key_heads, sizes.head_dim or shape.key_dim
    value_dim = sizes.head_v_dim or shape.value_dim
    if sizes.mixer not in ARCHITECTURES:
        raise ConfigError(f"mixer must be one of {', '.join(ARCHITECTURES)}, got {sizes.mixer!r}")
    if sizes.mixer == "attention":
        if sizes.head_v_dim not in (None, head_dim):
            raise ConfigError(f"attention has one head_dim, got {head_dim} and {value_dim}")
        if head_dim % 2:
            raise ConfigError(f"attention needs an even head_dim, got {head_dim}")
        value_dim = head_dim
    return EagleConfig(
        hidden_size=width,
        intermediate_size=sizes.intermediate_size or 8 * round(width * 8 / 3 / 8),
        num_heads=heads,
        num_v_heads=heads,
        head_dim=head_dim,
        head_v_dim=value_dim,
        conv_size=shape.conv_width,
        norm_eps=1e-6,
        mixer=sizes.mixer,
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
            file of answers to other prompts, or of other params.
    """
    answers = Answers(path, params)
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


class Run(Session[Batch]):
    """An EAGLE drafter in training in a folder.

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
        texts, held_out = teaching(texts, held_out, recipe)
        d2t = draft_vocabulary(texts, config.draft_vocab_size or 0, config.vocab_size)
        torch.manual_seed(recipe.seed)
        net = EagleNet(config, d2t, compute).to(model.device)
        net.start_from(model.head_weight, model.final_norm)
        packer = Packer(model, capture, d2t, recipe.length)
        self.trainer = Trainer(net, packer, texts, recipe)
        super().__init__(folder, self.trainer, all_batches(packer, held_out, recipe))
