# SPDX-License-Identifier: Apache-2.0
"""`specla bench round` where there is no GPU: refusals, runs read back, and what is kept of one
whose times are made up."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_rows_made
import pytest

from specla.bench.kernel_metrics import Metric
from specla.bench.kernel_report import line
from specla.bench.kernel_rows import BASELINE, RoundTime, Row
from specla.cli import main

CAPTURE = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch
RUN = replace(kernel_rows_made.RUN, command="specla bench round --record", bandwidth=4.5e12)
SIZES = {(1, 1): 900.0, (1, 2): 945.0, (1, 16): 1170.0, (8, 1): 1100.0, (8, 16): 2200.0,
         (64, 16): 11000.0}  # fmt: skip
FIGURES = [
    Metric(name="verify16_over_ar", value=1.3, p10=1.2, p90=1.4, baseline="own AR step"),
    Metric(name="round_b8_n16_us", value=2200.0, unit="us", baseline="none"),
]


def times() -> list[RoundTime]:
    return [
        RoundTime(rows=rows, nodes=nodes, us=us, p10=us - 3, p90=us + 3)
        for (rows, nodes), us in SIZES.items()
    ]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line(RUN, one) + "\n" for one in (*times(), *FIGURES)))
    return path


def test_without_a_gpu_it_refuses(capsys: CAPTURE, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "round"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("specla: error: specla bench round needs a CUDA device")
    assert "--from rows.jsonl" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--shape llama", "--shape must be one of gdn-1.3b, got 'llama'"),
        ("--from x --shape gdn-1.3b", "--shape has no effect with --from"),
        ("--from x --fla", "--fla has no effect with --from"),
        ("--from x --no-busy", "--busy has no effect with --from"),
        ("--from x --commit 12", "--commit has no effect with --from"),
        ("--from nowhere", "--from must be the JSON lines of one round run, got nowhere"),
    ],
)
def test_usage(capsys: CAPTURE, flags: str, says: str) -> None:
    assert main(["bench", "round", *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_lines_of_something_else_are_refused(capsys: CAPTURE, tmp_path: Path) -> None:
    other = Row(
        suite="tree", case="c", shape="8x256", rows=1, nodes=1, depth=0, pending=0, fold=False,
        method="m", kind=BASELINE, scope="state", baseline="", us=1.0, p10=1.0, p90=1.0,
    )  # fmt: skip
    path = tmp_path / "kernels.jsonl"
    path.write_text(line(RUN, other) + "\n")
    assert main(["bench", "round", "--from", str(path)]) == 2
    assert "of one round run" in capsys.readouterr().err


def test_a_run_of_another_machine_is_recorded_here(
    capsys: CAPTURE, rows: Path, tmp_path: Path
) -> None:
    results = tmp_path / "results" / "results.csv"
    command = ["bench", "round", "--from", str(rows), "--record", "--results", str(results)]
    assert main(command) == 0
    out, err = capsys.readouterr()
    lines = (re.findall(r"[\d.,-]+", text) for text in out.splitlines())
    table = {tuple(cells[:2]): cells for cells in lines if len(cells) == 6}
    assert table["1", "16"][2:] == ["1,170.0", "1,167.0-1,173.0", "1.300", "1,170.0"]
    assert table["8", "16"][4:] == ["2.000", "275.0"]
    # Nobody measured an AR step of 64 rows.
    assert table["64", "16"][4:] == ["-", "171.9"]
    with results.open() as file:
        recorded = {row["metric"]: row for row in csv.DictReader(file)}
    assert set(recorded) == {"verify16_over_ar", "round_b8_n16_us"}
    assert recorded["verify16_over_ar"]["command"] == RUN.command
    folder = results.parent / "rounds"
    assert f"files to {folder}" in err
    assert (folder / "rows.jsonl").read_text() == rows.read_text()
    page = (folder / "README.md").read_text()
    assert "| 8 | 16 | 2,200.0 | 2,197.0-2,203.0 | 2.000 | 275.0 |" in page
    assert "| `verify16_over_ar` | 1.30x | 1.20 - 1.40 | own AR step |" in page
    assert "commit abc1234, 2026-12-01; reads 4.50 TB/s" in page
    assert ("![rounds](rounds.png)" in page) == (folder / "rounds.png").exists()


def test_the_plot(rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", "round", "--from", str(rows), "--report", str(tmp_path / "r")]) == 0
    assert (tmp_path / "r" / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_page_all_the_same(
    rows: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("specla.bench.round_page.importlib.util.find_spec", lambda name: None)
    assert main(["bench", "round", "--from", str(rows), "--report", str(tmp_path / "r")]) == 0
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"README.md", "rows.jsonl"}
    assert ".png" not in (tmp_path / "r" / "README.md").read_text()


def test_json_lines(capsys: CAPTURE, rows: Path) -> None:
    assert main(["bench", "round", "--from", str(rows), "--json"]) == 0
    assert capsys.readouterr().out == rows.read_text()


@pytest.fixture
def device(monkeypatch: MonkeyPatch) -> None:
    """A GPU that times what SIZES says, and fails at what is not there."""

    def timed(model: Any, rows: int, nodes: int) -> RoundTime:
        us = SIZES[rows, nodes]
        return RoundTime(rows=rows, nodes=nodes, us=us, p10=us, p90=us)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("specla.bench.graphs.read_bandwidth", lambda device: 4.5e12)
    model = SimpleNamespace(device="cuda", read_bytes=2_700_000_000, reserve=lambda rows: None)
    monkeypatch.setattr("specla.bench.random_model.gdn_1_3b", lambda: model)
    monkeypatch.setattr("specla.bench.rounds.time_round", timed)


def test_what_a_run_leaves(device: None, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    sizes = tuple(SIZES)
    monkeypatch.setattr("specla.bench.rounds.run.__defaults__", (sizes, None))
    command = ["bench", "round", "--no-busy", "--commit", "abc", "--report", str(tmp_path / "r")]
    assert main(command) == 0
    lines = (tmp_path / "r" / "rows.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    assert [r["record"] for r in records] == ["round"] * 6 + ["metric"] * 7
    assert {r["run"]["commit"] for r in records} == {"abc"}
    figures = {r["name"]: r["value"] for r in records if r["record"] == "metric"}
    assert figures["ar_step_over_floor"] == pytest.approx(900 / 600)
    assert figures["verify16_over_ar"] == pytest.approx(1.3)


def test_what_was_measured_before_it_failed_is_kept(
    device: None, capsys: CAPTURE, tmp_path: Path
) -> None:
    command = ["bench", "round", "--commit", "abc", "--report", str(tmp_path / "r")]
    # (1, 4) is no key of SIZES.
    assert main(command) == 1
    capsys.readouterr()
    path = tmp_path / "r" / "rows.jsonl"
    assert len(path.read_text().splitlines()) == 2
    assert main(["bench", "round", "--from", str(path)]) == 0
    assert "945.0" in capsys.readouterr().out


def test_figures_are_kept_before_the_next_one_fails(
    device: None, capsys: CAPTURE, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def failing(model: Any) -> list[Metric]:
        raise RuntimeError("the engine broke")

    monkeypatch.setattr("specla.bench.rounds.run.__defaults__", (tuple(SIZES), None))
    monkeypatch.setattr("specla.bench.rounds.busy_metrics", failing)
    path = tmp_path / "r" / "rows.jsonl"
    assert main(["bench", "round", "--commit", "abc", "--report", str(path.parent)]) == 1
    assert "the engine broke" in capsys.readouterr().err
    records = [json.loads(text) for text in path.read_text().splitlines()]
    assert [r["record"] for r in records] == ["round"] * 6 + ["metric"] * 7
