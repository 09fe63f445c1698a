# SPDX-License-Identifier: Apache-2.0
"""Training by the clock, prompts from pools, and data found by name."""

from __future__ import annotations

import json
import lzma
import time
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specla.drafters.eagle_config import EagleConfig, expected_tensors
from specla.errors import ConfigError, SpeclaError
from specla.train import corpus, lineup, pack, target
from specla.train.capture import Text
from specla.train.chat import ASSISTANT_ID, END_ID, USER_ID
from specla.train.checkpoint import load_checkpoint
from specla.train.entries import GPU_LINE_UP, TOY_LINE_UP
from specla.train.gdn import GDNShape
from specla.train.lineup import prompts_of
from specla.train.packing import START_BIT, load_pools
from specla.train.pretrain import Log, Recipe, Trainer, build_model
from specla.train.prompts import train_prompts

SHAPE = GDNShape(32, 1, 2, 8, 2.0, 48, 64, tie_word_embeddings=False)
RECIPE = Recipe(rows=2, length=32, warmup=2, compile=False, shares={"gsm8k": 1.0})


def document(question: int, *, start: bool = True) -> np.ndarray:
    """<user> q q <end> <assistant> a <end>, now and then after an end of text."""
    words = [USER_ID, question, question, END_ID, ASSISTANT_ID, 9, END_ID]
    words = [0, *words] if question % 3 == 0 else words
    found = np.array(words, np.uint32)
    found[0] |= START_BIT if start else 0
    return found


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    folder = tmp_path / "pools"
    folder.mkdir()
    asked = [document(10 + i % 20) for i in range(60)]
    plain = np.full(12, 40, np.uint32)
    plain[0] |= START_BIT
    np.save(folder / "gsm8k.npy", np.concatenate([*asked, plain]))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    (folder / "pools.json").write_text("{}")
    record_what_they_are_made_of(folder)
    return folder


def record_what_they_are_made_of(folder: Path, **changes: object) -> None:
    """As for a scale of SHAPE and a folder of data that is empty."""
    usual = {"vocab_size": SHAPE.vocab_size, "generated": 80_000, "files": None}
    made_of = {"data": pack.data_digest(folder / "nowhere")} | usual | changes
    (folder / target.MADE_OF).write_text(json.dumps(made_of))


def test_training_ends_with_the_clock_and_decayed(pools: Path, tmp_path: Path) -> None:
    trainer = Trainer(replace(RECIPE), pools, build_model(RECIPE, SHAPE, "cpu"))
    lines: list[str] = []
    began = time.monotonic()
    loss = target.run_by_clock(trainer, 1.5, Log(tmp_path / "log.csv", 5, lines.append))
    took = time.monotonic() - began
    assert 1.5 <= took < 4
    assert trainer.step > 5
    group = trainer.optimizers[0].param_groups[0]
    # 1 % of the peak is the floor; the last step may begin a little before the end.
    assert group["lr"] < 0.2 * group["peak"]
    first = float(lines[0].split()[-1])
    assert loss < first
    assert len(lines) == trainer.step // 5


