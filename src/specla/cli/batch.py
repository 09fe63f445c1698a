# SPDX-License-Identifier: Apache-2.0
"""A file of prompts: JSON lines in, JSON lines out, in input order.

A bad line becomes an error record that names it; the other lines still run, and the exit code
at the end is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from specla.cli.console import progress_bars
from specla.cli.loading import Message, checked, load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.prompts import BadLine, Job, open_lines, read_jobs
from specla.cli.records import completion_record, dumps, error_record, run_record
from specla.cli.single import print_line
from specla.errors import GenerationFailed, RequestRejected
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.llm import LLM

# Lines handed to the engine at once, per slot: enough to keep every slot busy, few enough that
# results appear while the file is still running.
LINES_PER_SLOT = 4

Outcome = list[Completion] | Exception


def run_batch(
    engine: EngineOptions, path: str, params: SamplingParams, *, chat: bool | None, bars: bool
) -> int:
    """Run every line of a prompt file; 1 if any failed."""
    with closing(open_lines(path)) as lines:
        jobs = list(read_jobs(lines, params))
    with progress_bars(wanted=bars) as tick:
        llm = load(engine, tick)
    form, failed = prompt_format(llm, chat), 0
    run = run_record(llm, engine.model)
    with progress_bars(wanted=bars) as tick:
        for done, group in _groups(jobs, LINES_PER_SLOT * engine.max_slots):
            outcomes = _run_group(llm, [x for x in group if isinstance(x, Job)], form)
            for item in group:
                outcome = item.error if isinstance(item, BadLine) else outcomes[item.line]
                failed += isinstance(outcome, Exception)
                for record in _records(item, outcome, form):
                    print_line(dumps(record if "error" in record else record | run))
            if tick is not None:
                tick("prompts", done, len(jobs))
    return 1 if failed else 0


def _groups(
    jobs: Sequence[Job | BadLine], size: int
) -> Iterator[tuple[int, Sequence[Job | BadLine]]]:
    for start in range(0, len(jobs), size):
        group = jobs[start : start + size]
        yield start + len(group), group


def _run_group(llm: LLM, jobs: Sequence[Job], form: str) -> dict[int, Outcome]:
    """All jobs at once; one at a time if the engine rejects any, to find which."""
    try:
        return dict(_run(llm, jobs, form))
    except RequestRejected as error:
        if len(jobs) == 1:
            return {jobs[0].line: error}
        return {k: v for job in jobs for k, v in _run_group(llm, [job], form).items()}


def _run(llm: LLM, jobs: Sequence[Job], form: str) -> Iterator[tuple[int, Outcome]]:
    raw = [job for job in jobs if not _is_chat(job, form)]
    turns = [job for job in jobs if _is_chat(job, form)]
    if raw:
        params = [job.params for job in raw]
        yield from _deal(raw, llm.generate([job.prompt or "" for job in raw], params))
    if turns:
        params = [job.params for job in turns]
        yield from _deal(turns, llm.chat([_conversation(job) for job in turns], params))


def _is_chat(job: Job, form: str) -> bool:
    return job.messages is not None or form == "chat"


def _conversation(job: Job) -> list[Message]:
    return list(job.messages) if job.messages is not None else user_turn(job.prompt or "")


def _deal(jobs: Sequence[Job], completions: Sequence[Completion]) -> Iterator[tuple[int, Outcome]]:
    """Give each job its n completions, which come in order, or the error of one that failed."""
    start = 0
    for job in jobs:
        try:
            yield job.line, [checked(c) for c in completions[start : start + job.params.n]]
        except GenerationFailed as error:
            yield job.line, error
        start += job.params.n


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
