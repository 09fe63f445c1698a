# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in flash-linear-attention's checkpoint format: configuration and tensor table.

fla's defaults (6 heads, expand_v 2, 21 layers) differ from its published checkpoints', so a
size that is absent is refused, never guessed. Only fields whose absence has one meaning (they
were added to fla later, or every checkpoint shares the value) fall back to fla's default.

Letters as in ops/contract.py. Source: fla 0.6.0, models/gated_deltanet and modules/mlp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specla.errors import UnsupportedModel
from specla.models.fields import Fields
from specla.models.weights import Shape
from specla.ops.contract import RecurrentShape

# Owned by no model class since fla dropped its unused skip parameter; old files still hold it.
DEAD_TENSORS = ("model.layers.*.attn.D",)
_SWISH = ("swish", "silu")
# Field -> the values we run; null or absence means fla's default, which is the first of them.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attn": (None,),
    "attnres_block_size": (None,),
    "use_short_conv": (True,),
    "conv_bias": (False,),
    "hidden_act": _SWISH,
    "output_gate_activation": _SWISH,
}
_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaGDNConfig:
    """The fields of config.json that the forward pass depends on, all resolved.

    num_v_heads is a multiple of num_heads; head_v_dim = head_dim * expand_v.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    num_v_heads: int
    head_dim: int
    head_v_dim: int
    conv_size: int
    intermediate_size: int
    norm_eps: float
    use_gate: bool
    allow_neg_eigval: bool
    tie_word_embeddings: bool

    @property
    def key_dim(self) -> int:
        """H * K: width of q and of k."""
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """G * V: width of v and of the output gate."""
        return self.num_v_heads * self.head_v_dim

    @property
    def recurrent(self) -> RecurrentShape:
        return RecurrentShape(
            num_layers=self.num_hidden_layers,
            num_key_heads=self.num_heads,
            num_value_heads=self.num_v_heads,
            key_dim=self.head_dim,
            value_dim=self.head_v_dim,
            conv_width=self.conv_size,
        )

    def canonical(self) -> dict[str, Any]:
        """Plain values for the fingerprint: equal for configs that mean the same model."""
        return asdict(self)


def parse_config(values: Mapping[str, Any], where: str) -> FlaGDNConfig:
    """Read config.json's content. `where` names the file in messages.

    Raises:
        InvalidCheckpoint: a needed field is absent or has a value no model can have.
        UnsupportedModel: a valid field asks for something that is not implemented.
    """
    _check_supported(values, where)
    read = Fields(values, where)
    heads = read.count("num_heads")
    v_heads = read.count("num_v_heads", default=heads)
    if v_heads % heads:
        read.fail("num_v_heads", f"a multiple of num_heads ({heads})", v_heads)
    head_dim, hidden = read.count("head_dim"), read.count("hidden_size")
    return FlaGDNConfig(
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        num_hidden_layers=read.count("num_hidden_layers", most=_MAX_LAYERS),
        num_heads=heads,
        num_v_heads=v_heads,
        head_dim=head_dim,
        head_v_dim=_value_head_dim(read, head_dim),
        conv_size=read.count("conv_size", default=4, least=2, most=64),
        intermediate_size=_intermediate(read, hidden),
        norm_eps=read.positive("norm_eps", default=1e-6),
        use_gate=read.flag("use_gate", default=True),
        allow_neg_eigval=read.flag("allow_neg_eigval", default=False),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
    )


def _check_supported(values: Mapping[str, Any], where: str) -> None:
    for field, allowed in _ONLY.items():
        given = values.get(field)
        given = allowed[0] if given is None else given
        if not any(given is a or (isinstance(a, str) and given == a) for a in allowed):
            names = " or ".join(repr(a) for a in allowed)
            raise UnsupportedModel(
                f"{field} in {where} must be {names} for this model family, got "
                f"{repr(given)[:80]}; choose another checkpoint"
            )


def _value_head_dim(read: Fields, head_dim: int) -> int:
    expand = read.positive("expand_v")
    width = int(head_dim * expand)
    if width < 1 or not math.isclose(head_dim * expand, width, rel_tol=1e-5):
        read.fail("expand_v", f"a factor that makes head_dim ({head_dim}) an integer", expand)
    return width


def _intermediate(read: Fields, hidden: int) -> int:
    """fla's rule: two thirds of hidden_ratio * D, rounded up to a multiple of 256."""
    ratio = read.positive("hidden_ratio", default=4.0)
    rounded = 256 * math.ceil(int(hidden * ratio * 2 / 3) / 256)
    return read.count("intermediate_size", default=rounded)


def expected_tensors(config: FlaGDNConfig) -> dict[str, Shape]:
    """Name and shape of every tensor a checkpoint of this config holds, in forward order.

    18 per layer with an output gate, 17 without; plus embeddings, final norm and, when not tied,
    lm_head: 435 for GDN-1.3B. Linear weights are [out, in].
    """
    D, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, Shape] = {"model.embeddings.weight": (vocab, D)}
    layer = _layer_tensors(config)
    for i in range(config.num_hidden_layers):
        tensors.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    tensors["model.norm.weight"] = (D,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (vocab, D)
    return tensors


def _layer_tensors(config: FlaGDNConfig) -> dict[str, Shape]:
    D, F, G = config.hidden_size, config.intermediate_size, config.num_v_heads
    HK, GV, W = config.key_dim, config.value_dim, config.conv_size
    gate: dict[str, Shape] = {"attn.g_proj.weight": (GV, D)} if config.use_gate else {}
    return {
        "attn_norm.weight": (D,),
        "attn.q_proj.weight": (HK, D),
        "attn.k_proj.weight": (HK, D),
        "attn.v_proj.weight": (GV, D),
        **gate,
        "attn.a_proj.weight": (G, D),
        "attn.b_proj.weight": (G, D),
        "attn.q_conv1d.weight": (HK, 1, W),
        "attn.k_conv1d.weight": (HK, 1, W),
        "attn.v_conv1d.weight": (GV, 1, W),
        "attn.A_log": (G,),
        "attn.dt_bias": (G,),
        "attn.o_norm.weight": (config.head_v_dim,),
        "attn.o_proj.weight": (D, GV),
        "mlp_norm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
