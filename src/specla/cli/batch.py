# SPDX-License-Identifier: Apache-2.0
"""A file of prompts: JSON lines in, JSON lines out, in input order.

A bad line becomes an error record that names it; the other lines still run, and the exit code
at the end is 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from specla.cli.console import progress_bars
from specla.cli.loading import Message, checked, load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.prompts import BadLine, Job, open_lines, read_jobs
from specla.cli.records import completion_record, dumps, error_record, run_record
from specla.cli.single import print_line
from specla.errors import GenerationFailed, RequestRejected
from specla.request import Completion, Request, SamplingParams, requests_of

if TYPE_CHECKING:
    from specla.llm import LLM

# Requests in the engine per slot: the next line waits there when a slot becomes free.
AHEAD = 2

Outcome = list[Completion] | Exception


def run_batch(
    engine: EngineOptions, path: str, params: SamplingParams, *, chat: bool | None, bars: bool
) -> int:
    """Run every line of a prompt file; 1 if any failed."""
    with closing(open_lines(path)) as lines:
        items = list(read_jobs(lines, params))
    with progress_bars(wanted=bars) as tick:
        llm = load(engine, tick)
    form = prompt_format(llm, chat)
    output = _Output(items, form, run_record(llm, engine.model))
    jobs = [item for item in items if isinstance(item, Job)]
    with progress_bars(wanted=bars) as tick:
        try:
            for done, (line, outcome) in enumerate(_outcomes(llm, jobs, form), start=1):
                output.add(line, outcome)
                if tick is not None:
                    tick("prompts", done, len(jobs))
        finally:
            output.rest()
    return 1 if output.failed else 0


class _Output:
    """Records in the order of the lines, each as soon as those before it are there."""

    def __init__(
        self, items: Sequence[Job | BadLine], form: str, run: Mapping[str, object]
    ) -> None:
        self._left, self._form, self._run = deque(items), form, run
        self._ended: dict[int, Outcome] = {
            item.line: item.error for item in items if isinstance(item, BadLine)
        }
        self.failed = 0

    def add(self, line: int, outcome: Outcome) -> None:
        """A line has ended."""
        self._ended[line] = outcome
        while self._left and self._left[0].line in self._ended:
            self._print(self._left.popleft())

    def rest(self) -> None:
        """The run is over: what has ended is not lost, though lines before it have not."""
        for item in self._left:
            if item.line in self._ended:
                self._print(item)

    def _print(self, item: Job | BadLine) -> None:
        outcome = self._ended.pop(item.line)
        self.failed += isinstance(outcome, Exception)
        for record in _records(item, outcome, self._form):
            print_line(dumps(record if "error" in record else {**record, **self._run}))


def _outcomes(llm: LLM, jobs: Sequence[Job], form: str) -> Iterator[tuple[int, Outcome]]:
    """(line, what came of it), in the order in which lines end. Slots are refilled as they become
    free; a line that the engine rejects takes none."""
    waiting, live = deque(jobs), dict[str, Job]()
    ended: dict[int, dict[str, Completion]] = {job.line: {} for job in jobs}
    while waiting or live:
        while waiting and len(live) < AHEAD * llm.engine.state.pool.num_slots:
            job = waiting.popleft()
            try:
                for request in _requests(llm, job, form):
                    llm.engine.add(request)
                    live[request.request_id] = job
            except RequestRejected as error:
                yield job.line, error
        for delta in llm.engine.step():
            if (one := delta.completion) is not None:
                job = live.pop(one.request_id)
                ended[job.line][one.request_id] = one
                if len(ended[job.line]) == job.params.n:
                    yield job.line, _outcome(job, ended.pop(job.line))


def _requests(llm: LLM, job: Job, form: str) -> list[Request]:
    """As `LLM.generate` and `LLM.chat` ask.

    Raises:
        RequestRejected: the chat template does not take the conversation.
    """
    if _is_chat(job, form):
        tokens = llm.tokenizer.apply_chat_template(_conversation(job))
    else:
        tokens = llm.tokenizer.encode(job.prompt or "")
    return requests_of(tokens, job.params, partial(_id, job))


def _id(job: Job, index: int) -> str:
    return f"{job.line}.{index}"


def _outcome(job: Job, ended: Mapping[str, Completion]) -> Outcome:
    """A job's completions in order, or the error of the first that failed."""
    try:
        return [checked(ended[_id(job, i)]) for i in range(job.params.n)]
    except GenerationFailed as error:
        return error


def _is_chat(job: Job, form: str) -> bool:
    return job.messages is not None or form == "chat"


def _conversation(job: Job) -> list[Message]:
    return list(job.messages) if job.messages is not None else user_turn(job.prompt or "")


def _records(item: Job | BadLine, outcome: Outcome, form: str) -> list[dict[str, object]]:
    if isinstance(outcome, Exception):
        return [error_record(outcome, item.line, item.id)]
    assert isinstance(item, Job)
    name = "chat" if _is_chat(item, form) else "raw"
    head = {"id": item.id, "line": item.line}
    return [
        head | {"index": index} | completion_record(completion, name)
        for index, completion in enumerate(outcome)
    ]
