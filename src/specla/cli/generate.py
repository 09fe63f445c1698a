# SPDX-License-Identifier: Apache-2.0
"""`specla generate`: one prompt, a file of prompts, or a comparison."""

from __future__ import annotations

from typing import Annotated

import typer

from specla.cli import options as opt
from specla.cli.batch import run_batch
from specla.cli.compare import run_compare
from specla.cli.options import EngineOptions
from specla.cli.single import run_single
from specla.errors import ConfigError
from specla.request import SamplingParams


def generate(
    model: opt.Model = "demo",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help='JSON lines in ({"prompt": ...} or {"messages": [...]}, optional "id" and '
            "\"params\"), JSON lines out, in order; '-' reads standard input."
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask through the model's chat template, or continue the text as it stands. "
            "Default: --chat for every model that has a chat template.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run plain AR, exact AR and speculative decoding on the same prompt; print the "
            "three speeds and whether the last two are identical (exit code 5 if not).",
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option(help="Runs per method with --compare; the median counts.")
    ] = 3,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = None,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Report log-probabilities and this many alternatives (0 to 20) with --json.",
            rich_help_panel=opt.SAMPLING,
        ),
    ] = None,
    drafter: opt.Drafter = "auto",
    drafter_option: opt.DrafterOption = None,
    mode: Annotated[
        str,
        typer.Option(
            help="exact; fast (GPU: trees in batch on tensor cores, inexact); or plain (with "
            "--drafter none: fastest plain decoding, inexact).",
            rich_help_panel=opt.ENGINE,
        ),
    ] = "exact",
    max_nodes: opt.MaxNodes = 16,
    max_slots: opt.MaxSlots = 8,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    kernel: opt.Kernel = "auto",
    costs: opt.Costs = "auto",
    budget: opt.Budget = "auto",
    json: opt.Json = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Continue or answer a prompt. Text goes to stdout, everything else to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    engine = EngineOptions(
        model=model,
        drafter=drafter,
        drafter_options=opt.drafter_options(drafter_option),
        device=device,
        dtype=dtype,
        mode=mode,
        max_nodes=max_nodes,
        max_slots=max_slots,
        revision=revision,
        threads=threads,
        kernel=kernel,
        costs=costs,
        budget=budget,
    )
    _check_combination(prompt, prompts, compare=compare, mode=mode, json=json, logprobs=logprobs)
    bars = not no_progress
    if compare:
        return run_compare(
            engine, prompt, params, chat=chat, repeats=repeats, json=json, bars=bars
        )
    if prompts is not None:
        return run_batch(engine, prompts, params, chat=chat, bars=bars)
    return run_single(engine, prompt, params, chat=chat, json=json, bars=bars)


def _check_combination(
    prompt: str | None,
    prompts: str | None,
    *,
    compare: bool,
    mode: str,
    json: bool,
    logprobs: int | None,
) -> None:
    """A flag that would have no effect is an error, not a surprise."""
    if prompts is not None and prompt is not None:
        raise ConfigError("one source of prompts must be given, got both -p and --prompts")
    if prompts is not None and compare:
        raise ConfigError("--compare needs one prompt (-p), got --prompts; see 'specla bench'")
    if compare and mode != "exact":
        raise ConfigError(
            f"--compare checks mode exact against plain decoding, got --mode {mode}; leave one out"
        )
    if logprobs is not None and not (json or prompts is not None):
        raise ConfigError("--logprobs needs --json or --prompts: plain text cannot show them")
