# SPDX-License-Identifier: Apache-2.0
"""Trials: ways to decode that are to be measured on a GPU, each once in a process of its own.

What a kernel breaks there, it breaks for its whole process: after one bad address nothing can be
measured in it any more, and a kernel that never ends takes everybody's time. Trials run side by
side while the first methods are loaded, and what they compile is on disk for who is measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from specla.cli.console import note
from specla.cli.options import EngineOptions
from specla.errors import SpeclaError

SECONDS = 120.0
"""After which a trial is taken for one that never ends: several times what loading and compiling
take when nobody else does."""
TOKENS = 64


def command(options: EngineOptions, prompt: str) -> list[str]:
    """What answers a prompt as an engine with these options would."""
    own = options.drafter_options or {}
    given = {
        "--drafter": options.drafter,
        "--budget": options.budget,
        "--device": options.device,
        "--max-nodes": options.max_nodes,
        "--max-slots": options.max_slots,
        "--max-tokens": TOKENS,
    }
    return [
        *(sys.executable, "-m", "specla", "generate", options.model, f"--prompt={prompt}"),
        *(f"{name}={value}" for name, value in given.items()),
        *(f"--drafter-option={name}={json.dumps(value)}" for name, value in own.items()),
        *("--json", "--no-progress"),
    ]


@dataclass(frozen=True, slots=True)
class _Trial:
    process: subprocess.Popen[bytes]
    said: IO[bytes]


class Trials:
    """Begun at once. commands: by name, see `command`. control: the one of them that has nothing
    to prove; where it fails too, this machine has no room for such processes, and trials say
    nothing."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        control: str | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self._until, self._seconds = time.monotonic() + seconds, seconds
        self._control, self._trials = control, dict[str, _Trial]()
        for name, one in commands.items():
            said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
            started = subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=said)
            self._trials[name] = _Trial(started, said)

    def check(self, name: str) -> None:
        """Wait for one. Those that were not begun are taken to be good.

        Raises:
            SpeclaError: it failed, with what it said last, or did not end in time.
        """
        why = self._failure(name)
        if why is None:
            return
        if name == self._control:
            note(f"drafters are measured without a trial: {name} {why}")
        elif self._control is None or self._failure(self._control) is None:
            raise SpeclaError(why)

    def _failure(self, name: str) -> str | None:
        if name not in self._trials:
            return None
        one = self._trials[name]
        try:
            code = one.process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"in a process of its own did not answer {TOKENS} tokens in {self._seconds:g} s"
        if not code:
            return None
        one.said.seek(0)
        lines = one.said.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        return f"in a process of its own failed ({code}) and said: {last}"

    def end(self) -> None:
        """Nothing of them may run beside what is measured."""
        for one in self._trials.values():
            one.process.kill()
            one.process.wait()
            one.said.close()
