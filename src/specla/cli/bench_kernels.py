# SPDX-License-Identifier: Apache-2.0
"""`specla bench kernels`: our kernels against the other ways to verify, on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note
from specla.cli.failure import INCORRECT
from specla.cli.records import versions
from specla.cli.single import print_line
from specla.errors import ConfigError, KernelUnavailable

if TYPE_CHECKING:
    import torch

    from specla.bench.kernel_report import Run
    from specla.bench.kernel_rows import Row
    from specla.bench.kernels import Job

LOG_WIDTH = 130
DEFAULT_SHAPES = ("gdn-1.3b", "qwen3-next")
BUDGET = 420.0


def kernels(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="gdn-1.3b, qwen3-next, qwen3.5-27b; repeatable. Reproductions of papers run on "
            f"the first. Default: {', '.join(DEFAULT_SHAPES)}."
        ),
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(help="Folder with SGLang's unpacked wheel: adds its kernels as baselines."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="tree, chain, single, commit, log, table1, recovery, waves; repeatable. Default: "
            "all."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds after which no further case is started. Default: {BUDGET:.0f}."
        ),
    ] = None,
    no_overlap: Annotated[
        bool,
        typer.Option("--no-overlap", help="Leave out rows with programmatic dependent launch."),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the figures to --results.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report: README.md, plots, rows.jsonl. With --record "
            "results/kernels by default."
        ),
    ] = None,
    source: opt.Source = None,
    commit: opt.Commit = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON line per row and figure.")
    ] = False,
    debug: opt.Debug = False,
) -> int:
    """Time verification kernels by CUDA-graph replay over cold states, against baselines.

    Every method's output is checked before it is timed. A row that cannot run is shown as missing,
    with the reason. Exit code 5 if a method computed something wrong.
    """
    folder = report or (Path("results/kernels") if record else None)
    if source is not None:
        given = {"shape": shape, "sglang": sglang, "only": only, "budget": budget}
        opt.require_none(**given, no_overlap=no_overlap or None, commit=commit)
        run, rows = _read(source)
    else:
        run, jobs = _start(shape, sglang, only, commit, overlap=not no_overlap)
        rows = list(_measured(run, jobs, budget or BUDGET, folder, debug=debug))
    _show(run, rows, json=json)
    if folder is not None:
        _write(folder, run, rows)
    if record:
        _append(results, run, rows)
    return _verdict(rows)


def _read(source: Path) -> tuple[Run, list[Row]]:
    from specla.bench.kernel_report import read

    return read(source)


def _start(
    shape: Sequence[str] | None,
    sglang: Path | None,
    only: Sequence[str] | None,
    commit: str | None,
    *,
    overlap: bool,
) -> tuple[Run, list[Job]]:
    """Refuse what cannot run, list the jobs, measure what memory can do."""
    from specla.bench.kernel_cases import named_shape

    shapes = [named_shape(name) for name in shape or DEFAULT_SHAPES]
    device = _cuda()
    import torch

    from specla.bench import graphs
    from specla.bench import report as csv_report
    from specla.bench.kernel_report import Run
    from specla.bench.kernel_suites import SUITES, Plan
    from specla.bench.sglang import Folder

    names = list(only or SUITES)
    for name in names:
        if name not in SUITES:
            raise ConfigError(
                f"--only must be one of {', '.join(SUITES)}; got {name!r}; choose one"
            )
    plan = Plan(shapes=shapes, folder=Folder(sglang) if sglang else None, pdl=overlap)
    jobs = [job for name in names for job in SUITES[name](plan)]
    found = versions()
    run = Run.now(
        commit=commit or csv_report.commit(),
        device=torch.cuda.get_device_name(device),
        torch=found["torch"] or "",
        triton=found["triton"] or "",
        command=" ".join(["specla", *sys.argv[1:]]),
        bandwidth=graphs.read_bandwidth(device),
    )
    note(f"{run.device}: reads {run.bandwidth / 1e12:.3f} TB/s")
    return run, jobs


def _cuda() -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise KernelUnavailable(
            "specla bench kernels needs a CUDA device, found none; run it on a machine with an "
            "NVIDIA GPU, or give --from rows.jsonl to show an earlier run"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _measured(
    run: Run, jobs: Sequence[Job], budget: float, folder: Path | None, *, debug: bool
) -> Iterator[Row]:
    """Rows as they come; each is on disk before the next is measured."""
    from specla.bench.kernel_report import line
    from specla.bench.kernels import Bench

    device = _cuda()
    bench = Bench(device=device, bandwidth=run.bandwidth, note=note, budget_s=budget, trace=debug)
    if folder is None:
        yield from bench.run(jobs)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in bench.run(jobs):
            file.write(line(run, row) + "\n")
            file.flush()
            yield row


def _show(run: Run, rows: Sequence[Row], *, json: bool) -> None:
    from specla.bench.kernel_metrics import metrics
    from specla.bench.kernel_report import line, metric_table, table

    found = metrics(rows)
    if json:
        for row in rows:
            print_line(line(run, row))
        for metric in found:
            print_line(line(run, metric))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    console.print(table(rows, f"{run.device}, reads {run.bandwidth / 1e12:.2f} TB/s"))
    console.print(metric_table(found))


def _write(folder: Path, run: Run, rows: Sequence[Row]) -> None:
    from specla.bench.kernel_page import write
    from specla.bench.kernel_report import line

    written = write(folder, run, rows)
    lines = "".join(line(run, row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    note(f"wrote {len(written) + 1} files to {folder}")


def _append(path: Path, run: Run, rows: Sequence[Row]) -> None:
    from specla.bench import report as csv_report
    from specla.bench.kernel_metrics import metrics
    from specla.bench.kernel_report import csv_rows

    lines = csv_rows(run, metrics(rows))
    csv_report.append(path, lines)
    note(f"appended {len(lines)} rows to {path}")


def _verdict(rows: Sequence[Row]) -> int:
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        note(f"wrong: {row.method} on {row.case}: {row.missing}")
    return INCORRECT if wrong else 0
