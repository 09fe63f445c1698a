# SPDX-License-Identifier: Apache-2.0
"""`specla bench exactness` on a toy checkpoint; nothing is stubbed but what must go wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specla.bench import exactness
from specla.bench.report import COLUMNS
from specla.cli import main
from specla.request import Completion

CAPTURE = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch
FEW = ["--per-kind", "1", "--kind", "python", "--kind", "copy", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    from specla.models.toy import write_toy_checkpoint

    return str(write_toy_checkpoint(tmp_path_factory.mktemp("models") / "toy"))


def tampered(compare: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any) -> Any:
        one = exactness.Divergence(index=3, expected=7, got=8, margin=0.25)
        return [replace(row, divergence=one) for row in compare(*args)]

    return changed


def test_identical(toy: str, capsys: CAPTURE, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    flags = [*FEW, "--device", "cpu", "--json", "--record", "--results", str(path)]
    assert main(["bench", "exactness", toy, *flags, "--commit", "abc"]) == 0
    *rows, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["kind"] for row in rows] == ["python", "copy"]
    assert all(row["identical"] and row["divergence"] is None for row in rows)
    assert all(sum(row["kernels"].values()) >= 1 for row in rows)
    assert (summary["name"], summary["value"]) == ("exactness_identical", 1.0)
    assert "mode exact, suffix, batch 8, 16 nodes" in summary["notes"]
    with path.open() as file:
        (recorded,) = csv.DictReader(file)
    assert tuple(recorded) == COLUMNS
    assert (recorded["commit"], recorded["device"]) == ("abc", "cpu")


def test_every_draft_is_verified(toy: str, capsys: CAPTURE, monkeypatch: MonkeyPatch) -> None:
    """A budget would leave trees out, and the comparison would be about other ones."""
    seen: list[Completion] = []

    def watched(*args: Any) -> Any:
        seen.extend(args[3])
        return compare(*args)

    compare = exactness.compare
    monkeypatch.setattr(exactness, "compare", watched)
    assert main(["bench", "exactness", toy, *FEW, "--device", "cpu"]) == 0
    assert len(seen) == 2
    assert all(one.speculation.budget is None for one in seen)


def test_a_difference_is_exit_code_5_in_exact_mode_only(
    toy: str, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exactness, "compare", tampered(exactness.compare))
    command = ["bench", "exactness", toy, *FEW, "--device", "cpu"]
    assert main(command) == 5
    out = capsys.readouterr().out
    for word in ("token 3", "0.25", "exactness_identical: 0", "exactness_margin_smallest: 0.25"):
        assert word in out
    assert main([*command, "--mode", "plain"]) == 0
    assert "mode plain, none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        ("--mode fast --device cpu", 1, "needs a GPU"),
        ("--shape gdn-1.3b --device cpu", 1, "needs a CUDA device"),
        ("--shape gdn-2b", 2, "gdn-1.3b"),
        ("--shape gdn-1.3b --per-kind 0", 2, "--per-kind must be >= 1"),
        ("--shape gdn-1.3b --kind chat", 2, "leave MODEL and --kind out"),
        ("--drafter trees", 2, "trees"),
        ("--kind poetry", 2, "poetry"),
        ("--batch 0", 2, "max_slots"),
    ],
)
def test_refusals(capsys: CAPTURE, flags: str, code: int, word: str) -> None:
    assert main(["bench", "exactness", *flags.split()]) == code
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1
