# SPDX-License-Identifier: Apache-2.0
"""Lossless speculative decoding for linear-attention language models.

    from specla import LLM, SamplingParams

Names are resolved when first used (PEP 562): `import specla` loads neither torch nor
transformers, so the command line answers `--help` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specla.errors import ConfigError, ModelNotFound, RequestRejected, SpeclaError
    from specla.llm import LLM
    from specla.request import Completion, SamplingParams, SpeculationReport
    from specla.topology.tree import DraftTree

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "DraftTree",
    "ModelNotFound",
    "RequestRejected",
    "SamplingParams",
    "SpeclaError",
    "SpeculationReport",
    "__version__",
]

_HOME = {
    "LLM": "specla.llm",
    "Completion": "specla.request",
    "ConfigError": "specla.errors",
    "DraftTree": "specla.topology.tree",
    "ModelNotFound": "specla.errors",
    "RequestRejected": "specla.errors",
    "SamplingParams": "specla.request",
    "SpeclaError": "specla.errors",
    "SpeculationReport": "specla.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'specla' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
