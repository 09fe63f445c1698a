# SPDX-License-Identifier: Apache-2.0
"""`specla generate --prompts`: JSON lines in, JSON lines out, one record per line, in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specla.cli import main
from specla.cli.loading import load
from specla.request import SamplingParams

CAPTURE = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(stub: Any, tmp_path: Path, capsys: CAPTURE) -> Run:
    """Write lines, run them, return the exit code and the records."""

    def run(lines: list[object], *flags: str) -> tuple[int, list[dict[str, Any]]]:
        path = tmp_path / "prompts.jsonl"
        data = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        path.write_bytes(b"\n".join(data))
        code = main(["generate", "--prompts", str(path), *flags])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_in_order_with_ids_and_params(run: Run, stub: Any) -> None:
    code, records = run(
        [
            {"prompt": "one two three", "id": "first"},
            {"messages": [{"role": "user", "content": "four five"}]},
            b"",
            {"prompt": "six seven eight", "params": {"max_tokens": 2, "seed": 9}},
        ],
        "--max-tokens",
        "5",
    )
    assert code == 0
    assert [r["id"] for r in records] == ["first", 2, 4]
    assert [r["text"] for r in records] == ["three two one", "five four", "eight seven"]
    assert records[2]["finish_reason"] == "length"
    assert records[2]["seed"] == 9
    assert all(r["model"] == "demo" and r["usage"] and r["speculation"] for r in records)


def test_mixed_formats_keep_their_order(run: Run) -> None:
    turn = {"messages": [{"role": "user", "content": "b a"}]}
    code, records = run([turn, {"prompt": "d c"}, turn, {"prompt": "f e"}], "--raw")
    assert code == 0
    assert [r["text"] for r in records] == ["a b", "c d", "a b", "e f"]
    assert [r["prompt_format"] for r in records] == ["chat", "raw", "chat", "raw"]


def test_n_gives_n_records(run: Run) -> None:
    code, records = run([{"prompt": "a b", "params": {"n": 2}}, {"prompt": "c"}])
    assert code == 0
    assert [(r["line"], r["index"]) for r in records] == [(1, 0), (1, 1), (2, 0)]


BAD = [
    b"{not json",
    b"\xff\xfe",
    b'"a string"',
    b'{"prompt": "lone \\ud800"}',
    b'{"prompt": "x", "params": {"temperature": NaN}}',
    b"[" * 100_000,
    {"prompt": ""},
    {"prompt": 3},
    {},
    {"prompt": "x", "messages": []},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "x", "name": "y"}]},
    {"prompt": "x", "id": [1]},
    {"prompt": "x", "surprise": 1},
    {"prompt": "x", "params": []},
    {"prompt": "x", "params": {"max_tokens": 0}},
    {"prompt": "x", "params": {"max_tokens": "8"}},
    {"prompt": "x", "params": {"heat": 1}},
    {"prompt": "x", "params": {"stop": 5}},
    {"prompt": "x", "params": {"logit_bias": {"one": 1}}},
    {"prompt": "x", "params": {"logit_bias": {"1_0": 1}}},
    {"prompt": "x", "params": {"logit_bias": {" 5": 1}}},
    {"prompt": "x", "params": {"logit_bias": {"\u0665": 1}}},
    {"prompt": "x", "params": {"logit_bias": {"9" * 5000: 1}}},
    {"prompt": "x", "params": {"logit_bias": 3}},
    {"prompt": "reject me"},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: str(b)[:40])
def test_a_bad_line_names_itself_and_the_rest_runs(run: Run, bad: object) -> None:
    code, records = run([{"prompt": "a b"}, bad, {"prompt": "c d", "id": "last"}])
    assert code == 1
    assert [r.get("text") for r in records] == ["b a", None, "d c"]
    error = records[1]["error"]
    assert error["line"] == records[1]["line"] == 2
    assert error["message"]
    assert error["type"]


def test_logit_bias_keys_become_token_ids(run: Run) -> None:
    assert run([{"prompt": "x", "params": {"logit_bias": {"5": -100}}}])[0] == 0


def test_lines_from_standard_input(
    stub: Any, stdin: Callable[[bytes], None], capsys: CAPTURE
) -> None:
    stdin(b'{"prompt": "a b"}\n')
    assert main(["generate", "--prompts", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "b a"


def test_empty_file(run: Run) -> None:
    assert run([]) == (0, [])


def test_a_run_that_dies_has_printed_what_had_ended(run: Run, stub: Any) -> None:
    """In order, without the lines that had not; the stub's engine takes the latest of two."""
    lines = [{"prompt": text} for text in ("a", "b", "c", "d")] + [{"prompt": ""}]
    stub.behaviour["dies"] = 4, RuntimeError("no more")
    code, records = run(lines)
    assert code == 1
    assert [r["line"] for r in records] == [2, 3, 4, 5]
    assert stub.made[0].engine.waiting[0].request_id == "1.0"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    from specla.models.toy import write_toy_checkpoint

    return str(write_toy_checkpoint(tmp_path_factory.mktemp("toy")))


def test_slots_are_refilled_as_they_become_free(
    toy: str, tmp_path: Path, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real engine: as many steps as if all lines had been given at once, with lines that the
    engine rejects among them; each answer is its prompt's."""
    from specla.llm import LLM

    flags = [
        "--drafter",
        "none",
        "--max-slots",
        "3",
        "--temperature",
        "1",
        "--ignore-eos",
        "--raw",
    ]
    jobs: list[dict[str, Any]] = [
        {"prompt": f"line {i}", "params": {"max_tokens": (20, 1, 2)[i % 3], "seed": 7 * i}}
        for i in range(30)
    ]
    jobs[4]["params"]["n"] = 2
    rejected = {"prompt": "x", "params": {"logit_bias": {"99999": 1}}}
    path, seen = tmp_path / "p.jsonl", list[LLM]()
    path.write_text("".join(json.dumps(x) + "\n" for x in [*jobs[:9], rejected, *jobs[9:]]))

    def kept(*given: Any) -> LLM:
        seen.append(load(*given))
        return seen[-1]

    monkeypatch.setattr("specla.cli.batch.load", kept)
    assert main(["generate", toy, "--prompts", str(path), *flags]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "logit_bias" in records.pop(10)["error"]["message"]
    (mine,) = seen
    other = LLM(toy, drafter="none", max_slots=3)
    params = [SamplingParams(temperature=1, ignore_eos=True, **job["params"]) for job in jobs]
    wanted = other.generate([job["prompt"] for job in jobs], params)
    assert [tuple(r["token_ids"]) for r in records] == [c.token_ids for c in wanted]
    assert mine.engine.stats.steps <= other.engine.stats.steps
