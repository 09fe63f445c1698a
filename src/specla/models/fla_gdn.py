# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet language models in flash-linear-attention's checkpoint format.

Files in, `gdn_decoder.Decoder` out: tensors are fused the way its forward pass reads them.
Matrices, norms and convolutions are kept in the model's dtype. The decay parameters A_log and
dt_bias are not: they are used as stored, in float32 (float64 in a float64 model), because
rounding them moves every later decay. fla's own bfloat16 loading rounds dt_bias, so its bfloat16
decays differ from ours in the third digit; in float32 the two agree.

Source: fla 0.6.0, layers/gated_deltanet.py and models/gated_deltanet.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from specla.errors import InvalidCheckpoint
from specla.models.base import ModelInfo
from specla.models.files import eos_token_ids, read_json_object
from specla.models.fla_gdn_config import (
    DEAD_TENSORS,
    FlaGDNConfig,
    expected_tensors,
    parse_config,
)
from specla.models.gdn_decoder import Decoder
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.models.weights import Checkpoint, Progress, Shape, load_tensors, read_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ARCHITECTURE = "GatedDeltaNetForCausalLM"
# Of a tensor, places that the fingerprint reads, and bytes at each.
_PLACES, _BYTES = 16, 64


def weights_from(tensors: dict[str, Tensor], config: FlaGDNConfig) -> DecoderWeights:
    """Fuse loaded tensors (names and shapes of `expected_tensors`).

    Consumes `tensors`, entry by entry, so that no more than one layer is ever held twice.
    """
    blocks = tuple(
        _block(_Prefixed(tensors, f"model.layers.{i}."), config)
        for i in range(config.num_hidden_layers)
    )
    embeddings = tensors.pop("model.embeddings.weight")
    head = embeddings if config.tie_word_embeddings else tensors.pop("lm_head.weight")
    return DecoderWeights(
        embeddings=embeddings, blocks=blocks, norm=tensors.pop("model.norm.weight"), head=head
    )


def _each(weights: DecoderWeights) -> Iterator[Tensor]:
    """Every tensor once."""
    yield from (weights.embeddings, weights.norm)
    if weights.head is not weights.embeddings:
        yield weights.head
    for block in weights.blocks:
        yield from (getattr(block, field.name) for field in fields(block))


class _Prefixed:
    """Takes tensors out of a dict by the end of their name."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def take(self, name: str) -> Tensor:
        return self.tensors.pop(self.prefix + name)

    def cat(self, pattern: str, parts: str | tuple[str, ...]) -> Tensor:
        return torch.cat([self.take(pattern.format(part)) for part in parts])


def _block(layer: _Prefixed, config: FlaGDNConfig) -> BlockWeights:
    return BlockWeights(
        attn_norm=layer.take("attn_norm.weight"),
        in_proj=layer.cat("attn.{}_proj.weight", "qkvgab" if config.use_gate else "qkvab"),
        conv=layer.cat("attn.{}_conv1d.weight", "qkv").squeeze(1),
        A=-layer.take("attn.A_log").exp(),
        dt_bias=layer.take("attn.dt_bias"),
        o_norm=layer.take("attn.o_norm.weight"),
        o_proj=layer.take("attn.o_proj.weight"),
        mlp_norm=layer.take("mlp_norm.weight"),
        gate_up=layer.cat("mlp.{}_proj.weight", ("gate", "up")),
        down=layer.take("mlp.down_proj.weight"),
    )


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype a tensor is kept in: `dtype`, but at least float32 for the decay parameters."""
    decay = name.endswith((".A_log", ".dt_bias"))
    return torch.promote_types(dtype, torch.float32) if decay else dtype


def fingerprint(
    config: FlaGDNConfig, checkpoint: Checkpoint, expected: Mapping[str, Shape]
) -> str:
    """Hex sha256 of the config and, per tensor, its name, dtype, shape and bytes from 16 places,
    from the first to the last.

    Cheap (a kilobyte a tensor), independent of sharding, and different for a fine-tuned copy
    unless it differs in a few rows only.
    """
    digest = hashlib.sha256(json.dumps(config.canonical(), sort_keys=True).encode())
    for name in sorted(expected):
        entry = checkpoint.entries[name]
        digest.update(f"\n{name} {entry.dtype} {list(entry.shape)} ".encode())
        last = max(0, entry.num_bytes - _BYTES)
        with entry.file.open("rb") as file:
            for start in dict.fromkeys(i * last // (_PLACES - 1) for i in range(_PLACES)):
                file.seek(entry.start + start)
                digest.update(file.read(min(_BYTES, entry.num_bytes - start)))
    return digest.hexdigest()


class FlaGDN(Decoder):
    """A Gated DeltaNet target model; see `models.base.TargetModel`."""

    def __init__(self, config: FlaGDNConfig, weights: DecoderWeights, info: ModelInfo) -> None:
        super().__init__(
            weights,
            config.recurrent,
            eps=config.norm_eps,
            gated=config.use_gate,
            beta_scale=2.0 if config.allow_neg_eigval else 1.0,
        )
        self.config, self.info = config, info
        self.device, self.dtype = weights.embeddings.device, weights.embeddings.dtype

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> Self:
        """Load a folder with config.json and safetensors weights.

        Raises:
            InvalidCheckpoint, UnsupportedModel: see `parse_config` and `load_tensors`.
        """
        values = read_json_object(folder / "config.json")
        config = parse_config(values, str(folder / "config.json"))
        expected = expected_tensors(config)
        eos = _checked_eos(eos_token_ids(folder, values), config, folder)
        checkpoint = read_checkpoint(folder)
        tensors = load_tensors(
            checkpoint,
            expected,
            device=device,
            dtype_of=lambda name: stored_dtype(name, dtype),
            ignore=DEAD_TENSORS,
            progress=progress,
        )
        weights = weights_from(tensors, config)
        digest = fingerprint(config, checkpoint, expected)
        return cls(config, weights, _info(config, weights, eos, digest))


def _checked_eos(ids: tuple[int, ...], config: FlaGDNConfig, folder: Path) -> tuple[int, ...]:
    for token in ids:
        if token >= config.vocab_size:
            raise InvalidCheckpoint(
                f"eos_token_id of {folder} must be below vocab_size ({config.vocab_size}), got "
                f"{token}; correct generation_config.json or config.json"
            )
    return ids


def _info(
    config: FlaGDNConfig, weights: DecoderWeights, eos: tuple[int, ...], digest: str
) -> ModelInfo:
    tensors = tuple(_each(weights))
    return ModelInfo(
        architecture=ARCHITECTURE,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_parameters=sum(t.numel() for t in tensors),
        weight_bytes=sum(t.numel() * t.element_size() for t in tensors),
        recurrent=config.recurrent,
        eos_token_ids=eos,
        fingerprint=digest,
    )
