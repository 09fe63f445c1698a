# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `specla.llm`: the command line is tested without weights."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from completions import completion

from specla import drafters
from specla.errors import ConfigError, RequestRejected
from specla.request import Completion, Request, SamplingParams, StreamDelta

DRAFTERS = ("auto", "none", "ngram", "suffix")


class StubLLM:
    """Answers with the prompt's words in reverse. One token per word; drafters accept one draft
    per round. `made` keeps every instance, `behaviour` what tests change."""

    made: list[StubLLM]
    behaviour: dict[str, Any]

    def __init__(self, model: str = "demo", **options: Any) -> None:
        if options["drafter"] not in DRAFTERS:
            raise ConfigError(
                f"drafter must be one of: none, ngram; got {options['drafter']!r}; choose one"
            )
        if "load" in self.behaviour:
            raise self.behaviour["load"]
        self.name, self.options, self.calls = model, options, []
        self.drafters_seen: list[Any] = []
        template = self.behaviour.get("chat_template", True)
        self.tokenizer = types.SimpleNamespace(
            has_chat_template=template,
            encode=lambda text: list(text.encode()),
            apply_chat_template=lambda turns: list(turns[-1]["content"].encode()),
        )
        info = types.SimpleNamespace(architecture="StubForCausalLM", fingerprint="00")
        self.model = types.SimpleNamespace(
            info=info,
            device=torch.device("cpu"),
            dtype="torch.float32",
            check_rows=self.check_rows,
        )
        name = "suffix" if options["drafter"] == "auto" else options["drafter"]
        self.config = types.SimpleNamespace(
            drafter=name, drafter_options={}, summary=lambda: {"drafter": name, "reasons": {}}
        )
        self.engine = StubEngine(self)
        if options.get("progress"):
            options["progress"](1, 1)
        self.made.append(self)

    def renew(self) -> None:
        self.engine.drafter = drafters.build(self.config.drafter)

    def check_rows(self, rows: int) -> None:
        if self.behaviour.get("rows"):
            raise self.behaviour["rows"]

    def generate(self, prompts: Any, params: Any = None) -> list[Completion]:
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        self.calls.append(("generate", many))
        self.drafters_seen.append(self.engine.drafter)
        for prompt in many:
            if prompt == "reject me":
                raise RequestRejected("the prompt must fit, got too much; shorten it")
        pairs = [(prompt, p) for prompt, p in zip(many, each, strict=True) for _ in range(p.n)]
        return [self.answer(prompt, p) for prompt, p in pairs]

    def chat(self, messages: Any, params: Any = None) -> list[Completion]:
        one = isinstance(messages[0], Mapping)
        turns = [messages] if one else messages
        self.calls.append(("chat", turns))
        return self.generate([turn[-1]["content"] for turn in turns], params)

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[StreamDelta]:
        completion = self.generate([prompt], [params])[0]
        for index, token in enumerate(completion.token_ids):
            word = completion.text.split()[index]
            text = word if index == 0 else " " + word
            if self.behaviour.get("interrupt_at") == index:
                raise KeyboardInterrupt
            yield delta(text, (token,), None)
        yield delta("", (), completion)

    def stream_chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams
    ) -> Iterator[StreamDelta]:
        self.calls.append(("stream_chat", list(messages)))
        return self.stream(messages[-1]["content"], params)

    def answer(self, prompt: str, params: SamplingParams) -> Completion:
        words = list(reversed(prompt.split()))[: params.max_tokens]
        if self.behaviour.get("lie") and self.options["drafter"] != "none":
            words = words[:-1]
        ids = tuple(sum(word.encode()) for word in words)
        return completion(
            prompt=prompt, text=" ".join(words), ids=ids, params=params, options=self.options
        )


class StubEngine:
    """One slot, which takes the latest request: answers do not come in the order of the prompts.
    behaviour["dies"]: what the step of that number raises."""

    def __init__(self, llm: StubLLM) -> None:
        self.drafter, self._llm = None, llm
        self.state = types.SimpleNamespace(pool=types.SimpleNamespace(num_slots=1))
        self.waiting: list[Request] = []
        self.steps = 0

    def add(self, request: Request) -> None:
        self._llm.generate(bytes(request.prompt_token_ids).decode(), request.params)
        self.waiting.append(request)

    def step(self) -> list[StreamDelta]:
        self.steps += 1
        number, error = self._llm.behaviour.get("dies", (0, None))
        if number == self.steps:
            raise error
        request = self.waiting.pop()
        prompt = bytes(request.prompt_token_ids).decode()
        found = self._llm.answer(prompt, replace(request.params, seed=request.seed))
        return [delta("", (), replace(found, request_id=request.request_id))]


def delta(text: str, ids: tuple[int, ...], end: Completion | None) -> StreamDelta:
    return StreamDelta(request_id="r0", text=text, token_ids=ids, completion=end)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubLLM]:
    """`from specla.llm import LLM` gives a fresh StubLLM class, and every model is found."""
    monkeypatch.setattr("specla.models.resolve.resolve", lambda name, *, revision=None: Path(name))
    fresh = type("LLM", (StubLLM,), {"made": [], "behaviour": {}})
    module = types.ModuleType("specla.llm")
    module.LLM = fresh
    monkeypatch.setitem(sys.modules, "specla.llm", module)
    return fresh


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Give a command these bytes on standard input."""

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    return give
