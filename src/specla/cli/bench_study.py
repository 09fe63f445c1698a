# SPDX-License-Identifier: Apache-2.0
"""`specla bench study`: one factor after another is changed, and what it is worth is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specla.bench.studies import REGISTRY, find
from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.failure import INCORRECT
from specla.cli.options import EngineOptions
from specla.cli.records import dumps
from specla.cli.single import print_line
from specla.cli.study_plan import Plan
from specla.errors import ConfigError
from specla.request import SamplingParams

if TYPE_CHECKING:
    from specla.bench.measure import Prompt, Sample
    from specla.bench.studies.study import Lab, Measurement, Study, Value
    from specla.cli.console import Tick

# Console width where stdout is no terminal: the table must not be cut in a log.
LOG_WIDTH = 260


def study(
    name: Annotated[str, typer.Argument(help=f"{', '.join(REGISTRY)}.")],
    model: Annotated[
        str,
        typer.Argument(
            help="'demo', a directory, a hub id; controlled: also random:gdn-1.3b, random weights."
        ),
    ] = "demo",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Those that the study is about; repeatable. Default: what 'auto' picks."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="A factor's values, such as length=1,2,4; repeatable."),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(help="tree: where a factor stands while others vary; such as nodes=32."),
    ] = None,
    suite: Annotated[
        list[Path] | None, typer.Option(help="As for 'bench accept'. Default: built-in prompts.")
    ] = None,
    data: opt.HeldOut = None,
    prompts: Annotated[
        int | None, typer.Option(help="Of each suite, drawn with a seed. Default: the study's.")
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    ignore_eos: opt.IgnoreEos = False,
    minutes: Annotated[
        float,
        typer.Option(help="Where they run out, every setting is measured on fewer prompts."),
    ] = 5.0,
    record: Annotated[
        bool, typer.Option("--record", help="Append figures to --results; needs --texts.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rows.jsonl, the page and its plot. With --record studies/NAME beside "
            "--results."
        ),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Write the answers there, as JSON lines, to look at.")
    ] = None,
    source: opt.Source = None,
    commit: opt.Commit = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            help="Most tree nodes a round verifies, where no factor says so; default 16.",
            rich_help_panel=opt.ENGINE,
        ),
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per measurement.")] = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Measure what one thing after another is worth: acceptance by draft length, a tree's shape,
    a state reader, a drafter's mixer, the batch.

    All against exact plain decoding of the same run, greedily. Exit code 5 if an answer is not
    plain decoding's.
    """
    wanted = find(name)
    folder = report or (results.parent / "studies" / name if record else None)
    if source is not None:
        opt.require_none(
            texts=texts, drafter=drafter, vary=vary, at=at, suite=suite, data=data,
            prompts=prompts, commit=commit, max_nodes=max_nodes,
        )  # fmt: skip
        from specla.bench.studies import page

        found, run = page.read(source, name)
        kept: list[Sample] = []
    else:
        if record and texts is None:
            raise ConfigError(
                "--record must come with --texts FILE: a figure counts with the answers behind it"
            )
        plan = Plan(
            study=wanted, drafters=_drafters(wanted, drafter), vary=_factors("--vary", vary),
            at=_factors("--at", at), prompts=_prompts(wanted, suite, data, prompts),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos),
            minutes=minutes, commit=commit,
            engine=EngineOptions(
                model=model, max_nodes=_max_nodes(wanted, max_nodes), device=device, dtype=dtype,
                revision=revision, threads=threads,
            ),
        )  # fmt: skip
        with progress_bars(wanted=not no_progress) as tick:
            found, run, kept = _run(plan, folder, tick)
    _show(wanted, found, run, json=json)
    _keep(wanted, found, run, folder, results if record else None)
    if texts is not None:
        _write_texts(texts, kept)
    return _verdict(kept)


