# SPDX-License-Identifier: Apache-2.0
"""`specla bench headline`: a target, its drafters, and what they are worth, in one command."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.headline_progress import DRAFTERS, MEASURE, STEPS, TARGET, Plan
from specla.cli.headline_steps import SIZES, run_steps
from specla.cli.records import dumps
from specla.cli.single import print_line
from specla.errors import ConfigError

LOG_WIDTH = 140
TIME = "Time"


def headline(
    data: Annotated[
        Path, typer.Option(help="GSM8K, gsm_symbolic, Python, HumanEval and the mixed suite.")
    ] = Path("data"),
    work: Annotated[
        Path, typer.Option(help="Everything goes there; the same folder again: it goes on.")
    ] = Path("build/headline"),
    steps: Annotated[
        str, typer.Option(help=f"Which, of {','.join(STEPS)}; those done before are not repeated.")
    ] = ",".join(STEPS),
    size: Annotated[
        str, typer.Option(help="gdn-1.3b (a GPU of 140 GiB), or toy, to try the command.")
    ] = "gdn-1.3b",
    also: Annotated[
        list[str] | None,
        typer.Option(help="Train this drafter too, for a study: eagle-attention; repeatable."),
    ] = None,
    target_minutes: Annotated[float, typer.Option(rich_help_panel=TIME)] = 9.0,
    drafter_minutes: Annotated[float, typer.Option(rich_help_panel=TIME)] = 9.0,
    measure_minutes: Annotated[float, typer.Option(rich_help_panel=TIME)] = 6.0,
    full: Annotated[
        bool, typer.Option("--full", help="Every prompt of every suite, however long it takes.")
    ] = False,
    prompts: Annotated[int, typer.Option(help="Of each suite, drawn with a seed.")] = 48,
    batch: Annotated[int, typer.Option(help="Prompts decoded together for e2e_gsm8k_b64.")] = 64,
    max_tokens: opt.MaxTokens = 256,
    record: Annotated[
        bool, typer.Option("--record", help="Append to --results and write the page beside it.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    commit: opt.Commit = None,
    device: opt.Device = "auto",
    json: opt.Json = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Train a target of GDN-1.3B's shape and its drafters, and measure what they are worth.

    Three steps, each within its minutes and resumable: the learning rates follow the clock. AR
    and every method answer the same held-out prompts in turns, exact mode, batch 1. Exit code 5
    if a method's answer is not AR's.
    """
    import torch

    from specla.config import EngineConfig, resolve

    wanted = _steps(steps)
    if size not in SIZES:
        raise ConfigError(f"--size must be one of {', '.join(SIZES)}, got {size!r}")
    for name, value in (("--prompts", prompts), ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")
    minutes = dict(zip(STEPS, (target_minutes, drafter_minutes, measure_minutes), strict=True))
    if min(minutes.values()) <= 0:
        raise ConfigError(f"minutes must be > 0, got {minutes}")
    if full:
        minutes[MEASURE] = float("inf")
    plan = Plan(
        data=data, work=work, size=size, minutes=minutes, prompts=None if full else prompts,
        batch=batch, max_tokens=max_tokens,
        device=resolve(EngineConfig(drafter="none", device=device)).device,
        also=tuple(also or ()),
    )  # fmt: skip
    if size == SIZES[0] and plan.device == "cpu":
        raise ConfigError(
            f"--size {size} needs a GPU, and this is {torch.get_num_threads()} CPU threads; use "
            "--size toy to try the command"
        )
    with progress_bars(wanted=not no_progress) as tick:
        done = run_steps(plan, wanted, tick).steps
    if MEASURE not in done:
        return 0
    _show(done, plan, json=json)
    if record:
        _record(done, plan, results, commit)
    return _verdict(done[MEASURE])


def _steps(text: str) -> list[str]:
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for step in wanted:
        if step not in STEPS:
            raise ConfigError(f"--steps must be some of {', '.join(STEPS)}, got {step!r}")
    return wanted


def _show(done: dict[str, dict[str, Any]], plan: Plan, *, json: bool) -> None:
    from specla.bench import headline_page as page
    from specla.bench.kernel_report import metric_table

    if json:
        print_line(dumps(done))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_WIDTH)
    scores, batches, found = page.read(done[MEASURE])
    console.print(page.render(scores, done[MEASURE]["run"]["device"]))
    console.print(page.render_batches(batches))
    console.print(metric_table([m for m in found if not m.name.startswith("headline/")]))
    for name, why in done[MEASURE]["missing"].items():
        note(f"missing: {name}: {why}")


def _record(
    done: dict[str, dict[str, Any]], plan: Plan, results: Path, commit: str | None
) -> None:
    from specla.bench import headline_page as page
    from specla.bench import report

    scores, batches, found = page.read(done[MEASURE])
    run = done[MEASURE]["run"]
    head = {
        "date": run["date"],
        "commit": commit or run["commit"],
        "device": run["device"],
        "torch": run["versions"].get("torch") or "",
        "triton": run["versions"].get("triton") or "",
        "command": run["command"],
    }
    report.append(results, page.csv_rows(found, head))
    target = results.parent / "headline" / "README.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    facts = head | {"the budget's prices": run["prices"]} | _facts(done)
    text = page.page(scores, batches, found, done[MEASURE]["missing"], facts)
    target.write_text(text, encoding="utf-8")
    answers = target.with_name("texts.jsonl.xz")
    answers.write_bytes(lzma.compress((plan.work / "texts.jsonl").read_bytes()))
    note(f"appended to {results}; {target}; {answers}")


def _facts(done: dict[str, dict[str, Any]]) -> dict[str, object]:
    """What is said about the target and the drafters."""
    target = done[TARGET]
    facts: dict[str, object] = {
        "target": f"{target['parameters']:,} parameters, {target['tokens']:,} tokens in "
        f"{target['seconds']:.0f} s ({target['tokens_per_s']:,.0f} tokens/s), loss "
        f"{target['loss']:.3f}",
    }
    facts |= {f"held out, {name}": f"{x:.3f} nats/token" for name, x in target["held_out"].items()}
    for one in done[DRAFTERS]["entries"]:
        trained = (
            f"{one['steps']} steps in {one['seconds']:.0f} s, held-out chain tau {one['tau']}"
        )
        facts[f"drafter {one['name']}"] = trained if one["missing"] is None else one["missing"]
    return facts | {f"{name}, seconds": step["wall_s"] for name, step in done.items()}


def _verdict(measured: dict[str, Any]) -> int:
    from specla.bench.fla_sd import NAME, PLAIN
    from specla.cli.failure import INCORRECT

    failed = [s for s in measured["scores"] if s["failed"]]
    # fla's kernels round in their own way, and promise no bits.
    ours = [s for s in measured["scores"] if s["method"] not in (NAME, PLAIN)]
    changed = [s for s in ours if s["same"] < s["prompts"] - s["failed"]]
    for name in measured["unanswered"]:
        note(f"failed: {name}: {measured['missing'][name]}")
    for one in failed:
        note(f"failed: {one['method']} on {one['suite']}: {one['failed']} of {one['prompts']}")
    for one in changed:
        note(f"not identical: {one['method']} on {one['suite']}: {one['same']}")
    batches = [b for b in measured["batches"] if b["same"] < b["size"]]
    for one in batches:
        note(f"not identical: {one['method']}, batch of {one['size']}: {one['same']}")
    return INCORRECT if changed or batches else 1 if failed or measured["unanswered"] else 0
