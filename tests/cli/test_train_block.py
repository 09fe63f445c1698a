# SPDX-License-Identifier: Apache-2.0
"""`specla train --kind block` and `reader`: from prompts to drafters in use; nothing stubbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from specla.cli import main
from specla.models.toy import write_toy_checkpoint

CAPTURE = pytest.CaptureFixture[str]
QUESTIONS = ["Who has 12 apples?", "Two and two", "def add(a, b):", "How far is it?", "x"]
SIZES = ["--draft-layers", "1", "--block-size", "4", "--head-dim", "8", "--markov-rank", "6"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("toy")
    return str(write_toy_checkpoint(folder, hidden=32, intermediate=48, head_dim=8))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return str(path)


def train(toy: str, folder: Path, prompts: str, *flags: str) -> int:
    files = ["--prompts", prompts, "--held-out", prompts, "--out", str(folder)]
    sizes = ["--rows", "2", "--length", "64", "--every", "2", "--warmup", "1", "--anchors", "9"]
    other = ["--max-tokens", "8", "--max-slots", "3", "--device", "cpu"]
    return main(["train", toy, *files, *sizes, *other, *flags])


def loss_of(folder: Path) -> list[float]:
    """Shares of the loss that a run was begun with."""
    with safe_open(folder / "trainer.safetensors", "pt") as file:
        found: list[float] = json.loads(file.metadata()["notes"])["config"]["loss"]
    return found[:3]


def says(toy: str, drafter: str, capsys: CAPTURE) -> dict[str, object]:
    flags = ["-p", "Two and two", "--max-tokens", "12", "--json", "--drafter", drafter]
    assert main(["generate", toy, *flags]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_drafter_its_reader_and_both_together(
    toy: str, prompts: str, tmp_path: Path, capsys: CAPTURE
) -> None:
    block, read, both, more = (tmp_path / name for name in ("block", "read", "both", "more"))
    assert train(toy, block, prompts, "--kind", "block", *SIZES, "--steps", "2") == 0
    assert "starting at step 0" in capsys.readouterr().err
    assert train(toy, block, prompts, "--kind", "block", *SIZES, "--steps", "3") == 0
    assert "going on at step 2" in capsys.readouterr().err
    kind = ["--kind", "reader", "--steps", "2"]
    alone = ["--start", str(block / "checkpoint"), "--rank", "3", "--state-layers", "1"]
    assert train(toy, read, prompts, *kind, *alone) == 0
    assert train(toy, both, prompts, *kind, "--joint", "--start", str(read / "checkpoint")) == 0
    plain = ["--kind", "block", "--steps", "2", "--start", str(block / "checkpoint")]
    assert train(toy, more, prompts, *plain, "--reader-loss") == 0
    assert [loss_of(folder) for folder in (block, both, more)] == [
        [0.1, 0.9, 1.0],
        *2 * [[1.0, 0.1, 0.0]],
    ]
    capsys.readouterr()
    files = [folder / "checkpoint" / "model.safetensors" for folder in (block, read, both)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert load_file(files[1]).keys() == load_file(files[2]).keys()
    want = says(toy, "none", capsys)["token_ids"]
    for folder, name in ((block, "block"), (read, "block+reader"), (both, "block+reader")):
        found = says(toy, f"block:{folder / 'checkpoint'}", capsys)
        assert found["token_ids"] == want
        speculation = found["speculation"]
        assert isinstance(speculation, dict)
        assert speculation["drafter"] == name
        assert speculation["drafted"] > 0


def test_what_is_refused(toy: str, prompts: str, tmp_path: Path, capsys: CAPTURE) -> None:
    block = tmp_path / "block"
    assert train(toy, block, prompts, "--kind", "block", *SIZES, "--steps", "1") == 0
    start = ["--start", str(block / "checkpoint")]
    for flags, message in (
        (["--kind", "block", "--unroll", "3"], "unroll is not an option of --kind block"),
        (["--kind", "eagle", "--anchors", "3"], "anchors is not an option of --kind eagle"),
        (["--kind", "block", *start, "--block-size", "5"], "goes on with the sizes it has"),
        (["--kind", "block", "--layers", "0,7"], "feature layers must be different ids below 2"),
        (["--kind", "block", "--block-size", "0"], "block_size must be above 0"),
        (["--kind", "block", "--block-size", "257"], "block-size must be at most 256"),
        (["--kind", "block", "--window", "-1"], "window must be 0 or above"),
        (["--kind", "block", "--anchors", "0"], "anchors must be above 0"),
        (["--kind", "reader", *start, "--rank", "0"], "rank must be above 0"),
        (["--kind", "reader"], "is trained on a block drafter"),
        (["--kind", "reader", *start, "--block-size", "5"], "block_size is not an option"),
        (["--kind", "reader", *start, "--state-layers", "3"], "state layers must be"),
        (["--kind", "reader", "--start", str(tmp_path)], "does not exist"),
    ):
        assert train(toy, tmp_path / "run", prompts, *flags) == 2, flags
        assert message in capsys.readouterr().err
    config = block / "checkpoint" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_hash": "0" * 64}))
    assert train(toy, tmp_path / "run", prompts, "--kind", "block", *start) == 2
    assert "must be used with the tokenizer" in capsys.readouterr().err
