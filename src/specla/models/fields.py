# SPDX-License-Identifier: Apache-2.0
"""Fields of a checkpoint's config.json, read with their types and ranges checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specla.errors import InvalidCheckpoint


class Fields:
    """Typed access to one JSON object; null counts as absent, as in fla.

    Every refusal is an `InvalidCheckpoint` that names the field and `where`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, field: str, must: str, given: object) -> NoReturn:
        """Refuse a field's value."""
        raise InvalidCheckpoint(
            f"{field} in {self.where} must be {must}, got {repr(given)[:80]}; correct the file"
        )

    def _get(self, field: str, default: Any) -> Any:
        given = self.values.get(field)
        if given is None:
            given = default
        if given is None:
            raise InvalidCheckpoint(
                f"{self.where} must give {field}, but it is missing and has no safe default; "
                "add the field with the value the checkpoint was trained with"
            )
        return given

    def count(
        self, field: str, *, default: int | None = None, least: int = 1, most: int = 1 << 24
    ) -> int:
        """An integer from `least` to `most`."""
        given = self._get(field, default)
        if type(given) is not int or not least <= given <= most:
            self.fail(field, f"an integer from {least} to {most}", given)
        return int(given)

    def positive(self, field: str, *, default: float | None = None) -> float:
        """A number above 0."""
        given = self._get(field, default)
        if type(given) not in (int, float) or not 0 < given < 1e9:
            self.fail(field, "a positive number", given)
        return float(given)

    def flag(self, field: str, *, default: bool) -> bool:
        """true or false."""
        given = self._get(field, default)
        if not isinstance(given, bool):
            self.fail(field, "true or false", given)
        return bool(given)

    def choice(self, field: str, values: Sequence[str]) -> str:
        """One of `values`."""
        given = self._get(field, None)
        if given not in values:
            self.fail(field, f"one of {', '.join(values)}", given)
        return str(given)

    def text(self, field: str) -> str | None:
        """A string, or None where it is absent."""
        given = self.values.get(field)
        if given is not None and not isinstance(given, str):
            self.fail(field, "a string", given)
        return given

    def counts(self, field: str, *, most: int) -> tuple[int, ...]:
        """A list of different integers from 0 to `most`, at least one."""
        given = self._get(field, None)
        valid = isinstance(given, list) and given and len(set(given)) == len(given)
        if not valid or not all(type(i) is int and 0 <= i <= most for i in given):
            self.fail(field, f"a list of different integers from 0 to {most}", given)
        return tuple(given)
