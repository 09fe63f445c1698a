# SPDX-License-Identifier: Apache-2.0
"""Where prompts come from: an argument, standard input, or a file of JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from specla.cli.loading import Message
from specla.errors import ConfigError, RequestRejected
from specla.request import SamplingParams

FIELDS = ("id", "prompt", "messages", "params")
PARAMS = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One good line of a prompt file: a prompt or a conversation, and how to continue it."""

    line: int
    id: str | int
    prompt: str | None
    messages: tuple[Message, ...] | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be run, and why."""

    line: int
    id: str | int | None
    error: Exception


def read_prompt(text: str | None) -> str:
    """The prompt of one `generate`: -p TEXT, or standard input for '-p -' or a pipe."""
    if text is None and sys.stdin.isatty():
        raise ConfigError("a prompt must be given, got none; pass -p TEXT or pipe text in")
    if text is None or text == "-":
        # One final newline is the shell's, not the prompt's.
        text = decode(sys.stdin.buffer.read()).removesuffix("\n")
    return check_text(text)


def decode(data: bytes) -> str:
    """Bytes as UTF-8, or a rejection that names the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestRejected(
            f"the prompt must be valid UTF-8, got byte 0x{data[error.start]:02x} at offset "
            f"{error.start}; convert it first (iconv -t utf-8)",
            param="prompt",
        ) from error


def check_text(text: str) -> str:
    """A prompt must have characters, and only such as UTF-8 can write.

    Argument bytes the locale could not decode arrive as lone surrogates; JSON can spell others.
    """
    if not text:
        raise RequestRejected(
            "the prompt must not be empty, got 0 characters; pass -p TEXT or pipe text in",
            param="prompt",
        )
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = text.encode("utf-8", "surrogatepass")
    return decode(data)


def open_lines(path: str) -> BinaryIO:
    """A prompt file, or standard input for '-'."""
    if path == "-":
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(
            f"--prompts must name a readable file, got {path!r}: {error.strerror}; check the path"
        ) from error


def read_jobs(lines: Iterable[bytes], defaults: SamplingParams) -> Iterator[Job | BadLine]:
    """One job per non-blank line, in order. A bad line is reported, never skipped."""
    for number, data in enumerate(lines, start=1):
        if data.strip():
            yield _read_job(number, data, defaults)


def _read_job(number: int, data: bytes, defaults: SamplingParams) -> Job | BadLine:
    record: Any = None
    try:
        record = json.loads(decode(data))
        return _job(number, record, defaults)
    except (ValueError, TypeError, RecursionError) as error:
        name = record.get("id") if isinstance(record, dict) else None
        return BadLine(line=number, id=name if _is_id(name) else None, error=error)


def _job(number: int, record: Any, defaults: SamplingParams) -> Job:
    if not isinstance(record, dict):
        raise RequestRejected(f"a line must be a JSON object, got {type(record).__name__}")
    _known("field", record, FIELDS)
    name = record.get("id", number)
    if not _is_id(name):
        raise RequestRejected(f"id must be a string or an integer, got {name!r}", param="id")
    if ("prompt" in record) == ("messages" in record):
        raise RequestRejected("a line must have either prompt or messages", param="prompt")
    prompt, messages = record.get("prompt"), record.get("messages")
    return Job(
        line=number,
        id=name,
        prompt=_prompt(prompt) if "prompt" in record else None,
        messages=_messages(messages) if "messages" in record else None,
        params=_params(record.get("params", {}), defaults),
    )


def _is_id(name: object) -> bool:
    return isinstance(name, (str, int)) and not isinstance(name, bool)


def _known(what: str, given: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise RequestRejected(
                f"{what} must be one of {', '.join(allowed)}, got {name!r}", param=name
            )


def _prompt(value: object) -> str:
    if not isinstance(value, str):
        raise RequestRejected(f"prompt must be a string, got {value!r}", param="prompt")
    return check_text(value)


def _messages(value: object) -> tuple[Message, ...]:
    ok = isinstance(value, list) and value and all(_is_message(m) for m in value)
    if not ok:
        raise RequestRejected(
            f'messages must be a non-empty list of {{"role": text, "content": text}}, got '
            f"{value!r}",
            param="messages",
        )
    assert isinstance(value, list)
    for message in value:
        check_text(message["content"] or " ")
    return tuple(value)


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(x, str) for x in value.values())
    )


def _params(value: object, defaults: SamplingParams) -> SamplingParams:
    if not isinstance(value, dict):
        raise RequestRejected(f"params must be an object, got {value!r}", param="params")
    _known("params field", value, PARAMS)
    if isinstance(value.get("logit_bias"), dict):
        # JSON keys are strings; token ids are not.
        value = {**value, "logit_bias": {_token(k): x for k, x in value["logit_bias"].items()}}
    try:
        return replace(defaults, **value)
    except (TypeError, AttributeError) as error:
        raise RequestRejected(
            f"params must have values of SamplingParams' types, got {value!r}: {error}",
            param="params",
        ) from error


def _token(key: str) -> int:
    # int() would take "1_0", " 5" and other scripts' digits as well.
    if not (key.isascii() and key.isdecimal() and len(key) < 19):
        raise RequestRejected(
            f"logit_bias must be keyed by token ids, got {key!r:.80}; write digits only",
            param="logit_bias",
        )
    return int(key)
