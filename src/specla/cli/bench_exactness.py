# SPDX-License-Identifier: Apache-2.0
"""`specla bench exactness`: how far a way of decoding is from exact decoding without drafts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from specla.bench.workloads import WORKLOADS, prompts
from specla.cli import options as opt
from specla.cli.bench_round import SHAPES
from specla.cli.console import Tick, note, progress_bars
from specla.cli.failure import INCORRECT
from specla.cli.loading import load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import dumps, versions
from specla.cli.single import print_line
from specla.errors import ConfigError, KernelUnavailable
from specla.request import SamplingParams

if TYPE_CHECKING:
    from specla.bench.exactness import Comparison, Truth
    from specla.bench.kernel_metrics import Metric
    from specla.drafters.base import Drafter
    from specla.llm import LLM

RANDOM_PROMPTS = 16
TREES = "trees"
# Of the drafts that --drafter trees could get right.
P_RIGHT = 0.7
Spell = Callable[[int], str]


def exactness(
    model: opt.Model = "demo",
    shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights of this shape instead (GPU): {', '.join(SHAPES)}."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="What is compared with exact AR: exact, fast (GPU) or plain.",
            rich_help_panel=opt.ENGINE,
        ),
    ] = "exact",
    drafter: Annotated[
        str,
        typer.Option(
            help="A drafter; with --shape also 'trees' (its auto): random trees around exact AR's "
            "own tokens, as nothing else guesses random text.",
            rich_help_panel=opt.ENGINE,
        ),
    ] = "auto",
    drafter_option: opt.DrafterOption = None,
    batch: Annotated[
        int,
        typer.Option(help="Prompts decoded together; >= 1.", rich_help_panel=opt.ENGINE),
    ] = 8,
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Prompt kind; repeatable. Default: all ({', '.join(WORKLOADS)})."),
    ] = None,
    per_kind: Annotated[
        int | None,
        typer.Option(help="Only the first prompts of each kind; with --shape: how many in all."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Append the summary to --results.")
    ] = False,
    results: opt.Results = opt.RESULTS,
    commit: opt.Commit = None,
    max_tokens: opt.MaxTokens = 128,
    max_nodes: opt.MaxNodes = 16,
    kernel: opt.Kernel = "auto",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON line per prompt, then one per figure.")
    ] = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Decode the same prompts greedily in exact AR and otherwise; report where they first differ.

    Per prompt: identical, or the first output token that differs, both tokens, and the margin by
    which exact AR's logits preferred its own. Everything drafted is verified (no budget). Exit
    code 5 if --mode exact is not identical.
    """
    engine = EngineOptions(
        model=model, drafter=drafter, device=device, dtype=dtype, mode=mode, kernel=kernel,
        max_nodes=max_nodes, max_slots=batch, revision=revision, threads=threads,
        # All that is drafted is verified: these trees are what the comparison is about.
        budget="off", drafter_options=opt.drafter_options(drafter_option),
    )  # fmt: skip
    with progress_bars(wanted=not no_progress) as tick:
        if shape is not None:
            _check_shape(engine, shape, kind, per_kind)
            rows, where = _random(engine, shape, per_kind or RANDOM_PROMPTS, max_tokens)
            spell: Spell = str
        else:
            chosen = prompts(kind or (), per_kind)
            texts = [(prompt.kind, prompt.text) for prompt in chosen]
            rows, where, spell = _checkpoint(engine, texts, max_tokens, tick)
    from specla.bench.exactness import metrics

    found = metrics(rows, f"{where}, batch {batch}, {max_nodes} nodes, {_kernels(rows)}")
    _show(rows, found, spell, json=json)
    if record:
        _record(results, found, device=_device_name(engine), commit=commit)
    same = all(row.divergence is None for row in rows)
    return INCORRECT if mode == "exact" and not same else 0


def _checkpoint(
    engine: EngineOptions, texts: Sequence[tuple[str, str]], max_tokens: int, tick: Tick | None
) -> tuple[list[Comparison], str, Spell]:
    """The comparisons, what was compared, and how to write a token."""
    # First the one that may be refused.
    other = load(engine, tick)
    alone = replace(engine, drafter="none", drafter_options=None, mode="exact", kernel="auto")
    exact = load(alone, tick)
    from specla.bench.exactness import compare, exact_logits

    form = prompt_format(exact, None)
    ids = [_encode(exact, text, form) for _, text in texts]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    plain, judged = exact.generate(ids, params), other.generate(ids, params)
    config = exact.config
    logits_at = partial(
        exact_logits, exact.model,
        prefill_chunk=config.prefill_chunk, log_capacity=config.log_capacity,
    )  # fmt: skip
    kinds = [kind for kind, _ in texts]
    rows = compare(ids, kinds, plain, judged, logits_at)
    name = opt.labelled(other.config.drafter, engine.drafter_options or {})
    what = f"{engine.model}, {form} prompts, mode {other.config.mode}, {name}"
    return rows, what, lambda token: repr(exact.tokenizer.decode([token]))


