# SPDX-License-Identifier: Apache-2.0
"""From samples to rows, table and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from completions import completion
from rich.console import Console

from specla.bench import report
from specla.bench.measure import Prompt, Sample
from specla.bench.table import EXACT, PLAIN, Row, by_depth, rows, spread, tokens_per_round

DRAFTING = {"drafter": "ngram", "mode": "exact"}
P, Q = Prompt(kind="easy", text="p"), Prompt(kind="easy", text="q")


def sample(
    method: str, prompt: Prompt, seconds: float, ids: tuple[int, ...] = (1, 2, 3, 4)
) -> Sample:
    options = {"drafter": "none", "mode": "exact"} if method in (PLAIN, EXACT) else DRAFTING
    return Sample(
        method=method,
        prompt=prompt,
        completion=completion(ids=ids, options=options),
        decode_s=seconds,
    )


@pytest.fixture
def table() -> list[Row]:
    return rows(
        [
            sample(PLAIN, P, 1.0),
            sample(EXACT, P, 2.0),
            sample("ngram", P, 0.5),
            sample(PLAIN, Q, 1.0),
            sample(EXACT, Q, 2.0, (1, 2, 3, 9)),
            sample("ngram", Q, 0.5),
        ]
    )


def test_speeds_ratios_and_equality(table: list[Row]) -> None:
    plain, exact, ngram = table
    assert [r.tokens_per_s for r in table] == [4.0, 2.0, 8.0]
    assert (ngram.vs_plain, ngram.vs_exact) == (2.0, 4.0)
    assert (ngram.tokens_per_round, ngram.acceptance) == (2.0, 0.5)
    assert ngram.acceptance_by_depth == (0.5,)
    assert (plain.same, exact.same, ngram.same) == (1, 2, 1)
    assert exact.identical
    assert not ngram.identical


def test_a_round_that_an_end_cuts_has_no_bonus() -> None:
    """Rounds and accepted drafts alone would say 1.75."""
    whole = completion(ids=(1, 2, 3, 4), options=DRAFTING)
    cut = replace(whole, speculation=replace(whole.speculation, accepted=1, tokens_per_round=1.0))
    assert tokens_per_round([whole, cut]) == 1.5
    assert tokens_per_round([]) == 0.0


def test_failed_samples_are_counted_and_not_timed() -> None:
    bad = Sample(method=EXACT, prompt=P, completion=None, decode_s=0.0, error="no")
    (row,) = rows([bad])
    assert (row.failed, row.tokens_per_s, row.identical) == (1, 0.0, False)


def test_spread() -> None:
    assert spread([]) == (0.0, 0.0)
    assert spread([3.0]) == (3.0, 3.0)
    low, high = spread([float(i) for i in range(11)])
    assert (low, high) == (1.0, 9.0)


def test_by_depth_weighs_rounds_and_skips_who_never_went_there() -> None:
    long = completion(ids=tuple(range(40)), options=DRAFTING)
    none = completion(ids=tuple(range(40)))
    assert by_depth([long, none]) == (0.5,)
    assert by_depth([none]) == ()


def test_the_table_fits_a_log(table: list[Row]) -> None:
    out = io.StringIO()
    Console(width=110, file=out).print(report.render(table, "title"))
    text = out.getvalue()
    assert "plain AR" in text
    assert "2.00x" in text
    assert "…" not in text


def test_csv_is_append_only(table: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    first = report.head(device="cpu", versions={"torch": "2"}, command="specla x, y")
    lines = report.csv_rows(table, first)
    report.append(path, lines)
    before = path.read_text()
    report.append(path, lines)
    assert path.read_text().startswith(before)
    with path.open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == report.COLUMNS
    assert len(read) == 2 * len(lines)
    assert read[0]["command"] == "specla x, y"
    assert {r["metric"] for r in read} >= {"easy/ngram/decode", "easy/ngram/acceptance"}


def test_commit_is_a_hash_or_none() -> None:
    assert report.commit() == "none" or report.commit().rstrip("+").isalnum()
