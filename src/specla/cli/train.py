# SPDX-License-Identifier: Apache-2.0
"""`specla train`: a drafter for a target, from prompts."""

from __future__ import annotations

from collections.abc import Mapping
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
    from specla.llm import LLM
    from specla.train.run import Prompt

KINDS = ("eagle", "block", "reader")
TRAINING, EAGLE, BLOCK, READER = "Training", "Eagle", "Block, and reader", "Reader"


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
    rows: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Per step and process.")] = 4,
    length: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Tokens a row.")] = 512,
    lr: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=TRAINING,
            help="Peak rate; default: eagle 2e-3, block 6e-4, reader 1e-4.",
        ),
    ] = None,
    muon_lr: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=TRAINING,
            help="Peak rate of Muon, on matrices; 0: AdamW has them; default: eagle 0.02.",
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(rich_help_panel=TRAINING, help="Steps.")] = 40,
    every: Annotated[
        int, typer.Option(rich_help_panel=TRAINING, help="Steps between figures.")
    ] = 100,
    layers: Annotated[
        str | None, typer.Option(help="Feature layers (outputs), such as 1,11,20.")
    ] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Default: 8/3 of width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Default: as the target's.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Default: as the target's; 64.")] = None,
    unroll: Annotated[
        int | None, typer.Option(rich_help_panel=EAGLE, help="Steps ahead; default: 5.")
    ] = None,
    mixer: Annotated[
        str | None,
        typer.Option(rich_help_panel=EAGLE, help="gdn (default), or attention as in EAGLE-3."),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(rich_help_panel=EAGLE, help="Default: the target's.")
    ] = None,
    head_v_dim: Annotated[
        int | None, typer.Option(rich_help_panel=EAGLE, help="Default: the target's.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(rich_help_panel=EAGLE, help="Tokens that can be drafted; default: all."),
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(rich_help_panel=BLOCK, help="Default: 2.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(rich_help_panel=BLOCK, help="Drafts of a block; default: 7.")
    ] = None,
    markov_rank: Annotated[
        int | None, typer.Option(rich_help_panel=BLOCK, help="0: no Markov head.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(rich_help_panel=BLOCK, help="Tokens seen; default: all.")
    ] = None,
    anchors: Annotated[
        int | None, typer.Option(rich_help_panel=BLOCK, help="Per step and process; default: 128.")
    ] = None,
    reader_loss: Annotated[
        bool, typer.Option(rich_help_panel=BLOCK, help="A reader's loss, to compare with one.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(rich_help_panel=TRAINING, help="Folder of a drafter to start from."),
    ] = None,
    state_layers: Annotated[
        str | None, typer.Option(rich_help_panel=READER, help="Whose states, such as 11,23.")
    ] = None,
    rank: Annotated[int | None, typer.Option(rich_help_panel=READER, help="Default: 8.")] = None,
    joint: Annotated[
        bool, typer.Option(rich_help_panel=READER, help="Train the drafter with its reader.")
    ] = False,
    max_slots: opt.MaxSlots = 64,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads; default: all cores, but answers as generate has them.",
            rich_help_panel=opt.ENGINE,
        ),
    ] = None,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Train a drafter on a target's own answers: OUT/checkpoint is for --drafter KIND:FOLDER.

    The target answers the prompts first. A conversation that ends with an assistant's turn brings
    its answer, which is used as far as the target agrees with it. A reader is one of a block
    drafter: first alone, then again with --joint. Several processes, started by accelerate
    launch, share the work.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if every < 1:
        raise ConfigError(f"--every must be above 0, got {every}")
    # Not <= 0: NaN is refused too.
    if not minutes > 0:
        raise ConfigError(f"--minutes must be above 0, got {minutes:g}")
    _check_readable_by_all(prompts, held_out)
    schedule = {
        "rows": rows,
        "length": length,
        "steps": steps,
        "lr": lr,
        "muon_lr": muon_lr,
        "warmup": warmup,
    }
    own = {
        "intermediate_size": intermediate_size,
        "num_heads": heads,
        "head_dim": head_dim,
        "target_layer_ids": _layer_ids("--layers", layers),
        "unroll": unroll,
        "mixer": mixer,
        "hidden_size": hidden_size,
        "head_v_dim": head_v_dim,
        "draft_vocab_size": draft_vocab,
        "draft_layers": draft_layers,
        "block_size": block_size,
        "markov_rank": markov_rank,
        "window": window,
        "anchors": anchors,
        "reader_loss": reader_loss or None,
        "start": start,
        "state_layers": _layer_ids("--state-layers", state_layers),
        "rank": rank,
        "joint": joint or None,
    }
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
    jobs = _jobs(prompts, params)
    held_jobs = None if held_out is None else _jobs(held_out, params)
    _make(out)
    import torch

    from specla.train.team import joined

    # Before the model's size decides how many decode.
    cores = torch.get_num_threads()
    with joined(device) as team, progress_bars(wanted=not no_progress and team.main) as tick:
        llm = load(engine, tick)
        from specla.engine.cost import device_name
        from specla.train.capture import Capture
        from specla.train.kinds import kind_of
        from specla.train.run import KEEP_BYTES, texts_of
        from specla.train.session import compute_for, held_apart

        chosen = kind_of(kind, llm.model, llm.tokenizer.digest, _given(schedule), _given(own))
        capture = Capture(llm.model, chosen.feature_layers, keep_bytes=KEEP_BYTES)
        asked = [_prompt(llm, job, prompts) for job in jobs]
        texts = texts_of(llm.engine, capture, asked, params, out / "answers.jsonl", tick, team)
        if held_jobs is None:
            texts, held = held_apart(texts)
        else:
            again = [_prompt(llm, job, str(held_out)) for job in held_jobs]
            held = texts_of(llm.engine, capture, again, params, out / "held-out.jsonl", tick, team)
        torch.set_num_threads(threads or cores)
        run = chosen.run(out, capture, texts, held, compute_for(llm.model), team)
        if team.main:
            several = f" in {team.count} processes" if team.count > 1 else ""
            begins = "going on at" if run.resumed else "starting at"
            # A CPU's name says with how many threads.
            note(f"{begins} step {run.step}{several}, on {device_name(llm.model.device)}")
        found = run(every=every, minutes=minutes, tick=tick, note=note)
    if team.main:
        note(f"tau {found.tau:.3f} on held-out texts; {out / 'checkpoint'}")
    return 0


def _check_readable_by_all(*paths: str | None) -> None:
    from specla.train.team import launched

    if "-" in paths and launched() > 1:
        raise ConfigError(
            "several processes must each read all prompts, got '-': standard input can be read "
            "once; give a file that all of them see"
        )


def _given(options: Mapping[str, object]) -> dict[str, object]:
    """Without those that were left out."""
    return {name: value for name, value in options.items() if value is not None}


def _layer_ids(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be numbers such as 1,11,20, got {text!r}") from None


def _jobs(path: str, params: SamplingParams) -> list[Job]:
    """The file's lines, before anything is loaded or written.

    Raises:
        ConfigError: a line that cannot be used; the first is named.
    """
    found = list[Job]()
    with closing(open_lines(path)) as lines:
        for job in read_jobs(lines, params):
            if isinstance(job, BadLine):
                raise ConfigError(f"{path}, line {job.line}: {job.error}")
            found.append(job)
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out must name a folder, got {str(folder)!r}: {error.strerror}; give another"
        ) from error


def _prompt(llm: LLM, job: Job, path: str) -> Prompt:
    """A line as token ids.

    Raises:
        ConfigError: an answer that the chat template would not have begun so.
    """
    from specla.train.run import Prompt

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
