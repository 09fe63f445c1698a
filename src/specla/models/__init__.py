# SPDX-License-Identifier: Apache-2.0
"""Target models: a registry from a checkpoint's architecture to the class that runs it.

The registry is literal text and classes are imported when first used. Nothing named inside a
checkpoint is ever imported: a checkpoint chooses among these classes and cannot bring its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from specla.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from specla.models.base import TargetModel
    from specla.models.weights import Progress

REGISTRY = {
    "GatedDeltaNetForCausalLM": "specla.models.fla_gdn:FlaGDN",
}
MODEL_TYPES = {
    "gated_deltanet": "GatedDeltaNetForCausalLM",
}


def load(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    revision: str | None = None,
    progress: Progress | None = None,
) -> TargetModel:
    """Load the model called `name` (`demo`, a directory, a hub id; see `resolve`).

    Args:
        device, dtype: where and in which floating dtype the weights are kept.
        revision: a hub id's branch, tag or commit.
        progress: called with (bytes done, bytes in all) while weights load.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidCheckpoint: see `specla.errors`.
    """
    from specla.models.resolve import resolve

    return load_folder(
        resolve(name, revision=revision), device=device, dtype=dtype, progress=progress
    )


def load_folder(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> TargetModel:
    """`load` for a folder that is already resolved."""
    import torch

    from specla.models.files import read_json_object

    path = REGISTRY[architecture_of(read_json_object(folder / "config.json"), str(folder))]
    module, _, attribute = path.partition(":")
    family: Any = getattr(import_module(module), attribute)
    model = family.from_checkpoint(
        folder, device=torch.device(device), dtype=dtype, progress=progress
    )
    return cast("TargetModel", model)


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The registry key for a config: its first listed architecture, else its model_type.

    Raises:
        UnsupportedModel: neither is one we run; the message lists those we do.
    """
    listed = config.get("architectures")
    if isinstance(listed, list) and listed:
        given = listed[0]
        if isinstance(given, str) and given in REGISTRY:
            return given
    else:
        given = config.get("model_type")
        if isinstance(given, str) and given in MODEL_TYPES:
            return MODEL_TYPES[given]
    raise UnsupportedModel(
        f"the architecture must be one of: {', '.join(sorted(REGISTRY))}; {where} has "
        f"{given!r}; choose another checkpoint"
    )
