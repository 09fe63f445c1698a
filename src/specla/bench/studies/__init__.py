# SPDX-License-Identifier: Apache-2.0
"""Studies by name: what speculation is worth when one thing after another is changed.

A new study is one file with one class (`study.Study`) and one line of `REGISTRY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from specla.errors import ConfigError

if TYPE_CHECKING:
    from specla.bench.studies.study import Study

REGISTRY: Mapping[str, str] = {
    "controlled": "specla.bench.studies.controlled:Controlled",
    "tree": "specla.bench.studies.tree:Tree",
    "reader": "specla.bench.studies.reader:Reader",
    "mixer": "specla.bench.studies.mixer:Mixer",
    "batch": "specla.bench.studies.batch:Batch",
}


def find(name: str) -> Study:
    """The study of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in REGISTRY:
        raise ConfigError(f"a study must be one of {', '.join(REGISTRY)}, got {name!r}")
    module, _, attribute = REGISTRY[name].partition(":")
    return cast("Study", getattr(import_module(module), attribute)())
