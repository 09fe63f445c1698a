# SPDX-License-Identifier: Apache-2.0
"""Block drafters: config.json, tensor table, and what must agree with the target.

Keys and tensor names are those of published DFlash and DSpark checkpoints. They are read where
they stand, flat or in `dflash_config`; what a file computes follows from its keys, never from the
name of its architecture. Feature layers are layer OUTPUTS, as everywhere (`models.features`).

Source: DFlash (arXiv 2602.06036); DSpark (arXiv 2607.05147) for the heads and the shifted labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specla.drafters.agreement import (
    check_layers,
    check_only,
    check_same,
    inner_object,
    rope_theta,
)
from specla.errors import InvalidCheckpoint
from specla.models.base import ModelInfo
from specla.models.fields import Fields
from specla.models.weights import Shape

ARCHITECTURE = "DFlashDraftModel"
MODEL_TYPE = "qwen3"
KINDS = ("dflash", "dspark")
MAX_BLOCK = 256
_MAX_LAYERS = 1024
_NESTED = "dflash_config"
# All that is understood in `dflash_config`: another key there changes what a checkpoint computes.
_NESTED_KEYS = {
    "attention_mode", "block_size", "causal", "causal_head", "confidence_head_with_markov",
    "confidence_temperatures", "enable_confidence_head", "markov_head_type", "markov_rank",
    "mask_token_id", "num_anchors", "projector_type", "shift_label", "target_layer_ids",
    "use_confidence_head",
}  # fmt: skip
_DSPARK_KEYS = ("enable_confidence_head", "markov_head_type", "markov_rank", "num_anchors")
# Where a field that we do not have must be absent or one of these.
_ONLY = {
    "attention_bias": (False,),
    "attention_mode": ("gqa",),
    "causal_head": (False,),
    "hidden_act": ("silu", "swish"),
    "markov_head_type": ("vanilla",),
    "rope_scaling": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Sizes of a drafter, and the target it was made for.

    hidden_size, vocab_size: the target's. block_size: embeddings that go in, the anchor first.
    shift_label: the anchor's own output predicts the first draft (DSpark), else the first mask's
    (DFlash). windows: per layer, how far a position sees (None: all of it). is_causal: whether a
    block's position sees earlier ones only; None: in layers with a window. markov_rank: 0 without
    that head. confidence_temperatures: one per draft, of the confidence head (`calibration`).
    target_fingerprint (see `ModelInfo`), tokenizer_hash: what it was trained with; None is not
    compared.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    vocab_size: int
    windows: tuple[int | None, ...]
    is_causal: bool | None
    block_size: int
    shift_label: bool
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool
    confidence_temperatures: tuple[float, ...] | None
    target_fingerprint: str | None
    tokenizer_hash: str | None

    @property
    def num_layers(self) -> int:
        """Draft layers."""
        return len(self.windows)

    @property
    def num_drafts(self) -> int:
        """Positions that a block predicts."""
        return self.block_size if self.shift_label else self.block_size - 1

    def causal(self, layer: int) -> bool:
        """Whether a block's position sees earlier ones of the block only."""
        return self.windows[layer] is not None if self.is_causal is None else self.is_causal

    def as_dict(self) -> dict[str, Any]:
        """config.json's content."""
        window = next((w for w in self.windows if w is not None), None)
        nested: dict[str, Any] = {
            "projector_type": KINDS[self.shift_label],
            "shift_label": self.shift_label,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "markov_rank": self.markov_rank,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_with_markov,
            "confidence_temperatures": self.confidence_temperatures
            and list(self.confidence_temperatures),
        }
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "vocab_size": self.vocab_size,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in self.windows],
            "sliding_window": window,
            "is_causal": self.is_causal,
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            _NESTED: {name: value for name, value in nested.items() if value is not None},
            "target_fingerprint": self.target_fingerprint,
            "tokenizer_hash": self.tokenizer_hash,
        }


