# SPDX-License-Identifier: Apache-2.0
"""`specla bench study` on a tiny random model with untrained drafters. Nothing is stubbed."""

from __future__ import annotations

import csv
import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from block_toy import block_config, reader_config, write_block
from eagle_toy import toy_config, write_drafter
from headline_data import make_data

from specla import models
from specla.bench.studies import REGISTRY, find
from specla.cli import main
from specla.cli.bench_study import _prompts
from specla.models.base import ModelInfo
from specla.models.toy import write_toy_checkpoint

CAPTURE = pytest.CaptureFixture[str]
QUESTIONS = ["Who has 12 apples?", "Two and two", "def add(a, b):", "How far is it to the sea?"]
ATTENTION = {"mixer": "attention", "num_heads": 4, "num_v_heads": 2, "head_dim": 6,
             "head_v_dim": 6}  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(
        tmp_path_factory.mktemp("toy"), hidden=32, intermediate=48, head_dim=8
    )


@pytest.fixture(scope="module")
def info(toy: Path) -> ModelInfo:
    return models.load(str(toy), device="cpu", dtype=torch.float32).info


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("suites") / "tiny" / "question.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    return file


@pytest.fixture
def measure(toy: Path, suite: Path, capsys: CAPTURE) -> Any:
    """Runs a study; its measurements."""

    def run(name: str, *flags: str) -> list[dict[str, Any]]:
        sizes = ["--suite", str(suite), "--ignore-eos", "--device", "cpu", "--json"]
        assert main(["bench", "study", name, str(toy), *sizes, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = [json.loads(line) for line in lines]
        assert {one["study"] for one in found} == {name}
        for one in found:
            if one["missing"] is None:
                assert one["figures"]["same"] == one["figures"]["prompts"] > 0
        return found

    return run


def test_controlled_acceptance_brings_what_it_should(measure: Any, tmp_path: Path) -> None:
    flags = ["--vary", "p=0.7,1", "--vary", "length=2,5", "--max-tokens", "30", "--report"]
    found = measure("controlled", *flags, str(tmp_path), "--prompts", "2")
    tau = {(m["at"]["p"], m["at"]["length"]): m["figures"]["tau"] for m in found}
    for length in (2, 5):
        assert tau[1, length] == pytest.approx(30 / ceil(30 / (length + 1)))
        closed = (1 - 0.7 ** (length + 1)) / 0.3
        assert tau[0.7, length] == pytest.approx(closed, rel=0.2)
    assert [m["figures"]["closed_form"] for m in found[:2]] == pytest.approx([2.19, 3])
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md", "rows.jsonl", "controlled.png",
    }  # fmt: skip
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found


def test_controlled_acceptance_of_random_weights(
    toy: Path, suite: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No checkpoint, no tokenizer: prompts are their bytes."""

    def made(**options: object) -> object:
        assert options == {"device": "cpu", "dtype": torch.float32}
        return models.load(str(toy), device="cpu", dtype=torch.float32)

    monkeypatch.setattr("specla.bench.random_model.gdn_1_3b", made)
    sizes = ["--suite", str(suite), "--prompts", "2", "--max-tokens", "12", "--device", "cpu"]
    flags = ["--vary", "p=1", "--vary", "length=2", "--report", str(tmp_path), "--json"]
    assert main(["bench", "study", "controlled", "random:gdn-1.3b", *sizes, *flags]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["figures"]["same"] == found["figures"]["prompts"] == 2
    assert found["figures"]["tau"] == 3
    run = found["run"]
    assert (run["model"], run["prompts"]) == ("random:gdn-1.3b", "2, bytes")
    assert "random:gdn-1.3b" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("tree random:gdn-1.3b", "study tree is about drafters, which know a checkpoint"),
        ("controlled random:gdn-7b", "random weights must be of shape gdn-1.3b, got 'gdn-7b'"),
        ("controlled random:gdn-1.3b --revision v1", "--revision is of a hub id, got v1"),
    ],
)
def test_random_weights_that_there_are_not(capsys: CAPTURE, command: str, says: str) -> None:
    assert main(["bench", "study", *command.split(), "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


def test_one_factor_of_a_tree_at_a_time(measure: Any, info: ModelInfo, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "d", toy_config(info))
    values = ["top_k=1,2", "max_depth=1,2", "nodes=2,4", "threshold=0,50"]
    flags = [part for text in values for part in ("--vary", text)]
    centre = ["--at", "nodes=4", "--at", "max_depth=2", "--at", "top_k=2", "--at", "threshold=50"]
    sizes = ["--prompts", "1", "--max-tokens", "8", "--drafter", f"eagle:{folder}"]
    found = measure("tree", *flags, *centre, *sizes, "--report", str(tmp_path / "r"))
    middle = {"top_k": 2, "max_depth": 2, "nodes": 4, "threshold": 50, "suite": "tiny"}
    assert found[0]["at"] == middle
    for one in found[1:]:
        (factor,) = {name for name, value in one["at"].items() if value != middle[name]}
        assert one["at"][factor] in {"top_k": (1,), "max_depth": (1,), "nodes": (2,),
                                     "threshold": (0,)}[factor]  # fmt: skip
    assert len(found) == 5
    for one in found:
        assert 1 <= one["figures"]["tau"] <= 1 + min(one["at"]["max_depth"], one["at"]["nodes"])
    assert (tmp_path / "r" / "tree.png").stat().st_size > 1000


def test_what_cannot_be_loaded_is_missing_but_the_centre_must_be(
    measure: Any, info: ModelInfo, toy: Path, tmp_path: Path, capsys: CAPTURE
) -> None:
    folder = write_block(tmp_path / "b", block_config(info))
    only = ["--vary", "top_k=1", "--vary", "nodes=4", "--vary", "threshold=6"]
    few = ["--prompts", "1", "--max-tokens", "6", "--drafter", f"block:{folder}"]
    found = measure("tree", *only, *few, "--vary", "max_depth=6", "--at", "max_depth=2")
    missing = [one["missing"] for one in found if one["missing"]]
    assert len(missing) == 1
    assert "max_depth must be an integer in [1, 5], got 6" in str(missing)
    command = ["bench", "study", "tree", str(toy), "--device", "cpu"]
    assert main([*command, *only, *few, "--vary", "max_depth=2"]) == 2
    assert "max_depth must be an integer in [1, 5], got 6" in capsys.readouterr().err


def test_a_reader_on_and_off_and_beside_another(
    measure: Any, info: ModelInfo, tmp_path: Path
) -> None:
    config = block_config(info, block_size=3)
    write_block(tmp_path / "more", config, seed=3)
    write_block(tmp_path / "read", config, reader_config(info))
    drafters = [f"--drafter=block:{tmp_path / name}" for name in ("more", "read")]
    sizes = ["--prompts", "2", "--max-tokens", "8", "--report", str(tmp_path / "r")]
    found = measure("reader", *drafters, *sizes, "--vary", "top_k=1,2")
    names = ["more", "read, reader off", "read, reader on"]
    assert [(m["at"]["top_k"], m["at"]["drafter"]) for m in found] == [
        (k, name) for k in (1, 2) for name in names
    ]
    for one in found:
        figures = one["figures"]
        survival = [figures[f"survival_d{d}"]["value"] for d in (1, 2, 3)]
        assert survival == sorted(survival, reverse=True)
        # Without ends on the way, a round emits its path and one more.
        assert figures["tau"]["value"] == pytest.approx(1 + sum(survival), abs=0.15)
        assert figures["tau"]["low"] <= figures["tau"]["value"] <= figures["tau"]["high"]
        if one["at"]["top_k"] == 1:
            assert figures["first_token"]["value"] == pytest.approx(survival[0], abs=0.1)
    first = {"value": 1.0, "low": 1.0, "high": 1.0, "p10": 1.0, "p90": 1.0}
    assert found[0]["figures"]["over_first"] == first
    assert (tmp_path / "r" / "reader.png").stat().st_size > 1000


def test_the_memory_of_attention_grows_and_that_of_the_delta_rule_does_not(
    measure: Any, info: ModelInfo, tmp_path: Path
) -> None:
    gdn = write_drafter(tmp_path / "gdn", toy_config(info))
    attention = write_drafter(tmp_path / "att", toy_config(info, **ATTENTION))
    drafters = [f"--drafter=eagle:{folder}" for folder in (gdn, attention)]
    sizes = ["--prompts", "2", "--max-tokens", "4", "--report", str(tmp_path / "r")]
    found = measure("mixer", *drafters, *sizes, "--vary", "length=40,80")
    kept = {(m["at"]["mixer"], m["at"]["length"]): m["figures"]["slot_bytes"] for m in found}
    assert kept["gdn", 40] == kept["gdn", 80]
    # Keys and values of 2 heads of 6, in float32; a round may have added a token or two.
    per_token = 2 * 2 * 6 * 4
    for length in (40, 80):
        assert kept["attention", length] / per_token == pytest.approx(length, abs=6)
    assert all(m["figures"]["draft_us"] > 0 for m in found)
    assert (tmp_path / "r" / "mixer.png").stat().st_size > 1000


def test_batches_with_and_without_a_budget(measure: Any, tmp_path: Path) -> None:
    varied = ["--vary", "batch=2,5", "--vary", "waiting=0,1"]
    flags = ["--drafter", "suffix", *varied, "--max-tokens", "6", "--report"]
    found = measure("batch", *flags, str(tmp_path))
    ways = "AR", "auto", "off"
    assert [(m["at"]["batch"], m["at"]["waiting"], m["at"].get("way")) for m in found] == [
        *((2, 0, way) for way in ways),
        (5, 0, None),
        *((2, 1, way) for way in ways),
        (5, 1, None),
    ]
    missing = [m["missing"] for m in found if m["at"]["batch"] == 5]
    assert missing == [f"{n} prompts are needed, 4 were given" for n in (5, 10)]
    found = [m for m in found if m["at"]["batch"] == 2]
    for one in found:
        assert one["figures"]["tokens"] == 4 * 6
        assert ("ratio" in one["figures"]) == (one["at"]["way"] != "AR")
        assert ("over_off" in one["figures"]) == (one["at"]["way"] == "auto")
    assert found[1]["figures"]["drafting"] is not None
    assert "missing: 5 prompts are needed" in (tmp_path / "README.md").read_text()


def test_an_earlier_run_is_shown_and_recorded(
    measure: Any, tmp_path: Path, capsys: CAPTURE
) -> None:
    flags = ["--vary", "p=1", "--vary", "length=3", "--max-tokens", "8", "--commit", "abc1234"]
    measure("controlled", *flags, "--prompts", "1", "--report", str(tmp_path / "a"))
    results, rows = tmp_path / "results" / "results.csv", tmp_path / "a" / "rows.jsonl"
    again = ["bench", "study", "controlled", "--from", str(rows), "--record"]
    assert main([*again, "--results", str(results)]) == 0
    assert "length" in capsys.readouterr().out
    with results.open() as file:
        found = {row["metric"]: row for row in csv.DictReader(file)}
    assert set(found) == {f"study/controlled/p=1,length=3/{name}" for name in ("ratio", "tau")}
    tau = found["study/controlled/p=1,length=3/tau"]
    assert (tau["commit"], tau["value"], tau["unit"]) == ("abc1234", "4.0000", "tokens/round")
    assert (tmp_path / "results" / "studies" / "controlled" / "README.md").exists()
    assert main([*again[:2], "batch", "--from", str(rows)]) == 2
    assert "one run of study batch" in capsys.readouterr().err


def test_the_headline_s_suites_take_turns(tmp_path: Path) -> None:
    found = _prompts(find("tree"), None, make_data(tmp_path / "d"), 2)
    assert [prompt.kind for prompt in found] == ["gsm8k", "humaneval", "mixed"] * 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("weather", f"a study must be one of {', '.join(REGISTRY)}, got 'weather'"),
        ("controlled --drafter suffix", "study controlled takes 0 drafters, got 1: suffix"),
        ("controlled --vary q=1", "--vary must name one of: p, length; got 'q'"),
        ("controlled --vary length=0", "length must be whole numbers in [1, 63], got 0"),
        ("controlled --vary p=1.5", "p must be in [0, 1], got 1.5"),
        ("controlled --vary p", "--vary must be FACTOR=NUMBER[,NUMBER...], got 'p'"),
        ("controlled --at p=1", "--at must name one of: no factor; got 'p'"),
        ("tree --at nodes=4,8", "--at must give one value per factor, got 2 for nodes"),
        ("tree --drafter suffix", "option of drafter 'suffix' must be one of"),
        ("reader --drafter eagle:x", "must be block:FOLDER for this study, got 'eagle:x'"),
        ("reader --drafter block:x", "a --drafter must have a reader, got block:x"),
        ("mixer", "study mixer takes 2 drafters, got 1: auto"),
        ("mixer --drafter suffix --drafter ngram", "must be eagle:FOLDER for this study"),
        ("batch --prompts 0", "--prompts must be >= 1, got 0"),
        ("batch --suite a --data b", "--suite and --data must not be given together"),
        ("tree --max-nodes 8", "--max-nodes has no effect on study tree"),
        ("batch --record", "--record must come with --texts"),
        ("batch --from x --texts y", "--texts has no effect with --from"),
        ("batch --from x --vary batch=1", "--vary has no effect with --from"),
        ("batch --from x --commit 12", "--commit has no effect with --from"),
        ("batch --from nowhere", "--from must be the JSON lines of one run of study batch"),
    ],
)
def test_usage(capsys: CAPTURE, toy: Path, flags: str, says: str) -> None:
    name, *rest = flags.split()
    assert main(["bench", "study", name, str(toy), "--device", "cpu", *rest]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
