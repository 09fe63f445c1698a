# SPDX-License-Identifier: Apache-2.0
"""`--drafter-option`: what it is read as, whom it reaches, and that reports name it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_toy import toy_config, write_drafter

from specla import drafters, models
from specla.cli import main
from specla.cli.options import drafter_options, labelled
from specla.drafters import REGISTRY, option_names
from specla.errors import SpeclaError

CAPTURE = pytest.CaptureFixture[str]
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "cli.md"
TWO = "--drafter-option num_draft_tokens=2"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    from specla.models.toy import write_toy_checkpoint

    return str(write_toy_checkpoint(tmp_path_factory.mktemp("models") / "toy"))


def test_values_are_json_or_text() -> None:
    given = ["a=2", "b=0.5", "c=false", "d=null", "e=True", "f=x=y", "g="]
    found = {"a": 2, "b": 0.5, "c": False, "d": None, "e": "True", "f": "x=y", "g": ""}
    assert drafter_options(given) == found
    assert drafter_options(None) == {}


def test_names_in_reports() -> None:
    assert labelled("eagle:run", {}) == "eagle:run"
    assert labelled("eagle", {"top_k": 2, "spine": False}) == "eagle top_k=2 spine=False"


def test_the_guide_lists_them_all() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (`.*`) \|$", GUIDE.read_text(), re.M))
    for name in set(REGISTRY) - {"none"}:
        # The folder goes with the name.
        assert re.findall(r"\w+", listed[name]) == [x for x in option_names(name) if x != "path"]


@pytest.mark.parametrize("command", ["generate -p x", "generate -p x --compare", "chat"])
def test_they_reach_the_one_who_drafts(stub: Any, stdin: Any, command: str) -> None:
    stdin(b"hello\n")
    assert main([*command.split(), "--drafter", "ngram", *TWO.split()]) == 0
    for llm in stub.made:
        drafts = llm.options["drafter"] == "ngram"
        assert (llm.options["drafter_options"] or {}) == (
            {"num_draft_tokens": 2} if drafts else {}
        )


def test_bench_generate_names_them(stub: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    command = f"bench generate --per-kind 1 --kind chat --drafter ngram {TWO} --total e2e"
    assert main([*command.split(), "--record", "--results", str(path)]) == 0
    options = [llm.options["drafter_options"] for llm in stub.made]
    assert options == [None, None, {"num_draft_tokens": 2}]
    with path.open() as file:
        notes = {row["metric"]: row["notes"] for row in csv.DictReader(file)}
    assert "chat/ngram num_draft_tokens=2/decode" in notes
    assert notes["e2e"].startswith("ngram num_draft_tokens=2;")


def test_bench_accept_for_real(toy: str, capsys: CAPTURE, tmp_path: Path) -> None:
    target = models.load(toy, device="cpu", dtype=torch.float32)
    folder = write_drafter(tmp_path / "drafter", toy_config(target.info))
    command = f"bench accept {toy} --drafter eagle:{folder} --prompts 1 --max-tokens 6 --json"
    flags = ["--drafter-option=top_k=1", "--drafter-option=max_depth=1", "--temperature=0"]
    assert main([*command.split(), *flags, "--device", "cpu"]) == 0
    for one in map(json.loads, capsys.readouterr().out.splitlines()):
        assert one["drafter"] == f"eagle:{folder} top_k=1 max_depth=1"
        assert one["engine"]["drafter_options"] == {"top_k": 1, "max_depth": 1}
        # Everything is verified, and a chain of one is all that there is.
        assert len(one["raw"]["acceptance_by_depth"]) == 1


def test_bench_exactness_for_real(toy: str, capsys: CAPTURE) -> None:
    command = f"bench exactness {toy} --drafter ngram {TWO} --per-kind 1 --kind copy --json"
    assert main([*command.split(), "--max-tokens", "6", "--device", "cpu"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "ngram num_draft_tokens=2" in summary["notes"]


def test_profile_for_real(toy: str, capsys: CAPTURE, tmp_path: Path) -> None:
    command = f"profile {toy} --max-nodes 2 --max-batch 1 --drafter ngram {TWO} --json"
    assert main([*command.split(), "--output", str(tmp_path / "costs.json")]) == 0
    record = json.loads(capsys.readouterr().out)
    drafts = {cost["kernel"] for cost in record["costs"] if cost["part"] == "draft"}
    assert len(drafts) == 1
    assert drafts.pop().endswith("num_draft_tokens=2")


@pytest.mark.parametrize(
    "command", ["generate -p x", "bench generate", "bench accept", "bench exactness", "profile"]
)
def test_unknown_ones_are_refused_with_those_there_are(
    toy: str, capsys: CAPTURE, command: str
) -> None:
    first, *rest = command.split()
    words = [first, *rest, toy] if first == "bench" else [first, toy, *rest]
    assert main([*words, "--drafter", "ngram", "--drafter-option", "top_k=2"]) == 2
    assert (
        "option of drafter 'ngram' must be one of: prompt_lookup_max, prompt_lookup_min, "
        "num_draft_tokens; got 'top_k'"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("generate --drafter-option top_k", "must be NAME=VALUE, got 'top_k'"),
        ("generate --drafter-option =2", "must be NAME=VALUE, got '=2'"),
        ("generate --drafter-option a=1 --drafter-option a=2", "--drafter-option a must be given"),
        ("generate -p x --drafter none --drafter-option a=1", "none has no options, got 'a'"),
        ("generate -p x --mode plain --drafter-option a=1", "none has no options, got 'a'"),
        ("generate -p x --drafter eagle:d --drafter-option path=e", "folder must be given once"),
        ("generate -p x --drafter ngram --drafter-option num_draft_tokens=x", "got 'x'"),
        ("profile --drafter-option top_k=2", "--drafter-option must come with --drafter"),
        # Of two, before either has been measured.
        (f"bench accept --drafter ngram --drafter suffix {TWO}", "option of drafter 'suffix'"),
        (f"bench generate --drafter ngram --drafter suffix {TWO}", "option of drafter 'suffix'"),
        ("bench accept --drafter auto --drafter-option best=1", "option of drafter 'eagle'"),
    ],
)
def test_refusals(capsys: CAPTURE, command: str, says: str) -> None:
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_folder_named_like_a_number() -> None:
    with pytest.raises(SpeclaError, match="2024"):
        drafters.build("block", options={"path": 2024})
