# SPDX-License-Identifier: Apache-2.0
"""Evaluation prompts from files: JSON lines, plain or gzipped, given by a path.

A line's prompt is its "question" (GSM8K), its first of "turns" (MT-Bench, Spec-Bench), its
"prompt" (HumanEval) or what the first of its "messages" says; what comes after the first turn
would need answers, and is left out. A folder stands for every such file below it, each a suite by
the name of the folder it lies in.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specla.bench.measure import Prompt
from specla.errors import ConfigError

SUFFIXES = (".jsonl", ".jsonl.gz")
# Training sets lie beside the test sets, and are never measured on.
TRAINING = ("train.jsonl", "train.jsonl.gz")
MAX_BYTES = 256 << 20


def read_suites(
    paths: Iterable[Path], *, most: int | None = None, seed: int = 0
) -> dict[str, list[Prompt]]:
    """Prompts by suite.

    Args:
        paths: files or folders.
        most: prompts of each suite, drawn with `seed`; None: all.

    Raises:
        ConfigError: nothing is there, or a line has no prompt; the message names it.
    """
    if most is not None and most < 1:
        raise ConfigError(f"--prompts must be >= 1, got {most}")
    suites: dict[str, list[Prompt]] = {}
    for file in (file for path in paths for file in _files(path)):
        name = file.parent.name
        if name in suites:
            raise ConfigError(f"suites must have distinct folders, got {name!r} twice ({file})")
        suites[name] = sample(_read(file, name), most, seed)
    return suites


def sample(prompts: Sequence[Prompt], most: int | None, seed: int) -> list[Prompt]:
    """So many of them, in their order; the same for the same seed."""
    if most is None or most >= len(prompts):
        return list(prompts)
    chosen = sorted(random.Random(seed).sample(range(len(prompts)), most))
    return [prompts[i] for i in chosen]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for file in sorted(path.rglob("*")) if file.name.endswith(SUFFIXES)]
    found = [file for file in found if file.name not in TRAINING]
    if not found:
        raise ConfigError(
            f"a suite must be a file of JSON lines or a folder with some, got {path}"
        )
    return found


def _read(file: Path, name: str) -> list[Prompt]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            lines = stream.read(MAX_BYTES).decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} must be readable JSON lines ({error})") from error
    found = [
        Prompt(kind=name, text=_prompt(line, f"{file}:{number}"))
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"{file} must have at least one prompt, and is empty")
    return found


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} must be a JSON object ({error})") from error
    record = record if isinstance(record, dict) else {}
    said = _first(record.get("messages"))
    said = said.get("content") if isinstance(said, dict) else None
    given = (record.get("question"), _first(record.get("turns")), record.get("prompt"), said)
    text = next((x for x in given if x), None)
    if not isinstance(text, str):
        raise ConfigError(
            f'{where} must have a text in "question", "turns", "prompt" or "messages"'
        )
    return text


def _first(turns: Any) -> Any:
    return turns[0] if isinstance(turns, list) and turns else None
