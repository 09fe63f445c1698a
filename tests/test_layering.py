# SPDX-License-Identifier: Apache-2.0
"""Imports go one way (ARCHITECTURE.md). Read from the syntax trees, so nothing has to run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "specla"

# What each part may import, besides itself and errors, request and config.
UPWARD = {
    "topology": set(),
    "ops": {"topology"},
    "state": {"topology", "ops"},
    "sampling": {"topology", "ops"},
    "models": {"topology", "ops", "state"},
    "drafters": {"topology", "ops", "state", "models"},
}
ENGINE = {*UPWARD}
FRONT = {*ENGINE, "engine"}
ALLOWED = {
    **UPWARD,
    "testing": {*UPWARD},
    "testing_device": {*UPWARD},
    "engine": ENGINE,
    "llm": FRONT,
    "train": FRONT,
    "bench": {*FRONT, "testing_device"},
    "cli": {*FRONT, "llm", "train", "bench", "testing"},
    "__main__": {"cli"},
    "errors": set(),
    "request": set(),
    "config": set(),
}
EVERYONES = {"errors", "request", "config"}

# Families, drafters and checkpoints by name: the engine knows none of them.
NAMES = {
    "ngram", "eagle", "dflash", "dspark", "mtp", "gdn", "kda", "mamba", "mamba2", "rwkv",
    "fla", "qwen", "qwen3", "kimi", "llama",
}  # fmt: skip


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Modules a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (
                (f"{module}.{a.name}" for a in node.names) if module == "specla" else (module,)
            )


def part(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_one_way(path: Path) -> None:
    here = part(path)
    if here == "__init__":
        return  # its imports are lazy: test_lazy_imports.py
    # topology imports nothing but errors; errors imports nothing.
    common = {"topology": {"errors"}, "errors": set()}.get(here, EVERYONES)
    allowed = {*ALLOWED[here], *common, here}
    for module in imports(path):
        if module.split(".")[0] == "specla":
            target = module.split(".")[1] if "." in module else ""
            # `from specla import __version__` reaches for the package itself.
            assert target in {*allowed, "__version__"}, f"{here} must not import {module}"


def test_every_part_has_a_rule() -> None:
    """And every rule a part."""
    assert {part(path) for path in files()} - {"__init__"} == set(ALLOWED)


def test_reference_and_kernels_never_meet() -> None:
    for path in SRC.rglob("reference.py"):
        assert not any(m.endswith(".triton") for m in imports(path)), path
    for path in SRC.rglob("triton.py"):
        assert not any(m.endswith(".reference") for m in imports(path)), path


def test_topology_is_integers_only() -> None:
    for path in (SRC / "topology").rglob("*.py"):
        assert not any(m.split(".")[0] == "torch" for m in imports(path)), path


def test_engine_names_no_drafter_or_family() -> None:
    for path in (SRC / "engine").rglob("*.py"):
        words = set(re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+", path.read_text()))
        assert not NAMES & {word.lower() for word in words}, path
