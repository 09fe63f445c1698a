# SPDX-License-Identifier: Apache-2.0
"""Untrained EAGLE drafters: random weights of lively size, for a given target."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_config import EagleConfig, expected_tensors
from specla.models.base import ModelInfo
from specla.models.files import write_json
from specla.ops.contract import RecurrentShape


def toy_config(target: ModelInfo, **changes: Any) -> EagleConfig:
    """K != V, more value heads than key heads, another width than the target's."""
    layers = target.recurrent.num_layers
    fields: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 1,
        "num_v_heads": 2,
        "head_dim": 8,
        "head_v_dim": 12,
        "conv_size": 4,
        "norm_eps": 1e-6,
        "mixer": "gdn",
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_layer_ids": tuple(range(layers)),
        "draft_vocab_size": target.vocab_size,
        "fc_norm": True,
        "target_fingerprint": target.fingerprint,
        "tokenizer_hash": None,
    }
    return EagleConfig(**{**fields, **changes})


def write_drafter(folder: Path, config: EagleConfig, *, seed: int = 0) -> Path:
    """A checkpoint of that config; the same arguments write the same bytes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight") or "fc_norm" in name:
            tensors[name] = 1 + 0.3 * noise
        elif name.endswith("A_log"):
            tensors[name] = (0.05 + torch.rand(shape, generator=generator)).log()
        else:
            tensors[name] = noise * (2.0 if "lm_head" in name else 1.0) / math.sqrt(shape[-1])
    if config.has_draft_vocab:
        size = config.draft_vocab_size or 0
        ids = torch.randperm(config.vocab_size, generator=generator)[:size].sort().values
        tensors["d2t"] = ids - torch.arange(size)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config.as_dict())
    return folder


def toy_drafter(folder: Path, target: ModelInfo, *, seed: int = 0, **options: Any) -> EagleDrafter:
    """An untrained drafter for a target, written once per folder."""
    if not (folder / "config.json").exists():
        write_drafter(folder, toy_config(target), seed=seed)
    return EagleDrafter(path=str(folder), **{"min_survival": 0, **options})


def habits_drafter(**options: Any) -> EagleDrafter:
    """An untrained drafter for `engine_harness.load_target`'s target, without its fingerprint."""
    return EagleDrafter(path=str(_habits_folder()), tau=50.0, min_survival=0, **options)


@cache
def _habits_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    shape = RecurrentShape(
        num_layers=2, num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=16, conv_width=4
    )
    info = ModelInfo(
        architecture="",
        vocab_size=24,
        hidden_size=32,
        num_parameters=0,
        weight_bytes=0,
        recurrent=shape,
        eos_token_ids=(),
        fingerprint="",
    )
    return write_drafter(folder, toy_config(info, target_fingerprint=None))
