# SPDX-License-Identifier: Apache-2.0
"""One run of `specla train --kind eagle`: answers, then steps, with figures on held-out texts.

The folder also holds answers.jsonl and held-out.jsonl, the texts (for the rest see `session`). The
same command again goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.drafters.agreement import check_tokenizer
from specla.drafters.eagle_config import ARCHITECTURES, EagleConfig, check_target
from specla.drafters.eagle_files import MEMBERS, OFFSETS, read_config, target_ids
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.weights import load_tensors, read_checkpoint
from specla.request import SamplingParams
from specla.train.batches import Batch, Packer, draft_vocabulary
from specla.train.capture import Answers, Capture, Text, agreed, answer, part_of
from specla.train.eagle import EagleNet
from specla.train.loop import Recipe, Trainer
from specla.train.session import Session, Tick, all_batches, teaching
from specla.train.steps import check_above_zero
from specla.train.team import ALONE, Team

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
    team: Team = ALONE,
) -> list[Text]:
    """The target's answers to all prompts, in order of the prompts; kept in `path`, which may have
    more of them, to prompts that would come after these. capture: of
    the engine's model; reads known answers, and may keep what it has read. team: shares the
    prompts out; each process keeps its own answers beside `path` until all are done.

    Raises:
        ConfigError: known answers, and a temperature at which the target would say others; a
            file of answers to other prompts, or of other params or another target; a folder that
            not all see.
    """
    target = engine.model.info.fingerprint
    answers = team.of_main(lambda: _kept(path, prompts, params, target))
    todo = answers.missing(len(prompts))
    if params.temperature and any(prompts[i].known is not None for i in todo):
        raise ConfigError(
            f"prompts with answers are for temperature 0, got {params.temperature:g}: what the "
            "target would sample is not known; leave the answers out"
        )
    mine = team.share(todo)
    own = answers if team.main else Answers(part_of(path, team.number), params, target)
    done = len(prompts) - len(todo)
    total = done + len(mine)
    for number, text in _asked(engine, capture, {i: prompts[i] for i in mine}, params):
        own.add(number, text)
        done += 1
        if tick is not None:
            tick("answers", done, total)
    team.wait()
    texts = team.of_main(answers.take_parts)
    if own is not answers and own.path.exists():
        raise ConfigError(
            f"all processes must see one {path.parent}, but the main one did not find {own.path}; "
            "use a folder that they share"
        )
    return [texts[i] for i in range(len(prompts)) if i in texts]


def _kept(path: Path, prompts: Sequence[Prompt], params: SamplingParams, target: str) -> Answers:
    """The file with everybody's answers so far."""
    answers = Answers(path, params, target)
    answers.take_parts()
    for i, prompt in enumerate(prompts):
        text = answers.texts.get(i)
        if text is not None and text.tokens[: text.num_prompt] != prompt.tokens:
            raise ConfigError(
                f"{path} must hold answers to these prompts, but its answer to prompt {i} "
                "(from 0 on) is to another; use another folder, or delete the file"
            )
    return answers


def _asked(
    engine: Engine, capture: Capture, prompts: Mapping[int, Prompt], params: SamplingParams
) -> Iterator[tuple[int, Text]]:
    """Answers by number: known ones as far as the target agrees, then the others."""
    for i, prompt in prompts.items():
        if prompt.known is not None:
            yield i, agreed(capture, engine.model, prompt.tokens, prompt.known)
    rest = {i: prompt.tokens for i, prompt in prompts.items() if prompt.known is None}
    yield from answer(engine, rest, params)


class Run(Session[Batch]):
    """An EAGLE drafter in training in a folder.

    Args:
        capture: of the model, for the configuration's layers.
        texts, held_out: the target's answers.
        compute: of matrix products outside the recurrence.
        start: folder of the drafter to start from; its draft vocabulary stays.
        team: the processes that train it; recipe is of all of them.
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
        start: Path | None = None,
        team: Team = ALONE,
    ) -> None:
        texts, held_out = teaching(texts, held_out, recipe)
        torch.manual_seed(recipe.seed)
        net = _net(model, config, texts, start, compute)
        packer = Packer(model, capture, net.d2t, recipe.length)
        self.trainer = Trainer(net, packer, texts, recipe, team)
        seen = held_out if team.main else ()
        super().__init__(folder, self.trainer, all_batches(packer, seen, recipe))


def start_config(folder: Path, model: TargetModel, tokenizer_hash: str | None) -> EagleConfig:
    """The config of a drafter to start from.

    Raises:
        ConfigError: no drafter, one of another target or tokenizer, or without a head of its own.
    """
    config = read_config(folder)
    check_target(config, model.info, str(folder))
    check_tokenizer(config.tokenizer_hash, tokenizer_hash, folder)
    if config.draft_vocab_size is None:
        raise ConfigError(
            f"a drafter must have a head of its own to be trained, {folder} has none"
        )
    return config


def _net(
    model: TargetModel,
    config: EagleConfig,
    texts: Sequence[Text],
    start: Path | None,
    compute: torch.dtype,
) -> EagleNet:
    size = config.draft_vocab_size or 0
    if start is None:
        net = EagleNet(config, draft_vocabulary(texts, size, config.vocab_size), compute)
        net.start_from(model.head_weight, model.final_norm)
        return net.to(model.device)
    checkpoint = read_checkpoint(start)
    d2t = target_ids(checkpoint, config, torch.device("cpu"))
    net = EagleNet(config, torch.arange(size) if d2t is None else d2t, compute)
    found = load_tensors(
        checkpoint,
        {name: tuple(p.shape) for name, p in net.named_parameters()},
        device=torch.device("cpu"),
        dtype_of=lambda name: torch.float32,
        ignore=(OFFSETS, MEMBERS),
    )
    net.load_state_dict(found)
    return net.to(model.device)
