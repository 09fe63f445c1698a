# SPDX-License-Identifier: Apache-2.0
"""Untrained block drafters and state readers: random weights of lively size, for a target."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from engine_harness import load_target
from torch import Tensor

from specla.drafters.block import BlockDrafter
from specla.drafters.block_config import BlockConfig, expected_tensors
from specla.drafters.block_files import save_drafter, save_reader
from specla.drafters.reader import ReaderConfig, reader_tensors
from specla.models.base import ModelInfo
from specla.models.weights import Shape


def block_config(target: ModelInfo, **changes: Any) -> BlockConfig:
    """Two layers, more query heads than key heads, a head width that is not D / heads."""
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": target.vocab_size,
        "windows": (None, None),
        "is_causal": False,
        "block_size": 5,
        "shift_label": True,
        "mask_token_id": 3,
        "target_layer_ids": (0, 1),
        "num_target_layers": target.recurrent.num_layers,
        "markov_rank": 6,
        "confidence_head": True,
        "confidence_with_markov": True,
        "confidence_temperatures": None,
        "target_fingerprint": target.fingerprint,
        "tokenizer_hash": None,
    }
    return BlockConfig(**{**fields, **changes})


DFLASH: Mapping[str, Any] = {
    "shift_label": False,
    "markov_rank": 0,
    "confidence_head": False,
    "confidence_with_markov": False,
}
"""What makes it a DFlash drafter: the anchor predicts nothing, there are no heads."""


def reader_config(target: ModelInfo, **changes: Any) -> ReaderConfig:
    """Reads the states of both layers."""
    shape = target.recurrent
    fields: dict[str, Any] = {
        "state_layers": (0, 1),
        "rank": 3,
        "num_heads": shape.num_value_heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "hidden_size": target.hidden_size,
        "bottleneck": 16,
        "norm_eps": 1e-6,
    }
    return ReaderConfig(**{**fields, **changes})


def random_tensors(shapes: Mapping[str, Shape], seed: int) -> dict[str, Tensor]:
    """Norms near 1, the rest of unit gain; the Markov head's bias and the reader are lively."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.3 * noise
        elif "markov" in name or name == "mlp.up.weight":
            tensors[name] = noise
        else:
            tensors[name] = noise / math.sqrt(shape[-1])
    return tensors


def write_block(
    folder: Path, config: BlockConfig, reader: ReaderConfig | None = None, *, seed: int = 0
) -> Path:
    """A checkpoint; the same arguments write the same bytes."""
    save_drafter(folder, config, random_tensors(expected_tensors(config), seed))
    if reader is not None:
        save_reader(folder, reader, random_tensors(reader_tensors(reader), seed + 1))
    return folder


def block_drafter(folder: Path, target: ModelInfo, **options: Any) -> BlockDrafter:
    """An untrained drafter with a reader, written once per folder."""
    if not (folder / "config.json").exists():
        write_block(folder, block_config(target), reader_config(target))
    return BlockDrafter(path=str(folder), **{"tau": 50.0, **options})


def habits_block() -> BlockDrafter:
    """An untrained drafter with a reader for `engine_harness.load_target`'s target, without its
    fingerprint."""
    return BlockDrafter(path=str(_habits_folder()), tau=50.0)


@cache
def _habits_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    info = load_target(folder / "target").info
    config = block_config(info, target_fingerprint=None)
    return write_block(folder / "drafter", config, reader_config(info))
