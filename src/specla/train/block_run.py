# SPDX-License-Identifier: Apache-2.0
"""One run of `specla train --kind block` or `reader`: sizes for a target, and where to start.

A reader is trained in two stages: alone on a frozen drafter, then together with it (`joint`). The
drafter that went through as much without a reader (`--kind block --start`, with `reader_loss`) is
what its gain is measured against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specla.drafters.agreement import check_tokenizer
from specla.drafters.block_config import (
    MAX_BLOCK,
    OPTIONAL,
    BlockConfig,
    check_target,
    expected_tensors,
)
from specla.drafters.block_files import (
    READER,
    READER_FILE,
    has_reader,
    read_config,
    read_reader_config,
)
from specla.drafters.reader import ReaderConfig, check_states, reader_tensors
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.weights import Checkpoint, Shape, load_tensors, read_checkpoint
from specla.train.block import BlockNet, Named, ReaderNet
from specla.train.block_batches import BlockBatch, BlockPacker
from specla.train.block_loop import READER as READER_SHARES
from specla.train.block_loop import BlockRecipe, BlockSteps, shares_for
from specla.train.capture import Capture, Text
from specla.train.session import Session, all_batches, teaching
from specla.train.states import layers_before
from specla.train.steps import check_above_zero
from specla.train.team import ALONE, Team

FEATURES = 5
"""Feature layers of a target that has as many to give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """What a block drafter for a target looks like; None: see `block_config_for`.

    block_size: drafts. window: how far a position sees; 0: all of it.
    """

    draft_layers: int = 2
    block_size: int = 7
    markov_rank: int | None = None
    confidence: bool = True
    window: int = 0
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int = 64
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_above_zero(self, or_zero=("markov_rank", "window"), but=("mask_token_id",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSizes:
    """What a state reader looks like; None: see `reader_config_for`."""

    rank: int = 8
    bottleneck: int | None = None
    state_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_above_zero(self)


def block_config_for(
    model: TargetModel, sizes: BlockSizes, tokenizer_hash: str | None
) -> BlockConfig:
    """Sizes for a target: as wide as it, heads that fill its width, features evenly from layer 1
    to L - 3 as in DFlash, a Markov rank of at most 256. The mask is the last token unless said
    otherwise: any will do, as a block's first position tells it from a text.

    Raises:
        ConfigError: a size that the target does not allow.
    """
    info = model.info
    width, count = info.hidden_size, info.recurrent.num_layers
    layers = sizes.target_layer_ids or feature_layers(count)
    heads = sizes.num_heads or max(1, width // sizes.head_dim)
    kv_heads, mask = sizes.num_kv_heads or heads, sizes.mask_token_id
    valid = range(info.vocab_size)
    for what, ok in (
        (f"feature layers must be different ids below {count}", _ids_below(layers, count)),
        (f"block-size must be at most {MAX_BLOCK}", sizes.block_size <= MAX_BLOCK),
        (f"heads ({heads}) must be a multiple of kv-heads ({kv_heads})", heads % kv_heads == 0),
        (f"mask must be a token below {len(valid)}", mask is None or mask in valid),
        ("head-dim must be even", sizes.head_dim % 2 == 0),
    ):
        if not ok:
            raise ConfigError(f"{what}, got {sizes}")
    rank = min(256, width // 2) if sizes.markov_rank is None else sizes.markov_rank
    return BlockConfig(
        hidden_size=width,
        intermediate_size=sizes.intermediate_size or 8 * round(width * 8 / 3 / 8),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim,
        norm_eps=1e-6,
        rope_theta=1e6,
        vocab_size=info.vocab_size,
        windows=(sizes.window or None,) * sizes.draft_layers,
        is_causal=False,
        block_size=sizes.block_size,
        shift_label=True,
        mask_token_id=info.vocab_size - 1 if mask is None else mask,
        target_layer_ids=layers,
        num_target_layers=count,
        markov_rank=rank,
        confidence_head=sizes.confidence,
        confidence_with_markov=sizes.confidence and rank > 0,
        confidence_temperatures=None,
        target_fingerprint=info.fingerprint,
        tokenizer_hash=tokenizer_hash,
    )


def feature_layers(count: int) -> tuple[int, ...]:
    """Outputs evenly from layer 1 to L - 3; of a small target, all that there are."""
    last = count - 3
    if last <= FEATURES:
        return tuple(range(min(1, count - 1), max(last + 1, min(2, count))))
    return tuple(round(1 + i * (last - 1) / (FEATURES - 1)) for i in range(FEATURES))


def reader_config_for(
    model: TargetModel, sizes: ReaderSizes, feature_layers: Sequence[int]
) -> ReaderConfig:
    """Sizes for a target: the states of the layers above the drafter's middle and its last
    feature, whose inputs training captures anyway, a bottleneck of a quarter of its width.

    Raises:
        ConfigError: a size that the target does not allow.
    """
    shape, width = model.info.recurrent, model.info.hidden_size
    count = shape.num_layers
    ids = sorted(feature_layers)
    above = {min(i + 1, count - 1) for i in (ids[len(ids) // 2], ids[-1])}
    layers = sizes.state_layers or tuple(sorted(above))
    if not _ids_below(layers, count):
        raise ConfigError(f"state layers must be different ids below {count}, got {sizes}")
    return ReaderConfig(
        state_layers=layers,
        rank=sizes.rank,
        num_heads=shape.num_value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        hidden_size=width,
        bottleneck=sizes.bottleneck or max(1, width // 4),
        norm_eps=1e-6,
    )


def _ids_below(ids: Sequence[int], count: int) -> bool:
    return len(set(ids)) == len(ids) > 0 and all(0 <= i < count for i in ids)


def captured_layers(config: BlockConfig, reader: ReaderConfig | None) -> tuple[int, ...]:
    """Feature layers that training reads: the drafter's, then what else states are made from."""
    ids = config.target_layer_ids
    return ids if reader is None else (*ids, *layers_before(reader.state_layers, ids))


class BlockRun(Session[BlockBatch]):
    """A block drafter, or a state reader on one, in training in a folder.

    Args:
        capture: of the model, for `captured_layers`.
        texts, held_out: the target's answers.
        compute: of matrix products.
        start: folder of the drafter to start from (and of its reader, if it has one).
        reader: train a state reader of this configuration. joint: and the drafter with it.
        reader_loss: without a reader, its loss nevertheless.
        team: the processes that train it; recipe is of all of them.
    """

    def __init__(
        self,
        folder: Path,
        model: TargetModel,
        capture: Capture,
        config: BlockConfig,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        recipe: BlockRecipe,
        *,
        compute: torch.dtype,
        start: Path | None = None,
        reader: ReaderConfig | None = None,
        joint: bool = False,
        reader_loss: bool = False,
        team: Team = ALONE,
    ) -> None:
        texts, held_out = teaching(texts, held_out, recipe)
        torch.manual_seed(recipe.seed)
        packer = BlockPacker(capture, recipe.length)
        steps = BlockSteps(
            model,
            _net(model, config, start, compute),
            packer,
            texts,
            recipe,
            shares=READER_SHARES if reader or reader_loss else shares_for(config),
            reader=None if reader is None else _reader(model, reader, start),
            captured=captured_layers(config, reader),
            joint=joint,
            team=team,
        )
        seen = held_out if team.main else ()
        super().__init__(folder, steps, all_batches(packer, seen, recipe))


def start_config(folder: Path, model: TargetModel, tokenizer_hash: str | None) -> BlockConfig:
    """The config of a drafter to start from.

    Raises:
        ConfigError: no drafter, or one of another target or tokenizer.
    """
    config = read_config(folder)
    check_target(config, model.info, str(folder))
    check_tokenizer(config.tokenizer_hash, tokenizer_hash, folder)
    return config


def start_reader_config(
    folder: Path, model: TargetModel, sizes: ReaderSizes, feature_layers: Sequence[int]
) -> ReaderConfig:
    """The config of the reader that lies with a drafter, else one of these sizes.

    Raises:
        ConfigError: it has a reader of another target.
    """
    if not has_reader(folder):
        return reader_config_for(model, sizes, feature_layers)
    if sizes != ReaderSizes():
        raise ConfigError(
            f"a reader goes on with the sizes it has in {folder / READER}, got {sizes}; "
            "leave them out"
        )
    config = read_reader_config(folder)
    check_states(config, model.info, str(folder))
    return config


def _net(
    model: TargetModel, config: BlockConfig, start: Path | None, compute: torch.dtype
) -> BlockNet:
    net = BlockNet(config, model.embeddings, model.head_weight, compute)
    net.start_from(model.final_norm)
    if start is not None:
        _take(net, read_checkpoint(start), expected_tensors(config))
    return net


def _reader(model: TargetModel, config: ReaderConfig, start: Path | None) -> ReaderNet:
    net = ReaderNet(config).to(model.device)
    if start is not None and has_reader(start):
        _take(net, read_checkpoint(start / READER, file=READER_FILE), reader_tensors(config))
    return net


def _take(net: Named, checkpoint: Checkpoint, shapes: Mapping[str, Shape]) -> None:
    """Start from a checkpoint's tensors; copies of the target's own are left out."""
    found = load_tensors(
        checkpoint,
        shapes,
        device=torch.device("cpu"),
        dtype_of=lambda name: torch.float32,
        ignore=OPTIONAL,
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(found[name])
