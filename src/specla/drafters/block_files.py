# SPDX-License-Identifier: Apache-2.0
"""Block drafters' checkpoints: from a folder to weights, and back.

A folder holds config.json and model.safetensors; a state reader lies in its sub-folder `reader`
(reader_config.json, reader.safetensors), as ReaDy's does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specla.drafters.agreement import config_in
from specla.drafters.block_config import (
    OPTIONAL,
    BlockConfig,
    expected_tensors,
    parse_block_config,
)
from specla.drafters.block_model import BlockDraftWeights, weights_from
from specla.drafters.files import replacing
from specla.drafters.reader import (
    PROJECTIONS,
    ReaderConfig,
    parse_reader_config,
    reader_tensors,
)
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.files import read_json_object, write_json
from specla.models.resolve import SINGLE_FILE
from specla.models.weights import Checkpoint, load_tensors, read_checkpoint
from specla.ops.norm import compute_dtype

READER = "reader"
READER_CONFIG, READER_FILE = "reader_config.json", "reader.safetensors"


def read_config(folder: Path) -> BlockConfig:
    """config.json of a drafter's folder.

    Raises:
        ConfigError: no such folder. InvalidCheckpoint: not a block drafter's.
    """
    return parse_block_config(*config_in(folder, "block"))


def has_reader(folder: Path) -> bool:
    """Whether a state reader lies with a drafter."""
    return (folder / READER / READER_CONFIG).is_file()


def read_reader_config(folder: Path) -> ReaderConfig:
    """reader_config.json of a drafter's folder.

    Raises:
        ConfigError: it has no reader. InvalidCheckpoint: the file cannot be used.
    """
    path = folder / READER / READER_CONFIG
    if not path.is_file():
        raise ConfigError(
            f"a drafter with a state reader was asked for (reader), but {path} does not exist; "
            "train one with `specla train TARGET --kind reader`, or leave the option out"
        )
    return parse_reader_config(read_json_object(path), str(path))


def load_weights(folder: Path, config: BlockConfig, target: TargetModel) -> BlockDraftWeights:
    """The drafter's weights in the target's dtype, on its device. Embeddings and head are the
    target's own unless the file holds others.

    Raises:
        InvalidCheckpoint: tensors that do not belong to the config.
    """
    checkpoint = read_checkpoint(folder)
    shape = (config.vocab_size, config.hidden_size)
    own = {name: shape for name in OPTIONAL if name in checkpoint.entries}
    tensors = _load(checkpoint, {**expected_tensors(config), **own}, target)
    shared = (target.embeddings, target.head_weight)
    embeddings, head = (
        theirs if _is_copy(tensors.get(name), theirs) else tensors[name]
        for name, theirs in zip(OPTIONAL, shared, strict=True)
    )
    return weights_from(tensors, config, embeddings, head)


def load_reader(folder: Path, config: ReaderConfig, target: TargetModel) -> dict[str, Tensor]:
    """A reader's weights, by name; what projects the states is float32, as they are.

    Raises:
        InvalidCheckpoint: tensors that do not belong to the config.
    """
    checkpoint = read_checkpoint(folder / READER, file=READER_FILE)
    return _load(checkpoint, reader_tensors(config), target, wide=PROJECTIONS)


def save_drafter(folder: Path, config: BlockConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and the weights, as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder / SINGLE_FILE, tensors)
    write_json(folder / "config.json", config.as_dict())


def save_reader(folder: Path, config: ReaderConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a state reader into a drafter's folder."""
    (folder / READER).mkdir(parents=True, exist_ok=True)
    _save(folder / READER / READER_FILE, tensors)
    write_json(folder / READER / READER_CONFIG, config.as_dict())


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    kept = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    with replacing(path) as part:
        save_file(kept, part, metadata={"format": "pt"})


def _load(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    target: TargetModel,
    wide: Collection[str] = (),
) -> dict[str, Tensor]:
    """In the target's dtype; those of `wide` are at least float32."""
    low, high = target.dtype, compute_dtype(target.dtype)
    return load_tensors(
        checkpoint,
        expected,
        device=target.device,
        dtype_of=lambda name: high if name in wide else low,
    )


def _is_copy(own: Tensor | None, theirs: Tensor) -> bool:
    return own is None or torch.equal(own, theirs)
