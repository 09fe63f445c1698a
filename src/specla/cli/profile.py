# SPDX-License-Identifier: Apache-2.0
"""`specla profile`: measure what rounds cost here, for the engine to choose by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.loading import RANDOM, load_target
from specla.cli.records import dumps
from specla.cli.single import print_line
from specla.errors import ConfigError

if TYPE_CHECKING:
    from specla.bench.profile import Profile
    from specla.config import ResolvedConfig
    from specla.drafters.base import Drafter
    from specla.engine.cost import CostTable
    from specla.models.base import TargetModel

MODES = ("exact", "fast")
# Console width where stdout is no terminal: the table must not be cut in a log.
LOG_WIDTH = 110


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help=f"'demo', a directory, a hub id, or {RANDOM}gdn-1.3b: that shape, random weights."
        ),
    ] = "demo",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Also time this drafter; rounds then include it.", rich_help_panel=opt.ENGINE
        ),
    ] = None,
    drafter_option: opt.DrafterOption = None,
    mode: Annotated[
        str,
        typer.Option(help="exact, or fast (GPU): its kernels too.", rich_help_panel=opt.ENGINE),
    ] = "exact",
    max_nodes: opt.MaxNodes = 16,
    max_batch: Annotated[
        int, typer.Option(help="Most sequences decoded together.", rich_help_panel=opt.ENGINE)
    ] = 8,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to keep it; default: the cache folder."),
    ] = None,
    json: opt.Json = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Measure rounds by rows and nodes, and keep the costs for this model on this device.

    Later runs of the same model, device and versions choose their kernels by it. Prints each
    round in steps of plain decoding, and how often drafts must be right for it to pay.
    """
    if mode not in MODES:
        raise ConfigError(f"--mode must be one of {', '.join(MODES)}, got {mode!r}")
    from specla.config import EngineConfig, resolve

    config = resolve(
        EngineConfig(
            model=model, revision=revision, drafter=drafter or "auto", device=device, dtype=dtype,
            mode=mode, max_nodes=max_nodes, max_slots=max_batch, threads=threads,
        )
    )  # fmt: skip
    guesser = _drafter(drafter, opt.drafter_options(drafter_option), config)
    with progress_bars(wanted=not no_progress) as tick:
        target = load_target(config, tick)
        path, older = _place(output, target, config.log_capacity)
        measuring = (lambda done, total: tick("measuring", done, total)) if tick else None
        measured = _measure(config, target, guesser, measuring)
        table = measured.table().replacing(older)
    table.save(path)
    _print(table, config, measured.drafter, path, json=json)
    return 0


def _drafter(
    name: str | None, options: Mapping[str, object], config: ResolvedConfig
) -> Drafter | None:
    from specla import drafters
    from specla.models.resolve import resolve as resolve_model

    if name == "none":
        raise ConfigError("--drafter must be one that drafts, got none; leave it out")
    if name is None and options:
        raise ConfigError(
            f"--drafter-option must come with --drafter, got {', '.join(options)} alone; add it"
        )
    if name in drafters.TRAINED and not config.model.startswith(RANDOM):
        folder = resolve_model(config.model, revision=config.revision)
        name = drafters.with_folder(name, folder)
    return None if name is None else drafters.build(name, options=options)


def _place(
    output: Path | None, target: TargetModel, log_capacity: int
) -> tuple[Path, CostTable | None]:
    """Where the table goes, and what was there: known before minutes are spent on measuring.

    Raises:
        ConfigError: the file there is something else.
    """
    from specla.engine.cost import CostTable, Identity

    identity = Identity.of(target, log_capacity)
    path = output or identity.path
    if not path.exists():
        return path, None
    try:
        return path, CostTable.load(path, identity)
    except ConfigError as error:
        if output is not None:
            raise ConfigError(f"--output must not replace what is not its own: {error}") from error
        note(f"measuring anew: {error}")
        return path, None


def _measure(
    config: ResolvedConfig, target: TargetModel, drafter: Drafter | None, progress: object
) -> Profile:
    from specla.bench.profile import Profile

    measuring = Profile(
        target, mode=config.mode, max_batch=config.max_slots, max_nodes=config.max_nodes,
        log_capacity=config.log_capacity, drafter=drafter,
    )  # fmt: skip
    for done in measuring.run():
        if callable(progress):
            progress(done, len(measuring))
    return measuring


def _print(
    table: CostTable, config: ResolvedConfig, drafter: Drafter | None, path: Path, *, json: bool
) -> None:
    from specla.bench import profile_page as page

    name = drafter.info.name if drafter else None
    found = page.rounds(table, config.mode, drafter.info.priced_as if drafter else None)
    if json:
        record = {
            "path": str(path),
            "identity": asdict(table.identity),
            "mode": config.mode,
            "drafter": name,
            "rounds": [asdict(one) | {"shape": one.shape} for one in found],
            "costs": [asdict(cost) for cost in table.costs],
        }
        print_line(dumps(record))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    with_drafter = f", drafter {name}" if name else ""
    title = f"{config.model} on {table.identity.device}, mode {config.mode}{with_drafter}"
    console.print(page.render(found, title))
    if lost := page.hopeless(found):
        print_line(lost)
    note(f"kept in {path}")
