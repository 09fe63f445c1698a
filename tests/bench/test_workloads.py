# SPDX-License-Identifier: Apache-2.0
"""The shipped prompts."""

from __future__ import annotations

import pytest

from specla.bench.workloads import WORKLOADS, prompts
from specla.errors import ConfigError


def test_enough_kinds_and_prompts_all_different() -> None:
    assert len(WORKLOADS) >= 4
    assert all(len(texts) == 6 for texts in WORKLOADS.values())
    every = [prompt.text for prompt in prompts()]
    assert len(set(every)) == len(every)


def test_choice() -> None:
    assert [p.kind for p in prompts(["copy", "chat"], 2)] == ["copy", "copy", "chat", "chat"]
    with pytest.raises(ConfigError, match="poetry"):
        prompts(["poetry"])
    with pytest.raises(ConfigError, match="per-kind"):
        prompts([], 0)
