# SPDX-License-Identifier: Apache-2.0
"""`specla profile`, for real on a CPU: measured, printed, kept, and gone by afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specla import LLM, SamplingParams, models
from specla.cli import main
from specla.errors import ConfigError
from specla.models.toy import write_toy_checkpoint

CAPTURE = pytest.CaptureFixture[str]
SMALL = ["--max-nodes", "4", "--max-batch", "2"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder; the thread count, which commands set, is restored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield tmp_path / "cache" / "specla" / "costs"
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_toy_checkpoint(tmp_path_factory.mktemp("models") / "toy"))


def test_the_demo_model(capsys: CAPTURE, cache: Path) -> None:
    assert main(["profile", "demo", *SMALL, "--drafter", "suffix"]) == 0
    out, err = capsys.readouterr()
    (path,) = cache.iterdir()
    assert err.endswith(f"kept in {path}\n")
    title, header, *lines = (line for line in out.splitlines() if line.strip())
    assert title.startswith("demo on ")
    assert "1 thread, mode exact, drafter suffix" in title
    names = "rows nodes shape depth round us plain steps break-even p kernel"
    assert header.split() == names.split()
    sizes = [tuple(line.split()[:4]) for line in lines[:8]]
    one = [("1", "plain", "0"), ("2", "chain", "1"), ("4", "tree", "2"), ("4", "chain", "3")]
    assert sizes == [(rows, *size) for rows in "12" for size in one]
    assert all(line.split()[-1] == "reference" for line in lines[:8])
    for line in lines[:8]:
        us, steps = map(float, line.split()[4:6])
        assert us > 1000
        assert steps == 1.0 or line.split()[2] != "plain"

    llm = LLM("demo", drafter="suffix", max_nodes=4, max_slots=2)
    assert (llm.config.costs, llm.config.reasons["costs"]) == (str(path), f"measured: {path}")
    report = llm.generate("2 + 2 =", GREEDY)[0].speculation
    assert report.costs == "measured"
    assert report.kernels == {"reference": report.rounds}


def profiled(toy: str, capsys: CAPTURE, *flags: str) -> dict:
    assert main(["profile", toy, *SMALL, "--json", "--drafter", "ngram", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(toy: str, capsys: CAPTURE, cache: Path) -> None:
    record = profiled(toy, capsys)
    assert (record["mode"], record["drafter"]) == ("exact", "ngram")
    assert [r["shape"] for r in record["rounds"]] == ["plain", "chain", "tree", "chain"] * 2
    plain, chain, *_ = record["rounds"]
    costs = {(c["part"], c["rows"], c["nodes"]): c["us"] for c in record["costs"]}
    assert plain["us"] == pytest.approx(costs["verify", 1, 1] + costs["accept", 1, 1])
    assert chain["us"] == pytest.approx(
        costs["verify", 1, 2] + costs["accept", 1, 2] + costs["draft", 1, 4]
    )
    assert chain["steps"] == pytest.approx(chain["us"] / plain["us"])
    kept = json.loads(Path(record["path"]).read_text())
    assert kept["costs"] == record["costs"]
    assert Path(record["path"]).parent == cache


def test_what_engines_make_of_it(toy: str, capsys: CAPTURE, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    record = profiled(toy, capsys, "--output", str(mine))
    assert record["path"] == str(mine)
    # Nothing in the cache folder, and no reason to look elsewhere.
    unasked = LLM(toy, max_nodes=4, max_slots=2)
    assert unasked.config.costs == "none"
    assert unasked.config.reasons["costs"].startswith("default: there must be a cost table")
    assert unasked.generate("ab", GREEDY)[0].speculation.costs == "default"
    asked = LLM(toy, max_nodes=4, max_slots=2, costs=str(mine))
    assert asked.generate("ab", GREEDY)[0].speculation.costs == "measured"
    with pytest.raises(ConfigError, match="must cover 4 rows of 4 nodes"):
        LLM(toy, max_nodes=4, max_slots=3, costs=str(mine))
    other = write_toy_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="measured for model"):
        LLM(str(other), max_nodes=4, max_slots=2, costs=str(mine))


def test_generate_reports_costs(toy: str, capsys: CAPTURE, cache: Path) -> None:
    path = profiled(toy, capsys)["path"]
    command = ["generate", toy, "-p", "ab", "--raw", "--json", "--max-tokens", "6", *SMALL[:2]]
    command += ["--max-slots", "2"]
    for flags, costs, engine in (
        ([], "measured", path),
        (["--costs", path], "measured", path),
        (["--costs", "none"], "default", "none"),
    ):
        assert main([*command, *flags]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["speculation"]["costs"] == costs
        assert record["engine"]["costs"] == engine
        assert sum(record["speculation"]["kernels"].values()) == record["speculation"]["rounds"]
    assert main([*command, "--kernel", "walk"]) == 1
    assert "got walk for cpu" in capsys.readouterr().err
    assert main([*command, "--costs", path + "x"]) == 2
    assert "there is none" in capsys.readouterr().err


def test_a_second_run_replaces_the_first(toy: str, capsys: CAPTURE, cache: Path) -> None:
    first, second = profiled(toy, capsys), profiled(toy, capsys)
    assert first["path"] == second["path"]
    assert len(json.loads(Path(first["path"]).read_text())["costs"]) == len(second["costs"])
    Path(first["path"]).write_text("{}")
    assert main(["profile", toy, "--max-nodes", "1", "--max-batch", "1"]) == 0
    assert "measuring anew" in capsys.readouterr().err


def test_somebody_elses_file_is_left_alone(toy: str, capsys: CAPTURE, tmp_path: Path) -> None:
    diary = tmp_path / "diary.json"
    diary.write_text('{"dear": "diary"}')
    assert main(["profile", toy, *SMALL, "-o", str(diary)]) == 2
    assert "--output must not replace what is not its own" in capsys.readouterr().err
    assert diary.read_text() == '{"dear": "diary"}'


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--mode plain", 2, "--mode must be one of exact, fast"),
        ("--mode fast", 1, "needs a GPU"),
        ("--drafter none", 2, "--drafter must be one that drafts"),
        ("--drafter nobody", 2, "drafter must be one of"),
        ("--max-batch 0", 2, "max_slots must be an integer >= 1"),
    ],
)
def test_what_cannot_be_measured(
    toy: str, capsys: CAPTURE, cache: Path, flags: str, code: int, says: str
) -> None:
    assert main(["profile", toy, "--device", "cpu", *flags.split()]) == code
    assert says in capsys.readouterr().err
    assert not cache.exists()


def test_random_weights(
    toy: str, capsys: CAPTURE, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict] = []

    def made(**options: object) -> object:
        asked.append(options)
        return models.load(toy, device="cpu", dtype=torch.float32)

    monkeypatch.setattr("specla.bench.random_model.gdn_1_3b", made)
    command = ["profile", "random:gdn-1.3b", "--max-nodes", "2", "--max-batch", "1"]
    assert main([*command, "--device", "cpu", "--json"]) == 0
    assert asked == [{"device": "cpu", "dtype": torch.float32}]
    record = json.loads(capsys.readouterr().out)
    assert record["drafter"] is None
    assert [r["nodes"] for r in record["rounds"]] == [1, 2]
    assert [Path(record["path"])] == list(cache.iterdir())


def test_an_unknown_shape(capsys: CAPTURE) -> None:
    assert main(["profile", "random:gdn-7b"]) == 2
    assert "random weights must be of shape gdn-1.3b" in capsys.readouterr().err
