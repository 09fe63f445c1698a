# SPDX-License-Identifier: Apache-2.0
"""The newest version in the changelog is the package's."""

from __future__ import annotations

import re
from pathlib import Path

import specla

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_newest_entry_is_this_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\] - (.+)$", CHANGELOG.read_text(), re.MULTILINE)
    assert headings, "CHANGELOG.md needs a heading like '## [0.1.0] - unreleased'"
    version, date = headings[0]
    assert version == specla.__version__
    assert re.fullmatch(r"unreleased|\d{4}-\d{2}-\d{2}", date)
