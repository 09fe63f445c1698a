# SPDX-License-Identifier: Apache-2.0
"""EAGLE checkpoints: from a folder to weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specla.drafters.agreement import config_in
from specla.drafters.eagle_config import EagleConfig, expected_tensors, parse_eagle_config
from specla.drafters.eagle_model import EagleWeights
from specla.errors import InvalidCheckpoint
from specla.models.base import TargetModel
from specla.models.fla_gdn import stored_dtype
from specla.models.gdn_weights import BlockWeights
from specla.models.weights import Checkpoint, load_tensors, read_checkpoint

# Draft id -> target id as an offset, and which target ids are in the draft vocabulary.
OFFSETS, MEMBERS = "d2t", "t2d"


def read_config(folder: Path) -> EagleConfig:
    """config.json of a drafter's folder.

    Raises:
        ConfigError: no such folder. InvalidCheckpoint: not a drafter's.
    """
    return parse_eagle_config(*config_in(folder, "eagle"))


def load_weights(folder: Path, config: EagleConfig, target: TargetModel) -> EagleWeights:
    """The drafter's weights in the target's dtype, on its device; embeddings, and the head where
    it has none, are the target's own.

    Raises:
        InvalidCheckpoint: tensors that do not belong to the config.
    """
    checkpoint = read_checkpoint(folder)
    tensors = load_tensors(
        checkpoint,
        expected_tensors(config),
        device=target.device,
        dtype_of=lambda name: stored_dtype(name, target.dtype),
        ignore=(OFFSETS, MEMBERS),
    )
    norms = [tensors[name] for name in tensors if name.startswith("fc_norm.")]
    head = tensors.get("lm_head.weight")
    return EagleWeights(
        fc=tensors["fc.weight"],
        fc_norms=torch.stack(norms) if norms else None,
        embed_norm=tensors["midlayer.input_layernorm.weight"],
        feature_norm=tensors["midlayer.hidden_norm.weight"],
        mixer=_gdn(tensors) if config.mixer == "gdn" else _attention(tensors),
        mlp_norm=tensors["midlayer.post_attention_layernorm.weight"],
        gate_up=_cat(tensors, "mlp.{}_proj.weight", ("gate", "up")),
        down=tensors["midlayer.mlp.down_proj.weight"],
        norm=tensors["norm.weight"],
        head=target.head_weight if head is None else head,
        embeddings=target.embeddings,
        d2t=target_ids(checkpoint, config, target.device),
    )


def _cat(tensors: dict[str, Tensor], pattern: str, parts: str | tuple[str, ...]) -> Tensor:
    return torch.cat([tensors[f"midlayer.{pattern.format(part)}"] for part in parts])


def _gdn(tensors: dict[str, Tensor]) -> BlockWeights:
    prefix = "midlayer.linear_attn."
    return BlockWeights(
        attn_norm=tensors["midlayer.hidden_norm.weight"],
        in_proj=_cat(tensors, "linear_attn.{}_proj.weight", "qkvgab"),
        conv=_cat(tensors, "linear_attn.{}_conv1d.weight", "qkv").squeeze(1),
        A=-tensors[prefix + "A_log"].exp(),
        dt_bias=tensors[prefix + "dt_bias"],
        o_norm=tensors[prefix + "o_norm.weight"],
        o_proj=tensors[prefix + "o_proj.weight"],
        mlp_norm=tensors["midlayer.post_attention_layernorm.weight"],
        gate_up=_cat(tensors, "mlp.{}_proj.weight", ("gate", "up")),
        down=tensors["midlayer.mlp.down_proj.weight"],
    )


def _attention(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo"}


def target_ids(checkpoint: Checkpoint, config: EagleConfig, device: torch.device) -> Tensor | None:
    """Target ids of the head's rows, None where they are the same: d2t holds offsets, as in
    EAGLE-3.

    Raises:
        InvalidCheckpoint: there are none, or they are not of this vocabulary.
    """
    if not config.has_draft_vocab:
        return None
    entry = checkpoint.entries.get(OFFSETS)
    size = config.draft_vocab_size
    if entry is None or entry.dtype != "I64" or entry.shape != (size,):
        raise InvalidCheckpoint(
            f"{checkpoint.folder} must hold int64 tensor {OFFSETS} [{size}], the target ids of "
            "its draft vocabulary; the files and config.json do not belong together"
        )
    with safe_open(entry.file, "pt") as file:
        ids: Tensor = file.get_tensor(OFFSETS) + torch.arange(size or 0)
    if len(ids.unique()) != size or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise InvalidCheckpoint(
            f"{OFFSETS} in {entry.file} must lead to different ids below {config.vocab_size}; "
            "the file is damaged, copy it again"
        )
    return ids.to(device)
