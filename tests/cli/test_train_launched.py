# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch -m specla train`, in two processes on a CPU, against one process."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specla.cli import main
from specla.models.toy import write_toy_checkpoint

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
# The launcher's own default is whatever the machine has; all that it would ask for is said here.
TWO = [
    "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
    "--dynamo_backend", "no", "--main_process_port", "0", "-m", "specla",
]  # fmt: skip
QUESTIONS = ["Who has 12 apples?", "Two and two", "def add(a, b):", "How far?", "x", "y = 3", "z"]
EAGLE = ["--unroll", "3", "--draft-vocab", "200"]
BLOCK = ["--kind", "block", "--draft-layers", "1", "--block-size", "4", "--head-dim", "8"]
MANY = ["--anchors", "1000"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("toy")
    return str(write_toy_checkpoint(folder, hidden=32, intermediate=48, head_dim=8))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return str(path)


def command(toy: str, prompts: str, folder: Path, rows: int, *flags: str) -> list[str]:
    files = ["--prompts", prompts, "--held-out", prompts, "--out", str(folder)]
    sizes = ["--rows", str(rows), "--length", "64", "--every", "2", "--warmup", "1"]
    other = ["--max-tokens", "8", "--max-slots", "3", "--device", "cpu"]
    return ["train", toy, *files, *sizes, *other, *flags]


def launched(
    toy: str, prompts: str, folder: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    """Two processes of a row each."""
    arguments = [*LAUNCH, *TWO, *command(toy, prompts, folder, 1, *flags)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)


def compare(one: Path, two: Path) -> None:
    """Files, answers, figures and what a run goes on from."""
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (one, two)]
    assert names[0] == names[1]
    for name in ("answers.jsonl", "held-out.jsonl"):
        lines = [sorted((folder / name).read_text().splitlines()) for folder in (one, two)]
        assert lines[0] == lines[1]
        assert len(lines[0]) == len(QUESTIONS)
    logs = [list(csv.DictReader((f / "log.csv").read_text().splitlines())) for f in (one, two)]
    assert len(logs[0]) == len(logs[1]) > 1
    for want, got in zip(*logs, strict=True):
        assert got.keys() == want.keys()
        for name in got.keys() - {"seconds"}:
            assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-4, nan_ok=True)
    want, got = (load_file(f / "trainer.safetensors") for f in (one, two))
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-6)


def test_two_processes_train_what_one_does_and_go_on(
    toy: str, prompts: str, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for steps, said in (("2", "starting at step 0"), ("3", "going on at step 2")):
        flags = [*EAGLE, "--steps", steps]
        assert main(command(toy, prompts, one, 2, *flags)) == 0
        done = launched(toy, prompts, two, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"{said} in 2 processes") == 1
        assert done.stderr.count("on held-out texts") == 1
        compare(one, two)


def test_block_drafters_and_readers(toy: str, prompts: str, tmp_path: Path) -> None:
    block = tmp_path / "block-1" / "checkpoint"
    reader = ["--kind", "reader", "--start", str(block), "--joint", "--rank", "3"]
    for name, flags in (("block", [*BLOCK, "--markov-rank", "6"]), ("reader", reader)):
        one, two = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        assert main(command(toy, prompts, one, 2, *flags, *MANY, "--steps", "2")) == 0
        done = launched(toy, prompts, two, *flags, *MANY, "--steps", "2")
        assert done.returncode == 0, done.stderr
        compare(one, two)


def test_a_refusal_ends_all_processes(toy: str, prompts: str, tmp_path: Path) -> None:
    done = launched(toy, prompts, tmp_path, "--steps", "1", "--device", "cuda:1")
    assert done.returncode != 0
    assert "each of 2 processes must have a GPU of its own, got --device cuda:1" in done.stderr
