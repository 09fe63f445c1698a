# SPDX-License-Identifier: Apache-2.0
"""Tier: algebra. The oracle itself: resumable, and equal to an independently written one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracle_gdn import Oracle

from specla.models.toy import write_toy_checkpoint

SHARED = Path(__file__).parents[3] / "shared/reference/checks/fla_gdn_oracle.py"


def oracle(folder: Path) -> Oracle:
    return Oracle.from_folder(folder, json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("cut", range(1, 7))
def test_resuming_changes_nothing(tmp_path: Path, cut: int) -> None:
    model = oracle(write_toy_checkpoint(tmp_path, vocab=97))
    tokens = [3, 1, 4, 1, 5, 9, 2]
    whole, _ = model.run(tokens)
    _, memory = model.run(tokens[:cut])
    rest, _ = model.run(tokens[cut:], memory)
    torch.testing.assert_close(rest, whole[cut:], rtol=1e-12, atol=1e-12)


def shared_oracle() -> ModuleType:
    if not SHARED.exists():
        pytest.skip("the independent oracle is not part of this repository")
    spec = importlib.util.spec_from_file_location("shared_oracle", SHARED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("neg", [False, True])
@pytest.mark.parametrize(("heads", "key", "expand"), [(2, 16, 2.0), (3, 12, 0.5)])
def test_equals_an_independent_oracle(
    tmp_path: Path, heads: int, key: int, expand: float, neg: bool
) -> None:
    other = shared_oracle()
    folder = write_toy_checkpoint(
        tmp_path, vocab=97, heads=heads, head_dim=key, expand_v=expand, neg_eigval=neg
    )
    model, tokens = oracle(folder), torch.randint(0, 97, (11,)).tolist()
    mine, memory = model.run(tokens)
    ids, value = torch.tensor(tokens), int(key * expand)
    theirs, cache = other.forward(dict(model.tensors), ids, 2, heads, key, value, neg=neg)
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    for layer, (_, S) in zip(memory, cache, strict=True):
        torch.testing.assert_close(layer.S, S, rtol=1e-11, atol=1e-11)
