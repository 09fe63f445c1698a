# SPDX-License-Identifier: Apache-2.0
"""A run in a folder: it is stopped, dies, or is lengthened, and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_harness import make_engine
from safetensors.torch import load_file, save_file
from test_drafter_training import GREEDY, PROMPTS, packer_for, trainer_for

from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.train import session
from specla.train.batches import Batch
from specla.train.capture import Capture, Text, answer
from specla.train.loop import Recipe
from specla.train.optim import rate
from specla.train.run import Run, Sizes, config_for


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> list[Text]:
    found = dict(answer(make_engine(target, slots=8, nodes=1), dict(enumerate(PROMPTS)), GREEDY))
    return [found[i] for i in range(len(PROMPTS))]


def test_a_run_that_is_stopped_ends_with_figures_of_its_last_step(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """By the clock: the log, the figures and the checkpoint are of the last step. Going on, every
    step has one row."""
    recipe = Recipe(rows=2, length=64, unroll=4, steps=40, lr=6e-3, warmup=3)
    config = config_for(target, Sizes(hidden_size=24, target_layer_ids=(0, 1)), None)
    capture = Capture(target, (0, 1), keep_bytes=1 << 24)

    def run(steps: int) -> Run:
        return Run(
            tmp_path, target, capture, config, texts[:20], texts[20:],
            replace(recipe, steps=steps), compute=torch.float32,
        )  # fmt: skip

    def logged() -> list[list[str]]:
        return [row.split(",") for row in (tmp_path / "log.csv").read_text().splitlines()[1:]]

    with pytest.MonkeyPatch.context() as patch:
        stopped = run(40)
        clock = SimpleNamespace(monotonic=lambda: 99.0 if stopped.step >= 10 else 0.0)
        patch.setattr(session, "time", clock)
        found = stopped(every=50, minutes=1, note=lambda _: None)
    assert stopped.step == 10
    assert [row[0] for row in logged()] == ["0", "10"]
    assert found.tau == pytest.approx(float(logged()[1][4]), abs=1e-4)
    assert found.tau > float(logged()[0][4])
    kept = load_file(tmp_path / "checkpoint" / "model.safetensors")
    stopped.trainer.keep(tmp_path / "again")
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, kept[name]), name

    last = logged()[1]
    again = run(11)
    assert again.resumed
    again(every=50, minutes=9, note=lambda _: None)
    assert [row[0] for row in logged()] == ["0", "10", "11"]
    assert logged()[1] == last
    run(11)(every=50, minutes=9, note=lambda _: None)  # nothing is left to do
    assert [row[0] for row in logged()] == ["0", "10", "11"]


def test_a_run_that_dies_goes_on_from_where_it_was_saved(
    target: TargetModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is what it would have been; what it had done since is done and logged once."""
    recipe = Recipe(rows=2, length=40, unroll=2, steps=6, lr=1e-3, warmup=2)
    held = [packer_for(target, torch.arange(24))([texts[20:21]])]

    def run(folder: Path) -> session.Session[Batch]:
        folder.mkdir(exist_ok=True)
        return session.Session(folder, trainer_for(target, texts[:20], recipe), held)

    def die(line: str) -> None:
        if line.startswith("step 4"):
            raise KeyboardInterrupt

    def logged(name: str) -> list[list[str]]:
        rows = (tmp_path / name / "log.csv").read_text().splitlines()[1:]
        return [[*row.split(",")[:2], *row.split(",")[3:]] for row in rows]

    monkeypatch.setattr(session, "SAVE_SECONDS", -1.0)
    run(tmp_path / "whole")(every=2, minutes=9, note=lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "died")(every=2, minutes=9, note=die)
    assert [row[0] for row in logged("died")] == ["0", "2", "4"]
    again = run(tmp_path / "died")
    assert again.step == 2
    assert [row[0] for row in logged("died")] == ["0", "2"]
    again(every=2, minutes=9, note=lambda _: None)
    assert logged("died") == logged("whole")

    monkeypatch.setattr(session, "SAVE_SECONDS", 99.0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "early")(every=2, minutes=9, note=die)
    anew = run(tmp_path / "early")
    assert not anew.resumed
    anew(every=2, minutes=9, note=lambda _: None)
    assert logged("early") == logged("whole")


