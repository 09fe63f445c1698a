# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. Toy checkpoints are reproducible, complete and refuse what cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from specla.errors import ConfigError
from specla.models.toy import write_toy_checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    one = write_toy_checkpoint(tmp_path / "one", seed=3, shards=2)
    two = write_toy_checkpoint(tmp_path / "two", seed=3, shards=2)
    assert contents(one) == contents(two) == contents(write_toy_checkpoint(one, seed=3, shards=2))


def test_no_tokenizer_where_its_bytes_have_no_room(tmp_path: Path) -> None:
    assert (write_toy_checkpoint(tmp_path / "a", vocab=261) / "tokenizer.json").exists()
    assert not (write_toy_checkpoint(tmp_path / "b", vocab=260) / "tokenizer.json").exists()


def test_decays_reach_from_slow_to_fast(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path, heads=64, head_dim=4)
    tensors = load_file(folder / "model.safetensors")
    rate = tensors["model.layers.0.attn.A_log"].exp()
    step = tensors["model.layers.0.attn.dt_bias"].exp().log1p()
    decay = (-rate * step).exp()
    assert decay.max() > 0.98
    assert decay.min() < 0.5


@pytest.mark.parametrize("options", [{"vocab": 4}, {"shards": 0}, {"shards": 99}])
def test_impossible_toys(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        write_toy_checkpoint(tmp_path, **options)


def test_weights_of_another_toy_are_not_mixed_in(tmp_path: Path) -> None:
    write_toy_checkpoint(tmp_path, shards=2)
    for shards in (1, 3):
        with pytest.raises(ConfigError, match="give a new folder"):
            write_toy_checkpoint(tmp_path, shards=shards)
