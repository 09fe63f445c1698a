# SPDX-License-Identifier: Apache-2.0
"""Strict, streaming reading of safetensors checkpoints.

What the model expects and what the files hold must be the same set of tensors with the same
shapes; the first difference is an `InvalidCheckpoint` that names the tensor and the file. All
headers are checked before the first byte of weights is read. Pickle files are never opened.

Source: the safetensors format (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specla.errors import InvalidCheckpoint
from specla.models.files import parse_json_object, read_json_object
from specla.models.resolve import INDEX_FILE, SINGLE_FILE

Shape = tuple[int, ...]
Progress = Callable[[int, int], None]

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: file, stored dtype (safetensors' name), shape, byte range."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder's tensors by name; headers only, no weights in memory."""

    folder: Path
    entries: Mapping[str, TensorEntry]


def read_checkpoint(folder: Path, *, file: str = SINGLE_FILE) -> Checkpoint:
    """Read and check the headers of `model.safetensors`, or of every shard the index names.

    If both forms are present the single file is used, as in transformers. file: its name, where
    it is another.

    Raises:
        InvalidCheckpoint: no safetensors weights (pickles are refused with the reason), a
            missing, truncated or damaged file, a tensor in two shards, an index that disagrees
            with its shards.
    """
    single, index = folder / file, folder / INDEX_FILE
    if single.is_file():
        return Checkpoint(folder=folder, entries=_read_header(single))
    if index.is_file():
        return Checkpoint(folder=folder, entries=_read_shards(index))
    raise InvalidCheckpoint(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    pickles = [n for n in names if any(fnmatchcase(n, pattern) for pattern in _PICKLES)]
    need = f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}"
    if pickles:
        return (
            f"{need}, but holds only {pickles[0]}; pickle files can run code when opened and are "
            "never loaded; convert the checkpoint to safetensors"
        )
    return f"{need}, but holds neither; give the folder of a complete checkpoint"


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    where = _weight_map(index)
    entries: dict[str, TensorEntry] = {}
    for shard in dict.fromkeys(where.values()):
        for name, entry in _read_header(index.parent / shard, listed_in=index).items():
            if name in entries:
                raise InvalidCheckpoint(
                    f"tensor {name} must be in one shard, but is in {entries[name].file.name} and "
                    f"in {shard}; save the checkpoint again"
                )
            entries[name] = entry
    for name, shard in where.items():
        if name not in entries or entries[name].file.name != shard:
            given = entries[name].file.name if name in entries else "in no shard"
            raise InvalidCheckpoint(
                f"tensor {name} must be in {shard}, as {index} says, but is {given}; "
                "the index and the shards do not belong together"
            )
    return entries


def _weight_map(index: Path) -> dict[str, str]:
    where = read_json_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InvalidCheckpoint(f"{index} must hold a non-empty object 'weight_map'")
    for name, shard in where.items():
        # Only plain file names: an index must not lead out of its folder.
        plain = isinstance(shard, str) and shard.endswith(".safetensors")
        if not plain or Path(shard).name != shard or "\\" in shard or "\0" in shard:
            raise InvalidCheckpoint(
                f"{index} must map {name} to a .safetensors file beside it, got {shard!r}"
            )
    return where


def _read_header(path: Path, *, listed_in: Path | None = None) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > MAX_HEADER_BYTES:
                raise InvalidCheckpoint(
                    f"{path} must be a safetensors file, but its header of {length} bytes does "
                    f"not fit its {size} bytes: truncated or garbage; download or copy it again"
                )
            header = parse_json_object(file.read(length), f"the header of {path}")
    except OSError as error:
        says = f", which {listed_in.name} names," if listed_in else ""
        raise InvalidCheckpoint(
            f"{path}{says} must be a readable file ({error.strerror}); complete the checkpoint"
        ) from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + length) for name, info in header.items()}
    _check_ranges(path, entries, 8 + length, size)
    return entries


