# SPDX-License-Identifier: Apache-2.0
"""Drafter options: checked (every bad value is a ConfigError that names the option), and put into
words."""

from __future__ import annotations

import hashlib
import math

from specla.errors import ConfigError


def require(ok: bool, option: str, must: str, given: object) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"drafter option {option} must be {must}, got {given!r}")


def require_int(option: str, value: object, low: int, high: int) -> None:
    """`value` must be an integer in [low, high]; True and False are not integers."""
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(ok, option, f"an integer in [{low}, {high}]", value)


def described(**options: object) -> str:
    """Options as one text, "top_k=4 tau=6", for `DrafterInfo.variant`; 6.0 is 6."""

    def shown(value: object) -> object:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return " ".join(f"{name}={shown(value)}" for name, value in options.items())


def digest(*configs: object) -> str:
    """Tells configs of checkpoints apart, in 12 hex digits: frozen records of plain values."""
    return hashlib.sha256(repr(configs).encode()).hexdigest()[:12]


def require_flag(option: str, value: object) -> None:
    """`value` must be True or False."""
    require(isinstance(value, bool), option, "True or False", value)


def require_number(option: str, value: object, low: float, high: float) -> None:
    """`value` must be a finite number in [low, high]."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    ok = ok and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]
    require(ok, option, f"a number in [{low:g}, {high:g}]", value)
