# SPDX-License-Identifier: Apache-2.0
"""Rules about the text of the repository: licences, safety, nothing that only exists here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
PYTHON = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
TEXT = {".md", ".toml", ".txt", ".yaml", ".yml", ".py", ".csv", ".cff", ""}
FOLDERS = (".ci", ".github", "docs", "results", "src", "tests")
# Home folders and scratch folders of some machine.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|Users|opt|mnt)/\w")


def repository_files() -> Iterator[Path]:
    """Text files of the repository; virtual environments and caches lie beside these folders."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE"]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in [*top, *below]:
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
            yield path


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_licence_line_comes_first(path: Path) -> None:
    text = path.read_text()
    assert not text or text.splitlines()[0] == SPDX


def test_no_paths_of_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in repository_files()
        for match in MACHINE_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert not found


def test_nothing_is_unpickled_and_no_remote_code_runs() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {"pickle", "dill", "joblib"} & {a.name for a in node.names}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                # A trainer's own optimizer state, through the unpickler that builds tensors only.
                assert "train" in path.parts, f"{path}: torch.load"
                safe = any(ast.unparse(k) == "weights_only=True" for k in node.keywords)
                assert safe, f"{path}: torch.load needs weights_only=True"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                off = isinstance(node.value, ast.Constant) and node.value.value is False
                assert off, f"{path}: trust_remote_code must be False"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                raise AssertionError(f"{path}: allow_pickle")
