# SPDX-License-Identifier: Apache-2.0
"""`specla bench generate`: AR against each drafter, by prompt kind."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specla.bench import generate_page as page
from specla.bench import report
from specla.bench.measure import Method, Prompt, Sample, interleave
from specla.bench.suites import read_suites
from specla.bench.table import EXACT, PLAIN, Row, rows
from specla.bench.workloads import WORKLOADS, prompts
from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.failure import INCORRECT
from specla.cli.loading import check_options, load, prompt_format, runner
from specla.cli.options import EngineOptions
from specla.cli.records import dumps, machine, run_record
from specla.cli.single import print_line
from specla.errors import ConfigError
from specla.models.resolve import resolve
from specla.request import SamplingParams

# Console width where stdout is no terminal: the table must not be cut in a log.
LOG_WIDTH = 200


def generate(
    model: opt.Model = "demo",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Drafter to measure; repeatable. Default: every one there is."),
    ] = None,
    drafter_option: opt.DrafterOption = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Prompt kind; repeatable. Default: all ({', '.join(WORKLOADS)})."),
    ] = None,
    per_kind: Annotated[
        int | None, typer.Option(help="Only the first prompts of each kind.")
    ] = None,
    suite: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts from a file or folder instead, as for bench accept; repeatable."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--prompts", help="Prompts of each suite; default: all.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs per prompt; the median counts.")] = 1,
    total: Annotated[
        str | None,
        typer.Option(help="Name of the one drafter's speed over all prompts, to be kept."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Append the numbers to --results.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Folder for rows.jsonl, the page and its plot. With --record generate beside "
            "--results.",
        ),
    ] = None,
    source: opt.Source = None,
    commit: opt.Commit = None,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    ignore_eos: opt.IgnoreEos = False,
    max_nodes: opt.MaxNodes = 16,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    budget: opt.Budget = "auto",
    json: opt.Json = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Measure decode speed and acceptance at batch 1: AR against each drafter, by prompt kind.

    One table on stdout. `same` counts answers equal to exact AR's token for token, `loops` those
    that end in a loop (which makes drafting look better than it is). Exit code 1 if a request
    failed, 5 if a drafter changed the output.
    """
    folder = report_to or (results.parent / "generate" if record else None)
    if source is not None:
        opt.require_none(
            drafter=drafter, drafter_option=drafter_option, kind=kind, per_kind=per_kind,
            suite=suite, prompts=limit, total=total, commit=commit,
        )  # fmt: skip
        run, table, totals = page.read(source)
        form = {"prompt_format": run["prompts"]}
        found = Found(run=run, table=table, totals=totals, document=run | form)
    else:
        if repeats < 1:
            raise ConfigError(f"--repeats must be >= 1, got {repeats}")
        if total and len(drafter or ()) != 1:
            raise ConfigError(
                f"--total is of one drafter, got {drafter or 'all'}; give one --drafter"
            )
        if total and folder is None:
            raise ConfigError(
                f"--total {total} has no effect without --record or --report; add one"
            )
        found = _measure(
            EngineOptions(
                model=model, max_nodes=max_nodes, max_slots=1, device=device, dtype=dtype,
                revision=revision, threads=threads, budget=budget,
                drafter_options=opt.drafter_options(drafter_option),
            ),
            drafter, _prompts(kind, per_kind, suite, limit),
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos
            ),
            repeats=repeats, total=total, commit=commit, show=not no_progress,
        )  # fmt: skip
    if json:
        rows_of_all = {"rows": report.records(found.table), "totals": list(found.totals)}
        print_line(dumps(found.document | rows_of_all))
    else:
        _print(found)
    if record:
        lines = report.csv_rows(found.table, _shared(found.run))
        report.append(results, [*lines, *(_shared(found.run) | one for one in found.totals)])
        note(f"appended to {results}")
    if folder is not None:
        written = page.write(folder, found.run, found.table, found.totals)
        note(f"wrote {len(written)} files to {folder}")
    return _verdict(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a run came to. run: as its lines keep it; document: as --json says it."""

    run: dict[str, str]
    table: Sequence[Row]
    totals: Sequence[page.Total]
    document: dict[str, Any]
    samples: Sequence[Sample] = ()


def _measure(
    engine: EngineOptions,
    drafter: Sequence[str] | None,
    wanted: Sequence[Prompt],
    params: SamplingParams,
    *,
    repeats: int,
    total: str | None,
    commit: str | None,
    show: bool,
) -> Found:
    measured = commit or report.commit()  # of what runs, whatever is checked out by its end
    target = resolve(engine.model, revision=engine.revision)
    names, options = _drafters(drafter, target), engine.drafter_options or {}
    check_options(names, target, options)
    alone = replace(engine, drafter="none", drafter_options=None, budget="auto")
    with progress_bars(wanted=show) as tick:
        engines = {PLAIN: load(replace(alone, mode="plain"), tick), EXACT: load(alone, tick)}
        for one in names:
            name = opt.labelled(one, options)
            engines[name] = load(replace(engine, drafter=one), tick)
        form = prompt_format(engines[EXACT], None)
        methods = [Method(name=k, run=runner(v, form)) for k, v in engines.items()]
        count = (lambda done, total: tick("measuring", done, total)) if tick else None
        samples = interleave(methods, wanted, params, repeats=repeats, tick=count)
    document = run_record(engines[EXACT], engine.model) | {"prompt_format": form}
    # The arguments, not the program's path: the command has to work elsewhere.
    run = report.head(
        device=machine(document), versions=document["versions"],
        command=" ".join(["specla", *sys.argv[1:]]), measured=measured,
    )  # fmt: skip
    run |= {"machine": document["device_name"], "prompts": form, "budget": engine.budget}
    totals = list(report.totals(samples, name, total)) if total else []
    return Found(run=run, table=rows(samples), totals=totals, document=document, samples=samples)


def _shared(run: Mapping[str, str]) -> dict[str, object]:
    return {name: value for name, value in run.items() if name in report.COLUMNS}


def _drafters(wanted: Sequence[str] | None, target: Path) -> list[str]:
    """Those asked for; else all that need no training, and the trained one beside the target."""
    from specla.drafters import UNTRAINED, beside, resolve_name

    trained = (beside(target) or "").partition(":")[0]
    given = [(n == "auto" and trained) or n for n in wanted or (*UNTRAINED, trained or "none")]
    names = [n if n == trained or ":" in n else resolve_name(n) for n in given]
    return [name for name in dict.fromkeys(names) if name != "none" or wanted]


def _print(found: Found) -> None:
    run = found.run
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    title = f"{run['device']}, {run['prompts']} prompts, batch 1"
    console.print(report.render(found.table, title))


def _prompts(
    kind: Sequence[str] | None,
    per_kind: int | None,
    suite: Sequence[Path] | None,
    limit: int | None,
) -> list[Prompt]:
    if not suite:
        if limit is not None:
            raise ConfigError("--prompts is for --suite; of built-in prompts use --per-kind")
        return prompts(kind or (), per_kind)
    if kind or per_kind is not None:
        raise ConfigError("--kind and --per-kind are for built-in prompts; leave out --suite")
    return [one for found in read_suites(suite, most=limit).values() for one in found]


def _verdict(found: Found) -> int:
    for sample in found.samples:
        if sample.error is not None:
            note(f"failed: {sample.method} on {sample.prompt.kind!r}: {sample.error}")
    failed = [row for row in found.table if row.failed]
    for row in failed:
        note(f"failed: {row.method} on {row.kind!r}: {row.failed} of {row.num_prompts}")
    if failed:
        return 1
    changed = [row for row in found.table if row.method != PLAIN and not row.identical]
    for row in changed:
        note(f"not identical: {row.method} on {row.kind!r}: {row.same} of {row.num_prompts}")
    return INCORRECT if changed else 0
