# SPDX-License-Identifier: Apache-2.0
"""The command line on real engines and toy checkpoints; nothing is stubbed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specla.bench.workloads import prompts
from specla.cli import main
from specla.drafters import UNTRAINED

CAPTURE = pytest.CaptureFixture[str]
KINDS = ("problems", "python", "copy", "chat")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from specla.models.toy import write_toy_checkpoint

    return Path(write_toy_checkpoint(tmp_path_factory.mktemp("models") / "toy"))


@pytest.fixture
def broken(toy: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may damage."""
    return Path(shutil.copytree(toy, tmp_path / "broken"))


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def token_ids(model: str, jobs: Path, capsys: CAPTURE, *flags: str) -> list[list[int]]:
    assert main(["generate", model, "--prompts", str(jobs), *flags]) == 0
    return [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]


def check_every_drafter(model: str, jobs: Path, capsys: CAPTURE, flags: list[str]) -> None:
    """20 prompts of four kinds: the same tokens, whoever guesses."""
    lines = [json.dumps({"prompt": p.text}) for p in prompts(KINDS, 5)]
    assert len(lines) == 20
    jobs.write_text("\n".join(lines))
    truth = token_ids(model, jobs, capsys, "--drafter", "none", *flags)
    for name in UNTRAINED:
        assert token_ids(model, jobs, capsys, "--drafter", name, *flags) == truth, name


LAWS = ["--temperature 0", "--temperature 0.8 --seed 7"]


@pytest.mark.parametrize("law", LAWS)
def test_every_drafter_gives_the_same_tokens(
    toy: Path, tmp_path: Path, capsys: CAPTURE, law: str
) -> None:
    flags = [*law.split(), "--max-tokens", "16", "--ignore-eos"]
    check_every_drafter(str(toy), tmp_path / "jobs.jsonl", capsys, flags)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_every_drafter_gives_the_same_tokens_on_the_demo_model(
    tmp_path: Path, capsys: CAPTURE, law: str
) -> None:
    flags = [*law.split(), "--max-tokens", "96"]
    check_every_drafter("demo", tmp_path / "jobs.jsonl", capsys, flags)


def test_json(toy: Path, capsys: CAPTURE) -> None:
    command = ["generate", str(toy), "-p", "hello", "--json", "--max-tokens", "8", "--seed", "7"]
    assert main([*command, "--temperature", "0.8", "--ignore-eos"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["usage"]["completion_tokens"] == len(record["token_ids"]) == 8
    speculation = record["speculation"]
    assert speculation["rounds"] + speculation["accepted"] == 8
    assert speculation["mode"] == "exact"
    assert record["seed"] == 7
    assert record["architecture"] == "GatedDeltaNetForCausalLM"


def test_streamed_text_is_the_json_text(toy: Path, capsys: CAPTURE) -> None:
    command = ["generate", str(toy), "-p", "12 apples", "--max-tokens", "24"]
    assert main(command) == 0
    streamed = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert streamed == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_compare(toy: Path, capsys: CAPTURE) -> None:
    command = ["generate", str(toy), "--compare", "-p", "a b a b a b", "--repeats", "1"]
    assert main([*command, "--max-tokens", "16", "--ignore-eos"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "identical: yes"


def test_bench(toy: Path, capsys: CAPTURE) -> None:
    command = f"bench generate {toy} --kind copy --per-kind 1 --max-tokens 16 --json"
    assert main(command.split()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["method"] for row in rows} >= {"plain AR", "exact AR", *UNTRAINED} - {"none"}


def test_doctor(toy: Path, capsys: CAPTURE) -> None:
    assert main(["doctor", str(toy)]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    tests = [line for line in out.splitlines() if line.startswith("PASS")]
    assert len(tests) >= 4
    # The self-test must not pass for want of anything to accept.
    counts = re.findall(r"tiny .* (\d+) tokens in (\d+) rounds", "\n".join(tests))
    assert counts
    assert all(int(tokens) > int(rounds) for tokens, rounds in counts)


def test_chat(toy: Path) -> None:
    command = [sys.executable, "-m", "specla", "chat", str(toy), "--max-tokens", "8"]
    done = subprocess.run(command, input=b"hello\n/stats\n", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"1 answer, " in done.stderr


def fails(capsys: CAPTURE, code: int, model: object, *words: str, prompt: str = "x") -> None:
    assert main(["generate", str(model), "-p", prompt, "--max-tokens", "4"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specla: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_no_such_model(capsys: CAPTURE) -> None:
    fails(capsys, 3, "no/such-model", "no/such-model")


def test_unknown_architecture(broken: Path, capsys: CAPTURE) -> None:
    edit_config(broken, architectures=["FooForCausalLM"])
    fails(capsys, 3, broken, "FooForCausalLM", "GatedDeltaNetForCausalLM")


def test_config_that_is_not_json(broken: Path, capsys: CAPTURE) -> None:
    (broken / "config.json").write_text("{")
    fails(capsys, 3, broken, "config.json")


def test_truncated_weights(broken: Path, capsys: CAPTURE) -> None:
    path = weights(broken)
    path.write_bytes(path.read_bytes()[:-100])
    fails(capsys, 3, broken, path.name)


def test_missing_weights(broken: Path, capsys: CAPTURE) -> None:
    weights(broken).unlink()
    fails(capsys, 3, broken, "safetensors")


def test_missing_tokenizer(broken: Path, capsys: CAPTURE) -> None:
    for path in broken.glob("tokenizer*"):
        path.unlink()
    fails(capsys, 3, broken, "tokenizer")


def test_pickled_weights_are_not_opened(broken: Path, capsys: CAPTURE) -> None:
    weights(broken).unlink()
    marker = broken / "ran"
    (broken / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + os.fsencode(marker) + b"'\ntR."
    )
    fails(capsys, 3, broken, "safetensors")
    assert not marker.exists()
