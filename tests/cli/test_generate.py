# SPDX-License-Identifier: Apache-2.0
"""`specla generate` on a stand-in model: what goes where, and what --json holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from specla.cli import main

STDIN = Callable[[bytes], None]
CAPTURE = pytest.CaptureFixture[str]


def test_text_to_stdout_summary_to_stderr(stub: Any, capsys: CAPTURE) -> None:
    assert main(["generate", "-p", "one two three"]) == 0
    out, err = capsys.readouterr()
    assert out == "three two one\n"
    lines = err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt", "generation", "contract"]
    assert "tokens/round" in lines[1]
    assert "seed" not in lines[1]


def test_the_summary_of_a_sampled_text_names_its_seed(stub: Any, capsys: CAPTURE) -> None:
    assert main(["generate", "-p", "x", "--temperature", "1", "--seed", "12"]) == 0
    assert "seed 12" in capsys.readouterr().err


def test_the_model_defaults_to_demo_and_options_arrive(stub: Any) -> None:
    main(["generate", "-p", "x", "--drafter", "ngram", "--max-nodes", "5", "--threads", "1"])
    (llm,) = stub.made
    assert llm.name == "demo"
    assert llm.options["drafter"] == "ngram"
    assert (llm.options["max_nodes"], llm.options["threads"]) == (5, 1)


def test_a_budget_is_for_those_who_draft(stub: Any) -> None:
    main("generate -p hi --drafter suffix --budget 3".split())
    assert stub.made[-1].options["budget"] == "3"
    main("generate --compare -p hi --drafter suffix --budget 3".split())
    assert [m.options["budget"] for m in stub.made[-3:]] == ["auto", "auto", "3"]


def test_json_is_one_object_with_the_promised_fields(stub: Any, capsys: CAPTURE) -> None:
    command = "generate some/model -p x --json --seed 3 --drafter suffix --logprobs 1".split()
    command[3] = "one two three four"
    assert main(command) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert out.count("\n") == 1
    assert err == ""
    assert record["text"] == "four three two one"
    assert len(record["token_ids"]) == 4
    assert record["finish_reason"] == "stop"
    assert record["seed"] == 3
    assert record["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    speculation = {
        "drafter", "mode", "rounds", "drafted", "accepted", "tokens_per_round",
        "acceptance_by_depth", "fallback",
    }  # fmt: skip
    assert speculation <= set(record["speculation"])
    assert record["speculation"]["drafter"] == "suffix"
    assert set(record["timing"]) == {"prefill_s", "decode_s", "tokens_per_s"}
    assert record["model"] == "some/model"
    assert record["device"] == "cpu"
    assert record["dtype"] == "float32"
    assert record["versions"]["specla"]
    assert record["engine"]["drafter"] == "suffix"
    assert record["prompt_format"] == "chat"
    assert len(record["logprobs"]) == 4


@pytest.mark.parametrize(
    ("template", "flags", "form"),
    [
        (True, [], "chat"),
        (True, ["--raw"], "raw"),
        (True, ["--chat"], "chat"),
        (False, [], "raw"),
        (False, ["--raw"], "raw"),
    ],
)
def test_prompt_format(
    stub: Any, capsys: CAPTURE, template: bool, flags: list[str], form: str
) -> None:
    stub.behaviour["chat_template"] = template
    assert main(["generate", "-p", "hello you", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_format"] == form
    assert ("stream_chat" in [name for name, _ in stub.made[0].calls]) == (form == "chat")


def test_chat_without_a_template_is_refused(stub: Any, capsys: CAPTURE) -> None:
    stub.behaviour["chat_template"] = False
    assert main(["generate", "-p", "x", "--chat"]) == 2
    assert "--raw" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["-p", "-"], []])
def test_prompt_from_standard_input(
    stub: Any, stdin: STDIN, capsys: CAPTURE, flags: list[str]
) -> None:
    stdin("zwei drü\n".encode())
    assert main(["generate", *flags]) == 0
    assert capsys.readouterr().out == "drü zwei\n"


def test_prompt_that_looks_like_an_option(stub: Any, capsys: CAPTURE) -> None:
    assert main(["generate", "-p", "--help me"]) == 0
    assert capsys.readouterr().out == "me --help\n"


def test_no_progress_off_a_terminal(stub: Any) -> None:
    main(["generate", "-p", "x"])
    assert stub.made[0].options["progress"] is None


def test_compare(stub: Any, capsys: CAPTURE) -> None:
    assert main(["generate", "--compare", "-p", "one two three", "--repeats", "2"]) == 0
    out, _ = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "three two one"
    assert lines[-1] == "identical: yes"
    for name in ("plain AR", "exact AR", "speculative (suffix)"):
        (row,) = [line for line in lines if line.startswith(name)]
        assert len([word for word in row.split() if word.replace(".", "").isdigit()]) >= 2
    assert [(m.options["drafter"], m.options["mode"]) for m in stub.made] == [
        ("none", "plain"),
        ("none", "exact"),
        ("auto", "exact"),
    ]
    # A warm-up and two timed runs each.
    assert all(len([c for c in m.calls if c[0] == "generate"]) == 3 for m in stub.made)


def test_no_run_of_a_comparison_remembers_another(stub: Any) -> None:
    main(["generate", "--compare", "-p", "one two three", "--repeats", "2"])
    seen = stub.made[2].drafters_seen
    assert len(seen) == 3
    assert len({id(drafter) for drafter in seen}) == 3
    assert seen[0].info.name == "suffix"


def test_compare_fails_when_outputs_differ(stub: Any, capsys: CAPTURE) -> None:
    stub.behaviour["lie"] = True
    assert main(["generate", "--compare", "-p", "one two three"]) == 5
    assert capsys.readouterr().out.splitlines()[-1] == "identical: NO"


def test_compare_json(stub: Any, capsys: CAPTURE) -> None:
    assert main(["generate", "--compare", "-p", "one two three", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] is True
    assert [row["method"] for row in record["comparison"]] == [
        "plain AR",
        "exact AR",
        "speculative",
    ]
    assert record["comparison"][2]["vs_exact"] > 1
    assert record["text"] == "three two one"
