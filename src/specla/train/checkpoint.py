# SPDX-License-Identifier: Apache-2.0
"""Writing and reading a trained model as a checkpoint in fla's format: bf16 shards, index,
config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.drafters.files import replacing
from specla.train.gdn import GDNLanguageModel, GDNShape
from specla.train.tokenizer import write_json

SHARD_BYTES = 13 * 2**20
KEPT_FLOAT32 = ("A_log", "dt_bias")


def config_of(shape: GDNShape) -> dict[str, Any]:
    """config.json with every field explicit."""
    sizes = {k: v for k, v in shape.as_dict().items()}
    return {
        "architectures": ["GatedDeltaNetForCausalLM"], "model_type": "gated_deltanet",
        "attn": None, "attn_mode": "chunk", **sizes, "num_v_heads": None,
        "use_gate": True, "use_short_conv": True, "conv_bias": False, "allow_neg_eigval": False,
        "hidden_act": "swish", "hidden_ratio": 4, "max_position_embeddings": 2048,
        "use_cache": True, "fuse_norm": True, "fuse_swiglu": True,
        "fuse_cross_entropy": True, "fuse_linear_cross_entropy": False, "use_l2warp": False,
        "bos_token_id": 0, "eos_token_id": 4, "pad_token_id": 0, "dtype": "bfloat16",
    }  # fmt: skip


def stored(name: str, tensor: Tensor) -> Tensor:
    """A parameter as it is written: bf16, but float32 for the decay's parameters."""
    dtype = torch.float32 if name.endswith(KEPT_FLOAT32) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def split_shards(tensors: dict[str, Tensor], limit: int = SHARD_BYTES) -> list[dict[str, Tensor]]:
    """Consecutive tensors in shards of at most ``limit`` bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def save_checkpoint(model: GDNLanguageModel, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """config.json, ``model-0000i-of-0000n.safetensors`` and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: stored(name, p) for name, p in model.named_parameters()}
    shards = split_shards(tensors, shard_bytes)
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        with replacing(folder / file) as part:
            save_file(shard, part, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", config_of(model.shape))


def load_checkpoint(folder: Path, device: str = "cpu") -> GDNLanguageModel:
    """The model of a folder written by `save_checkpoint`, in float32."""
    config = json.loads((folder / "config.json").read_text())
    model = GDNLanguageModel(GDNShape(**{k: config[k] for k in GDNShape().as_dict()}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        state |= load_file(folder / file)
    model.load_state_dict({k: v.float() for k, v in state.items()}, strict=True)
    return model.to(device)
