# SPDX-License-Identifier: Apache-2.0
"""`specla train`: from prompts to a drafter that the other commands take. Nothing is stubbed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specla.cli import main
from specla.engine.engine import Engine
from specla.models.toy import write_toy_checkpoint
from specla.train.steps import Steps

CAPTURE = pytest.CaptureFixture[str]
QUESTIONS = ["Who has 12 apples?", "Two and two", "def add(a, b):", "How far is it?", "x"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("toy")
    return str(write_toy_checkpoint(folder, hidden=32, intermediate=48, head_dim=8))


def write_prompts(path: Path, *, answers: bool = False) -> str:
    rows = []
    for i, text in enumerate(QUESTIONS):
        turns = [{"role": "user", "content": text}]
        if answers and i % 2:
            turns.append({"role": "assistant", "content": "An answer."})
        rows.append({"messages": turns} if i else {"prompt": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(toy: str, folder: Path, prompts: str, *flags: str) -> int:
    sizes = ["--rows", "2", "--length", "64", "--unroll", "3", "--every", "2", "--warmup", "1"]
    other = ["--max-tokens", "8", "--max-slots", "3", "--draft-vocab", "200", "--device", "cpu"]
    files = ["--prompts", prompts, "--held-out", prompts, "--out", str(folder)]
    return main(["train", toy, *files, *sizes, *other, *flags])


def test_a_run_that_goes_on_and_its_drafter_in_use(
    toy: str, tmp_path: Path, capsys: CAPTURE
) -> None:
    prompts, out = write_prompts(tmp_path / "p.jsonl", answers=True), tmp_path / "run"
    assert train(toy, out, prompts, "--steps", "2") == 0
    assert "starting at step 0" in capsys.readouterr().err
    assert train(toy, out, prompts, "--steps", "3") == 0
    assert "going on at step 2" in capsys.readouterr().err
    assert len((out / "answers.jsonl").read_text().splitlines()) == len(QUESTIONS)
    drafter = f"eagle:{out / 'checkpoint'}"
    says = []
    for name in (drafter, "none"):
        flags = ["-p", "Two and two", "--max-tokens", "12", "--json", "--drafter", name]
        assert main(["generate", toy, *flags]) == 0
        says.append(json.loads(capsys.readouterr().out))
    assert says[0]["token_ids"] == says[1]["token_ids"]
    assert says[0]["speculation"]["drafter"] == "eagle"
    assert says[0]["speculation"]["drafted"] > 0
    mode = Path(prompts).stat().st_mode
    assert {path.stat().st_mode for path in out.rglob("*") if path.is_file()} == {mode}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("flags", "count"), [([], 2), (["--threads", "1"], 1)])
def test_training_has_all_threads_though_answering_has_one(
    toy: str, tmp_path: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch,
    flags: list[str], count: int,
) -> None:  # fmt: skip
    seen: dict[str, set[int]] = {"step": set(), "train_step": set()}

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def watched(self: Any) -> Any:
            seen[name].add(torch.get_num_threads())
            return real(self)

        monkeypatch.setattr(owner, name, watched)

    watch(Engine, "step")
    watch(Steps, "train_step")
    prompts = write_prompts(tmp_path / "p.jsonl")
    assert train(toy, tmp_path / "run", prompts, "--steps", "1", *flags) == 0
    assert seen == {"step": {1}, "train_step": {count}}
    threads = "2 threads" if count == 2 else "1 thread"
    assert f", {threads}\n" in capsys.readouterr().err


def test_what_is_refused(toy: str, tmp_path: Path, capsys: CAPTURE) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", answers=True)
    for flags, message in (
        (["--kind", "medusa"], "--kind must be one of"),
        (["--layers", "1,x"], "--layers must be numbers"),
        (["--layers", "0,7"], "feature layers must be different ids below 2"),
        (["--every", "0"], "--every must be above 0"),
        (["--minutes", "-1"], "--minutes must be above 0, got -1"),
        (["--minutes", "nan"], "--minutes must be above 0, got nan"),
        (["--steps", "0"], "steps must be above 0"),
        (["--warmup", "0"], "warmup must be above 0"),
        (["--lr", "-1"], "lr must be above 0"),
        (["--unroll", "0"], "unroll must be above 0"),
        (["--heads", "0"], "num_heads must be above 0"),
        (["--draft-vocab", "0"], "draft_vocab_size must be above 0"),
        (["--mixer", "attention", "--head-dim", "5"], "an even head_dim, got 5"),
        (["--temperature", "1"], "prompts with answers are for temperature 0"),
    ):
        assert train(toy, tmp_path / "run", prompts, *flags) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    assert train(toy, tmp_path / "run", str(tmp_path / "bad.jsonl")) == 2
    assert "bad.jsonl, line 2: prompt must be a string" in capsys.readouterr().err


def test_a_folder_is_made_once_the_prompts_are_read(tmp_path: Path, capsys: CAPTURE) -> None:
    """And nothing is loaded before: the model is none."""
    good, bad = write_prompts(tmp_path / "p.jsonl"), tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 3}\n')
    for prompts, out, says in (
        (tmp_path / "none.jsonl", tmp_path / "run", "must name a readable file"),
        (bad, tmp_path / "run", "bad.jsonl, line 1: prompt must be a string"),
        (good, bad, "--out must name a folder, got"),
        (good, bad / "run", "Not a directory; give another"),
    ):
        assert main(["train", "nowhere", "--prompts", str(prompts), "--out", str(out)]) == 2
        assert says in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_processes_do_not_share_standard_input(
    tmp_path: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would get a part of it, and answer other prompts under the same numbers."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for files in (["--prompts", "-"], ["--prompts", "p.jsonl", "--held-out", "-"]):
        assert main(["train", "nowhere", "--out", str(tmp_path), *files]) == 2
        assert "give a file that all of them see" in capsys.readouterr().err