def _drafters(study: Study, given: Sequence[str] | None) -> list[str]:
    least, most = study.drafters
    names = list(given or (["auto"] if most else []))
    if not least <= len(names) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise ConfigError(
            f"study {study.name} takes {wanted} drafters, got {len(names)}: {', '.join(names)}"
        )
    return names


def _max_nodes(study: Study, given: int | None) -> int:
    if given is not None and study.max_nodes is None:
        raise ConfigError(
            f"--max-nodes has no effect on study {study.name}, whose factors say how many; leave "
            "it out"
        )
    return given or study.max_nodes or 1


def _factors(option: str, given: Sequence[str] | None) -> dict[str, list[Value]]:
    """ "length=1,2" by factor; whole numbers as such."""
    found: dict[str, list[Value]] = {}
    for text in given or ():
        factor, _, values = text.partition("=")
        try:
            numbers = [float(part) for part in values.split(",")]
        except ValueError as error:
            raise ConfigError(
                f"{option} must be FACTOR=NUMBER[,NUMBER...], got {text!r}"
            ) from error
        found[factor] = [int(x) if x.is_integer() else x for x in numbers]
    return found


def _prompts(
    study: Study, suite: Sequence[Path] | None, data: Path | None, most: int | None
) -> list[Prompt]:
    """All suites in turn."""
    from specla.bench.headline import in_turn
    from specla.cli.bench_accept import chosen_suites

    return in_turn(chosen_suites(suite, data, study.prompts if most is None else most, 0))


def _run(
    plan: Plan, folder: Path | None, tick: Tick | None
) -> tuple[list[Measurement], dict[str, Any], list[Sample]]:
    """Measurements, each of them on disk before the next is made."""
    from specla.cli.study_lab import make_lab

    deadline = time.monotonic() + 60 * plan.minutes
    lab, run = make_lab(plan, deadline, tick)
    found = list(_written(plan.study, lab, run, folder))
    return found, run, lab.kept


def _written(
    study: Study, lab: Lab, run: Mapping[str, Any], folder: Path | None
) -> Iterator[Measurement]:
    from specla.bench.studies import page

    if folder is None:
        yield from study.measure(lab)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for one in study.measure(lab):
            file.write(page.line(study.name, one, run) + "\n")
            file.flush()
            yield one


def _show(
    study: Study, found: Sequence[Measurement], run: Mapping[str, Any], *, json: bool
) -> None:
    from specla.bench.studies import page

    if json:
        for one in found:
            print_line(page.line(study.name, one, run))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    console.print(page.render(found, f"{study.name}: {run['model']} on {run['device']}"))
    for one in found:
        if one.missing is not None:
            note(f"missing: {dict(one.at)}: {one.missing}")


def _keep(
    study: Study,
    found: Sequence[Measurement],
    run: Mapping[str, Any],
    folder: Path | None,
    results: Path | None,
) -> None:
    from specla.bench import report
    from specla.bench.studies import page

    if folder is not None:
        written = page.write(folder, study, found, run)
        lines = "".join(page.line(study.name, one, run) + "\n" for one in found)
        (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
        note(f"wrote {len(written) + 1} files to {folder}")
    if results is not None:
        report.append(results, page.csv_rows(study, found, run))
        note(f"appended to {results}")


def _write_texts(path: Path, kept: Sequence[Sample]) -> None:
    from specla.bench import headline_page as page

    lines = [dumps(page.text_record(one)) for one in kept]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--texts must be writable, got {path}: {error.strerror}") from error
    note(f"texts in {path}")


def _verdict(kept: Sequence[Sample]) -> int:
    """By every answer: those to one prompt must be the same, whoever gave them."""
    failed = [one for one in kept if one.completion is None]
    first: dict[str, tuple[int, ...]] = {}
    changed = 0
    for one in kept:
        if one.completion is not None:
            tokens = one.completion.token_ids
            changed += first.setdefault(one.prompt.text, tokens) != tokens
    for one in failed:
        note(f"failed: {one.method}: {one.error}")
    if changed:
        note(f"not identical: {changed} answers")
    return INCORRECT if changed else 1 if failed else 0
