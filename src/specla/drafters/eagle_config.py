# SPDX-License-Identifier: Apache-2.0
"""EAGLE drafters: config.json, tensor table, and what must agree.

Keys and tensor names are those of published EAGLE-3 checkpoints where the architecture is the
same; the recurrent mixer's are fla's. Feature layers are layer OUTPUTS (`models.features`): a
file that counts inputs, as EAGLE-3 does (`eagle_aux_hidden_state_layer_ids`), is converted here.

Source: EAGLE-3 (arXiv 2503.01840) for what it computes; the mixer is our own.
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
from specla.ops.contract import RecurrentShape

ARCHITECTURES = {"gdn": "GatedDeltaNetForCausalLMEagle3", "attention": "LlamaForCausalLMEagle3"}
"""By mixer."""
MODEL_TYPES = {"gdn": "gated_deltanet_eagle", "attention": "llama"}
_MAX_LAYERS = 1024
# Where a field that we do not have must be absent or one of these.
_ONLY = {
    "attention_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "num_hidden_layers": (1,),
    "rope_scaling": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Sizes of a drafter, and the target it was made for.

    mixer: "gdn" or "attention", whose num_v_heads are Llama's num_key_value_heads, and whose
    head_v_dim is head_dim; rope_theta is attention's, conv_size is not.
    hidden_size: the drafter's own width; target_hidden_size, vocab_size, target_layer_ids: the
    target's. draft_vocab_size: rows of its own head; None where it shares the target's head and
    width. fc_norm: a norm per feature. target_fingerprint (see `ModelInfo`), tokenizer_hash: what
    it was trained with; None is not compared.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    head_v_dim: int
    conv_size: int
    norm_eps: float
    mixer: str
    target_hidden_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int | None
    fc_norm: bool
    target_fingerprint: str | None
    tokenizer_hash: str | None
    rope_theta: float = 10000.0

    @property
    def recurrent(self) -> RecurrentShape:
        """The mixer as a stack of one recurrent layer."""
        return RecurrentShape(
            num_layers=1,
            num_key_heads=self.num_heads,
            num_value_heads=self.num_v_heads,
            key_dim=self.head_dim,
            value_dim=self.head_v_dim,
            conv_width=self.conv_size,
        )

    @property
    def has_draft_vocab(self) -> bool:
        """Whether the head covers a part of the vocabulary only."""
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.vocab_size

    def as_dict(self) -> dict[str, Any]:
        """config.json's content."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["target_layer_ids"] = list(self.target_layer_ids)
        if self.mixer == "attention":
            fields = {_LLAMA.get(name, name): value for name, value in fields.items()}
        return {
            "architectures": [ARCHITECTURES[self.mixer]],
            "model_type": MODEL_TYPES[self.mixer],
            "num_hidden_layers": 1,
            **fields,
        }


