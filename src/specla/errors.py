# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet.

Each message says what must hold, what was given, and what to do.

    SpeclaError
    |-- ConfigError (ValueError)        an engine or drafter setting is invalid or has no effect
    |-- RequestRejected (ValueError)    one request is invalid; the engine goes on
    |-- InvalidTree (ValueError)        a draft tree breaks a rule; names the node
    |-- CapacityExceeded                a fixed-size buffer (nodes, log, slots) would overflow
    |-- ModelNotFound                   a path or hub id that cannot be resolved
    |-- UnsupportedModel                a checkpoint whose architecture or fields we cannot run
    |-- InvalidCheckpoint               missing, unexpected or misshapen tensors; a damaged file
    |-- GenerationFailed                one request left no token to draw; others went on
    |   `-- InvalidLogits               (specla.sampling.draw) the rows it happened to, in a round
    |-- ExactnessUnavailable            start-up found row-dependent bits; exact mode is refused
    `-- KernelUnavailable               an explicitly requested implementation cannot run here

`assert` marks our own bugs and never judges user input.
"""

from __future__ import annotations

import sys


class SpeclaError(Exception):
    """Base of every error specla raises on purpose. `exit_code` is what the CLI returns."""

    exit_code = 1


class ConfigError(SpeclaError, ValueError):
    """An engine, drafter or command-line setting that is invalid or would have no effect."""

    exit_code = 2


class RequestRejected(SpeclaError, ValueError):
    """One request cannot be served as asked. `param` names the offending parameter."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidTree(SpeclaError, ValueError):
    """A draft tree breaks a structural rule. `node` is the index of the first offending node."""

    def __init__(self, message: str, *, node: int) -> None:
        super().__init__(message)
        self.node = node


class CapacityExceeded(SpeclaError):
    """A fixed-size buffer would overflow."""


class ModelNotFound(SpeclaError):
    """A model name is neither a usable directory nor a reachable or cached hub id."""

    exit_code = 3


class UnsupportedModel(SpeclaError):
    """The checkpoint is readable, but its architecture or a config field is not supported."""

    exit_code = 3


class InvalidCheckpoint(SpeclaError):
    """A checkpoint's files are damaged, incomplete or inconsistent with its config."""

    exit_code = 3


class GenerationFailed(SpeclaError):
    """A request ended with finish_reason "error": no token was left to draw."""


class ExactnessUnavailable(SpeclaError):
    """On this machine an operation's bits depend on row count or position."""

    exit_code = 5


class KernelUnavailable(SpeclaError):
    """An explicitly requested implementation cannot run here. Nothing falls back silently."""


def what_may_fail() -> tuple[type[Exception], ...]:
    """For those who go on without what has failed: errors of ours, torch's own, and Triton's (no
    room for a kernel), which are of no kind that torch knows."""
    if "triton" not in sys.modules:
        return SpeclaError, RuntimeError
    from triton.errors import TritonError

    return SpeclaError, RuntimeError, TritonError
