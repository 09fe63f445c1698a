# SPDX-License-Identifier: Apache-2.0
"""What was asked of `specla bench headline`, and the file that remembers which steps are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specla.cli.records import dumps
from specla.drafters.files import replacing
from specla.errors import ConfigError

TARGET, DRAFTERS, MEASURE = STEPS = ("target", "drafters", "measure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was asked for. minutes: of each step. prompts: per suite; None: every one. also:
    drafters that are trained beside those that are measured."""

    data: Path
    work: Path
    size: str
    minutes: Mapping[str, float]
    prompts: int | None
    batch: int
    max_tokens: int
    device: str
    also: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path:
        """The target."""
        return self.work / "target"

    def settings(self, step: str) -> dict[str, object]:
        """What a step's outcome depends on, minutes and the machine aside: those bound how much
        is done, and the outcome says so itself."""
        from specla.train.pack import data_digest

        asked: dict[str, object] = {"size": self.size, "data": data_digest(self.data)}
        if step == DRAFTERS and self.also:
            asked["also"] = list(self.also)
        if step == MEASURE:
            asked |= {name: getattr(self, name) for name in ("prompts", "batch", "max_tokens")}
        return asked


class Progress:
    """headline.json: what each finished step came to, and for what settings.

    Raises:
        ConfigError: a step was done for others than the plan's; or the file is no such file.
    """

    def __init__(self, plan: Plan) -> None:
        self._path, self._plan = plan.work / "headline.json", plan
        self._part = self._path.with_name("headline-so-far.json")
        plan.work.mkdir(parents=True, exist_ok=True)
        self.steps: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, dict[str, object]] = {}
        if self._path.exists():
            self._asked, self.steps = _read(self._path)
        for step, before in self._asked.items():
            self._require(step, before)

    def _require(self, step: str, before: Mapping[str, object]) -> None:
        now = self._plan.settings(step)
        for name in now:
            if before.get(name) != now[name]:
                raise ConfigError(
                    f"--work must be a folder of the same {name}, but in {self._plan.work} step "
                    f"{step} was done with {name} {before.get(name)}, now {now[name]}; give the "
                    "same, or another folder"
                )

    def finish(self, step: str, result: dict[str, Any]) -> None:
        """Remember it; steps after it are no longer done."""
        kept = [name for name in STEPS[: STEPS.index(step)] if name in self.steps]
        self.steps = {name: self.steps[name] for name in kept} | {step: result}
        self._asked = {name: self._asked[name] for name in kept}
        self._asked[step] = self._plan.settings(step)
        _write(self._path, self._asked, self.steps)
        self._part.unlink(missing_ok=True)

    def so_far(self, step: str, result: dict[str, Any]) -> None:
        """What a step that goes on has come to, in headline-so-far.json: renamed to headline.json,
        the step is done."""
        asked = self._asked | {step: self._plan.settings(step)}
        _write(self._part, asked, self.steps | {step: result})

    def need(self, step: str) -> dict[str, Any]:
        """What an earlier step came to.

        Raises:
            ConfigError: it is not done.
        """
        if step not in self.steps:
            raise ConfigError(f"--steps must begin with {step}, which is not done yet")
        return self.steps[step]


def _read(path: Path) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, Any]]]:
    """Settings and outcomes by step."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        asked, steps = dict(found["asked"]), dict(found["steps"])
        if {*asked} != {*steps}:
            raise ValueError("its steps have no settings")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path} must say what was done and for what settings ({type(error).__name__}: "
            f"{error}), it may be of an older version; use another folder"
        ) from error
    return asked, steps


def _write(path: Path, asked: Mapping[str, object], steps: Mapping[str, object]) -> None:
    with replacing(path) as part:
        part.write_text(dumps({"asked": asked, "steps": steps}), encoding="utf-8")


def origin() -> dict[str, str]:
    """Day, commit and command of the measurement: a later call may only show or record it."""
    from specla.bench import report

    # The arguments, not the program's path: the command has to work elsewhere.
    command = " ".join(["specla", *sys.argv[1:]])
    head = report.head(device="", versions={}, command=command)
    return {name: str(head[name]) for name in ("date", "commit", "command")}
