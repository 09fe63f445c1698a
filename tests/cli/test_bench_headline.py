# SPDX-License-Identifier: Apache-2.0
"""`specla bench headline`: suites, refusals, and (slow) all of it at toy size."""

from __future__ import annotations

import csv
import json
import lzma
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from completions import completion
from headline_data import MIXED_KINDS, make_data

from specla.bench.measure import Method
from specla.cli import headline_steps, main
from specla.cli.bench_headline import _verdict
from specla.cli.headline_contenders import contenders
from specla.cli.headline_progress import Plan, Progress
from specla.cli.headline_suites import suites
from specla.cli.headline_trials import Trials, command
from specla.cli.options import EngineOptions
from specla.errors import ConfigError, SpeclaError
from specla.request import Completion, SamplingParams
from specla.train.lineup import Trained

CAPTURE = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "d")


def plan(work: Path, **changes: Any) -> Plan:
    asked = {"data": work, "work": work, "size": "toy", "minutes": {}, "prompts": 1, "batch": 1,
             "max_tokens": 4, "device": "cpu"}  # fmt: skip
    return Plan(**{**asked, **changes})


def test_suites_leave_out_what_the_templates_were_made_from(data: Path) -> None:
    lines = (data / "gsm8k/test.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    every = suites(data, None)
    gsm8k = [p.text for p in every["gsm8k"]]
    assert gsm8k == [q for i, q in enumerate(questions) if i not in (0, 2)]
    mixed = [p.text for p in every["mixed"]]
    assert len(mixed) == 5 * 4 + 2
    assert questions[1] in mixed
    assert questions[0] not in mixed
    assert every["humaneval"][0].text.startswith("Complete this function:\n```python\ndef add0")
    assert {p.kind for p in every["mixed"]} == {"mixed"}
    assert {p.part for p in every["mixed"]} == set(MIXED_KINDS)


def test_suites_are_drawn_with_a_seed_and_mixed_evenly(data: Path) -> None:
    some = suites(data, 6)
    assert {name: len(prompts) for name, prompts in some.items()} == {
        "gsm8k": 6, "humaneval": 4, "mixed": 6,
    }  # fmt: skip
    assert some == suites(data, 6)
    assert some["gsm8k"] != suites(data, 6, seed=1)["gsm8k"]
    kinds = {p.text.split()[0] for p in some["mixed"]} - {"gsm8k"}
    assert set(MIXED_KINDS) - {"gsm8k"} <= kinds


def test_a_finished_step_is_remembered_and_undoes_those_after_it(tmp_path: Path) -> None:
    progress = Progress(plan(tmp_path))
    with pytest.raises(ConfigError, match="--steps must begin with target"):
        progress.need("target")
    for step in ("target", "drafters", "measure"):
        progress.finish(step, {"wall_s": 1})
    again = Progress(plan(tmp_path))
    assert list(again.steps) == ["target", "drafters", "measure"]
    again.finish("drafters", {"wall_s": 2})
    assert Progress(plan(tmp_path)).steps == {
        "target": {"wall_s": 1}, "drafters": {"wall_s": 2},
    }  # fmt: skip


def test_a_folder_is_gone_on_with_as_it_was_begun(data: Path, tmp_path: Path) -> None:
    first = plan(tmp_path / "w", data=data)
    progress = Progress(first)
    progress.finish("target", {"wall_s": 1})
    Progress(replace(first, prompts=2, max_tokens=8))  # nothing was measured yet
    progress.finish("measure", {"wall_s": 1})
    moved = Path(shutil.copytree(data, tmp_path / "moved"))
    Progress(replace(first, data=moved, minutes={"target": 3.0}, device="cuda"))
    (moved / "gsm8k/test.jsonl").write_text("{}")
    for name, value in {
        "size": "gdn-1.3b", "data": moved, "prompts": None, "batch": 8, "max_tokens": 5,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=rf"of the same {name}, .* step (target|measure)"):
            Progress(replace(first, **{name: value}))
    with pytest.raises(ConfigError, match="of the same data"):
        Progress(replace(first, data=tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["{", "[]", '{"size": "toy", "steps": {"target": {}}}'])
def test_what_is_no_progress_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "headline.json").write_text(text)
    with pytest.raises(ConfigError, match=r"headline.json must say what was done"):
        Progress(plan(tmp_path))


def test_every_contender_has_its_own_name_and_ar_is_first() -> None:
    names = [one.name for one in contenders()]
    assert len(set(names)) == len(names)
    assert names[0] == "AR"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--steps target,fly", "--steps must be some of target, drafters, measure, got 'fly'"),
        ("--size huge", "--size must be one of gdn-1.3b, toy"),
        ("--size gdn-1.3b", "needs a GPU"),
        ("--size toy --also turtle", "--also must name one of eagle-attention, got 'turtle'"),
        ("--size toy --prompts 0", "--prompts must be >= 1"),
        ("--size toy --drafter-minutes 0", "minutes must be > 0"),
        ("--size toy --data nowhere", "nowhere"),
        ("--size toy --max-tokens 0", "max_tokens must be"),
        ("--size toy --steps measure", "--steps must begin with target"),
    ],
)
def test_refusals(flags: str, says: str, tmp_path: Path, capsys: CAPTURE) -> None:
    command = f"bench headline --device cpu --work {tmp_path}/w {flags}"
    assert main(command.split()) == 2
    assert says in capsys.readouterr().err


