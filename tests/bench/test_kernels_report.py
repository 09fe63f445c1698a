# SPDX-License-Identifier: Apache-2.0
"""From rows to figures, CSV, JSON lines, tables, the report and its plots."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from kernel_rows_made import RUN, row
from rich.console import Console

from specla.bench import kernel_page, kernel_report, report
from specla.bench.kernel_metrics import Metric, metrics
from specla.bench.kernel_rows import Row
from specla.errors import ConfigError

TREE, CHAIN, ONE = "tree_n16_b64_8x256", "chain_n8_b64_8x256", "tree_n16_b1_8x256"
STATE_ONLY = "exact, state only, no overlap"
ROWS = [
    row(TREE, "exact", 100.0),
    row(TREE, "exact, no overlap", 120.0),
    row(TREE, STATE_ONLY, 80.0),
    row(TREE, "fast", None),
    row(TREE, "SGLang 0.5.17 tree", 1000.0),
    row(TREE, "SGLang 0.5.17 tree, unpacked", 900.0),
    row(CHAIN, "exact", 60.0, suite="chain"),
    row(CHAIN, "SGLang 0.5.17 ReplaySSM, ring 32", 150.0, suite="chain"),
    row(CHAIN, "SGLang 0.5.17 ReplaySSM, ring 16", 120.0, suite="chain"),
    row(CHAIN, "SGLang 0.5.17 ReplaySSM, fold every step", 90.0, suite="chain"),
    row(ONE, "exact", 9.0, suite="single", rows=1),
    row("pending3_n16_b1_8x256", STATE_ONLY, 8.0, suite="commit", rows=1),
    row("pending3_n16_b1_8x256", "separate commit", 12.0, suite="commit", rows=1),
    row("pending3_n16_b1_8x256", "recover from factors", 3.0, suite="recovery", rows=1),
    row("pending3_n16_b1_8x256", "recover from tokens", 4.5, suite="recovery", rows=1),
    row("log0_b64_8x256", "log of 0", 80.0, suite="log"),
    row("log0_b64_8x256", "decode in place", 72.0, suite="log", written=8e8),
    row("log16_b64_8x256", "log of 16", 45.0, suite="log"),
    row("top2_depth12_n16_8x256", "root to leaf", 60.0, suite="table1"),
    row("top2_depth12_n16_8x256", STATE_ONLY, 12.0, suite="table1"),
    row("top2_depth12_n16_8x256", "hybrid in waves", 15.0, suite="table1"),
    row("waves_n32_b8_8x256", STATE_ONLY, 20.0, suite="waves"),
    row("waves_n32_b8_8x256", "portable walk", 25.0, suite="waves"),
    row("waves_n32_b8_8x256", "hybrid in waves", 35.0, suite="waves"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics(ROWS)}


def test_trees_are_a_speedup_over_the_faster_call(found: dict[str, Metric]) -> None:
    metric = found[f"{TREE}_exact_over_sglang"]
    assert metric.value == 9.0
    assert metric.p10 == pytest.approx(900 / 120)
    assert metric.p90 == pytest.approx(900 / 90)
    assert metric.baseline == "SGLang 0.5.17 tree, unpacked: 900.00 us"
    assert "exact: 100.00 us (state); 400.0 MB = 50% of read bandwidth" in metric.notes
    assert found[f"{TREE}_exact_state_only_over_sglang"].value == 900 / 80


def test_a_row_that_did_not_run_is_no_figure(found: dict[str, Metric]) -> None:
    metric = found[f"{TREE}_fast_over_sglang"]
    assert metric.value is None
    assert metric.notes == "missing: ours"


def test_chains_are_a_cost_against_the_ring(found: dict[str, Metric]) -> None:
    metric = found[f"{CHAIN}_exact_over_replayssm"]
    assert metric.value == 0.5
    assert (metric.p10, metric.p90) == (pytest.approx(0.45), pytest.approx(0.6))


def test_the_other_tables(found: dict[str, Metric]) -> None:
    assert found[f"{ONE}_exact_us"].value == 9.0
    assert found[f"{ONE}_exact_us"].unit == "us"
    assert found["fused_over_separate_len3"].value == 1.5
    assert found["fused_over_separate_len1"].value is None
    # Against the faster way to fold every token.
    assert found["log16_ar_b64_speedup"].value == 72 / 45
    assert found["log16_ar_b64_write_cut"].value == 8.0
    assert found["table1_2_12_16_serial_over_r2l"].value == 5.0
    assert found["table1_2_12_16_hybrid_over_r2l"].value == 4.0
    assert found["waves_n32_b8_8x256_exact_over_hybrid"].value == 1.75
    assert found["waves_n32_b8_8x256_portable_over_hybrid"].value == 1.4
    assert found["waves_n16_b8_8x256_exact_over_hybrid"].value is None
    assert found["recovery_tokens_over_factors_len3"].value == 1.5


def test_memory_is_counted_with_and_without_conv_inputs(found: dict[str, Metric]) -> None:
    whole, part = (found[f"state_memory_n16_8x256_{name}_cut"] for name in ("whole", "recurrent"))
    assert part.value == pytest.approx(127.75, abs=0.01)
    assert whole.value == pytest.approx(74.3, abs=0.1)
    assert part.baseline == "a state per node: 32.00 MiB"
    assert part.notes == (
        "factors: 256.5 KiB per row and layer; conv inputs left out; counted, not measured"
    )
    assert not any(name.startswith("state_memory_n16_16x") for name in found)


def test_csv_rows_hold_only_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    report.append(path, kernel_report.csv_rows(RUN, metrics(ROWS)))
    with path.open() as file:
        rows = {r["metric"]: r for r in csv.DictReader(file)}
    first = rows[f"{TREE}_exact_over_sglang"]
    assert (first["value"], first["unit"], first["commit"]) == ("9", "x", "abc1234")
    assert first["device"] == "NVIDIA H200"
    assert first["notes"].endswith("reads 4.40 TB/s")
    assert f"{TREE}_fast_over_sglang" not in rows


def test_a_run_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    wrong = row(TREE, "snapshot per node", None, error=float("inf"), wrong=True)
    path.write_text("".join(kernel_report.line(RUN, r) + "\n" for r in [*ROWS, wrong]))
    run, rows = kernel_report.read(path)
    assert run == RUN
    assert rows[:-1] == ROWS
    assert (rows[-1].error, rows[-1].wrong) == ("inf", True)
    entry = json.loads(path.read_text().splitlines()[0])
    assert entry["run"]["device"] == "NVIDIA H200"
    assert entry["record"] == "row"


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"record": "row", "run": {}}'])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--from must be"):
        kernel_report.read(path)


def test_tables_show_missing_rows_and_ratios() -> None:
    out = io.StringIO()
    console = Console(file=out, width=150)
    console.print(kernel_report.table(ROWS, "kernels"))
    console.print(kernel_report.metric_table(metrics(ROWS)))
    text = out.getvalue()
    assert "no such file" in text
    assert "9.00x" in text
    assert "missing" in text
    assert "9.00 us" in text


def test_the_report_has_every_part(tmp_path: Path) -> None:
    written = kernel_page.write(tmp_path, RUN, ROWS)
    text = (tmp_path / "README.md").read_text()
    for part in ("## Figures", "## Beside the papers", "## Why they differ", "## Rows: tree"):
        assert part in text
    assert (
        "| 2, 12, 16 | 22.5 ms | 1.31x | 0.58x | 2.2x | 60.0 us | 5.00x | missing | 4.00x |"
        in text
    )
    assert "| 16 | 0.62x, 2.00x |" not in text
    assert "| 3 | 1.50x | missing |" in text
    assert (
        "| 8x256 | 8 | 2.0 MiB | 16.3 MiB | 224.2 KiB | 74x | 16.0 MiB | 128.2 KiB | 128x |"
        in text
    )
    assert max(map(len, kernel_page.DIFFERENCES.splitlines())) < 100
    for image in written[1:]:
        assert image.name in text
        assert image.stat().st_size > 1000


def test_a_report_of_few_rows(tmp_path: Path) -> None:
    rows: list[Row] = [row(TREE, "exact", None)]
    written = kernel_page.write(tmp_path, RUN, rows)
    assert [path.name for path in written] == ["README.md"]
