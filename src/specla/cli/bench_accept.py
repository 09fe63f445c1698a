# SPDX-License-Identifier: Apache-2.0
"""`specla bench accept`: what of a drafter's guesses the target accepts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.loading import check_options, load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import dumps, machine, run_record
from specla.cli.single import print_line
from specla.errors import ConfigError
from specla.models.resolve import resolve
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.bench.accept import Answer, Result, Watched
    from specla.bench.measure import Prompt
    from specla.cli.console import Tick
    from specla.llm import LLM

# Console width where stdout is no terminal: the table must not be cut in a log.
LOG_WIDTH = 200
# Prompts handed to the engine at once: enough to keep its slots busy.
GROUP = 32


def accept(
    model: opt.Model = "demo",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafter to measure; repeatable. Default: what 'auto' picks."),
    ] = None,
    drafter_option: opt.DrafterOption = None,
    suite: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with question, turns or prompt (.gz too), or a folder of such files; "
            "repeatable. Default: the built-in prompts."
        ),
    ] = None,
    data: opt.HeldOut = None,
    prompts: Annotated[
        int | None, typer.Option(help="Prompts per suite, drawn with --sample-seed; default: all.")
    ] = None,
    sample_seed: Annotated[int, typer.Option(help="Which prompts --prompts draws.")] = 0,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    seed: opt.Seed = 0,
    ignore_eos: opt.IgnoreEos = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the figures to --results; needs --texts.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    commit: opt.Commit = None,
    texts: Annotated[
        Path | None, typer.Option(help="Write the answers there, as JSON lines, to look at.")
    ] = None,
    max_nodes: opt.MaxNodes = 16,
    max_slots: opt.MaxSlots = 8,
    mode: Annotated[
        str, typer.Option(help="exact, or fast (GPU).", rich_help_panel=opt.ENGINE)
    ] = "exact",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per suite.")] = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Measure tau (tokens per round, the bonus counted), acceptance and survival by depth,
    first-token match and top-k recall, raw and without answers that loop.

    All that the drafter proposes is verified: the budget is off. Exit code 1 if a request failed.
    """
    from specla.bench import accept as bench

    if mode == "plain":
        raise ConfigError("--mode must be exact or fast: plain decoding has no drafts to accept")
    if record and texts is None:
        raise ConfigError(
            "--record must come with --texts FILE: a figure counts with the answers behind it"
        )
    suites = chosen_suites(suite, data, prompts, sample_seed)
    laws = [
        SamplingParams(temperature=t, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
        for t in dict.fromkeys(temperature or (0.0, 1.0))
    ]
    options = opt.drafter_options(drafter_option)
    names = list(dict.fromkeys(drafter or ("auto",)))
    check_options(names, resolve(model, revision=revision), options)
    engine = EngineOptions(
        model=model, max_nodes=max_nodes, max_slots=max_slots, device=device, dtype=dtype,
        mode=mode, revision=revision, threads=threads, budget="off", drafter_options=options,
    )  # fmt: skip
    found: list[Result] = []
    kept: list[tuple[Answer, float]] = []
    with progress_bars(wanted=not no_progress) as tick:
        for name in names:
            llm = _load(replace(engine, drafter=name), tick)
            form = prompt_format(llm, None)
            for kind, law in ((kind, law) for kind in suites for law in laws):
                answers = bench.collect(suites[kind], _runner(llm, form, law, tick))
                # Two checkpoints of one kind have one name.
                kept_as = name if ":" in name else llm.engine.drafter.info.name
                label = opt.labelled(kept_as, options)
                found.append(bench.result(kind, label, law.temperature, answers))
                kept += [(answer, law.temperature) for answer in answers]
    if texts is not None:
        _write_texts(texts, kept)
    _report(found, llm, model, form, json=json, record=results if record else None, commit=commit)
    return 1 if any(one.failed for one in found) else 0


def chosen_suites(
    paths: Sequence[Path] | None, data: Path | None, most: int | None, seed: int
) -> dict[str, Sequence[Prompt]]:
    """Those of the paths, or of the headline's data, or the built-in ones; so many prompts of
    each, drawn with a seed."""
    from specla.bench.suites import read_suites, sample
    from specla.bench.workloads import WORKLOADS
    from specla.bench.workloads import prompts as built_in
    from specla.cli.headline_suites import suites

    if paths and data:
        raise ConfigError("--suite and --data must not be given together; leave one out")
    if most is not None and most < 1:
        raise ConfigError(f"--prompts must be >= 1, got {most}")
    if paths:
        return dict(read_suites(paths, most=most, seed=seed))
    if data is not None:
        return dict(suites(data, most, seed))
    return {kind: sample(built_in([kind]), most, seed) for kind in WORKLOADS}


def _load(options: EngineOptions, tick: Tick | None) -> LLM:
    llm = load(options, tick)
    if llm.config.drafter == "none":
        raise ConfigError(
            "--drafter must be one that drafts, got none; there is nothing to accept"
        )
    return llm


def _runner(
    llm: LLM, form: str, law: SamplingParams, tick: Tick | None
) -> Callable[[Sequence[Prompt], Callable[[Watched], None]], list[Completion]]:
    """Answers all prompts of a suite in one batch, with a drafter that remembers nothing."""
    if llm.model.device.type == "cuda":
        # Rounds that the host does not see cannot be watched: rows that report run with it.
        law = replace(law, logprobs=0)

    def run(prompts: Sequence[Prompt], watch: Callable[[Watched], None]) -> list[Completion]:
        llm.renew()
        with _watching(llm, watch):
            done: list[Completion] = []
            for start in range(0, len(prompts), GROUP):
                group = prompts[start : start + GROUP]
                done += _answer(llm, [prompt.text for prompt in group], law, form)
                if tick is not None:
                    tick(f"{prompts[0].kind}, T {law.temperature:g}", len(done), len(prompts))
        return done

    return run


def _answer(llm: LLM, texts: Sequence[str], law: SamplingParams, form: str) -> list[Completion]:
    if form == "raw":
        return llm.generate(texts, law)
    return llm.chat([user_turn(text) for text in texts], law)


@contextmanager
def _watching(llm: LLM, watch: Callable[[Watched], None]) -> Iterator[None]:
    llm.engine.watch = watch
    try:
        yield
    finally:
        llm.engine.watch = None


def _report(
    found: Sequence[Result], llm: LLM, model: str, form: str, *, json: bool, record: Path | None,
    commit: str | None,
) -> None:  # fmt: skip
    from specla.bench import accept_page as page
    from specla.bench import report

    run = run_record(llm, model)
    device = machine(run)
    if json:
        for one in found:
            print_line(dumps(page.record(one) | {"prompt_format": form} | run))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=LOG_WIDTH)
        console.print(page.render(found, f"{model} on {run['device']}, {run['dtype']}, {form}"))
    if record is not None:
        # The arguments, not the program's path: the command has to work elsewhere.
        command = " ".join(["specla", *sys.argv[1:]])
        first = report.head(
            device=device, versions=run["versions"], command=command, measured=commit
        )
        report.append(record, page.csv_rows(found, first))
        note(f"appended to {record}")


def _write_texts(path: Path, kept: Sequence[tuple[Answer, float]]) -> None:
    from specla.bench import accept_page as page

    lines = [dumps(page.text_record(answer, temperature)) for answer, temperature in kept]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--texts must be writable, got {path}: {error.strerror}") from error
    note(f"texts in {path}")
