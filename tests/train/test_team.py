# SPDX-License-Identifier: Apache-2.0
"""Several processes do what one with all the rows does; one alone does what it always did.

Threads stand for the processes here; tests/cli/test_train_launched.py has real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from block_toy import block_config, reader_config
from engine_harness import make_engine
from test_block_training import reader_for, steps_for
from test_drafter_training import net_for, packer_for
from thread_team import together
from torch import Tensor

from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.train.block_loop import BlockRecipe
from specla.train.capture import Answers, Capture, Text, answer, part_of
from specla.train.kinds import kind_of
from specla.train.loop import Recipe, Trainer
from specla.train.optim import rate
from specla.train.run import Prompt, texts_of
from specla.train.session import Session, all_batches
from specla.train.steps import Steps
from specla.train.team import ALONE, Team, joined

PROMPTS = [tuple(5 + (i * k + k * k) % 19 for k in range(3 + i % 9)) for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
Make = Callable[[Team], Steps[Any]]


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> list[Text]:
    found = dict(answer(make_engine(target, slots=8, nodes=1), dict(enumerate(PROMPTS)), GREEDY))
    return [found[i] for i in range(len(PROMPTS))]


def eagle(target: TargetModel, texts: list[Text], team: Team) -> Steps[Any]:
    recipe = Recipe(rows=2, length=40, unroll=3, steps=8, lr=1e-3, warmup=2)
    packer = packer_for(target, torch.arange(24))
    return Trainer(net_for(target), packer, texts, recipe, team)


def block(target: TargetModel, texts: list[Text], team: Team, reads: bool = False) -> Steps[Any]:
    # More anchors than there are: which are drawn is not the same in two processes.
    recipe = BlockRecipe(rows=2, length=64, steps=8, lr=1e-3, warmup=2, anchors=1000)
    reader = reader_for(reader_config(target.info)) if reads else None
    return steps_for(
        target, texts, block_config(target.info), recipe=recipe, reader=reader, joint=reads,
        team=team,
    )  # fmt: skip


KINDS = {"eagle": eagle, "block": block, "reader": partial(block, reads=True)}


class Seen(NamedTuple):
    """Of some steps: losses; the first step's gradients, clipped; parameters; counters."""

    losses: list[float]
    gradients: list[Tensor]
    weights: dict[str, Tensor]
    counters: tuple[int, int, int]