def test_a_batch_that_is_not_ars_has_an_exit_code_of_its_own(capsys: CAPTURE) -> None:
    score = {"suite": "gsm8k", "method": "tree", "prompts": 2, "failed": 0, "same": 2}
    batch = {"suite": "gsm8k", "method": "tree, budget", "size": 64, "same": 64}
    measured = {"scores": [score], "batches": [batch], "unanswered": [], "missing": {"x": "why"}}
    assert _verdict(measured) == 0
    assert _verdict(measured | {"batches": [batch | {"same": 63}]}) == 5
    assert "not identical: tree, budget, batch of 64: 63" in capsys.readouterr().err
    assert _verdict(measured | {"unanswered": ["x"]}) == 1
    assert "failed: x: why" in capsys.readouterr().err


def test_drafters_that_were_trained_outlive_one_that_breaks_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_line_up(*_: object, after: Any, **__: object) -> None:
        after([Trained(name="eagle", kind="eagle", checkpoint="there")])
        raise KeyboardInterrupt

    llm = SimpleNamespace(engine=None, tokenizer=SimpleNamespace(digest=""))
    monkeypatch.setattr("specla.train.lineup.train_line_up", train_line_up)
    monkeypatch.setattr(headline_steps, "load", lambda *_: llm)
    progress = Progress(plan(tmp_path))
    progress.finish("target", {"wall_s": 1})
    with pytest.raises(KeyboardInterrupt):
        headline_steps._drafters(plan(tmp_path), progress, 0.0, None)
    (tmp_path / "headline-so-far.json").rename(tmp_path / "headline.json")
    (one,) = Progress(plan(tmp_path)).need("drafters")["entries"]
    assert (one["name"], one["checkpoint"], one["missing"]) == ("eagle", "there", None)


