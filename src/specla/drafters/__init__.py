# SPDX-License-Identifier: Apache-2.0
"""Drafters by name. A new drafter is one file and one line of `REGISTRY`.

The table is literal and nothing is imported before it is asked for, so a drafter that needs
torch costs nothing to those who do not use it. A drafter's options are the keyword-only
parameters of its class; there is no other list of them. A trained drafter's checkpoint can be
given with its name, "eagle:FOLDER"; without one it is the folder of that name beside the target's
files, and "auto" takes it where it is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import cast

from specla.drafters.base import Drafter, DrafterInfo, DraftRow, Observation
from specla.errors import ConfigError

__all__ = [
    "REGISTRY",
    "TRAINED",
    "UNTRAINED",
    "DraftRow",
    "Drafter",
    "DrafterInfo",
    "Observation",
    "beside",
    "build",
    "checked_options",
    "option_names",
    "resolve_name",
    "with_folder",
]

REGISTRY: Mapping[str, str] = {
    "none": "specla.drafters.none:NoDrafter",
    "ngram": "specla.drafters.ngram:NgramDrafter",
    "suffix": "specla.drafters.suffix:SuffixDrafter",
    "eagle": "specla.drafters.eagle:EagleDrafter",
    "block": "specla.drafters.block:BlockDrafter",
}
TRAINED = ("eagle", "block")
"""Those with weights: `path` is one of their options."""
UNTRAINED = tuple(name for name in REGISTRY if name not in TRAINED)


def beside(target: Path) -> str | None:
    """The trained drafter that lies beside a target's files, as "name:FOLDER"."""
    for name in TRAINED:
        if (target / name / "config.json").is_file():
            return f"{name}:{target / name}"
    return None


def with_folder(name: str, target: Path) -> str:
    """A trained drafter's name with its folder: the one beside the target if it has none yet.

    Raises:
        ConfigError: there is none.
    """
    if name not in TRAINED:
        return name
    if not (target / name / "config.json").is_file():
        raise ConfigError(
            f"drafter {name} needs a trained checkpoint, and {target / name} does not exist; "
            f"train one with `specla train TARGET --kind {name}`, then --drafter {name}:FOLDER"
        )
    return f"{name}:{target / name}"


def resolve_name(name: str) -> str:
    """The registry key that `name` stands for ("auto" becomes a concrete drafter).

    Raises:
        ConfigError: no such drafter; the message lists the valid names.
    """
    if name == "auto":
        from specla.config import DEFAULT_DRAFTER  # imports torch

        return DEFAULT_DRAFTER
    key, colon, _ = name.partition(":")
    if key not in (TRAINED if colon else REGISTRY):
        _refuse("drafter", name, ["auto", *REGISTRY])
    return key


def option_names(name: str) -> tuple[str, ...]:
    """The options that drafter `name` takes, in the order of its documentation."""
    parameters = inspect.signature(_load(resolve_name(name))).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def build(name: str, *, options: Mapping[str, object] | None = None) -> Drafter:
    """A fresh drafter.

    Args:
        name: a key of `REGISTRY`, or "auto"; for a trained one also with its checkpoint's folder.
            `drafter.info.name` tells what was built.
        options: keyword arguments of its class.

    Raises:
        ConfigError: an unknown name or option, or an option out of range.
    """
    return cast(Drafter, _load(resolve_name(name))(**checked_options(name, options or {})))


def checked_options(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments that `build` gives to the class of drafter `name`.

    Raises:
        ConfigError: no such drafter, an option that it does not have, or not one folder.
    """
    _, colon, path = name.partition(":")
    name = resolve_name(name)
    known = option_names(name)
    for option in options:
        if not known:
            raise ConfigError(f"drafter {name} has no options, got {option!r}; leave it out")
        if option not in known:
            _refuse(f"option of drafter {name!r}", option, known)
    if colon and "path" in options:
        raise ConfigError(f"drafter {name}'s folder must be given once; leave option path out")
    if name in TRAINED and not colon and "path" not in options:
        raise ConfigError(f"drafter {name} needs a checkpoint's folder; give {name}:FOLDER")
    found = {**options, **({"path": path} if colon else {})}
    # A number, if it was written like one on the command line.
    return found | ({"path": str(found["path"])} if "path" in found else {})


def _load(name: str) -> type:
    module, _, attribute = REGISTRY[name].partition(":")
    return cast(type, getattr(import_module(module), attribute))


def _refuse(what: str, given: str, valid: Iterable[str]) -> None:
    valid = list(valid)
    close = get_close_matches(given, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"{what} must be one of: {', '.join(valid)}; got {given!r}{hint}")
