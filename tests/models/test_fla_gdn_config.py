# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. config.json: nothing that matters is guessed, nothing unsupported slips through."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from specla.errors import InvalidCheckpoint, SpeclaError, UnsupportedModel
from specla.models.fla_gdn_config import FlaGDNConfig, expected_tensors, parse_config

SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 8,
    "head_dim": 256,
    "expand_v": 1,
    "vocab_size": 32000,
}


def parse(**fields: Any) -> FlaGDNConfig:
    return parse_config({**SIZES, **fields}, "config.json")


def refused(kind: type[SpeclaError], field: str, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        parse(**fields)
    message = str(caught.value)
    assert field in message
    assert "config.json" in message
    assert "\n" not in message
    return message


def test_gdn_1_3b_has_its_published_size() -> None:
    config = parse()
    tensors = expected_tensors(config)
    assert config.intermediate_size == 5632
    assert len(tensors) == 435
    assert sum(prod(shape) for shape in tensors.values()) == 1_466_343_808


def test_tied_and_gateless_models_own_fewer_tensors() -> None:
    assert "lm_head.weight" not in expected_tensors(parse(tie_word_embeddings=True))
    gateless = expected_tensors(parse(use_gate=False))
    assert len(gateless) == 435 - 24
    assert gateless["model.layers.0.attn.o_norm.weight"] == (256,)


def test_value_heads_size_values_gates_and_decays() -> None:
    tensors = expected_tensors(parse(num_v_heads=16, expand_v=0.5))
    assert tensors["model.layers.3.attn.q_proj.weight"] == (2048, 2048)
    assert tensors["model.layers.3.attn.v_proj.weight"] == (16 * 128, 2048)
    assert tensors["model.layers.3.attn.g_proj.weight"] == (16 * 128, 2048)
    assert tensors["model.layers.3.attn.v_conv1d.weight"] == (16 * 128, 1, 4)
    assert tensors["model.layers.3.attn.o_norm.weight"] == (128,)
    for name in ("a_proj.weight", "b_proj.weight", "A_log", "dt_bias"):
        assert tensors[f"model.layers.3.attn.{name}"][0] == 16


@pytest.mark.parametrize(
    ("hidden", "ratio", "want"),
    [(2048, 4, 5632), (1024, 4, 2816), (320, None, 1024), (96, 2, 256), (1536, 3, 3072)],
)
def test_intermediate_size_by_flas_rule(hidden: int, ratio: int | None, want: int) -> None:
    config = parse(hidden_size=hidden, hidden_ratio=ratio, intermediate_size=None)
    assert config.intermediate_size == want
    assert parse(intermediate_size=96).intermediate_size == 96


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
def test_sizes_are_never_guessed(field: str, absent: bool) -> None:
    values: dict[str, Any] = {k: v for k, v in SIZES.items() if k != field}
    if not absent:
        values[field] = None
    with pytest.raises(InvalidCheckpoint, match=f"must give {field}"):
        parse_config(values, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn", {"layers": [5], "num_heads": 8}),
        ("use_short_conv", False),
        ("conv_bias", True),
        ("hidden_act", "relu"),
        ("hidden_act", "powlu"),
        ("output_gate_activation", "sigmoid"),
        ("attnres_block_size", 2),
    ],
)
def test_unsupported_values_are_named(field: str, value: Any) -> None:
    assert "choose another checkpoint" in refused(UnsupportedModel, field, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_heads", -8),
        ("num_heads", 8.0),
        ("num_heads", True),
        ("num_heads", "8"),
        ("num_v_heads", 12),
        ("num_v_heads", 4),
        ("expand_v", 0.3),
        ("expand_v", float("nan")),
        ("expand_v", float("inf")),
        ("expand_v", 0),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**30),
        ("norm_eps", -1e-6),
        ("norm_eps", "1e-6"),
        ("conv_size", 1),
        ("use_gate", "yes"),
        ("tie_word_embeddings", 1),
    ],
)
def test_impossible_values_are_named(field: str, value: Any) -> None:
    assert "must be" in refused(InvalidCheckpoint, field, **{field: value})


def test_silu_is_swish() -> None:
    assert parse(hidden_act="silu", output_gate_activation="silu") == parse()


def test_fields_without_influence_are_ignored() -> None:
    assert parse(fuse_norm=False, use_cache=False, transformers_version="4.0", x=1) == parse()
