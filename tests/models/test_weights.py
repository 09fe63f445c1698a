# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. Strict loading: every way a checkpoint can be wrong is refused by name, before any
weight is read, in one line that says what must hold, what was given and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specla.errors import InvalidCheckpoint
from specla.models.weights import load_tensors, read_checkpoint

CPU = torch.device("cpu")
EXPECTED = {"a.k_proj": (4, 6), "a.v_proj": (8, 6), "b": (3,)}


def good() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in EXPECTED.items()}


def single(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def sharded(folder: Path, *shards: Mapping[str, Tensor], where: Any = None) -> Path:
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        save_file(dict(tensors), folder / f"model-{i}.safetensors")
        weight_map.update(dict.fromkeys(tensors, f"model-{i}.safetensors"))
    index = {"weight_map": weight_map if where is None else where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path, **options: Any) -> dict[str, Tensor]:
    options = {"device": CPU, "dtype_of": lambda name: torch.float32, **options}
    return load_tensors(read_checkpoint(folder), EXPECTED, **options)


def refused(folder: Path, *words: str, **options: Any) -> None:
    with pytest.raises(InvalidCheckpoint) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_single_file_and_shards_load_the_same(tmp_path: Path) -> None:
    tensors = good()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = load(single(tmp_path / "one", tensors))
    first, *others = tensors
    rest = {name: tensors[name] for name in others}
    two = load(sharded(tmp_path / "two", {first: tensors[first]}, rest))
    for name, tensor in tensors.items():
        assert torch.equal(one[name], tensor)
        assert torch.equal(two[name], tensor)


def test_converts_each_tensor_and_reports_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load(
        single(tmp_path, {name: t.to(torch.bfloat16) for name, t in good().items()}),
        dtype_of=lambda name: torch.float64 if name == "b" else torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert {name: t.dtype for name, t in loaded.items()} == {
        "a.k_proj": torch.float32,
        "a.v_proj": torch.float32,
        "b": torch.float64,
    }
    total = 2 * (24 + 48 + 3)
    assert [total] * 3 == [entry[1] for entry in seen]
    assert seen[-1][0] == total
    assert seen == sorted(seen)


def test_result_does_not_depend_on_the_file(tmp_path: Path) -> None:
    tensors = good()
    loaded = load(single(tmp_path, tensors))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 10)
    assert torch.equal(loaded["a.k_proj"], tensors["a.k_proj"])


def test_missing_tensor(tmp_path: Path) -> None:
    refused(single(tmp_path, {"b": torch.zeros(3)}), "a.k_proj [4, 6]", "missing", "and 1 more")


def test_unexpected_tensor(tmp_path: Path) -> None:
    folder = single(tmp_path, {**good(), "attn.D": torch.zeros(8), "extra": torch.zeros(2)})
    refused(folder, "must hold only", "attn.D [8]", "and 1 more")
    refused(folder, "extra [2]", ignore=("*.D",))
    assert load(folder, ignore=("*.D", "extra")).keys() == EXPECTED.keys()


def test_wrong_shape(tmp_path: Path) -> None:
    refused(single(tmp_path, {**good(), "b": torch.zeros(5)}), "b in", "[3]", "[5]")


def test_transposed_shape_is_recognised(tmp_path: Path) -> None:
    folder = single(tmp_path, {**good(), "a.k_proj": torch.zeros(6, 4)})
    refused(folder, "a.k_proj", "[4, 6]", "[6, 4]", "looks transposed", "K and V swapped")


def test_swapped_key_and_value_are_recognised(tmp_path: Path) -> None:
    swapped = {**good(), "a.k_proj": torch.zeros(8, 6), "a.v_proj": torch.zeros(4, 6)}
    refused(single(tmp_path, swapped), "a.k_proj", "[8, 6]", "K and V swapped")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_integer_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = single(tmp_path, {**good(), "b": torch.zeros(3, dtype=dtype)})
    refused(folder, "b in", "must be one of F64, F32, F16, BF16", "quantised or integer")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = good()
    refused(sharded(tmp_path, tensors, {"b": tensors["b"]}), "b must be in one shard", "model-1")


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    folder = sharded(tmp_path, good(), {"more": torch.zeros(1)})
    (folder / "model-1.safetensors").unlink()
    refused(folder, "model-1.safetensors", "model.safetensors.index.json", "No such file")


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    where = {**dict.fromkeys(EXPECTED, "model-0.safetensors"), "ghost": "model-0.safetensors"}
    refused(sharded(tmp_path, good(), where=where), "ghost", "in no shard")


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", 7, "\0"]
)
def test_index_may_not_lead_elsewhere(tmp_path: Path, shard: Any) -> None:
    refused(sharded(tmp_path, good(), where={"b": shard}), "b to a .safetensors file beside it")


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {}}])
def test_malformed_index(tmp_path: Path, content: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("keep", [0, 4, 8, 60, 300, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = single(tmp_path, good()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, str(path), "again")


def test_trailing_bytes(tmp_path: Path) -> None:
    path = single(tmp_path, good()) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    refused(tmp_path, "too long")


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 400, b"\x80\x02}q\x00." * 50, b"PK\x03\x04" * 30, (1 << 40).to_bytes(8, "little")],
    ids=["ones", "pickle", "zip", "giant header"],
)
def test_garbage_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "truncated or garbage", "download or copy it again")


def with_header(folder: Path, header: bytes, data: bytes = b"") -> Path:
    content = len(header).to_bytes(8, "little") + header + data
    (folder / "model.safetensors").write_bytes(content)
    return folder


def entry(start: int, end: int) -> str:
    return f'{{"dtype": "F32", "shape": [3], "data_offsets": [{start}, {end}]}}'


@pytest.mark.parametrize(
    "header",
    [
        "not json",
        "[1]",
        '{"b": 3}',
        '{"b": {"dtype": "F32", "shape": [3]}}',
        '{"b": {"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]}}',
        '{"b": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 12]}}',
        '{"b": {"dtype": 1, "shape": [3], "data_offsets": [0, 12]}}',
        f'{{"b": {entry(0, 12)}, "b": {entry(0, 12)}}}',
        f'{{"b": {entry(0, 12)}, "c": {entry(4, 12)}}}',
        f'{{"b": {entry(12, 0)}}}',
        f'{{"b": {entry(0, 1200)}}}',
        "[" * 100_000,
    ],
)
def test_damaged_header(tmp_path: Path, header: str) -> None:
    refused(with_header(tmp_path, header.encode(), b"\0" * 12), "model.safetensors", "again")


def test_byte_range_that_does_not_fit_the_shape(tmp_path: Path) -> None:
    header = '{"b": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    folder = with_header(tmp_path, header.encode(), b"\0" * 8)
    with pytest.raises(InvalidCheckpoint, match=re.escape("b in")) as caught:
        load_tensors(
            read_checkpoint(folder), {"b": (3,)}, device=CPU, dtype_of=lambda _: torch.float32
        )
    assert "must have 12 bytes, has 8" in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    refused(tmp_path, name, "can run code when opened", "convert the checkpoint to safetensors")


def test_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, "model.safetensors", "holds neither")