def _entry(path: Path, name: str, info: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        ints = [*shape, start, end]
        if not isinstance(dtype, str) or any(type(i) is not int or i < 0 for i in ints):
            raise TypeError
    except (TypeError, KeyError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{path}: the header must give dtype, shape and data_offsets of {name}, got "
            f"{str(info)[:120]}; the file is damaged, download or copy it again"
        ) from error
    return TensorEntry(file=path, dtype=dtype, shape=shape, start=base + start, end=base + end)


def _check_ranges(path: Path, entries: Mapping[str, TensorEntry], base: int, size: int) -> None:
    """Byte ranges follow each other without gap or overlap and end where the file ends."""
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at or entry.end < entry.start:
            raise InvalidCheckpoint(
                f"{path}: tensor {name} must start at byte {at}, but its header says "
                f"{entry.start}..{entry.end}; the file is damaged, download or copy it again"
            )
        at = entry.end
    if at != size:
        state = "truncated" if at > size else "too long"
        raise InvalidCheckpoint(
            f"{path} must be {at} bytes long, has {size}: {state}; download or copy it again"
        )


def load_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, Shape],
    *,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Load exactly `expected`, one tensor at a time, each converted and moved as it is read.

    Args:
        checkpoint: from `read_checkpoint`.
        expected: shape of every tensor of the model, by name.
        device: where the result lives.
        dtype_of: floating dtype to keep a tensor in, by name.
        ignore: patterns (fnmatch) of names that may be present and are not read.
        progress: called with (bytes done, bytes in all) of the files after every tensor.

    Returns:
        Contiguous tensors, in the order of `expected`.

    Raises:
        InvalidCheckpoint: missing, unexpected, misshapen or non-float tensors, found before
            anything is read; a file that cannot be read.
    """
    check_tensors(checkpoint, expected, ignore=ignore)
    total = sum(checkpoint.entries[name].num_bytes for name in expected)
    done, loaded = 0, dict.fromkeys(expected, torch.empty(0))
    for path in dict.fromkeys(checkpoint.entries[name].file for name in expected):
        names = [name for name in expected if checkpoint.entries[name].file == path]
        # Handing the path to the library once per file keeps a single mapping open at a time.
        for name, tensor in _stream(path, names):
            loaded[name] = _placed(tensor, device, dtype_of(name))
            done += checkpoint.entries[name].num_bytes
            if progress is not None:
                progress(done, total)
    return loaded


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    placed = tensor.to(device=device, dtype=dtype).contiguous()
    # A tensor that needed no change would still be a view of the file mapped into memory.
    return placed.clone() if placed.data_ptr() == tensor.data_ptr() else placed


def _stream(path: Path, names: list[str]) -> Iterable[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in names:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidCheckpoint(
            f"{path} must be a valid safetensors file ({reason}); download or copy it again"
        ) from error


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], *, ignore: Iterable[str] = ()
) -> None:
    """Compare names, shapes and dtype families with `expected`; see `load_tensors`."""
    entries, patterns = checkpoint.entries, tuple(ignore)
    missing = [name for name in expected if name not in entries]
    if missing:
        raise InvalidCheckpoint(
            f"{checkpoint.folder} must hold tensor {missing[0]} {list(expected[missing[0]])}, "
            f"which is missing{_more(missing)}; the files and config.json do not belong together"
        )
    surplus = [name for name in entries if name not in expected]
    surplus = [n for n in surplus if not any(fnmatchcase(n, pattern) for pattern in patterns)]
    if surplus:
        raise InvalidCheckpoint(
            f"{entries[surplus[0]].file} must hold only tensors of the configured model, but has "
            f"{surplus[0]} {list(entries[surplus[0]].shape)}{_more(surplus)}; "
            "the files and config.json do not belong together"
        )
    for name, shape in expected.items():
        _check_entry(name, entries[name], shape, expected)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_entry(
    name: str, entry: TensorEntry, shape: Shape, expected: Mapping[str, Shape]
) -> None:
    if entry.shape != shape:
        raise InvalidCheckpoint(
            f"tensor {name} in {entry.file} must have shape {list(shape)} by config.json, has "
            f"{list(entry.shape)}; {_shape_hint(name, entry.shape, expected)}"
        )
    if entry.dtype not in FLOAT_BYTES:
        raise InvalidCheckpoint(
            f"tensor {name} in {entry.file} must be one of {', '.join(FLOAT_BYTES)}, is "
            f"{entry.dtype}; quantised or integer weights are not supported, convert them first"
        )
    need = FLOAT_BYTES[entry.dtype]
    for size in shape:
        need *= size
    if entry.num_bytes != need:
        raise InvalidCheckpoint(
            f"tensor {name} in {entry.file} must have {need} bytes, has {entry.num_bytes}; "
            "the file is damaged, download or copy it again"
        )


def _shape_hint(name: str, given: Shape, expected: Mapping[str, Shape]) -> str:
    for mine, other in ((".k_", ".v_"), (".q_", ".v_"), (".v_", ".k_")):
        if mine in name and expected.get(name.replace(mine, other)) == given:
            return "it has the other's shape: K and V swapped (head_dim, expand_v)?"
    if given == expected[name][::-1]:
        return "looks transposed: K and V swapped, or saved as [in, out]? must be [out, in]"
    return "the files and config.json do not belong together"