@pytest.mark.parametrize(
    ("child", "says"),
    [
        ("pass", ""),
        ("raise SystemExit(3)", "beside training failed (3): its loop will take longer"),
        ("import time; time.sleep(60)", "beside training was not done: its loop"),
    ],
)
def test_what_became_of_the_tuning_beside_training_is_said(
    child: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPTURE
) -> None:
    """And nothing of it is left when the step ends, whether or not that failed."""
    started: list[subprocess.Popen[bytes]] = []

    def tune_beside(folder: Path, device: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", child]))
        return started[0]

    def train_line_up(*_: object, **__: object) -> None:
        if "sleep" not in child:
            started[0].wait()
        raise RuntimeError("no memory")

    llm = SimpleNamespace(engine=None, tokenizer=SimpleNamespace(digest=""))
    monkeypatch.setattr("specla.bench.fla_sd.tune_beside", tune_beside)
    monkeypatch.setattr("specla.train.lineup.train_line_up", train_line_up)
    monkeypatch.setattr(headline_steps, "load", lambda *_: llm)
    with pytest.raises(RuntimeError, match="no memory"):
        headline_steps._drafters(
            plan(tmp_path, device="cuda"), Progress(plan(tmp_path)), 0.0, None
        )
    assert started[0].returncode is not None
    err = capsys.readouterr().err
    assert says in err if says else not err


def test_flas_loop_is_not_begun_without_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured last: what a machine's time limit ends there is lost with all before it."""
    monkeypatch.setattr("specla.bench.fla_sd.load", lambda *_: pytest.fail("it was loaded"))
    missing: dict[str, str] = {}
    past = time.monotonic() - 1
    found = headline_steps._foreign(plan(tmp_path), None, [], None, past, missing)  # type: ignore[arg-type]
    assert found == []
    assert missing == {"FLA-SD": headline_steps.NO_TIME}


def broken(*_: object) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def answered(text: str, params: SamplingParams) -> Completion:
    return completion(ids=(1, 2, 3), options={}, decode_s=0.1)


@pytest.mark.parametrize("ends_in", ["_batches", "_foreign"])
def test_what_a_machines_limit_ends_leaves_all_that_was_measured(
    ends_in: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPTURE
) -> None:
    """A GPU on which a kernel has failed gives no memory back either."""
    asked = plan(tmp_path / "w", data=data)
    progress = Progress(asked)
    progress.finish("target", {"wall_s": 1})
    progress.finish("drafters", {"wall_s": 1, "entries": []})
    methods = [Method(name="AR", run=answered), Method(name="ngram", run=broken)]  # type: ignore[arg-type]
    run = {"device": "cpu", "dtype": "float32", "model": "toy", "versions": {}}
    monkeypatch.setattr(
        headline_steps, "_methods", lambda *_: (methods, SimpleNamespace(tokenizer=None))
    )
    monkeypatch.setattr("specla.cli.records.run_record", lambda *_: run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    monkeypatch.setattr(headline_steps, "_batches", lambda *_: ([], []))
    monkeypatch.setattr(headline_steps, ends_in, lambda *_: pytest.fail("a machine's limit"))
    with pytest.raises(pytest.fail.Exception, match="a machine's limit"):
        headline_steps._measure(asked, progress, time.monotonic() + 60, None)
    assert "no memory could be given back: an illegal memory access" in capsys.readouterr().err
    work = tmp_path / "w"
    kept = [json.loads(line) for line in (work / "texts.jsonl").read_text().splitlines()]
    assert [one["suite"] for one in kept[::2]] == ["gsm8k", "humaneval", "mixed"]
    assert Progress(asked).steps.keys() == {"target", "drafters"}
    (work / "headline-so-far.json").rename(work / "headline.json")
    again = Progress(asked)
    measured = again.steps["measure"]
    assert {one["method"] for one in measured["scores"]} == {"AR"}
    assert "illegal memory access" in measured["missing"]["ngram, gsm8k"]
    assert measured["missing"]["FLA-SD"] == headline_steps.NOT_REACHED
    assert ("tree, budget, batch" in measured["missing"]) == (ends_in == "_batches")
    again.so_far("measure", measured)
    again.finish("measure", measured)
    assert {path.name for path in work.iterdir()} == {"headline.json", "texts.jsonl"}


@pytest.mark.parametrize("room", [True, False])
def test_what_fails_in_its_trial_is_not_measured_beside_the_others(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPTURE
) -> None:
    """A bad address would end the process in which all are measured. Where nobody can have a
    process of its own, AR cannot either, and that says nothing about drafters."""
    child = {
        "none": "pass" if room else "raise SystemExit('the device is busy')",
        "eagle": "pass",
        "block": "import sys; print('specla: error: bad address', file=sys.stderr); sys.exit(1)",
        "block-more": "import os; os.abort()",
    }
    entries = {name: {"missing": None, "checkpoint": name} for name in child}

    def command(options: EngineOptions, prompt: str) -> list[str]:
        return [sys.executable, "-c", child[options.drafter.split(":")[-1]]]

    llm = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=True))
    monkeypatch.setattr(headline_steps, "command", command)
    monkeypatch.setattr(headline_steps, "load", lambda *_: llm)
    missing: dict[str, str] = {}
    on_gpu = plan(tmp_path, device="cuda")
    methods, _ = headline_steps._methods(on_gpu, entries, missing, "?", None)
    good = ["AR", "ngram", "chain", "tree", "tree + pruning", "tree, budget"]
    untrained = {"block + reader": "no reader-joint was trained"}
    without = "without a trial: AR in a process of its own failed (1) and said: the device is busy"
    if room:
        assert [one.name for one in methods] == good
        assert missing == untrained | {
            "block": "in a process of its own failed (1) and said: specla: error: bad address",
            "block, trained on": "in a process of its own failed (-6) and said: nothing",
        }
    else:
        assert [one.name for one in methods] == [*good, "block", "block, trained on"]
        assert missing == untrained
    assert (without in capsys.readouterr().err) != room


