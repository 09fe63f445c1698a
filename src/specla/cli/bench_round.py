# SPDX-License-Identifier: Apache-2.0
"""`specla bench round`: whole rounds of a whole model on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note
from specla.cli.records import versions
from specla.cli.single import print_line
from specla.errors import ConfigError, KernelUnavailable

SHAPES = ("gdn-1.3b",)


def rounds(
    shape: Annotated[str, typer.Option(help="The model's shape: gdn-1.3b.")] = "gdn-1.3b",
    fla: Annotated[
        bool, typer.Option("--fla", help="Also time fla's own generate (needs fla 0.6).")
    ] = False,
    busy: Annotated[
        bool, typer.Option("--busy/--no-busy", help="Run 500 rounds through the engine.")
    ] = True,
    record: Annotated[
        bool, typer.Option("--record", help="Append the figures to --results.")
    ] = False,
    results: Annotated[Path, typer.Option(help="The append-only CSV of --record.")] = Path(
        "results/results.csv"
    ),
    commit: Annotated[
        str | None, typer.Option(help="Hash to record where there is no checkout to ask.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line per figure.")] = False,
    debug: opt.Debug = False,
) -> int:
    """Time one verify of every size by graph replay: the AR step against the time it takes to
    read the weights, trees against the AR step, and the host against the GPU."""
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    import torch

    if not torch.cuda.is_available():
        raise KernelUnavailable(
            "specla bench round needs a CUDA device, found none; run it on a machine with an "
            "NVIDIA GPU"
        )
    from specla.bench import report as csv_report
    from specla.bench import rounds as bench
    from specla.bench.kernel_report import Run, csv_rows, line, metric_table
    from specla.bench.random_model import gdn_1_3b

    model = gdn_1_3b()
    times, bandwidth = bench.run(
        model,
        tick=lambda t: note(f"{t.rows} rows of {t.nodes} nodes: {t.timing.us:.1f} us"),
    )
    found = bench.metrics(times, model.read_bytes, bandwidth)
    note(f"reads {bandwidth / 1e12:.3f} TB/s")
    if busy:
        found += bench.busy_metrics(model)
        note(f"{found[-2].notes}; {found[-1].notes}")
    if fla:
        step = next(t for t in times if (t.rows, t.nodes) == (1, 1))
        found += bench.fla_metrics(step.timing.us)
    found_versions = versions()
    run = Run.now(
        commit=commit or csv_report.commit(),
        device=torch.cuda.get_device_name(),
        torch=found_versions["torch"] or "",
        triton=found_versions["triton"] or "",
        command=" ".join(["specla", *sys.argv[1:]]),
        bandwidth=bandwidth,
    )
    if json:
        for metric in found:
            print_line(line(run, metric))
    else:
        console = Console(highlight=False)
        console.print(metric_table(found))
    if record:
        csv_report.append(results, csv_rows(run, found))
        note(f"appended to {results}")
    return 0
