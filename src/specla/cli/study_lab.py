# SPDX-License-Identifier: Apache-2.0
"""The lab of a study: one target in every setting that is asked for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specla.bench import report
from specla.bench.headline_page import PLAIN
from specla.bench.studies.study import Lab, Setting, Study, Subject, Value
from specla.cli.console import Tick
from specla.cli.loading import RANDOM, load, load_target, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import machine, run_record
from specla.cli.study_plan import Plan
from specla.config import EngineConfig, ResolvedConfig, resolve
from specla.drafters.base import Drafter, FeatureDrafter
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.tokenizer import Tokenizer
from specla.state import State

if TYPE_CHECKING:
    from specla.llm import LLM


def make_lab(plan: Plan, deadline: float, tick: Tick | None) -> tuple[Lab, dict[str, Any]]:
    """The lab, with plain decoding loaded, and what is said about the run.

    Raises:
        ConfigError: a factor that the study does not have.
        SpeclaError: the target cannot be loaded.
    """
    study = plan.study
    values = _chosen("--vary", study.factors, plan.vary)
    centre = _chosen("--at", {k: (v,) for k, v in study.centre.items()}, plan.at)
    for name, given in centre.items():
        if len(given) != 1:
            raise ConfigError(f"--at must give one value per factor, got {len(given)} for {name}")
    target, plain = _plain(plan, tick)
    lab = Lab(
        plain=plain,
        load=lambda setting: _loaded(plan.engine, setting, tick),
        own=lambda drafter, nodes: _owned(target, drafter, nodes),
        tokenizer=target.tokenizer,
        prompts=plan.prompts,
        params=plan.params,
        drafters=plan.drafters,
        values=values,
        centre={name: given[0] for name, given in centre.items()},
        max_nodes=plan.engine.max_nodes,
        deadline=deadline,
        tick=(lambda done, total: tick("measuring", done, total)) if tick else None,
    )
    return lab, _run(plan, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured. tokenizer: None with random weights. form: of prompts, "chat" or "raw";
    "bytes", token ids without a tokenizer."""

    model: TargetModel
    config: ResolvedConfig
    tokenizer: Tokenizer | None
    form: str


def _plain(plan: Plan, tick: Tick | None) -> tuple[Target, Subject]:
    """The target, and its exact plain decoding."""
    options = replace(plan.engine, drafter="none", budget="auto", max_slots=1)
    if options.model.startswith(RANDOM):
        target = _random(plan.study, options)
        return target, _owned(target, NoDrafter(), 1)
    llm = load(options, tick)
    form = prompt_format(llm, None)
    target = Target(model=llm.model, config=llm.config, tokenizer=llm.tokenizer, form=form)
    return target, _subject(llm)


def _random(study: Study, options: EngineOptions) -> Target:
    if study.drafters[1]:
        raise ConfigError(
            f"study {study.name} is about drafters, which know a checkpoint; got {options.model}"
        )
    config = resolve(
        EngineConfig(
            model=options.model, revision=options.revision, drafter=options.drafter,
            device=options.device, dtype=options.dtype, max_slots=options.max_slots,
            threads=options.threads,
        )
    )  # fmt: skip
    return Target(model=load_target(config), config=config, tokenizer=None, form="bytes")


def _chosen(
    option: str, known: Mapping[str, Sequence[Value]], given: Mapping[str, Sequence[Value]]
) -> dict[str, Sequence[Value]]:
    for name in given:
        if name not in known:
            names = ", ".join(known) or "no factor"
            raise ConfigError(f"{option} must name one of: {names}; got {name!r}")
    return {**known, **given}


def _loaded(engine: EngineOptions, setting: Setting, tick: Tick | None) -> Subject:
    """The target in a setting, with weights of its own; those of settings that nobody measures
    any more are let go of first."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    options = replace(
        engine, drafter=setting.drafter, drafter_options=dict(setting.options) or None,
        budget=setting.budget, max_nodes=setting.max_nodes, max_slots=setting.max_slots,
    )  # fmt: skip
    return _subject(load(options, tick))


def _subject(llm: LLM) -> Subject:
    # One that reads features is reset with its slot, and on a GPU another one means new graphs.
    forgets = isinstance(llm.engine.drafter, FeatureDrafter)
    encode = _encoder(llm.tokenizer, prompt_format(llm, None))
    return Subject(llm.engine, encode, None if forgets else llm.new_drafter)


def _owned(target: Target, drafter: Drafter, nodes: int) -> Subject:
    """The same weights in an engine of one slot, with this drafter."""
    config, model, tokenizer = target.config, target.model, target.tokenizer
    model.check_rows(min(nodes, 64))
    state = State(
        model.info.recurrent,
        num_slots=1,
        max_nodes=nodes,
        log_capacity=config.log_capacity,
        max_path=drafter.info.max_depth + 1,
        dtype=config.torch_dtype,
        device=config.device,
    )
    engine = Engine(
        model, state, drafter, mode=config.mode, prefill_chunk=config.prefill_chunk,
        tokenizer=tokenizer, end_token_ids=tokenizer.eos_token_ids if tokenizer else (),
        kernel=config.kernel,
    )  # fmt: skip
    engine.capture()
    return Subject(engine, _encoder(tokenizer, target.form))


def _encoder(tokenizer: Tokenizer | None, form: str) -> Callable[[str], Sequence[int]]:
    """In the format that the target expects."""
    if tokenizer is None:
        return lambda text: list(text.encode())
    if form == "raw":
        return tokenizer.encode
    return lambda text: tokenizer.apply_chat_template(user_turn(text))


def _run(plan: Plan, target: Target) -> dict[str, Any]:
    record = run_record(target, plan.engine.model)
    # The arguments, not the program's path: the command has to work elsewhere.
    command = " ".join(["specla", *sys.argv[1:]])
    device = machine(record)
    head = report.head(
        device=device, versions=record["versions"], command=command, measured=plan.commit
    )
    return head | {
        "model": plan.engine.model,
        "baseline": PLAIN,
        "prompts": f"{len(plan.prompts)}, {target.form}",
        "max_tokens": plan.params.max_tokens,
        "threads": target.config.threads,
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores, at the start",
    }
