# SPDX-License-Identifier: Apache-2.0
"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_harness import load_target, one_thread

from specla.models.base import TargetModel


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return load_target(tmp_path_factory.mktemp("target"))
