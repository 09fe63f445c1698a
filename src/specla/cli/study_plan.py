# SPDX-License-Identifier: Apache-2.0
"""What a study is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specla.cli.options import EngineOptions
from specla.request import SamplingParams

if TYPE_CHECKING:
    from specla.bench.measure import Prompt
    from specla.bench.studies.study import Study, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. vary, at: by factor."""

    study: Study
    drafters: Sequence[str]
    vary: Mapping[str, Sequence[Value]]
    at: Mapping[str, Sequence[Value]]
    prompts: Sequence[Prompt]
    params: SamplingParams
    minutes: float
    commit: str | None
    engine: EngineOptions