def _encode(llm: LLM, text: str, form: str) -> list[int]:
    if form == "raw":
        return llm.tokenizer.encode(text)
    return llm.tokenizer.apply_chat_template(user_turn(text))


def _check_shape(
    engine: EngineOptions, shape: str, kind: Sequence[str] | None, count: int | None
) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if engine.model != "demo" or kind:
        raise ConfigError("--shape has random weights and prompts: leave MODEL and --kind out")
    if count is not None and count < 1:
        raise ConfigError(f"--per-kind must be >= 1, got {count}")
    import torch

    if engine.device == "cpu" or not torch.cuda.is_available():
        raise KernelUnavailable(
            "specla bench exactness --shape needs a CUDA device, found none; run it on a machine "
            "with an NVIDIA GPU, or compare a checkpoint (specla bench exactness demo)"
        )


def _random(
    engine: EngineOptions, shape: str, count: int, max_tokens: int
) -> tuple[list[Comparison], str]:
    from specla.bench.exactness import compare_decoding, random_prompts
    from specla.bench.random_model import gdn_1_3b
    from specla.config import CHEAPEST, EngineConfig, resolve

    config = resolve(
        EngineConfig(
            model=shape, drafter="ngram" if engine.drafter == TREES else engine.drafter,
            device=engine.device, dtype=engine.dtype, mode=engine.mode, kernel=engine.kernel,
            max_slots=engine.max_slots, max_nodes=engine.max_nodes,
        )
    )  # fmt: skip
    name = TREES if engine.drafter == "auto" and config.mode != "plain" else engine.drafter
    options = engine.drafter_options or {}
    guess = _guesser(name, options)
    target = gdn_1_3b(device=config.device, dtype=config.torch_dtype)
    rows = compare_decoding(
        target,
        random_prompts(count, target.info.vocab_size),
        lambda truth: guess(truth, target.info.vocab_size),
        mode=config.mode,
        kernel=CHEAPEST if config.kernel == "auto" else config.kernel,
        batch=config.max_slots,
        max_nodes=config.max_nodes,
        max_tokens=max_tokens,
    )
    return rows, f"random {shape}, mode {config.mode}, {opt.labelled(name, options)}"


def _guesser(name: str, options: Mapping[str, object]) -> Callable[[Truth, int], Drafter]:
    """From what exact AR said, and the number of tokens there are, to a drafter."""
    from specla import drafters
    from specla.testing import RandomTreeDrafter

    if name != TREES:
        chosen = "none" if name == "auto" else name
        drafters.checked_options(chosen, options)
        return lambda truth, vocab_size: drafters.build(chosen, options=options)
    if options:
        raise ConfigError(f"--drafter {TREES} has no options, got {', '.join(options)}")
    return lambda truth, vocab_size: RandomTreeDrafter(
        0, vocab_size, max_depth=12, max_children=4, truth=truth, p_right=P_RIGHT
    )


def _kernels(rows: Sequence[Comparison]) -> str:
    """Rounds by kernel, and what the drafts brought."""
    rounds = sum((Counter(row.kernels) for row in rows), Counter())
    counts = ", ".join(f"{name} {count}" for name, count in rounds.most_common())
    return f"rounds by kernel: {counts}; accepted drafts {sum(row.accepted for row in rows)}"


def _show(
    rows: Sequence[Comparison], found: Sequence[Metric], spell: Spell, *, json: bool
) -> None:
    if json:
        for row in rows:
            same = {"record": "prompt", "identical": row.divergence is None}
            print_line(dumps(same | asdict(row)))
        for metric in found:
            print_line(dumps({"record": "metric"} | asdict(metric)))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("prompt", "kind", "tokens", "first difference", "exact AR", "got", "margin"):
        table.add_column(name, justify="right" if name in ("prompt", "margin") else "left")
    for row in rows:
        table.add_row(str(row.prompt), row.kind, str(row.num_tokens), *_cells(row, spell))
    Console(highlight=False).print(table)
    for metric in found:
        print_line(f"{metric.name}: {metric.value:.4g} {metric.unit}")
    print_line(found[0].notes)


def _cells(row: Comparison, spell: Spell) -> list[str]:
    one = row.divergence
    if one is None:
        return ["identical", "", "", ""]
    return [f"token {one.index}", spell(one.expected), spell(one.got), f"{one.margin:.4g}"]


def _device_name(engine: EngineOptions) -> str:
    import torch

    on_gpu = engine.device != "cpu" and torch.cuda.is_available()
    return str(torch.cuda.get_device_name()) if on_gpu else "cpu"


def _record(path: Path, found: Sequence[Metric], *, device: str, commit: str | None) -> None:
    from specla.bench import report
    from specla.bench.exactness import csv_rows

    lines = csv_rows(
        found,
        commit=commit,
        device=device,
        versions=versions(),
        command=" ".join(["specla", *sys.argv[1:]]),
    )
    report.append(path, lines)
    note(f"appended to {path}")
