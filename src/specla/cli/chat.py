# SPDX-License-Identifier: Apache-2.0
"""`specla chat`: a conversation in the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.failure import describe
from specla.cli.loading import Message, checked, load, prompt_format
from specla.cli.options import EngineOptions
from specla.cli.prompts import check_text
from specla.cli.records import summary
from specla.cli.single import print_line
from specla.errors import SpeclaError
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.llm import LLM

HELP = """/help   this list
/stats  speed and acceptance of this conversation
/reset  forget the conversation
/exit   leave (so does Ctrl-D); Ctrl-C stops an answer, not the program"""


def chat(
    model: opt.Model = "demo",
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = None,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    drafter: opt.Drafter = "auto",
    drafter_option: opt.DrafterOption = None,
    max_nodes: opt.MaxNodes = 16,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    budget: opt.Budget = "auto",
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Talk with a model. /help lists the commands; piped input is one turn per line."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    engine = EngineOptions(
        model=model,
        drafter=drafter,
        drafter_options=opt.drafter_options(drafter_option),
        max_nodes=max_nodes,
        max_slots=1,
        device=device,
        dtype=dtype,
        revision=revision,
        threads=threads,
        budget=budget,
    )
    with progress_bars(wanted=not no_progress) as tick:
        llm = load(engine, tick)
    prompt_format(llm, True)
    return Conversation(llm, params).run(read_turns())


def read_turns() -> Iterator[str]:
    """Lines the user types (with history and editing), or lines of a pipe, until they end."""
    if not sys.stdin.isatty():
        # What is not UTF-8 is refused as that turn's text: the lines after it are answered.
        for line in sys.stdin.buffer:
            yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        return
    import readline  # noqa: F401  (importing it gives input() history and editing)

    note("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            note("\n/exit or Ctrl-D leaves")


@dataclass(slots=True)
class Conversation:
    """Turns so far, and what they cost. `history` grows only by finished or stopped answers."""

    llm: LLM
    params: SamplingParams
    history: list[Message] = field(default_factory=list)
    done: list[Completion] = field(default_factory=list)
    failure: int = 0

    def run(self, turns: Iterator[str]) -> int:
        """Answer every turn; the exit code of the last one that failed."""
        commands = {"/help": self._help, "/stats": self._stats, "/reset": self._reset}
        for text in turns:
            command = text.strip()
            if command == "/exit":
                break
            if command in commands:
                commands[command]()
            elif command.startswith("/"):
                note(f"unknown command {command!r}; /help lists them")
            elif command:
                self._answer(text)
        return self.failure

    def _answer(self, text: str) -> None:
        asked: list[Message] = [*self.history, {"role": "user", "content": text}]
        try:
            check_text(text)
            answer, completion = self._stream(asked)
        except SpeclaError as error:
            self.failure, message = describe(error)
            note(f"specla: error: {message}")
            return
        self.history = [*asked, {"role": "assistant", "content": answer}]
        if completion is not None:
            self.done.append(completion)
            for line in summary(completion, self.params):
                note(line)

    def _stream(self, messages: list[Message]) -> tuple[str, Completion | None]:
        """Write one answer as it comes. Ctrl-C ends it: the text so far stays in the history."""
        parts: list[str] = []
        completion: Completion | None = None
        deltas = self.llm.stream_chat(messages, self.params)
        try:
            for delta in deltas:
                parts.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                completion = delta.completion and checked(delta.completion)
        except KeyboardInterrupt:
            # Closing the generator aborts the request and frees its slot.
            getattr(deltas, "close", lambda: None)()
            note("\n[stopped]")
        print_line("")
        return "".join(parts), completion

    def _help(self) -> None:
        note(HELP)

    def _reset(self) -> None:
        self.history.clear()
        note("the conversation is forgotten")

    def _stats(self) -> None:
        specs, timings = [c.speculation for c in self.done], [c.timing for c in self.done]
        rounds, seconds = sum(s.rounds for s in specs), sum(t.decode_s for t in timings)
        # What the rounds of each answer brought, as its own line says it.
        speed = sum(t.tokens_per_s * t.decode_s for t in timings) / seconds if seconds else 0.0
        mean = sum(s.tokens_per_round * s.rounds for s in specs) / rounds if rounds else 0.0
        answers = _counted(len(self.done), "answer")
        tokens = _counted(sum(len(c.token_ids) for c in self.done), "token")
        note(f"{answers}, {tokens}, {speed:.1f} tokens/s, {mean:.2f} tokens/round")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
