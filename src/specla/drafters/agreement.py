# SPDX-License-Identifier: Apache-2.0
"""What trained drafters must agree on with a target, and what their config.json have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specla.errors import ConfigError
from specla.models.fields import Fields
from specla.models.files import read_json_object

_ADVICE = "use the target it was trained for"


def check_same(
    pairs: Iterable[tuple[str, object, object]], where: str, who: str = "a drafter"
) -> None:
    """Refuse another target. pairs: (what, the drafter's, the target's); None is not compared.

    Raises:
        ConfigError: a pair differs; it is named.
    """
    for what, mine, theirs in pairs:
        if mine not in (None, theirs):
            raise ConfigError(
                f"{who} and its target must have the same {what}, but {where} has {mine} and the "
                f"target {theirs}; {_ADVICE}"
            )


def check_layers(what: str, ids: Sequence[int], count: int, where: str) -> None:
    """Refuse ids of layers that a target of `count` layers does not have.

    Raises:
        ConfigError: one is not below `count`.
    """
    if max(ids) >= count:
        raise ConfigError(
            f"{what} must be below the target's {count} layers, but {where} has {list(ids)}; "
            f"{_ADVICE}"
        )


def check_tokenizer(trained_with: str | None, digest: str | None, where: object) -> None:
    """Refuse another tokenizer than a drafter was trained with; None is not compared.

    Raises:
        ConfigError: the hashes differ.
    """
    if None not in (trained_with, digest) and trained_with != digest:
        raise ConfigError(
            f"a drafter must be used with the tokenizer it was trained with (tokenizer_hash), but "
            f"{where} names {trained_with} and the target's is {digest}; {_ADVICE}"
        )


def config_in(folder: Path, name: str) -> tuple[dict[str, Any], str]:
    """config.json of drafter `name`'s folder, and its path for messages.

    Raises:
        ConfigError: no such file. InvalidCheckpoint: it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"drafter {name} needs the folder of a trained drafter, but {path} does not exist; "
            f"train one with `specla train TARGET --kind {name}`, then --drafter {name}:FOLDER"
        )
    return read_json_object(path), str(path)


def check_only(read: Fields, valid: Mapping[str, Sequence[object]]) -> None:
    """Refuse a value that ours do not compute, of fields that must be absent or one of `valid`.

    Raises:
        InvalidCheckpoint: such a value.
    """
    for field, values in valid.items():
        if (given := read.values.get(field)) is not None and given not in values:
            read.fail(field, " or ".join(map(repr, values)) or "absent", given)


def inner_object(read: Fields, field: str) -> Fields:
    """A field that is an object; empty where it is absent.

    Raises:
        InvalidCheckpoint: it is something else.
    """
    values = read.values.get(field)
    if values is not None and not isinstance(values, dict):
        read.fail(field, "an object", values)
    return Fields(values or {}, f"{field} in {read.where}")


def rope_theta(read: Fields, default: float | None = None) -> float:
    """The base of plain rotary positions, flat or in `rope_parameters`.

    Raises:
        InvalidCheckpoint: other rotary positions, or no base where there is no default.
    """
    inner = inner_object(read, "rope_parameters")
    for name, value in (("rope_type", "default"), ("partial_rotary_factor", 1)):
        if (given := inner.values.get(name, value)) != value:
            read.fail(f"rope_parameters.{name}", repr(value), given)
    flat = read.values.get("rope_theta") is not None
    return (read if flat else inner).positive("rope_theta", default=default)
