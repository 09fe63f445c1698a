# SPDX-License-Identifier: Apache-2.0
"""`specla chat` with piped input: history, commands, interruption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from completions import completion

from specla.cli import main
from specla.cli.chat import Conversation
from specla.cli.records import summary
from specla.request import SamplingParams

if TYPE_CHECKING:
    from specla.llm import LLM

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
    assert "1 answer, 2 tokens" in err
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


def test_stats_of_one_answer_are_its_own_line(capsys: CAPTURE) -> None:
    """Of one whose last round an end cut: it brought a token less than rounds and drafts say."""
    params = SamplingParams(max_tokens=3)
    whole = completion(ids=(1, 2, 3), params=params, options={"drafter": "ngram", "mode": "exact"})
    cut = replace(whole, speculation=replace(whole.speculation, accepted=2))
    assert cut.speculation.rounds == 2
    assert "1.50 tokens/round" in summary(cut, params)[1]
    Conversation(cast("LLM", None), params, done=[cut])._stats()
    one = capsys.readouterr().err
    Conversation(cast("LLM", None), params, done=[cut, cut])._stats()
    two = capsys.readouterr().err
    assert one == "1 answer, 3 tokens, 150.0 tokens/s, 1.50 tokens/round\n"
    assert two == "2 answers, 6 tokens, 150.0 tokens/s, 1.50 tokens/round\n"
