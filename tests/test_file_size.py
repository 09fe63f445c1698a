# SPDX-License-Identifier: Apache-2.0
"""Files stay short enough to read in one sitting."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT, KERNEL_LIMIT, README_LIMIT = 400, 500, 120
CATCH_ALL = {"utils.py", "misc.py", "helpers.py", "common.py"}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_sources_and_tests_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines(path)
        for folder in ("src", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if lines(path) > (KERNEL_LIMIT if path.name.startswith("triton") else LIMIT)
    }
    assert not long


def test_no_catch_all_modules() -> None:
    assert not [p for p in (ROOT / "src").rglob("*.py") if p.name in CATCH_ALL]


def test_readme_is_short() -> None:
    assert lines(ROOT / "README.md") <= README_LIMIT
