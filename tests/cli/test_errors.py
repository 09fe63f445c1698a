# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line on stderr, the documented exit code, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from specla.cli import main
from specla.errors import (
    ExactnessUnavailable,
    InvalidCheckpoint,
    ModelNotFound,
    SpeclaError,
    UnsupportedModel,
)

STDIN = Callable[[bytes], None]
CAPTURE = pytest.CaptureFixture[str]


def fails(capsys: CAPTURE, code: int, *arguments: str) -> str:
    """Run a command that must fail with `code` and one line; that line."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specla: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["-p", ""], "empty"),
        (["-p", "x", "--max-tokens", "0"], "max_tokens must be an integer >= 1, got 0"),
        (["-p", "x", "--max-tokens", "-1"], "max_tokens must be an integer >= 1, got -1"),
        (["-p", "x", "--max-tokens", "many"], "--max-tokens"),
        (["-p", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["-p", "x", "--temperature", "inf"], "temperature"),
        (["-p", "x", "--temperature", "-1"], "temperature"),
        (["-p", "x", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["-p", "x", "--top-k", "-2"], "top_k"),
        (["-p", "x", "--min-p", "2"], "min_p"),
        (["-p", "x", "--seed", "-1"], "seed"),
        (["-p", "x", "--stop", ""], "stop"),
        (["-p", "x", "--logprobs", "21", "--json"], "logprobs"),
        (["-p", "x", "--logprobs", "1"], "--json"),
        (["-p", "x", "--drafter", "crystal-ball"], "drafter must be one of"),
        (["-p", "x", "--nonsense"], "No such option"),
        (["-p", "x", "--prompts", "y"], "both"),
        (["--prompts", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--prompts", "x", "--compare"], "--compare"),
        (["-p", "x", "--compare", "--mode", "fast"], "--compare checks mode exact"),
        (["-p", "x", "--compare", "--repeats", "0"], "--repeats must be >= 1, got 0"),
    ],
)
def test_usage_errors(stub: Any, capsys: CAPTURE, flags: list[str], word: str) -> None:
    assert word in fails(capsys, 2, "generate", *flags)


def test_bad_prompts_and_parameters_are_found_before_the_model_is_loaded(
    stub: Any, capsys: CAPTURE
) -> None:
    fails(capsys, 2, "generate", "-p", "")
    fails(capsys, 2, "generate", "-p", "x", "--max-tokens", "0")
    assert stub.made == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("a model must exist,\ngot nothing; check the name"), 3),
        (UnsupportedModel("architecture must be known, got Foo; use another"), 3),
        (InvalidCheckpoint("model.safetensors must be whole, got 3 bytes; fetch it again"), 3),
        (ExactnessUnavailable("rows must not change bits"), 5),
        (SpeclaError("something else"), 1),
        (MemoryError("no room"), 4),
        (RuntimeError("[enforce fail] can't allocate memory: 8 bytes"), 4),
        (RuntimeError("a bug\nof ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(stub: Any, capsys: CAPTURE, error: BaseException, code: int) -> None:
    stub.behaviour["load"] = error
    line = fails(capsys, code, "generate", "-p", "x")
    assert code != 4 or "--max-nodes" in line
    assert str(error) != "a bug\nof ours" or "--debug" in line
    assert (code == 130) == ("interrupted" in line)


def test_debug_shows_the_traceback(stub: Any, capsys: CAPTURE) -> None:
    stub.behaviour["load"] = RuntimeError("a bug of ours")
    assert main(["generate", "-p", "x", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert (
        err.splitlines()[-1] == "specla: error: RuntimeError: a bug of ours (--debug shows where)"
    )


def test_debug_shows_where_it_was_interrupted(stub: Any, capsys: CAPTURE) -> None:
    stub.behaviour["load"] = KeyboardInterrupt()
    assert main(["generate", "-p", "x", "--debug"]) == 130
    err = capsys.readouterr().err
    assert 'raise self.behaviour["load"]' in err
    assert err.splitlines()[-1] == "specla: error: interrupted"


def test_interrupted_while_the_command_line_is_imported() -> None:
    code = (
        "import sys, specla.__main__\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.exit(specla.__main__.run())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "specla: error: interrupted\n")


def test_invalid_utf8_on_standard_input(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stdin(b"fine until \xff here")
    line = fails(capsys, 2, "generate", "-p", "-")
    assert "0xff at offset 11" in line


def test_invalid_utf8_argument(stub: Any, capsys: CAPTURE) -> None:
    # How Python hands over bytes that the locale cannot decode.
    assert "0xfe at offset 1" in fails(capsys, 2, "generate", "-p", "a\udcfe")
    assert "UTF-8" in fails(capsys, 2, "generate", "-p", "lone \ud800 surrogate")


def test_empty_standard_input(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stdin(b"")
    assert "empty" in fails(capsys, 2, "generate")


def test_no_prompt_on_a_terminal(
    stub: Any, capsys: CAPTURE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "-p TEXT" in fails(capsys, 2, "generate")


def test_invalid_utf8_in_a_real_process() -> None:
    command = [sys.executable, "-m", "specla", "generate", "-p", os.fsdecode(b"a\xff")]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"specla: error: the prompt must be valid UTF-8, got byte 0xff")


def test_unknown_command(capsys: CAPTURE) -> None:
    assert "frobnicate" in fails(capsys, 2, "frobnicate")


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["chat"], ["bench", "generate"], ["doctor"]]
)
def test_help_lists_the_exit_codes(command: list[str], capsys: CAPTURE) -> None:
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "130 interrupted" in " ".join(out.split())


def test_version(capsys: CAPTURE) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specla 0.")


def test_a_model_that_is_not_there_is_told_before_torch_loads() -> None:
    """Importing torch takes longer than the answer should."""
    code = (
        "import sys; from specla.cli import main; code = main(['generate', 'no/such', '-p', 'x']);"
        "sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3
    assert "no/such" in done.stderr
