# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. Whole checkpoints: registry, fused weights, dtypes, fingerprints, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import models
from specla.errors import InvalidCheckpoint, SpeclaError, UnsupportedModel
from specla.models.fla_gdn import FlaGDN
from specla.models.toy import write_toy_checkpoint


def load(folder: Path, dtype: torch.dtype = torch.float32) -> FlaGDN:
    model = models.load(str(folder), device="cpu", dtype=dtype)
    assert isinstance(model, FlaGDN)
    return model


def edit_config(folder: Path, drop: str | None = None, **fields: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    values.pop(drop, None)
    path.write_text(json.dumps(values))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def refused(folder: Path, kind: type[SpeclaError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_info_describes_the_model(tmp_path: Path) -> None:
    info = load(write_toy_checkpoint(tmp_path, num_v_heads=4)).info
    assert info.architecture == "GatedDeltaNetForCausalLM"
    assert (info.vocab_size, info.hidden_size, info.eos_token_ids) == (320, 64, (4,))
    shape = info.recurrent
    assert (shape.num_key_heads, shape.num_value_heads) == (2, 4)
    assert (shape.key_dim, shape.value_dim, shape.conv_channels) == (16, 32, 192)
    stored = load_file(tmp_path / "model.safetensors").values()
    assert info.num_parameters == sum(t.numel() for t in stored)
    assert info.weight_bytes == 4 * info.num_parameters


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    model = load(write_toy_checkpoint(tmp_path, tie=True))
    stored = load_file(tmp_path / "model.safetensors").values()
    assert model.info.num_parameters == sum(t.numel() for t in stored)


def test_459_names_of_the_published_checkpoint_load(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(
        tmp_path, num_layers=24, hidden=32, head_dim=8, expand_v=1.0, dead_d=True, shards=2
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 459
    assert len([name for name in index["weight_map"] if name.endswith(".attn.D")]) == 24
    assert load(folder).info.recurrent.num_layers == 24


def test_only_the_dead_tensor_of_a_layer_is_dropped(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    edit_weights(folder, lambda t: t.update({"model.layers.0.mlp.D": torch.zeros(2)}))
    refused(folder, InvalidCheckpoint, "model.layers.0.mlp.D")


def test_low_precision_keeps_the_decay_parameters_in_float32(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    block = load(folder, torch.bfloat16)._weights.blocks[1]
    stored = load_file(folder / "model.safetensors")
    assert block.in_proj.dtype == block.conv.dtype == block.o_norm.dtype == torch.bfloat16
    assert torch.equal(block.dt_bias, stored["model.layers.1.attn.dt_bias"])
    assert torch.equal(block.A, -stored["model.layers.1.attn.A_log"].exp())


def test_rows_are_fused_in_the_documented_order(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path, num_v_heads=4)
    weights, stored = load(folder)._weights, load_file(folder / "model.safetensors")

    def rows(*names: str) -> Tensor:
        return torch.cat([stored[f"model.layers.1.{name}.weight"] for name in names])

    block = weights.blocks[1]
    assert torch.equal(block.in_proj, rows(*(f"attn.{n}_proj" for n in "qkvgab")))
    assert torch.equal(block.conv, rows(*(f"attn.{n}_conv1d" for n in "qkv"))[:, 0])
    assert torch.equal(block.gate_up, rows("mlp.gate_proj", "mlp.up_proj"))
    assert torch.equal(weights.head, stored["lm_head.weight"])


def test_fingerprint_names_the_weights_not_the_files(tmp_path: Path) -> None:
    def print_of(name: str, **options: Any) -> str:
        return load(write_toy_checkpoint(tmp_path / name, **options)).info.fingerprint

    plain = print_of("plain")
    assert plain == print_of("again") == print_of("shards", shards=3)
    assert plain == print_of("dead", dead_d=True)
    others = [
        print_of("seed", seed=1),
        print_of("tied", tie=True),
        print_of("beta", neg_eigval=True),
    ]
    assert len({plain, *others}) == 4


def test_fingerprint_sees_past_the_first_row(tmp_path: Path) -> None:
    """As a fine-tuned copy may have it: no tensor differs in its first bytes."""
    folder = write_toy_checkpoint(tmp_path)
    before = load(folder).info.fingerprint
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        tensor[1:] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert load(folder).info.fingerprint != before


def test_weights_that_give_no_finite_logits_are_named(tmp_path: Path) -> None:
    """... and not the machine."""
    folder = write_toy_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    next(x for name, x in tensors.items() if name.endswith("o_norm.weight"))[0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match="finite logits"):
        load(folder).check_rows(4)


def test_end_tokens_come_from_generation_config_then_config(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    generation = folder / "generation_config.json"
    for value, want in (([4, 0, 4], (4, 0)), (7, (7,)), (None, (4,)), ([], (4,))):
        generation.write_text(json.dumps({"eos_token_id": value}))
        assert load(folder).info.eos_token_ids == want
    generation.unlink()
    assert load(folder).info.eos_token_ids == (4,)
    edit_config(folder, drop="eos_token_id")
    assert load(folder).info.eos_token_ids == ()


@pytest.mark.parametrize("value", [-1, 320, "4", [4, 1.5], True, {}])
def test_impossible_end_tokens(tmp_path: Path, value: Any) -> None:
    folder = write_toy_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    refused(folder, InvalidCheckpoint, "eos_token_id", "correct")


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["GatedDeltaNetModel"]},
        {"architectures": [], "model_type": "mamba2"},
        {"architectures": None, "model_type": None},
        {"architectures": [["x"]]},
    ],
)
def test_unknown_architecture_lists_the_known_ones(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write_toy_checkpoint(tmp_path)
    edit_config(folder, **fields)
    refused(folder, UnsupportedModel, "must be one of: GatedDeltaNetForCausalLM")


def test_model_type_alone_is_enough(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    edit_config(folder, drop="architectures")
    assert load(folder).info.architecture == "GatedDeltaNetForCausalLM"


@pytest.mark.parametrize("field", ["num_heads", "head_dim", "expand_v", "hidden_size"])
def test_missing_config_field(tmp_path: Path, field: str) -> None:
    folder = write_toy_checkpoint(tmp_path)
    edit_config(folder, drop=field)
    refused(folder, InvalidCheckpoint, f"must give {field}", str(folder / "config.json"))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1, "a": 2}', "\ufeff{}"])
def test_damaged_config(tmp_path: Path, content: str) -> None:
    folder = write_toy_checkpoint(tmp_path)
    (folder / "config.json").write_text(content, encoding="utf-8")
    refused(folder, InvalidCheckpoint, str(folder / "config.json"))


def test_key_and_value_sizes_swapped_in_the_config(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path)
    edit_config(folder, head_dim=32, expand_v=0.5)
    refused(folder, InvalidCheckpoint, "model.layers.0.attn.q_proj", "K and V swapped")


def test_transposed_projection(tmp_path: Path) -> None:
    folder, name = write_toy_checkpoint(tmp_path), "model.layers.1.attn.k_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name].T}))
    refused(folder, InvalidCheckpoint, name, "[32, 64]", "[64, 32]", "looks transposed")


def test_missing_tensor(tmp_path: Path) -> None:
    folder, name = write_toy_checkpoint(tmp_path), "model.layers.1.attn.A_log"
    edit_weights(folder, lambda t: t.pop(name))
    refused(folder, InvalidCheckpoint, f"{name} [2]", "missing")


def test_truncated_file(tmp_path: Path) -> None:
    path = write_toy_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(tmp_path, InvalidCheckpoint, "truncated", str(path))


def test_code_in_a_repository_is_never_run(tmp_path: Path) -> None:
    folder, marker = write_toy_checkpoint(tmp_path / "model"), tmp_path / "code-was-run"
    (folder / "modeling_trap.py").write_text(f"open({str(marker)!r}, 'w')\n")
    auto_map = {"AutoConfig": "modeling_trap.C", "AutoModelForCausalLM": "modeling_trap.M"}
    edit_config(folder, auto_map=auto_map)
    load(folder)
    edit_config(folder, architectures=["TrapForCausalLM"], model_type="modeling_trap")
    refused(folder, UnsupportedModel, "'TrapForCausalLM'")
    assert not marker.exists()
