# SPDX-License-Identifier: Apache-2.0
"""`specla generate --compare`: is it faster, and is it the same?

Plain AR is the fastest decoding without drafts and promises no bits; exact AR and speculative
decoding must agree token for token. The comparison is the result, so it goes to stdout.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from specla.bench.loops import has_loop
from specla.bench.measure import Method, Prompt, Sample, interleave
from specla.bench.table import EXACT, PLAIN, Row, rows
from specla.cli.console import note, progress_bars
from specla.cli.failure import INCORRECT
from specla.cli.loading import load, prompt_format, runner
from specla.cli.options import EngineOptions
from specla.cli.prompts import read_prompt
from specla.cli.records import completion_record, dumps, run_record
from specla.cli.single import print_line
from specla.errors import ConfigError, SpeclaError
from specla.request import Completion, SamplingParams


def run_compare(
    engine: EngineOptions,
    prompt: str | None,
    params: SamplingParams,
    *,
    chat: bool | None,
    repeats: int,
    json: bool,
    bars: bool,
) -> int:
    """Print the text, the three speeds and the verdict; exit code 5 if not identical."""
    if repeats < 1:
        raise ConfigError(f"--repeats must be >= 1, got {repeats}")
    text = read_prompt(prompt)
    if params.seed is None:
        params = replace(params, seed=0)
    alone = replace(engine, drafter="none", drafter_options=None, budget="auto")
    with progress_bars(wanted=bars) as tick:
        engines = {
            PLAIN: load(replace(alone, mode="plain", costs="none"), tick),
            EXACT: load(replace(alone, mode="exact"), tick),
            "speculative": load(replace(engine, mode="exact"), tick),
        }
        form = prompt_format(engines[EXACT], chat)
        methods = [Method(name=k, run=runner(v, form)) for k, v in engines.items()]
        count = (lambda done, total: tick("comparing", done, total)) if tick else None
        prompts = [Prompt(kind="prompt", text=text)]
        samples = interleave(methods, prompts, params, repeats=repeats, tick=count)
    spec, table = _last(samples), rows(samples)
    identical = table[-1].identical
    if json:
        run = run_record(engines["speculative"], engine.model)
        print_line(dumps(completion_record(spec, form) | run | _record(table, repeats)))
    else:
        print_line(spec.text)
        _print_table(table, spec)
    return 0 if identical else INCORRECT


def _last(samples: list[Sample]) -> Completion:
    """The speculative completion; a method that failed ends the comparison."""
    for sample in samples:
        if sample.completion is None:
            raise SpeclaError(f"{sample.method} must finish to be compared: {sample.error}")
    completion = samples[-1].completion
    assert completion is not None
    return completion


def _record(table: list[Row], repeats: int) -> dict[str, object]:
    methods = [{k: v for k, v in asdict(row).items() if k != "kind"} for row in table]
    return {"identical": table[-1].identical, "comparison": methods, "repeats": repeats}


def _print_table(table: list[Row], spec: Completion) -> None:
    grid = Table(box=None, pad_edge=False)
    for name in ("", "tokens/s", "vs plain", "vs exact", "tokens/round", "acceptance"):
        grid.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in table:
        name = f"speculative ({spec.speculation.drafter})" if row is table[-1] else row.method
        grid.add_row(
            name,
            f"{row.tokens_per_s:.1f}",
            f"{row.vs_plain:.2f}x" if row.vs_plain else "-",
            f"{row.vs_exact:.2f}x" if row.vs_exact else "-",
            f"{row.tokens_per_round:.2f}",
            f"{row.acceptance:.0%}" if row.acceptance is not None else "-",
        )
    print_line("")
    Console(highlight=False).print(grid)
    if has_loop(spec.token_ids):
        note("note: the text loops, which makes drafting look better than it is")
    if spec.speculation.fallback:
        note(f"note: {spec.speculation.fallback}")
    print_line(f"identical: {'yes' if table[-1].identical else 'NO'}")
