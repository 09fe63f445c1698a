# SPDX-License-Identifier: Apache-2.0
"""`specla bench round`: whole rounds of a whole model on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note
from specla.cli.records import versions
from specla.cli.single import print_line
from specla.errors import ConfigError, KernelUnavailable

if TYPE_CHECKING:
    from specla.bench.kernel_metrics import Metric
    from specla.bench.kernel_report import Record, Run
    from specla.bench.kernel_rows import RoundTime

SHAPES = ("gdn-1.3b",)


def rounds(
    shape: Annotated[str | None, typer.Option(help="The model's shape: gdn-1.3b.")] = None,
    fla: Annotated[
        bool, typer.Option("--fla", help="Also time fla's own generate (needs fla 0.6).")
    ] = False,
    busy: Annotated[
        bool | None,
        typer.Option(
            "--busy/--no-busy", help="Run 500 rounds through the engine. Default: --busy."
        ),
    ] = None,
    logs: Annotated[
        bool,
        typer.Option("--logs", help="Also rounds by how many factors a log holds."),
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Append the figures to --results.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Folder for rows.jsonl, the page and its plot. With --record rounds beside "
            "--results."
        ),
    ] = None,
    source: opt.Source = None,
    commit: opt.Commit = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON line per size and figure.")
    ] = False,
    debug: opt.Debug = False,
) -> int:
    """Time one verify of every size by graph replay: the AR step against the time it takes to
    read the weights, trees against the AR step, and the host against the GPU."""
    folder = report or (results.parent / "rounds" if record else None)
    if source is not None:
        opt.require_none(shape=shape, fla=fla or None, busy=busy, logs=logs or None, commit=commit)
        from specla.bench.kernel_report import read_rounds

        run, times, found = read_rounds(source)
    else:
        _check(shape)
        run, times, found = _measured(
            fla=fla, busy=busy is not False, logs=logs, commit=commit, folder=folder
        )
    _show(run, times, found, json=json)
    if folder is not None:
        _write(folder, run, times, found)
    if record:
        _append(results, run, found)
    return 0


def _check(shape: str | None) -> None:
    """Refuse what cannot be measured here."""
    if shape not in (None, *SHAPES):
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    import torch

    if not torch.cuda.is_available():
        raise KernelUnavailable(
            "specla bench round needs a CUDA device, found none; run it on a machine with an "
            "NVIDIA GPU, or give --from rows.jsonl to show an earlier run"
        )


def _measured(
    *, fla: bool, busy: bool, logs: bool, commit: str | None, folder: Path | None
) -> tuple[Run, list[RoundTime], list[Metric]]:
    """All sizes and figures; each is on disk before the next is measured."""
    from specla.bench import graphs
    from specla.bench import rounds as bench
    from specla.bench.random_model import gdn_1_3b

    model = gdn_1_3b()
    run = _run(commit, graphs.read_bandwidth(model.device))
    note(f"reads {run.bandwidth / 1e12:.3f} TB/s")
    with _kept(folder, run) as keep:

        def tick(time: RoundTime) -> None:
            keep(time)
            note(f"{time.rows} rows of {time.nodes} nodes: {time.us:.1f} us")

        found: list[Metric] = []

        def add(more: list[Metric]) -> None:
            found.extend(more)
            for metric in more:
                keep(metric)

        times = bench.run(model, tick=tick)
        add(bench.metrics(times, model.read_bytes, run.bandwidth))
        if busy:
            add(bench.busy_metrics(model))
            note(f"{found[-2].notes}; {found[-1].notes}")
        if logs:
            for metric in bench.log_metrics(model):
                add([metric])
                note(f"{metric.name}: {metric.value:.1f}")
        if fla:
            step = next(t for t in times if (t.rows, t.nodes) == (1, 1))
            add(bench.fla_metrics(step.us))
    return run, times, found


def _run(commit: str | None, bandwidth: float) -> Run:
    import torch

    from specla.bench import report
    from specla.bench.kernel_report import Run

    found = versions()
    return Run.now(
        commit=commit or report.commit(),
        device=torch.cuda.get_device_name(),
        torch=found["torch"] or "",
        triton=found["triton"] or "",
        command=" ".join(["specla", *sys.argv[1:]]),
        bandwidth=bandwidth,
    )


@contextmanager
def _kept(folder: Path | None, run: Run) -> Iterator[Callable[[Record], None]]:
    """What writes a record to the folder's rows.jsonl, if there is to be one."""
    from specla.bench.kernel_report import line

    if folder is None:
        yield lambda record: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:

        def keep(record: Record) -> None:
            file.write(line(run, record) + "\n")
            file.flush()

        yield keep


def _lines(run: Run, times: Sequence[RoundTime], found: Sequence[Metric]) -> list[str]:
    from specla.bench.kernel_report import line

    return [*(line(run, time) for time in times), *(line(run, metric) for metric in found)]


def _show(run: Run, times: Sequence[RoundTime], found: Sequence[Metric], *, json: bool) -> None:
    from specla.bench import round_page as page
    from specla.bench.kernel_report import metric_table

    if json:
        for text in _lines(run, times, found):
            print_line(text)
        return
    console = Console(highlight=False)
    console.print(page.render(times, f"{run.device}, reads {run.bandwidth / 1e12:.2f} TB/s"))
    console.print(metric_table(found))


def _write(folder: Path, run: Run, times: Sequence[RoundTime], found: Sequence[Metric]) -> None:
    from specla.bench import round_page as page

    written = page.write(folder, run, times, found)
    lines = "".join(text + "\n" for text in _lines(run, times, found))
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    note(f"wrote {len(written) + 1} files to {folder}")


def _append(path: Path, run: Run, found: Sequence[Metric]) -> None:
    from specla.bench import report
    from specla.bench.kernel_report import csv_rows

    lines = csv_rows(run, found)
    report.append(path, lines)
    note(f"appended {len(lines)} rows to {path}")
