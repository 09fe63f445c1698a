# SPDX-License-Identifier: Apache-2.0
"""`specla bench generate` on a stand-in model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from specla.bench.report import COLUMNS
from specla.cli import main

CAPTURE = pytest.CaptureFixture[str]


def test_one_table(stub: Any, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specla.drafters.beside", lambda target: None)
    command = "bench generate --per-kind 2 --max-tokens 8 --kind python --kind copy"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    for word in ("python", "copy", "plain AR", "exact AR", "ngram", "suffix", "by depth", "loops"):
        assert word in out
    assert [m.options["drafter"] for m in stub.made] == ["none", "none", "ngram", "suffix"]


def test_json_and_record(stub: Any, capsys: CAPTURE, tmp_path: Path) -> None:
    path = tmp_path / "results" / "results.csv"
    command = "bench generate --per-kind 1 --kind chat --drafter ngram --json --record --results"
    for _ in range(2):
        assert main([*command.split(), str(path)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert [row["method"] for row in record["rows"]] == ["plain AR", "exact AR", "ngram"]
    assert record["rows"][2]["identical"] is True
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 2 * (1 + 2 + 4)
    assert not path.read_text().count("\r")


def test_suites_and_one_drafters_total(stub: Any, capsys: CAPTURE, tmp_path: Path) -> None:
    for name in ("sums", "tales"):
        (tmp_path / name).mkdir()
        lines = [{"messages": [{"role": "user", "content": f"{name} {i}"}]} for i in range(3)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "held-out.jsonl").write_text(text)
    suites = f"--suite {tmp_path / 'sums'} --suite {tmp_path / 'tales'} --prompts 2"
    path = tmp_path / "results.csv"
    command = f"bench generate {suites} --drafter ngram --total e2e --record --results {path}"
    assert main(command.split()) == 0
    with path.open() as file:
        rows = {row["metric"]: row for row in csv.DictReader(file)}
    assert {"sums/ngram/ratio", "tales/ngram/ratio", "e2e", "e2e_over_plain"} <= set(rows)
    assert rows["e2e"]["baseline"] == "exact AR"
    assert rows["e2e_over_plain"]["baseline"] == "plain AR"
    assert "4 of 4 prompts of sums, tales" in rows["e2e"]["notes"]
    assert float(rows["e2e"]["p10"]) <= float(rows["e2e"]["p90"])


def test_changed_output_is_exit_code_5(stub: Any, capsys: CAPTURE) -> None:
    stub.behaviour["lie"] = True
    assert main("bench generate --per-kind 1 --kind chat --drafter ngram".split()) == 5
    assert "not identical: ngram" in capsys.readouterr().err


def test_a_failed_request_is_exit_code_1(
    stub: Any, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specla.bench.workloads.WORKLOADS", {"bad": ("reject me", "fine here")})
    assert main("bench generate --drafter ngram --kind bad".split()) == 1
    out, err = capsys.readouterr()
    assert "failed: ngram" in err
    assert "(1 failed)" in out


@pytest.mark.parametrize(
    "flags",
    [
        "--kind poetry", "--per-kind 0", "--drafter x", "--repeats 0", "--prompts 2",
        "--suite x --kind chat", "--total e2e --record", "--suite nowhere",
        "--total e2e --drafter ngram",
    ],
)  # fmt: skip
def test_usage(stub: Any, capsys: CAPTURE, flags: str) -> None:
    assert main(["bench", "generate", *flags.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