def test_a_run_is_lengthened_by_what_there_is_time_for(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """Or up to a step on the way. Its rate falls to the new end; nothing is written that nobody
    goes on from, and no look is taken twice. Of drafters with equal figures the last is kept."""
    trainer = trainer_for(
        target, texts, Recipe(rows=1, length=40, unroll=2, steps=3, lr=1e-3, warmup=1)
    )
    run, notes = session.Session(tmp_path, trainer, []), list[str]()
    run(every=9, minutes=9, note=notes.append, saves=False)
    run.lengthen(5)
    run(every=9, minutes=9, note=notes.append, saves=False, until=4)
    assert run.step == 4
    run(every=9, minutes=9, note=notes.append, saves=False)
    assert [note.split()[1] for note in notes] == ["0", "3", "4", "5"]
    assert trainer.optimizers[-1].param_groups[0]["lr"] == 1e-3 * rate(4 / 5, 4, 1, floor=0.02)
    assert not list(tmp_path.glob("trainer*"))
    trainer.keep(tmp_path / "last")
    last, kept = (load_file(tmp_path / x / "model.safetensors") for x in ("last", "checkpoint"))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in last.items())


def test_damaged_files_of_a_run_are_named(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """With what to do about them, which works: a log has lost figures, a trainer its steps."""
    recipe = Recipe(rows=1, length=40, unroll=2, steps=2, lr=1e-3, warmup=1)
    trainer, log = tmp_path / "trainer.safetensors", tmp_path / "log.csv"

    def run() -> session.Session[Batch]:
        return session.Session(tmp_path, trainer_for(target, texts, recipe), [])

    def steps() -> list[bytes]:
        return [row.split(b",")[0] for row in log.read_bytes().splitlines()]

    run()(every=1, minutes=9, note=lambda _: None)
    rows = log.read_bytes().splitlines(keepends=True)
    for damaged, says in ((b"", []), (rows[0][:9], []), (b"".join(rows) + b"1", rows)):
        log.write_bytes(damaged)
        assert run().resumed
        assert log.read_bytes() == b"".join(says)
    log.write_bytes(b"")
    run()(every=1, minutes=9, note=lambda _: None)
    assert steps() == [b"step", b"2"]
    log.write_bytes(rows[0] + b"\xff,x\n" + rows[1])
    with pytest.raises(
        ConfigError, match=r"log.csv, line 2, must be the figures of a step.*delet"
    ):
        run()
    log.unlink()

    whole = trainer.read_bytes()
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    for damaged in (b"", whole[:100], whole[:-10], (tmp_path / "other").read_bytes()):
        trainer.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"trainer.safetensors must be .*delete it"):
            run()
    trainer.unlink()
    assert not run().resumed


def test_a_log_is_replaced_or_left(
    target: TargetModel, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies while it drops rows has lost none."""
    recipe = Recipe(rows=1, length=40, unroll=2, steps=1, lr=1e-3, warmup=1)
    session.Session(tmp_path, trainer_for(target, texts, recipe), [])(
        every=1, minutes=9, note=lambda _: None
    )
    log = tmp_path / "log.csv"
    log.write_bytes(log.read_bytes() + b"9,\n")
    before, write = log.read_bytes(), Path.write_bytes

    def die(path: Path, data: bytes) -> None:
        write(path, data[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", die)
    with pytest.raises(KeyboardInterrupt):
        session.Session(tmp_path, trainer_for(target, texts, recipe), [])
    assert log.read_bytes() == before