def test_a_trial_that_does_not_end_is_given_up() -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    trials = Trials({"x": sleeps}, seconds=0.2)
    with pytest.raises(SpeclaError, match=r"of its own did not answer 64 tokens in 0.2 s"):
        trials.check("x")
    trials.check("who was not begun")
    trials.end()
    assert trials._trials["x"].process.returncode is not None


def test_a_trial_is_an_answer_by_the_same_engine(
    capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specla.cli.headline_trials.TOKENS", 4)
    options = EngineOptions(
        model="demo", drafter="ngram", device="cpu", max_slots=1, max_nodes=8, budget="off",
        drafter_options={"num_draft_tokens": 3},
    )  # fmt: skip
    program, *line = command(options, "-1 + 1 =\n1 + 1 =")
    assert (program, line[:2]) == (sys.executable, ["-m", "specla"])
    assert main(line[2:]) == 0
    (done,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert done["engine"]["drafter"] == "ngram"
    assert (done["engine"]["max_slots"], done["engine"]["max_nodes"]) == (1, 8)
    assert done["engine"]["drafter_options"] == {"num_draft_tokens": 3}


@pytest.mark.slow
def test_all_of_it_at_toy_size(data: Path, tmp_path: Path, capsys: CAPTURE) -> None:
    work, results = tmp_path / "w", tmp_path / "results" / "results.csv"
    command = f"bench headline --data {data} --work {work} --size toy --device cpu --prompts 2"
    limits = "--target-minutes 1 --drafter-minutes 1 --measure-minutes 1 --batch 3 --max-tokens 12"
    record = f"--record --results {results} --commit abc --json"
    assert main([*command.split(), *limits.split(), *record.split()]) == 0
    done = json.loads(capsys.readouterr().out)
    assert all(one["missing"] is None for one in done["drafters"]["entries"])
    assert done["measure"]["missing"] == {
        "FLA-SD": "fla's kernels need a GPU, and this runs on a CPU"
    }
    for score in done["measure"]["scores"]:
        assert score["same"] == score["prompts"] == 2
    with results.open() as file:
        metrics = {row["metric"] for row in csv.DictReader(file)}
    assert {"round_over_ar", "e2e_gsm8k_b1", "e2e_mixed_b1", "e2e_worst_case"} <= metrics
    assert "FLA-SD" in (results.parent / "headline/README.md").read_text()
    answers = lzma.decompress((results.parent / "headline/texts.jsonl.xz").read_bytes())
    assert answers == (work / "texts.jsonl").read_bytes()
    kept = [json.loads(line) for line in answers.splitlines()]
    assert len(kept) == 6 * len(contenders()) + 3 * 3
    assert sum(one["method"] == "tree, budget, batch of 3" for one in kept) == 9
    again = [*command.split(), *limits.split(), "--steps", "target,drafters"]
    assert main(again) == 0
    assert "target: done before" in capsys.readouterr().err