# Our field -> Llama's, in checkpoints with attention.
_LLAMA = {
    "num_heads": "num_attention_heads",
    "num_v_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}


def parse_eagle_config(values: Mapping[str, Any], where: str) -> EagleConfig:
    """Read config.json's content. `where` names the file in messages.

    Raises:
        InvalidCheckpoint: not such a drafter, or a field that no such drafter can have.
    """
    listed = values.get("architectures")
    mixer = next((m for m, name in ARCHITECTURES.items() if listed == [name]), None)
    if mixer is None:
        names = " or ".join(f"[{name!r}]" for name in ARCHITECTURES.values())
        raise InvalidCheckpoint(
            f"architectures in {where} must be {names} for drafter eagle, got {listed!r}; give "
            "the folder of a drafter that `specla train --kind eagle` wrote"
        )
    name: Mapping[str, str] = _LLAMA if mixer == "attention" else {}
    read = Fields(values, where)
    check_only(read, _ONLY)
    heads = read.count(name.get("num_heads", "num_heads"))
    v_heads = read.count(name.get("num_v_heads", "num_v_heads"), default=heads)
    fewer, more = (heads, v_heads) if mixer == "gdn" else (v_heads, heads)
    if more % fewer:
        read.fail("the larger number of heads", f"a multiple of the other ({fewer})", more)
    head_dim = read.count("head_dim", default=_head_dim(read, heads) if name else None)
    if mixer == "attention" and head_dim % 2:
        read.fail("head_dim", "even: positions rotate its halves", head_dim)
    config = EagleConfig(
        hidden_size=read.count("hidden_size"),
        intermediate_size=read.count("intermediate_size"),
        num_heads=heads,
        num_v_heads=v_heads,
        head_dim=head_dim,
        head_v_dim=read.count("head_v_dim", default=head_dim if name else None),
        conv_size=read.count("conv_size", default=4, least=2, most=64),
        norm_eps=read.positive(name.get("norm_eps", "norm_eps"), default=1e-6),
        mixer=mixer,
        target_hidden_size=read.count(
            "target_hidden_size", default=read.count("hidden_size") if name else None
        ),
        vocab_size=read.count("vocab_size"),
        target_layer_ids=_layer_ids(values, where),
        draft_vocab_size=_draft_vocab(read),
        fc_norm=read.flag("fc_norm", default=False),
        target_fingerprint=read.text("target_fingerprint"),
        tokenizer_hash=read.text("tokenizer_hash"),
        rope_theta=rope_theta(read, default=10000.0),
    )
    if config.draft_vocab_size is None and config.hidden_size != config.target_hidden_size:
        read.fail("draft_vocab_size", "given where hidden_size is not the target's", None)
    return config


def _head_dim(read: Fields, heads: int) -> int:
    """Llama's default."""
    return read.count("hidden_size") // heads


def _layer_ids(values: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Output ids; EAGLE-3's own key counts inputs, so that its 1 is the output of layer 0."""
    if values.get("target_layer_ids") is not None:
        return Fields(values, where).counts("target_layer_ids", most=_MAX_LAYERS)
    inputs = inner_object(Fields(values, where), "eagle_config")
    ids = inputs.counts("eagle_aux_hidden_state_layer_ids", most=_MAX_LAYERS)
    if 0 in ids:
        raise InvalidCheckpoint(
            f"eagle_aux_hidden_state_layer_ids in {where} must be above 0, the input of layer 0 "
            f"being the embeddings, got {list(ids)}; correct the file"
        )
    return tuple(i - 1 for i in ids)


def _draft_vocab(read: Fields) -> int | None:
    size = read.values.get("draft_vocab_size")
    return None if size is None else read.count("draft_vocab_size", most=read.count("vocab_size"))


def check_target(config: EagleConfig, target: ModelInfo, where: str) -> None:
    """Refuse, by name, a target that the drafter was not made for.

    Raises:
        ConfigError: another vocabulary or width, too few layers, or other weights.
    """
    layers = target.recurrent.num_layers
    check_same(
        (
            ("vocabulary (vocab_size)", config.vocab_size, target.vocab_size),
            ("width (target_hidden_size)", config.target_hidden_size, target.hidden_size),
            ("weights (target_fingerprint)", config.target_fingerprint, target.fingerprint),
        ),
        where,
    )
    check_layers("feature layers (target_layer_ids)", config.target_layer_ids, layers, where)


def expected_tensors(config: EagleConfig) -> dict[str, Shape]:
    """Name and shape of every floating tensor. Linear weights are [out, in].

    Without a head of its own, lm_head is the target's.
    """
    D, target, count = config.hidden_size, config.target_hidden_size, len(config.target_layer_ids)
    tensors: dict[str, Shape] = {}
    if config.fc_norm:
        tensors.update({f"fc_norm.{i}.weight": (target,) for i in range(count)})
    tensors["fc.weight"] = (D, count * target)
    layer = {"input_layernorm.weight": (target,), "hidden_norm.weight": (D,), **_mixer(config)}
    F = config.intermediate_size
    layer |= {
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    tensors.update({f"midlayer.{name}": shape for name, shape in layer.items()})
    tensors["norm.weight"] = (D,)
    if config.draft_vocab_size is not None:
        tensors["lm_head.weight"] = (config.draft_vocab_size, D)
    return tensors


def _mixer(config: EagleConfig) -> dict[str, Shape]:
    """Inputs are [normed embedding; normed feature], side by side."""
    inputs = config.target_hidden_size + config.hidden_size
    return _gdn(config, inputs) if config.mixer == "gdn" else _attention(config, inputs)


def _attention(config: EagleConfig, inputs: int) -> dict[str, Shape]:
    query, kv = config.num_heads * config.head_dim, config.num_v_heads * config.head_dim
    rows = {"q": query, "k": kv, "v": kv}
    mixer: dict[str, Shape] = {f"{n}_proj.weight": (count, inputs) for n, count in rows.items()}
    mixer["o_proj.weight"] = (config.hidden_size, query)
    return {f"self_attn.{name}": shape for name, shape in mixer.items()}


def _gdn(config: EagleConfig, inputs: int) -> dict[str, Shape]:
    G, W = config.num_v_heads, config.conv_size
    HK, GV = config.num_heads * config.head_dim, G * config.head_v_dim
    named = {"q": HK, "k": HK, "v": GV, "g": GV, "a": G, "b": G}
    mixer: dict[str, Shape] = {f"{n}_proj.weight": (rows, inputs) for n, rows in named.items()}
    mixer |= {f"{n}_conv1d.weight": (named[n], 1, W) for n in "qkv"}
    mixer |= {
        "A_log": (G,),
        "dt_bias": (G,),
        "o_norm.weight": (config.head_v_dim,),
        "o_proj.weight": (config.hidden_size, GV),
    }
    return {f"linear_attn.{name}": shape for name, shape in mixer.items()}
