# SPDX-License-Identifier: Apache-2.0
"""`specla bench accept` on the demo model."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from specla.cli import main

CAPTURE = pytest.CaptureFixture[str]


def test_the_demo_model_for_real(capsys: CAPTURE, tmp_path: Path) -> None:
    suite = tmp_path / "tiny" / "question.jsonl"
    suite.parent.mkdir()
    lines = [{"question": "Repeat: red blue red blue red blue"}, {"question": "2 + 2 ="}]
    suite.write_text("\n".join(map(json.dumps, lines)))
    results, texts = tmp_path / "results.csv", tmp_path / "texts.jsonl"
    command = "bench accept demo --drafter suffix --drafter ngram --max-tokens 12 --json --record"
    paths = ["--suite", str(suite), "--results", str(results), "--texts", str(texts)]
    assert main([*command.split(), *paths, "--device", "cpu"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(r["suite"], r["drafter"], r["temperature"]) for r in records]
    assert found == [("tiny", d, t) for d in ("suffix", "ngram") for t in (0.0, 1.0)]
    for one in records:
        raw = one["raw"]
        assert one["prompts"] == 2
        assert raw["tau"] == pytest.approx(raw["tokens"] / raw["rounds"])
        assert raw["tau"] >= 1
        assert one["engine"]["budget"] == "off"
        assert (raw["recall"] is None) == (one["drafter"] == "ngram")
    with results.open() as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert {f"accept/tiny/t{t}/suffix/tau" for t in "01"} <= metrics
    kept = [json.loads(line) for line in texts.read_text().splitlines()]
    assert len(kept) == 8
    assert {one["prompt"] for one in kept} == {line["question"] for line in lines}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mode plain", "must be exact or fast"),
        ("--prompts 0", "--prompts must be >= 1"),
        ("--record", "--record must come with --texts"),
        ("--suite nowhere", "folder with some"),
        ("--data nowhere", "nowhere"),
        ("--data nowhere --suite nowhere", "must not be given together"),
        ("--drafter none", "nothing to accept"),
        ("--temperature -1", "temperature must be"),
    ],
)
def test_usage(capsys: CAPTURE, flags: str, says: str) -> None:
    assert main(["bench", "accept", *flags.split()]) == 2
    assert says in capsys.readouterr().err
