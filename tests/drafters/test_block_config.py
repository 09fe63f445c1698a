# SPDX-License-Identifier: Apache-2.0
"""config.json of block drafters: published layouts, round trips, refusals by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specla.drafters.block_config import (
    BlockConfig,
    check_target,
    expected_tensors,
    parse_block_config,
)
from specla.errors import ConfigError, InvalidCheckpoint
from specla.models.base import ModelInfo
from specla.ops.contract import RecurrentShape

QWEN = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
IDS = [1, 9, 17, 25, 33]
# Hand-written after the layouts that are published; no file is copied.
DFLASH: dict[str, Any] = {
    **QWEN,
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": IDS},
    "layer_types": ["full_attention"] * 5,
}
SLIDING: dict[str, Any] = {
    **{k: v for k, v in DFLASH.items() if k != "rope_theta"},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "sliding_window": 2048,
}
DEEPSPEC: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "num_anchors": 512,
    "target_layer_ids": IDS,
}
SPECFORGE: dict[str, Any] = {
    **QWEN,
    "architectures": ["DSparkDraftModel"],
    "block_size": 7,
    "dflash_config": {
        "attention_mode": "gqa",
        "causal": False,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 151669,
        "projector_type": "dspark",
        "target_layer_ids": IDS,
    },
}
PUBLISHED = {"dflash": DFLASH, "sliding": SLIDING, "deepspec": DEEPSPEC, "specforge": SPECFORGE}


def parse(values: dict[str, Any]) -> BlockConfig:
    return parse_block_config(json.loads(json.dumps(values)), "file")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layout_survives_being_written_again(name: str) -> None:
    config = parse(PUBLISHED[name])
    assert parse(config.as_dict()) == config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.target_layer_ids == tuple(IDS)
    assert config.mask_token_id == 151669


def test_block_size_means_what_the_layout_means() -> None:
    """15 drafts of 16 inputs in DFlash, 7 of 7 in DSpark, whatever the architecture is called."""
    assert [parse(x).num_drafts for x in PUBLISHED.values()] == [15, 15, 7, 7]
    renamed = {**DEEPSPEC, "architectures": ["DFlashDraftModel"]}
    assert parse(renamed) == parse(DEEPSPEC)
    assert parse({**DFLASH, "architectures": ["DSparkDraftModel"]}) == parse(DFLASH)


def test_flat_and_nested_keys_are_the_same_config() -> None:
    assert parse(SPECFORGE) == parse(DEEPSPEC)
    nested = SPECFORGE["dflash_config"]
    assert parse({**SPECFORGE, **nested}) == parse(DEEPSPEC)
    with pytest.raises(InvalidCheckpoint, match=r"markov_rank .* got 256 and 128"):
        parse({**SPECFORGE, "markov_rank": 128})


def test_windows_and_causality() -> None:
    config = parse(SLIDING)
    assert config.windows == (2048,) * 4 + (None,)
    assert config.rope_theta == 1e7
    # DFlash's own rule where the file does not say: layers with a window are causal.
    assert [config.causal(i) for i in (0, 4)] == [True, False]
    assert [parse({**SLIDING, "is_causal": False}).causal(i) for i in (0, 4)] == [False, False]
    assert parse({**SPECFORGE, "sliding_window": 4}).windows == (None,) * 5
    unsaid = parse({**DEEPSPEC, "layer_types": SLIDING["layer_types"], "sliding_window": 9})
    assert not unsaid.causal(0)


def nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {**DFLASH["dflash_config"], **changes}}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("selector_rank", nested(selector_rank=256)),
        ("causal_head", nested(causal_head=True)),
        ("causal", {"is_causal": True, **nested(causal=False)}),
        ("mask_token_id", nested(mask_token_id=151936)),
        ("target_layer_ids", nested(target_layer_ids=None)),
        ("target_layer_ids", nested(target_layer_ids=[-1, 3])),
        ("markov_head_type", {"markov_rank": 4, "markov_head_type": "gated"}),
        ("attention_bias", {"attention_bias": True}),
        ("rope_scaling", {"rope_scaling": {"rope_type": "yarn"}}),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}),
        ("rope_theta", {"rope_theta": None}),
        ("num_key_value_heads", {"num_key_value_heads": 5}),
        ("head_dim", {"head_dim": 5}),
        ("block_size", {"block_size": 1}),
        (
            "confidence_head_with_markov",
            {"enable_confidence_head": True, "confidence_head_with_markov": True},
        ),
        ("confidence_temperatures", {"confidence_temperatures": [1.0] * 15}),
        ("draft_vocab_size", {"draft_vocab_size": 32000}),
        ("layer_types", {"layer_types": ["full_attention"]}),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint, match=field):
        parse({**DFLASH, **changes})


def target(**changes: Any) -> ModelInfo:
    shape = RecurrentShape(
        num_layers=36, num_key_heads=1, num_value_heads=1, key_dim=2, value_dim=4, conv_width=4
    )
    fields: dict[str, Any] = {
        "architecture": "",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "num_parameters": 0,
        "weight_bytes": 0,
        "recurrent": shape,
        "eos_token_ids": (),
        "fingerprint": "ab",
    }
    return ModelInfo(**{**fields, **changes})


def test_another_target_is_refused_by_name() -> None:
    config = parse(DEEPSPEC)
    check_target(config, target(), "file")
    check_target(replace(config, target_fingerprint="ab"), target(), "file")
    fewer = replace(target().recurrent, num_layers=35)
    unsaid = replace(config, num_target_layers=None)
    for changed, info, name in (
        (config, target(vocab_size=9), "vocabulary"),
        (config, target(hidden_size=9), "width"),
        (config, target(recurrent=fewer), "number of layers"),
        (unsaid, target(recurrent=replace(fewer, num_layers=33)), "feature layers"),
        (replace(config, target_fingerprint="cd"), target(), "target_fingerprint"),
    ):
        with pytest.raises(ConfigError, match=name):
            check_target(changed, info, "file")


def test_tensor_names_are_the_published_ones() -> None:
    tensors = expected_tensors(parse(DEEPSPEC))
    assert tensors["fc.weight"] == (2560, 5 * 2560)
    assert tensors["layers.4.self_attn.k_proj.weight"] == (1024, 2560)
    assert tensors["layers.0.self_attn.q_norm.weight"] == (128,)
    assert tensors["markov_head.markov_w2.weight"] == (151936, 256)
    assert tensors["confidence_head.proj.weight"] == (1, 2560 + 256)
    plain = expected_tensors(parse(DFLASH))
    assert not any("head" in name for name in plain)
    assert len(plain) == 2 + 5 * 11 + 1