def watched(make: Make, team: Team, steps: int = 2) -> Seen:
    trainer, gradients = make(team), list[Tensor]()

    def look(*_: object) -> None:
        if not gradients:
            found = (p.grad for p in trainer._net.parameters())
            gradients.extend(g.clone() for g in found if g is not None)

    trainer.optimizers[0].register_step_pre_hook(look)
    losses = [float(trainer.train_step()) for _ in range(steps)]
    weights = {name: p.clone() for name, p in trainer._net.state_dict().items()}
    return Seen(losses, gradients, weights, (trainer.step, trainer.used, trainer.tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_do_what_one_with_all_rows_does(
    target: TargetModel, texts: list[Text], kind: str
) -> None:
    """To the order of a sum: a row has documents of its own number and lengths."""
    make = partial(KINDS[kind], target, texts)
    alone, team = watched(make, ALONE), together(2, partial(watched, make))
    for seen in team:
        assert seen.counters == alone.counters
        assert seen.losses == pytest.approx(alone.losses, rel=1e-6)
        for got, want in zip(seen.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.abs().max()))
        for name, p in alone.weights.items():
            torch.testing.assert_close(seen.weights[name], p, rtol=0, atol=4e-6)
    for name, p in team[0].weights.items():
        assert torch.equal(p, team[1].weights[name]), name


@pytest.mark.parametrize("kind", ["eagle", "reader"])
def test_alone_a_step_is_what_it_was_to_the_bit(
    target: TargetModel, texts: list[Text], kind: str
) -> None:
    """The step written out without a team, in a second trainer."""
    trainer, plain = (KINDS[kind](target, texts, ALONE) for _ in range(2))
    for step in range(2):
        loss = plain.loss(plain.next_batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain._net.parameters(), plain.schedule.clip)
        for optimizer in plain.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(step / 8, step, 2, floor=0.02)
            optimizer.step()
            optimizer.zero_grad()
        assert trainer.train_step() == float(loss.detach())
    for name, p in plain._net.state_dict().items():
        assert torch.equal(p, trainer._net.state_dict()[name]), name


def test_rows_are_filled_from_any_number_of_texts(target: TargetModel) -> None:
    short = [Text(tokens=(5, 6, 7), num_prompt=1), Text(tokens=(8, 9, 10), num_prompt=1)]
    trainer = eagle(target, short, ALONE)
    assert trainer.next_batch().pairs.segments[:, -1].tolist() == [19, 19]
    assert trainer.used == 40


def test_processes_draw_anchors_of_their_own(target: TargetModel, texts: list[Text]) -> None:
    """As many together as one alone; of one batch, others."""

    def draw(team: Team) -> tuple[float, float]:
        recipe, config = BlockRecipe(rows=2, length=64, anchors=8), block_config(target.info)
        steps = steps_for(target, texts, config, recipe=recipe, team=team)
        found = steps.loss(steps._pack([texts[:2]]))
        return float(found.loss.detach()), found.lessons / config.num_drafts

    (one, _), (other, _) = together(2, draw)
    assert one != other
    assert all(3 < count <= 4 for _, count in together(2, draw))
    assert draw(ALONE)[1] > 6


def session(
    folder: Path, target: TargetModel, texts: list[Text], notes: list[str], team: Team
) -> Session[Any]:
    trainer = eagle(target, texts[:20], team)
    packer = packer_for(target, torch.arange(24))
    held = all_batches(packer, texts[20:] if team.main else (), trainer.schedule)
    return Session(folder, trainer, held)


def test_the_main_process_looks_and_writes(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    folders, found, notes = (tmp_path / "alone", tmp_path / "team"), [], list[str]()
    for folder, count in zip(folders, (1, 2), strict=True):
        folder.mkdir()

        def run(team: Team, folder: Path = folder) -> Any:
            one = session(folder, target, texts, notes, team)
            return one(every=4, minutes=9, note=notes.append), one.step

        found.append(together(count, run))
    (alone,), team = found
    assert team[0] == team[1]
    assert team[0][1] == alone[1] == 8
    assert team[0][0].tau == pytest.approx(alone[0].tau, abs=0.02)
    assert len(notes) == 6
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in folders]
    assert names[0] == names[1]
    logs = [(f / "log.csv").read_text().splitlines() for f in folders]
    assert len(logs[0]) == len(logs[1]) == 4
    # Before the first step, all figures are the same.
    assert logs[0][1].split(",")[4:] == logs[1][1].split(",")[4:]


def test_a_team_goes_on_as_if_it_had_not_stopped(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """Bit for bit; and so does one process with all the rows, to the order of a sum."""
    make = partial(eagle, target, texts)

    def stopped(team: Team) -> list[float]:
        first = make(team)
        losses = [float(first.train_step()) for _ in range(2)]
        team.of_main(lambda: first.save(tmp_path))
        second = make(team)
        assert second.restore(tmp_path)
        return losses + [float(second.train_step()) for _ in range(2)]

    straight = together(2, lambda team: watched(make, team, 4).losses)
    assert together(2, stopped) == straight
    alone = make(ALONE)
    assert alone.restore(tmp_path)
    assert [float(alone.train_step()) for _ in range(2)] == pytest.approx(
        straight[0][2:], rel=1e-5
    )


def test_a_folder_that_not_all_see_is_refused(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    def elsewhere(team: Team) -> None:
        folder = tmp_path / str(team.number)
        folder.mkdir()
        if team.main:
            begun = eagle(target, texts[:20], ALONE)
            begun.train_step()
            begun.save(folder)
        session(folder, target, texts, [], team)

    with pytest.raises(ConfigError, match="got step 1 in the main process and 0 in number 1"):
        together(2, elsewhere)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_shared_out(
    target: TargetModel, texts: list[Text], tmp_path: Path, temperature: float
) -> None:
    """The same texts as alone; what another process had got before it was stopped is used."""
    params = replace(GREEDY, temperature=temperature)
    prompts = [Prompt(tokens=p, known=None) for p in PROMPTS[:9]]
    if not temperature:
        said = texts[4].tokens[texts[4].num_prompt :]
        prompts[4] = replace(prompts[4], known=said)

    def ask(path: Path, team: Team) -> list[Text]:
        engine, capture = make_engine(target, slots=3, nodes=1), Capture(target, (0,))
        return texts_of(engine, capture, prompts, params, path, team=team)

    want = ask(tmp_path / "alone.jsonl", ALONE)
    assert temperature or want == texts[:9]
    path = tmp_path / "answers.jsonl"
    Answers(part_of(path, 1), params, target.info.fingerprint).add(2, want[2])
    assert together(2, partial(ask, path)) == [want, want]
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    # Number 2 was there; of the others every second is the main process's, and comes first.
    assert (numbers[0], sorted(numbers[1:5]), sorted(numbers[5:])) == (
        2,
        [0, 3, 5, 7],
        [1, 4, 6, 8],
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone.jsonl", "answers.jsonl"]


def test_answers_that_the_main_process_does_not_find(target: TargetModel, tmp_path: Path) -> None:
    def ask(team: Team) -> None:
        folder = tmp_path / str(team.number)
        folder.mkdir()
        engine, capture = make_engine(target, slots=3, nodes=1), Capture(target, (0,))
        prompts = [Prompt(tokens=p, known=None) for p in PROMPTS[:3]]
        texts_of(engine, capture, prompts, GREEDY, folder / "a.jsonl", team=team)

    with pytest.raises(ConfigError, match=r"one .*1, but the main one did not find"):
        together(2, ask)


def test_kinds_multiply_rows_by_processes(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    assert BlockRecipe(rows=3, anchors=5).times(4) == BlockRecipe(rows=12, anchors=20)
    assert Recipe(rows=3, unroll=2).times(2) == Recipe(rows=6, unroll=2)
    kind = kind_of("eagle", target, None, {"rows": 1, "length": 40}, {"hidden_size": 24})
    capture = Capture(target, kind.feature_layers)

    def rows(team: Team) -> tuple[int, int]:
        run = kind.run(tmp_path, capture, texts[:20], texts[20:], torch.float32, team)
        return run._steps.schedule.rows, len(run._steps.next_batch().pairs.segments)

    assert together(2, rows) == [(2, 1), (2, 1)]


def test_a_team_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with joined("cpu") as team:
        assert team is ALONE
    monkeypatch.setenv("LOCAL_RANK", "1")
    for count in ("abc", "0", ""):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", count)
            says = f"WORLD_SIZE must be the number of processes .*, got '{count}'; start"
            with pytest.raises(ConfigError, match=says), joined("cpu"):
                pass
    with (
        pytest.raises(ConfigError, match="a GPU of its own, got --device cuda:1"),
        joined("cuda:1"),
    ):
        pass
    monkeypatch.setattr("specla.train.team.find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"needs accelerate.*pip install 'specla\[train\]'"),
        joined("cpu"),
    ):
        pass
