# SPDX-License-Identifier: Apache-2.0
"""`specla train`: a drafter for a target, from prompts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specla.cli import options as opt
from specla.cli.console import note, progress_bars
from specla.cli.loading import load, prompt_format
from specla.cli.options import EngineOptions
from specla.cli.prompts import BadLine, Job, open_lines, read_jobs
from specla.errors import ConfigError
from specla.request import SamplingParams

if TYPE_CHECKING:
    import torch

    from specla.llm import LLM
    from specla.train.run import Prompt

KINDS = ("eagle",)
TRAINING = "Training"
# Every so many answers one is kept for the figures, where no held-out prompts are given.
HOLD_OUT = 50


def train(
    model: opt.Model,
    prompts: Annotated[
        str, typer.Option(help="JSON lines: a prompt or messages each, as for generate.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; again: it goes on there.")],
    kind: Annotated[str, typer.Option(help=f"Which drafter: {', '.join(KINDS)}.")] = "eagle",
    held_out: Annotated[
        str | None,
        typer.Option(help="Prompts for the figures; default: every 50th of --prompts."),
    ] = None,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.0,
    steps: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="In all.")] = 1000,
    minutes: Annotated[
        float, typer.Option(rich_help_panel=TRAINING, help="Most of this run's training time.")
    ] = 1e9,
    rows: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Per step.")] = 4,
    length: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Tokens a row.")] = 512,
    unroll: Annotated[
        int, typer.Option(rich_help_panel=TRAINING, help="Steps of the training-time test.")
    ] = 5,
    lr: Annotated[float, typer.Option(rich_help_panel=TRAINING, help="Peak rate.")] = 1e-4,
    warmup: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Steps.")] = 40,
    every: Annotated[
        int, typer.Option(rich_help_panel=TRAINING, help="Steps between figures.")
    ] = 100,
    layers: Annotated[
        str | None, typer.Option(help="Feature layers (outputs), such as 1,11,20.")
    ] = None,
    mixer: Annotated[str, typer.Option(help="gdn, or attention as in EAGLE-3.")] = "gdn",
    hidden_size: Annotated[int | None, typer.Option(help="Default: the target's.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Default: 8/3 of it.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: the target's.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Default: the target's.")] = None,
    head_v_dim: Annotated[int | None, typer.Option(help="Default: the target's.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that can be drafted; default: all.")
    ] = None,
    max_slots: opt.MaxSlots = 64,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Train a drafter on a target's own answers: OUT/checkpoint is for --drafter eagle:FOLDER.

    The target answers the prompts first. A conversation that ends with an assistant's turn brings
    its answer, which is used as far as the target agrees with it.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    engine = EngineOptions(
        model=model,
        drafter="none",
        max_slots=max_slots,
        device=device,
        dtype=dtype,
        revision=revision,
        threads=threads,
    )
    out.mkdir(parents=True, exist_ok=True)
    with progress_bars(wanted=not no_progress) as tick:
        llm = load(engine, tick)
        from specla.train.capture import Capture
        from specla.train.loop import Recipe
        from specla.train.run import KEEP_BYTES, Run, Sizes, config_for, texts_of

        sizes = Sizes(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=heads,
            head_dim=head_dim,
            head_v_dim=head_v_dim,
            mixer=mixer,
            draft_vocab_size=draft_vocab,
            target_layer_ids=_layer_ids(layers),
        )
        config = config_for(llm.model, sizes, llm.tokenizer.digest)
        capture = Capture(llm.model, config.target_layer_ids, keep_bytes=KEEP_BYTES)
        asked = _prompts(llm, prompts, params)
        texts = texts_of(llm.engine, capture, asked, params, out / "answers.jsonl", tick)
        if held_out is None:
            held, texts = texts[::HOLD_OUT], [t for i, t in enumerate(texts) if i % HOLD_OUT]
        else:
            again = _prompts(llm, held_out, params)
            held = texts_of(llm.engine, capture, again, params, out / "held-out.jsonl", tick)
        recipe = Recipe(rows=rows, length=length, unroll=unroll, steps=steps, lr=lr, warmup=warmup)
        run = Run(
            out,
            llm.model,
            capture,
            config,
            texts,
            held,
            recipe,
            compute=_compute(llm.config.device),
        )
        note(f"{'going on at' if run.resumed else 'starting at'} step {run.trainer.step}")
        found = run(every=every, minutes=minutes, tick=tick, note=note)
    note(f"tau {found.tau:.3f} on held-out texts; {out / 'checkpoint'}")
    return 0


def _compute(device: str) -> torch.dtype:
    import torch

    return torch.float32 if device == "cpu" else torch.bfloat16


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--layers must be numbers such as 1,11,20, got {text!r}") from None


def _prompts(llm: LLM, path: str, params: SamplingParams) -> list[Prompt]:
    """The file's prompts as token ids.

    Raises:
        ConfigError: a line that cannot be used; the first is named.
    """
    with closing(open_lines(path)) as lines:
        jobs = list(read_jobs(lines, params))
    return [_prompt(llm, job, path) for job in jobs]


def _prompt(llm: LLM, job: Job | BadLine, path: str) -> Prompt:
    from specla.train.run import Prompt

    if isinstance(job, BadLine):
        raise ConfigError(f"{path}, line {job.line}: {job.error}")
    if job.messages is None and prompt_format(llm, None) == "raw":
        return Prompt(tokens=tuple(llm.tokenizer.encode(job.prompt or "")), known=None)
    turns = list(job.messages or ({"role": "user", "content": job.prompt or ""},))
    if turns[-1]["role"] != "assistant":
        return Prompt(tokens=tuple(llm.tokenizer.apply_chat_template(turns)), known=None)
    asked = tuple(llm.tokenizer.apply_chat_template(turns[:-1]))
    whole = tuple(llm.tokenizer.apply_chat_template(turns, add_generation_prompt=False))
    if whole[: len(asked)] != asked:
        raise ConfigError(
            f"{path}, line {job.line}: an answer must be written as the chat template lets the "
            "model begin one; leave it out"
        )
    return Prompt(tokens=asked, known=whole[len(asked) :])