def parse_block_config(values: Mapping[str, Any], where: str) -> BlockConfig:
    """Read config.json's content. `where` names the file in messages.

    Raises:
        InvalidCheckpoint: not such a drafter, or something that ours cannot compute.
    """
    read = Fields(_flat(values, where), where)
    check_only(read, _ONLY)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    markov = read.count("markov_rank", default=0, least=0)
    confident = _either(read, "enable_confidence_head", "use_confidence_head")
    vocab = read.count("vocab_size")
    config = BlockConfig(
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=read.count("num_key_value_heads", default=heads),
        head_dim=read.count("head_dim", default=max(1, hidden // heads)),
        norm_eps=read.positive("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta(read),
        vocab_size=vocab,
        windows=_windows(read),
        is_causal=_is_causal(read),
        block_size=read.count("block_size", least=1, most=MAX_BLOCK),
        shift_label=_shift_label(read),
        mask_token_id=read.count("mask_token_id", least=0, most=vocab - 1),
        target_layer_ids=read.counts("target_layer_ids", most=_MAX_LAYERS),
        num_target_layers=_optional_count(read, "num_target_layers"),
        markov_rank=markov,
        confidence_head=confident,
        confidence_with_markov=confident
        and read.flag("confidence_head_with_markov", default=markov > 0),
        confidence_temperatures=_temperatures(read),
        target_fingerprint=read.text("target_fingerprint"),
        tokenizer_hash=read.text("tokenizer_hash"),
    )
    _check_whole(config, read)
    return config


def _flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flat keys and those of `dflash_config` as one; null counts as absent."""
    nested = inner_object(Fields(values, where), _NESTED).values
    if unknown := sorted(set(nested) - _NESTED_KEYS):
        raise InvalidCheckpoint(
            f"{_NESTED} in {where} may have {', '.join(sorted(_NESTED_KEYS))}, but has "
            f"{unknown[0]}: an architecture that is not supported; give a DFlash or DSpark drafter"
        )
    flat = {name: value for name, value in values.items() if value is not None}
    for name, value in nested.items():
        if value is not None and flat.setdefault(name, value) != value:
            raise InvalidCheckpoint(
                f"{name} in {where} must be the same in {_NESTED} as outside, got {value!r} and "
                f"{flat[name]!r}; correct the file"
            )
    return flat


def _check_whole(config: BlockConfig, read: Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        read.fail("num_key_value_heads", f"a divisor of {config.num_heads}", config.num_kv_heads)
    if config.head_dim % 2:
        read.fail("head_dim", "even", config.head_dim)
    if not config.num_drafts:
        read.fail("block_size", "at least 2 where the anchor predicts nothing", 1)
    if config.confidence_with_markov and not config.markov_rank:
        read.fail("confidence_head_with_markov", "false without a Markov head", True)
    if read.values.get("draft_vocab_size", config.vocab_size) != config.vocab_size:
        read.fail("draft_vocab_size", "vocab_size or absent", read.values["draft_vocab_size"])
    given = config.confidence_temperatures
    if given is not None and (len(given) != config.num_drafts or not config.confidence_head):
        read.fail("confidence_temperatures", "one per draft of a confidence head", list(given))


def _optional_count(read: Fields, field: str) -> int | None:
    return read.count(field) if field in read.values else None


def _either(read: Fields, *names: str) -> bool:
    return any([read.flag(name, default=False) for name in names])


def _is_causal(read: Fields) -> bool | None:
    given = [read.flag(n, default=False) for n in ("is_causal", "causal") if n in read.values]
    if len(set(given)) > 1:
        read.fail("causal", "the same as is_causal", given[1])
    # DSpark's own files do not say: their blocks are never causal.
    return given[0] if given else (False if _shift_label(read) else None)


def _shift_label(read: Fields) -> bool:
    if "projector_type" in read.values:
        kind = read.choice("projector_type", KINDS)
        return read.flag("shift_label", default=kind == "dspark")
    return read.flag("shift_label", default=any(key in read.values for key in _DSPARK_KEYS))


def _windows(read: Fields) -> tuple[int | None, ...]:
    count = read.count("num_hidden_layers", most=_MAX_LAYERS)
    types = read.values.get("layer_types", ["full_attention"] * count)
    valid = isinstance(types, list) and len(types) == count
    if not valid or not set(types) <= {"full_attention", "sliding_attention"}:
        read.fail("layer_types", f"{count} of full_attention, sliding_attention", types)
    slides = [kind == "sliding_attention" for kind in types]
    window = read.count("sliding_window") if any(slides) else None
    return tuple(window if slide else None for slide in slides)


def _temperatures(read: Fields) -> tuple[float, ...] | None:
    given = read.values.get("confidence_temperatures")
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(t) in (int, float) and t > 0 for t in given):
        read.fail("confidence_temperatures", "a list of positive numbers", given)
    return tuple(float(t) for t in given)


def check_target(config: BlockConfig, target: ModelInfo, where: str) -> None:
    """Refuse, by name, a target that the drafter was not made for.

    Raises:
        ConfigError: another vocabulary, width, number of layers, or other weights.
    """
    layers = target.recurrent.num_layers
    check_same(
        (
            ("vocabulary (vocab_size)", config.vocab_size, target.vocab_size),
            ("width (hidden_size)", config.hidden_size, target.hidden_size),
            ("number of layers (num_target_layers)", config.num_target_layers, layers),
            ("weights (target_fingerprint)", config.target_fingerprint, target.fingerprint),
        ),
        where,
    )
    check_layers("feature layers (target_layer_ids)", config.target_layer_ids, layers, where)


def expected_tensors(config: BlockConfig) -> dict[str, Shape]:
    """Name and shape of every tensor. Linear weights are [out, in].

    Embeddings and head are the target's; a file may hold copies (`OPTIONAL`).
    """
    D, F, d = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * d, config.num_kv_heads * d
    tensors: dict[str, Shape] = {
        "fc.weight": (D, len(config.target_layer_ids) * D),
        "hidden_norm.weight": (D,),
    }
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (queries, D),
        "self_attn.k_proj.weight": (keys, D),
        "self_attn.v_proj.weight": (keys, D),
        "self_attn.o_proj.weight": (D, queries),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    for i in range(config.num_layers):
        tensors.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    tensors["norm.weight"] = (D,)
    if config.markov_rank:
        pair = (config.vocab_size, config.markov_rank)
        tensors |= {f"markov_head.markov_w{i}.weight": pair for i in (1, 2)}
    if config.confidence_head:
        width = D + (config.markov_rank if config.confidence_with_markov else 0)
        tensors |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return tensors


OPTIONAL = ("embed_tokens.weight", "lm_head.weight")