def test_warming_up_changes_nothing() -> None:
    model = build_model(RECIPE, SHAPE, "cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    target.warm_up(model, RECIPE)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_too_little_time_is_refused(pools: Path, tmp_path: Path) -> None:
    scale = target.Scale(shape=SHAPE, recipe=RECIPE, reserve=5)
    with pytest.raises(ConfigError, match="at least 1 s after its data"):
        target.train_target(tmp_path, tmp_path, time.monotonic() + 5, scale, "cpu", note=print)


def test_pools_for_another_scale_are_refused(pools: Path, tmp_path: Path) -> None:
    scale = target.Scale(shape=SHAPE, recipe=RECIPE)

    def train(data: Path = tmp_path, scale: target.Scale = scale) -> None:
        with pytest.raises(ConfigError, match="use another work folder, or delete it"):
            target.train_target(data, tmp_path, time.monotonic() + 99, scale, "cpu", note=print)

    train(scale=replace(scale, generated=5))
    train(scale=replace(scale, files=40))
    train(scale=replace(scale, shape=replace(SHAPE, vocab_size=65)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("{}")
    train(data=tmp_path / "data")
    (pools / target.MADE_OF).unlink()
    train()


def test_pools_that_are_made_anew_keep_nothing_of_others(
    pools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation that was stopped has left some of them, for whatever it was."""
    (pools / "pools.json").unlink()
    scale = target.Scale(shape=SHAPE, recipe=RECIPE, generated=7)
    asked: list[list[str]] = []
    monkeypatch.setattr(target.subprocess, "Popen", lambda command, **_: asked.append(command))
    target._start_pools(tmp_path, pools, scale)
    assert asked[0][-2:] == ["--generated", "7"]
    assert not list(pools.glob("*.npy"))
    assert json.loads((pools / target.MADE_OF).read_text())["generated"] == 7


def test_a_failed_preparation_says_why(tmp_path: Path) -> None:
    scale = target.Scale(shape=SHAPE, recipe=RECIPE)
    with pytest.raises(SpeclaError, match=r"could not be prepared.*gsm_symbolic_40k"):
        target.train_target(tmp_path, tmp_path, time.monotonic() + 99, scale, "cpu", note=print)


def test_the_checkpoint_is_whole_or_not_there(pools: Path, tmp_path: Path) -> None:
    model = build_model(RECIPE, SHAPE, "cpu")
    for _ in range(2):
        target._save(model, tmp_path)
    assert not (tmp_path / "target.tmp").exists()
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert (tmp_path / "target/tokenizer_config.json").exists()
    loaded = load_checkpoint(tmp_path / "target")
    assert torch.equal(loaded.head, model.head.bfloat16().float())


def test_prompts_are_questions_of_the_pools_each_once(pools: Path) -> None:
    line_up = replace(TOY_LINE_UP, prompts=50, pools={"gsm8k": 1.0, "absent": 1.0})
    found = [prompt.tokens for prompt in prompts_of(pools, line_up)]
    asked = [(USER_ID, q, q, END_ID, ASSISTANT_ID) for q in range(10, 30)]
    assert sorted(found) == asked
    assert found == [prompt.tokens for prompt in prompts_of(pools, line_up)]
    few = prompts_of(pools, replace(line_up, prompts=7))
    assert len({prompt.tokens for prompt in few}) == 7


def test_data_are_found_by_name_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 3)
    (tmp_path / corpus.OVERLAP).write_text("[1]")
    assert corpus.locate(tmp_path, "test.jsonl") == tmp_path / "gsm8k/test.jsonl"
    assert len(corpus.gsm8k_test(tmp_path)) == 2
    with pytest.raises(ConfigError, match=r"one train\.jsonl .* has none"):
        corpus.locate(tmp_path, corpus.GSM8K_TRAIN)
    (tmp_path / "again").mkdir()
    (tmp_path / "again/test.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"has .*again/test\.jsonl, .*gsm8k/test\.jsonl"):
        corpus.locate(tmp_path, "test.jsonl")


def test_prompts_come_from_data_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few problems would all be held out.
    monkeypatch.setattr(corpus, "split_symbolic", lambda problems: {"train": problems})
    for name, count in (("gsm8k/train.jsonl", 3), ("symbolic/" + corpus.SYMBOLIC, 9)):
        rows = [{"question": f"q {i}", "answer": "a"} for i in range(count)]
        path = tmp_path / name
        path.parent.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)
    found = train_prompts(tmp_path, 20)
    assert {name: len(rows) for name, rows in found.items()} == {
        "generated": 7, "symbolic": 5, "gsm8k": 3, "functions": 2,
    }  # fmt: skip


def test_pools_of_another_format_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "gsm8k.npy", np.zeros(8, np.uint16))
    with pytest.raises(ConfigError, match=r"uint32 words, .*gsm8k\.npy holds uint16"):
        load_pools(tmp_path, ["gsm8k"])


def test_a_part_of_the_corpus_is_whole_files(tmp_path: Path) -> None:
    path = tmp_path / corpus.PYTHON
    files = {f"p{i}/m.py": f"x = {i}\n" * 20 for i in range(9)}
    text = "".join(f"<|file|>{name}\n{source}" for name, source in files.items())
    path.write_bytes(lzma.compress(text.encode()))
    part = pack.python_part(path, 300)
    kept = dict(item.split("\n", 1) for item in part.split("<|file|>")[1:])
    assert 0 < len(kept) < 9
    assert all(files[name] == source for name, source in kept.items())


def test_looks_have_time_of_their_own_and_are_no_part_of_a_step() -> None:
    """A look takes as long as ten steps; of the second stretch, as long as forty, as steps have
    become faster."""
    run = SimpleNamespace(step=0, seconds=0.0, look_seconds=1.0)
    stretches = lineup.Stretches(run, lambda: 98.0)  # type: ignore[arg-type]
    assert stretches.affordable(7) == 1
    run.step, run.seconds = 20, 2.0
    more = stretches.affordable(7)
    assert more == 864
    assert 0.85 * 98 < 0.1 * more + 7 < 98
    assert stretches.seconds(7) == 98 / 7 - 1
    run.step, run.seconds = 220, 7.0
    assert stretches.affordable(6) == int(0.95 * (98 - 6) / 0.025)
    run.look_seconds = 20.0
    assert (stretches.affordable(6), stretches.seconds(6)) == (1, 0.0)


def test_a_run_that_repeats_anothers_has_its_steps_rates_and_looks() -> None:
    """As far as there is time."""
    asked: list[tuple[int, int | None]] = []
    run: Any = SimpleNamespace(step=0, of=0)

    def lengthen(steps: int) -> None:
        run.of = steps

    def go(*, minutes: float, tick: object, until: int) -> SimpleNamespace:
        asked.append((run.of, until))
        run.step = until if minutes else run.step
        return SimpleNamespace(tau=1.0 + run.step)

    run.lengthen = lengthen
    like = [lineup.Stretch(until=7, of=1000), lineup.Stretch(until=9, of=12)]
    assert lineup._again(run, go, like, lambda: 5.0, None) == (10.0, like)  # type: ignore[arg-type]
    assert asked == [(1000, 7), (12, 9)]
    run.step = 0
    tau, done = lineup._again(run, go, like, lambda: -5.0, None)  # type: ignore[arg-type]
    assert (tau, [stretch.until for stretch in done]) == (1.0, [0, 0])


def test_a_readers_gain_is_measured_against_the_same_training() -> None:
    """Lessons and loss of both stages, rates of the second; in the first the reader is new."""
    for line_up in (GPU_LINE_UP, TOY_LINE_UP):
        named = {one.name: one for one in line_up.entries}
        for reads, plain in (("reader", "block-first"), ("reader-joint", "block-more")):
            assert named[plain].like == reads
            rates = [dict(named[x].schedule).pop("lr", 0) for x in (plain, reads)]
            assert rates == ([1e-4, 6e-4] if rates[0] and reads == "reader" else 2 * rates[:1])
            assert {**named[plain].schedule, "lr": 0} == {**named[reads].schedule, "lr": 0}
            assert named[plain].options == {"reader_loss": True}
            assert named[plain].share >= named[reads].share
        assert named["block-more"].start == "block-first"
        assert named["reader-joint"].start == "reader"
        assert named["block-first"].start == named["reader"].start == "block"


def test_mixers_are_compared_at_equal_size_and_after_as_many_steps() -> None:
    """Of GDN-1.3B, whose heads drafters take over."""
    both = {one.name: one for one in GPU_LINE_UP.also(["eagle-attention"]).entries}
    sizes = {}
    for name in ("eagle", "eagle-attention"):
        own = dict(both[name].options)
        mixer = own.pop("mixer", "gdn")
        config = EagleConfig(
            **own, num_v_heads=own["num_heads"], head_dim=256, head_v_dim=256, mixer=mixer,
            conv_size=4, norm_eps=1e-6, target_hidden_size=2048, vocab_size=32_000,
            target_layer_ids=(1, 11, 20), fc_norm=True, target_fingerprint=None,
            tokenizer_hash=None,
        )  # fmt: skip
        sizes[mixer] = sum(map(prod, expected_tensors(config).values()))
    assert sizes["attention"] == pytest.approx(sizes["gdn"], rel=1e-3)
    assert both["eagle-attention"].like == "eagle"
    assert both["eagle-attention"].schedule == both["eagle"].schedule
    assert list(both)[:-1] == [one.name for one in GPU_LINE_UP.entries]


def test_a_drafter_that_cannot_be_trained_is_missing_and_stops_no_other(
    pools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(tokens=(1, 2, 3), num_prompt=1)
    monkeypatch.setattr(lineup, "answers_by_clock", lambda *_: [text] * 60)

    class Made:
        feature_layers = (0,)

        def run(self, folder: Path, *_: object) -> Made:
            self.step, self.seconds, self.look_seconds, self.folder = 3, 0.3, 0.1, folder
            return self

        def lengthen(self, steps: int) -> None:
            assert steps > self.step

        def __call__(self, **_: object) -> SimpleNamespace:
            (self.folder / "checkpoint").mkdir(exist_ok=True)
            (self.folder / "checkpoint/config.json").write_text("{}")
            return SimpleNamespace(tau=1.5)

    def kind_of(name: str, *_: object) -> Made:
        if name == "block":
            raise ConfigError("blocks are out")
        return Made()

    monkeypatch.setattr(lineup, "kind_of", kind_of)
    monkeypatch.setattr(lineup, "Capture", lambda _, layers, **__: SimpleNamespace(layers=layers))
    engine = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    deadline, notes, seen = time.monotonic() + 9, list[str](), list[list[str]]()
    found = lineup.train_line_up(
        engine, "hash", tmp_path, deadline, TOY_LINE_UP, note=notes.append,
        after=lambda found: seen.append([one.name for one in found]),
    )  # type: ignore[arg-type]  # fmt: skip
    names = [one.name for one in TOY_LINE_UP.entries]
    assert seen == [names[: i + 1] for i in range(len(names))]
    missing = {one.name: one.missing for one in found}
    assert missing["eagle"] is None
    assert missing["block"] == "blocks are out"
    assert missing["reader-joint"] == "reader, which it starts from, is missing"
    assert missing["block-more"] == "reader-joint, whose steps it repeats, is missing"
    eagle = found[0]
    assert (eagle.steps, eagle.tau) == (3, 1.5)
    assert Path(str(eagle.checkpoint)).is_dir()
    assert "block is missing: blocks are out" in notes
