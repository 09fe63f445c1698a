# SPDX-License-Identifier: Apache-2.0
"""One prompt: the text streams to stdout, or one JSON object is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from specla.cli.console import Tick, note, progress_bars
from specla.cli.loading import checked, load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.prompts import read_prompt
from specla.cli.records import completion_record, dumps, run_record, summary
from specla.request import Completion, SamplingParams, StreamDelta

if TYPE_CHECKING:
    from specla.llm import LLM


def run_single(
    engine: EngineOptions,
    prompt: str | None,
    params: SamplingParams,
    *,
    chat: bool | None,
    json: bool,
    bars: bool,
) -> int:
    """Generate one completion. The prompt is checked before the model is loaded."""
    text = read_prompt(prompt)
    with progress_bars(wanted=bars) as tick:
        llm = load(engine, tick)
    form = prompt_format(llm, chat)
    if json:
        with progress_bars(wanted=bars) as tick:
            completion = collect(stream(llm, text, params, form), params.max_tokens, tick)
        print_line(dumps(completion_record(completion, form) | run_record(llm, engine.model)))
        return 0
    completion = echo(stream(llm, text, params, form))
    for line in summary(completion, params):
        note(line)
    return 0


def stream(llm: LLM, text: str, params: SamplingParams, form: str) -> Iterator[StreamDelta]:
    """Deltas of one completion, in the wanted prompt format."""
    if form == "chat":
        return llm.stream_chat(user_turn(text), params)
    return llm.stream(text, params)


def collect(deltas: Iterator[StreamDelta], total: int, tick: Tick | None) -> Completion:
    """The completion at the end of a stream."""
    done, last = 0, None
    for delta in deltas:
        done, last = done + len(delta.token_ids), delta.completion
        if tick is not None:
            tick("generating", done, total)
    assert isinstance(last, Completion)
    return checked(last)


def echo(deltas: Iterator[StreamDelta]) -> Completion:
    """Write a stream to stdout as it comes; the completion at its end."""
    last = None
    for delta in deltas:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        last = delta.completion
    print_line("")
    assert isinstance(last, Completion)
    return checked(last)


def print_line(text: str) -> None:
    """The answer, on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
