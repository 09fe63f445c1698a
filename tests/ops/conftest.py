# SPDX-License-Identifier: Apache-2.0
"""One thread: sizes are small, and thread count is one of the things bits may depend on. Triton's
language as it is for compiling: its interpreter leaves parts of it patched for its own use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch


def _language() -> list[tuple[Any, str, Any]]:
    """What Triton's interpreter replaces, before any kernel ran in it."""
    try:
        from triton.language import core, math
    except ImportError:
        return []
    return [
        (where, name, member)
        for where in (core, core.tensor, core.tensor_descriptor_base, math)
        for name, member in inspect.getmembers(where)
        if not name.startswith("__") or core.is_builtin(member)
    ]


LANGUAGE = _language()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def language() -> None:
    """Functions that the interpreter runs below a kernel patch `triton.language.core` for good."""
    for where, name, member in LANGUAGE:
        if getattr(where, name, None) is not member:
            setattr(where, name, member)
