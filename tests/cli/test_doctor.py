# SPDX-License-Identifier: Apache-2.0
"""`specla doctor` on a stand-in model: verdicts and exit codes. The real one: test_end_to_end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specla.cli import doctor as command
from specla.cli import main
from specla.errors import ExactnessUnavailable, ModelNotFound

CAPTURE = pytest.CaptureFixture[str]


@pytest.fixture
def healthy(stub: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in whose rows are fine; no tiny checkpoint is written."""
    monkeypatch.setattr(command, "_write_tiny", lambda folder: "tiny")
    stub.behaviour["rows"] = None
    return stub


def test_all_pass(healthy: Any, capsys: CAPTURE) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    assert out.count("PASS") == 4
    assert "cpu:" in out


def test_json(healthy: Any, capsys: CAPTURE) -> None:
    assert main(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"] is True
    assert record["environment"]["torch"]
    assert [check["ok"] for check in record["checks"]] == [True] * 4


def test_a_difference_fails(healthy: Any, capsys: CAPTURE) -> None:
    healthy.behaviour["lie"] = True
    assert main(["doctor"]) == 5
    assert capsys.readouterr().out.count("FAIL") == 3


def test_row_dependence_fails(healthy: Any, capsys: CAPTURE) -> None:
    healthy.behaviour["rows"] = ExactnessUnavailable("rows must not change bits, got some")
    assert main(["doctor"]) == 5
    assert "FAIL  demo, rows do not change bits: rows must not" in capsys.readouterr().out


def test_no_model_is_not_a_failed_test(healthy: Any, capsys: CAPTURE) -> None:
    healthy.behaviour["load"] = ModelNotFound("a model must exist, got none; check its name")
    assert main(["doctor", "nowhere"]) == 3
