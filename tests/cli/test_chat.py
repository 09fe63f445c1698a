# SPDX-License-Identifier: Apache-2.0
"""`specla chat` with piped input: history, commands, interruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specla.cli import main

STDIN = Callable[[bytes], None]
CAPTURE = pytest.CaptureFixture[str]


def turns(stub: Any) -> list[list[dict[str, str]]]:
    """The conversations the model was given."""
    return [messages for name, messages in stub.made[0].calls if name == "stream_chat"]


def test_history_grows_through_the_chat_template(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stdin(b"one two\nthree four\n")
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "two one\nfour three\n"
    assert err.count("tokens/round") == 2
    assert [m["content"] for m in turns(stub)[1]] == ["one two", "two one", "three four"]
    assert [m["role"] for m in turns(stub)[1]] == ["user", "assistant", "user"]


def test_commands(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stdin(b"/help\none two\n/stats\n/reset\nthree\n/what\n\n/exit\nnever\n")
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "two one\nthree\n"
    assert "/reset  forget" in err
    assert "1 answers, 2 tokens" in err
    assert "unknown command '/what'" in err
    assert len(turns(stub)[1]) == 1


def test_a_failed_turn_does_not_end_the_conversation(
    stub: Any, stdin: STDIN, capsys: CAPTURE
) -> None:
    stdin(b"reject me\nhello\n")
    assert main(["chat"]) == 2
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "specla: error: the prompt must fit" in err
    assert len(turns(stub)[1]) == 1


def test_interrupt_stops_the_answer_not_the_program(
    stub: Any, stdin: STDIN, capsys: CAPTURE
) -> None:
    stub.behaviour["interrupt_at"] = 2
    stdin(b"a b c d\nx\n")
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "d c\nx\n"
    assert "[stopped]" in err
    assert [m["content"] for m in turns(stub)[1]] == ["a b c d", "d c", "x"]


def test_needs_a_chat_template(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stub.behaviour["chat_template"] = False
    stdin(b"x\n")
    assert main(["chat"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_invalid_utf8_is_a_failed_turn(stub: Any, stdin: STDIN, capsys: CAPTURE) -> None:
    stdin(b"one two\nsay \xff\n/\xfe\nthree\n")
    assert main(["chat"]) == 2
    out, err = capsys.readouterr()
    assert out == "two one\nthree\n"
    assert "specla: error: the prompt must be valid UTF-8, got byte 0xff at offset 4" in err
    assert r"unknown command '/\udcfe'" in err
    assert len(turns(stub)[1]) == 3
