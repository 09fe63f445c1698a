# SPDX-License-Identifier: Apache-2.0
"""LLM: a checkpoint, ready to generate. The offline facade over Engine.

llm = LLM("demo")
print(llm.generate("2 + 2 =", SamplingParams(temperature=0, max_tokens=8))[0].text)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from specla import drafters, models
from specla.config import EngineConfig, ResolvedConfig, resolve, with_costs, with_threads
from specla.drafters.base import Drafter, FeatureDrafter
from specla.engine.cost import CostTable, Identity, find_table
from specla.engine.engine import Engine
from specla.errors import ConfigError, RequestRejected, SpeclaError
from specla.models.resolve import resolve as resolve_model
from specla.models.tokenizer import load_tokenizer
from specla.request import Completion, Request, SamplingParams, StreamDelta, requests_of
from specla.state import State

Message = Mapping[str, str]
Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class LLM:
    """A target model, its tokenizer, a drafter and an engine. Several threads may use one: each
    round is run by one of them, over what all have asked for.

    Args:
        model: "demo", a directory, or a hub id.
        drafter: a drafter's name; "auto" picks one and reports it.
        device, dtype: "auto" or a name. mode: "exact", "fast"
            (GPU) or "plain" for the AR baseline.
        max_slots: sequences decoded together. max_nodes: most nodes of one tree.
        log_capacity, prefill_chunk, threads, drafter_options, kernel, costs, budget: see
            EngineConfig.
        progress: called with (bytes read, bytes in all) while weights load.
        capture_progress: called with (graphs made, graphs in all) at start-up on a GPU.

    Raises:
        SpeclaError: the model cannot be found, read or run as asked (see specla.errors).
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        drafter: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        mode: str = "exact",
        max_slots: int = 8,
        max_nodes: int = 16,
        log_capacity: int | None = None,
        prefill_chunk: int | None = None,
        drafter_options: Mapping[str, object] | None = None,
        revision: str | None = None,
        threads: int | None = None,
        kernel: str = "auto",
        costs: str = "auto",
        budget: str = "auto",
        progress: Progress | None = None,
        capture_progress: Progress | None = None,
    ) -> None:
        asked = EngineConfig(
            model=model,
            revision=revision,
            drafter=drafter,
            drafter_options=drafter_options or {},
            device=device,
            dtype=dtype,
            mode=mode,
            max_slots=max_slots,
            max_nodes=max_nodes,
            log_capacity=log_capacity,
            prefill_chunk=prefill_chunk,
            threads=threads,
            kernel=kernel,
            costs=costs,
            budget=budget,
        )
        self.config: ResolvedConfig = resolve(asked)
        self._gpu = self._which_gpu()
        self._use_gpu()
        self._load(costs, progress)
        self.engine.capture(capture_progress)
        self._ids = itertools.count()
        self._inboxes: dict[str, deque[StreamDelta]] = {}
        self._one_at_a_time = RLock()

    def _load(self, costs: str, progress: Progress | None) -> None:
        config = self.config
        path = resolve_model(config.model, revision=config.revision)
        self.config = config = self._find_drafter(path)
        self.tokenizer = load_tokenizer(path)
        guesser = self.new_drafter()
        self.model = models.load(
            str(path), device=config.device, dtype=config.torch_dtype, progress=progress
        )
        self.config = config = with_threads(config, self.model.info.weight_bytes)
        self._use_threads()
        table = self._find_costs(costs)
        if config.mode == "exact":
            self.model.check_rows(min(config.max_slots * config.max_nodes, 64))
        self.engine = Engine(
            self.model,
            State(
                self.model.info.recurrent,
                num_slots=config.max_slots,
                max_nodes=config.max_nodes,
                log_capacity=config.log_capacity,
                max_path=guesser.info.max_depth + 1,
                dtype=config.torch_dtype,
                device=config.device,
            ),
            guesser,
            mode=config.mode,
            prefill_chunk=config.prefill_chunk,
            tokenizer=self.tokenizer,
            end_token_ids=self.tokenizer.eos_token_ids,
            kernel=config.kernel,
            costs=table,
            budget=config.budget,
        )

    def _find_costs(self, asked: str) -> CostTable | None:
        """What was measured for this model here, if it was; config says where or why not."""
        config = self.config
        table, reason = find_table(
            asked,
            Identity.of(self.model, config.log_capacity),
            rows=config.max_slots,
            nodes=config.max_nodes,
            mode=config.mode,
            kernel=config.kernel,
        )
        self.config = with_costs(config, reason)
        return table

    def new_drafter(self) -> Drafter:
        """A drafter as configured, that remembers nothing."""
        guesser = drafters.build(self.config.drafter, options=self.config.drafter_options)
        if isinstance(guesser, FeatureDrafter):
            guesser.check_tokenizer(self.tokenizer.digest)
        return guesser

    def renew(self) -> None:
        """Draft from now on as if nothing had been answered yet: a budget that has seen nothing,
        and a drafter that remembers nothing, which is another one only where it has to be. No
        request may be running."""
        with self._one_at_a_time:
            mine = self.engine.drafter
            self.engine.use(self.new_drafter() if mine.info.remembers else mine)

    def _find_drafter(self, target: Path) -> ResolvedConfig:
        """The configuration with a trained drafter's folder in its name: where nobody chose, and
        where only the kind was given, it is the one beside the target."""
        config = self.config
        if config.mode == "plain" or "drafter" not in config.reasons:
            return replace(config, drafter=drafters.with_folder(config.drafter, target))
        found = drafters.beside(target)
        if found is None:
            return config
        reasons = {**config.reasons, "drafter": f"{found}: trained for this target"}
        return replace(config, drafter=found, reasons=reasons)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete prompts (text or token ids), all in one batch.

        Returns completions in the order of the prompts; with n > 1, n of them per prompt.

        Raises:
            RequestRejected: a prompt or parameter is invalid; nothing has been generated.
        """
        many = [prompts] if isinstance(prompts, str) else _many(prompts, "prompts", "texts")
        requests = [
            request
            for prompt, p in zip(many, _per_prompt(params, len(many)), strict=True)
            for request in self._requests(prompt, p)
        ]
        finished = {d.request_id: d.completion for d in self._run(requests) if d.completion}
        return [finished[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or a list of them, through the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...]. Returns as `generate` does.
        """
        said = _many(messages, "messages", "messages")
        one = not said or isinstance(said[0], Mapping)
        prompts = [self._template(c) for c in ([said] if one else said)]
        return self.generate(prompts, params)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """Yield text as it becomes certain; the last delta carries the completion.

        Leaving the iterator early aborts the request and frees its slot.
        """
        requests = self._requests(prompt, params or SamplingParams())
        if len(requests) > 1:
            raise RequestRejected("n must be 1 for streaming, got more", param="n")
        return self._run(requests)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """`stream` for a conversation."""
        return self.stream(self._template(messages), params)

    def _template(self, messages: Sequence[Message]) -> list[int]:
        said = _many(messages, "messages", "messages")
        if not all(isinstance(message, Mapping) for message in said):
            raise RequestRejected(
                "a message must be a mapping with role and content, got "
                f"{said!r:.80}; say [{{'role': 'user', 'content': '...'}}]",
                param="messages",
            )
        return self.tokenizer.apply_chat_template([dict(message) for message in said])

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return requests_of(ids, params, lambda i: f"r{next(self._ids)}", prompt=text)

    def _run(self, requests: Sequence[Request]) -> Iterator[StreamDelta]:
        """Step the engine until these requests are done. Several of these iterators may be open
        at once, and any of them steps for all: each request's deltas wait in its own inbox."""
        inbox: deque[StreamDelta] = deque()
        added: list[Request] = []
        try:
            with self._one_at_a_time:
                for request in requests:
                    self.engine.add(request)
                    added.append(request)
                    self._inboxes[request.request_id] = inbox
            left = dict.fromkeys(request.request_id for request in requests)
            while left:
                while not inbox:
                    self._step(inbox, left)
                delta = inbox.popleft()
                if delta.completion is not None:
                    del left[delta.request_id]
                yield delta
        finally:
            with self._one_at_a_time:
                for request in added:
                    self.engine.abort(request.request_id)
                    del self._inboxes[request.request_id]

    def _which_gpu(self) -> int | None:
        """The index of the GPU asked for; "cuda" is the current one."""
        if self.config.device == "cpu":
            return None
        index = self.config.device.partition(":")[2]
        return int(index) if index else torch.cuda.current_device()

    def _use_gpu(self) -> None:
        """Kernels run on the process's current GPU, and another LLM may have changed it."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def _use_threads(self) -> None:
        """The thread count is the process's, and another LLM may have changed it: row invariance
        was checked for ours only."""
        if torch.get_num_threads() != self.config.threads:
            torch.set_num_threads(self.config.threads)

    def _step(self, inbox: Sequence[StreamDelta], left: Iterable[str]) -> None:
        """A step of the engine, unless another thread's has filled the inbox meanwhile. left:
        requests that are not complete."""
        with self._one_at_a_time:
            if inbox:
                return
            self._use_threads()
            self._use_gpu()
            if not any(map(self.engine.scheduler.find, left)):
                raise SpeclaError(
                    "a request must stay in the engine until it completes, but a round that "
                    "failed dropped it; see the error raised then, and send the request again"
                )
            for delta in self.engine.step():
                if delta.request_id in self._inboxes:
                    self._inboxes[delta.request_id].append(delta)


def _many(given: Any, param: str, what: str) -> list[Any]:
    """What must be a list. A text is a sequence too, and so is a mapping."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestRejected(
            f"{param} must be a list of {what}, got {given!r:.80}; put it into a list", param=param
        )
    return list(given)


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, prompt))
    except TypeError:
        raise RequestRejected(
            f"a prompt must be text or a sequence of token ids, got {prompt!r:.80}; "
            "put several prompts into a list of prompts",
            param="prompt",
        ) from None


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping):
        raise ConfigError(
            f"params must be SamplingParams or a list of them, got {params!r:.80}; say "
            "SamplingParams(**params)"
        )
    if len(params) != count:
        raise ConfigError(f"params must be one or one per prompt ({count}), got {len(params)}")
    return list(params)
