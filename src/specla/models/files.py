# SPDX-License-Identifier: Apache-2.0
"""Small files of a checkpoint folder: JSON read defensively, and the end tokens they name.

Nothing here trusts a file: size, encoding, syntax and types are checked, and every refusal is an
`InvalidCheckpoint` that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specla.errors import InvalidCheckpoint

MAX_JSON_BYTES = 64 << 20


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON bytes whose top level must be an object with unique keys.

    Raises:
        InvalidCheckpoint: anything else; `where` names the place in the message.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InvalidCheckpoint(
            f"{where} must be a JSON object, but cannot be read ({reason}); "
            "download or write the file again"
        ) from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(
            f"{where} must hold a JSON object, not a {type(value).__name__}; "
            "download or write the file again"
        )
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read one JSON file of a checkpoint.

    Raises:
        InvalidCheckpoint: missing, unreadable, larger than 64 MiB, or not a JSON object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise InvalidCheckpoint(
                f"{path} must be at most {MAX_JSON_BYTES} bytes, has {size}; is it the right file?"
            )
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidCheckpoint(
            f"{path} must be a readable file ({reason}); a checkpoint folder needs it"
        ) from error


def write_json(path: Path, value: object) -> None:
    """Readable, stable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def eos_token_ids(folder: Path, config: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """End tokens of a checkpoint: generation_config.json's if it names any, else config.json's.

    Either file may hold one id, a list, or null. No end token at all gives an empty tuple.

    Raises:
        InvalidCheckpoint: an id that is not a non-negative integer.
    """
    generation = folder / "generation_config.json"
    if generation.exists():
        ids = _ids(read_json_object(generation).get("eos_token_id"), generation)
        if ids:
            return ids
    source = folder / "config.json"
    values = read_json_object(source) if config is None else config
    return _ids(values.get("eos_token_id"), source)


def _ids(value: Any, path: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InvalidCheckpoint(
            f"eos_token_id in {path} must be a non-negative integer or a list of them, "
            f"got {value!r}; correct the file"
        )
    return tuple(dict.fromkeys(ids))
