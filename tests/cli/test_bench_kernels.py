# SPDX-License-Identifier: Apache-2.0
"""`specla bench kernels` where there is no GPU: refusals, and runs read back from their rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import kernel_rows_made
import pytest

from specla.bench.kernel_report import line
from specla.bench.kernel_rows import BASELINE, OURS, Row
from specla.cli import main

CAPTURE = pytest.CaptureFixture[str]
RUN = replace(kernel_rows_made.RUN, command="specla bench kernels --only tree")
CASE = "tree_n16_b64_8x256"


def row(method: str, kind: str, us: float, *, wrong: bool = False) -> Row:
    return Row(
        suite="tree", case=CASE, shape="8x256", rows=64, nodes=16, depth=4, pending=4, fold=True,
        method=method, kind=kind, scope="state", baseline="SGLang" if kind == OURS else "",
        us=us, p10=us, p90=us, read=1e6, written=1e6, bandwidth=0.5, error=1e-6, layers=2,
        wrong=wrong,
    )  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    found = [row("exact", OURS, 100.0), row("SGLang 0.5.17 tree", BASELINE, 900.0)]
    path.write_text("".join(line(RUN, r) + "\n" for r in found))
    return path


def test_without_a_gpu_it_refuses(capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "kernels"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("specla: error: specla bench kernels needs a CUDA device")
    assert err.count("\n") == 1


def test_an_unknown_shape_is_a_usage_error(capsys: CAPTURE) -> None:
    assert main("bench kernels --shape llama".split()) == 2
    assert "--shape must be one of" in capsys.readouterr().err


def test_rows_of_another_machine_are_recorded_here(
    capsys: CAPTURE, rows: Path, tmp_path: Path
) -> None:
    results, folder = tmp_path / "results.csv", tmp_path / "kernels"
    command = ["bench", "kernels", "--from", str(rows), "--record"]
    assert main([*command, "--results", str(results), "--report", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "9.00x" in out
    assert "appended 1 rows" in err
    with results.open() as file:
        (recorded,) = csv.DictReader(file)
    assert recorded["metric"] == f"{CASE}_exact_over_sglang"
    assert (recorded["commit"], recorded["command"]) == (RUN.commit, RUN.command)
    assert (folder / "rows.jsonl").read_text() == rows.read_text()
    assert "# Kernel benchmark" in (folder / "README.md").read_text()


def test_json_lines(capsys: CAPTURE, rows: Path) -> None:
    assert main(["bench", "kernels", "--from", str(rows), "--json"]) == 0
    records = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [r["record"] for r in records][:3] == ["row", "row", "metric"]
    assert all(r["run"]["device"] == "NVIDIA H200" for r in records)


def test_wrong_output_is_exit_code_5(capsys: CAPTURE, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line(RUN, row("exact", OURS, 1.0, wrong=True)) + "\n")
    assert main(["bench", "kernels", "--from", str(path)]) == 5
    assert "wrong: exact" in capsys.readouterr().err


def test_a_file_that_is_no_run(capsys: CAPTURE, tmp_path: Path) -> None:
    assert main(["bench", "kernels", "--from", str(tmp_path / "none")]) == 2
    assert "--from must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--only", "tree"], ["--budget", "9"], ["--no-overlap"], ["--sglang", "x"]]
)
def test_rows_of_an_earlier_run_are_not_run_otherwise(
    rows: Path, option: list[str], capsys: CAPTURE
) -> None:
    assert main(["bench", "kernels", "--from", str(rows), *option]) == 2
    assert f"{option[0]} has no effect with --from" in capsys.readouterr().err
