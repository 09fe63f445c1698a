# SPDX-License-Identifier: Apache-2.0
"""`specla bench generate` on a stand-in model."""

from __future__ import annotations

import csv
import importlib.util
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


def test_a_page_here_and_from_another_machines_lines(
    stub: Any, capsys: CAPTURE, tmp_path: Path
) -> None:
    there, here, results = tmp_path / "there", tmp_path / "results", tmp_path / "results.csv"
    command = "bench generate --per-kind 1 --kind chat --kind copy --drafter ngram --total e2e"
    assert main([*command.split(), "--commit", "abc1234", "--report", str(there)]) == 0
    assert not results.exists()
    capsys.readouterr()
    lines = there / "rows.jsonl"
    again = ["bench", "generate", "--from", str(lines), "--record", "--results", str(results)]
    assert main(again) == 0
    out, err = capsys.readouterr()
    assert f"files to {tmp_path / 'generate'}" in err
    assert "exact AR" in out
    for name in ("README.md", "rows.jsonl"):
        assert (tmp_path / "generate" / name).read_text() == (there / name).read_text()
    page = (there / "README.md").read_text()
    for words in ("| copy | ngram |", "`e2e_over_plain`", "| commit | abc1234 |"):
        assert words in page
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert ("![generate](generate.png)" in page) == (there / "generate.png").exists() == drawn
    with results.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert {"chat/ngram/ratio", "e2e", "e2e_over_plain"} <= {row["metric"] for row in rows}
    assert main([*again[:4], "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 6
    assert not here.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--from {} --drafter ngram", "--drafter has no effect with --from"),
        ("--from {} --total x", "--total has no effect with --from"),
        ("--from {}", "must be the JSON lines of one run of bench generate"),
        ("--from nowhere", "must be the JSON lines of one run of bench generate"),
        ("--drafter ngram --total x", "--total x has no effect without --record or --report"),
    ],
)
def test_what_it_refuses(capsys: CAPTURE, tmp_path: Path, flags: str, says: str) -> None:
    other = tmp_path / "rows.jsonl"
    other.write_text('{"record": "metric", "run": {"commit": "a"}}\n')
    assert main(["bench", "generate", *flags.format(other).split()]) == 2
    assert says in capsys.readouterr().err


@pytest.fixture
def kept(stub: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """The lines of a run: three rows, a total and its counterpart."""
    command = (
        f"bench generate --per-kind 1 --kind chat --drafter ngram --total e2e --report {tmp_path}"
    )
    assert main(command.split()) == 0
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def again(lines: list[dict[str, Any]], folder: Path) -> int:
    path = folder / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return main(["bench", "generate", "--from", str(path)])


@pytest.mark.parametrize("method", [0, 1, 2])
def test_what_failed_elsewhere_has_failed(
    kept: list[dict[str, Any]], capsys: CAPTURE, tmp_path: Path, method: int
) -> None:
    kept[method] |= {"failed": 1, "same": 0}
    assert again(kept, tmp_path) == 1
    assert f"failed: {kept[method]['method']} on 'chat': 1 of 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines.clear(), "there must be lines, all of one run"),
        (lambda lines: lines.extend(lines[:3]), "one row of every method"),
        (lambda lines: lines[0]["run"].pop("device"), "there must be lines, all of one run"),
        (lambda lines: [line["run"].pop("device") for line in lines], "device must be there"),
        (lambda lines: lines[3].pop("p10"), "p10 must be there"),
        (lambda lines: lines[0].update(tokens_per_s="fast"), "must be numbers"),
        (lambda lines: lines[0].pop("kind"), "'kind'"),
    ],
)
def test_damaged_lines_are_refused(
    kept: list[dict[str, Any]], capsys: CAPTURE, tmp_path: Path, change: Any, says: str
) -> None:
    change(kept)
    assert again(kept, tmp_path) == 2
    assert says in capsys.readouterr().err


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
