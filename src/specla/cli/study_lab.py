# SPDX-License-Identifier: Apache-2.0
"""The lab of a study: one target in every setting that is asked for."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specla.bench import report
from specla.bench.headline_page import PLAIN
from specla.bench.studies.study import Lab, Setting, Subject, Value
from specla.cli.console import Tick
from specla.cli.loading import load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import machine, run_record
from specla.drafters.base import Drafter, FeatureDrafter
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.state import State

if TYPE_CHECKING:
    from specla.cli.bench_study import Plan
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
    plain = load(replace(plan.engine, drafter="none", budget="auto", max_slots=1), tick)
    lab = Lab(
        plain=_subject(plain),
        load=lambda setting: _loaded(plan.engine, setting, tick),
        own=lambda drafter, nodes: _owned(plain, drafter, nodes),
        tokenizer=plain.tokenizer,
        prompts=plan.prompts,
        params=plan.params,
        drafters=plan.drafters,
        values=values,
        centre={name: given[0] for name, given in centre.items()},
        max_nodes=plan.engine.max_nodes,
        deadline=deadline,
        tick=(lambda done, total: tick("measuring", done, total)) if tick else None,
    )
    return lab, _run(plan, plain)


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
    return Subject(llm.engine, _encoder(llm), None if forgets else llm.new_drafter)


def _owned(llm: LLM, drafter: Drafter, nodes: int) -> Subject:
    """The same weights in an engine with a drafter that has no name."""
    config, model = llm.config, llm.model
    model.check_rows(min(nodes, 64))
    state = State(
        model.info.recurrent,
        num_slots=1,
        max_nodes=nodes,
        log_capacity=config.log_capacity,
        dtype=config.torch_dtype,
        device=config.device,
    )
    engine = Engine(
        model, state, drafter, mode=config.mode, prefill_chunk=config.prefill_chunk,
        tokenizer=llm.tokenizer, end_token_ids=llm.tokenizer.eos_token_ids, kernel=config.kernel,
    )  # fmt: skip
    engine.capture()
    return Subject(engine, _encoder(llm))


def _encoder(llm: LLM) -> Callable[[str], Sequence[int]]:
    """In the format that the target expects."""
    if prompt_format(llm, None) == "raw":
        return llm.tokenizer.encode
    return lambda text: llm.tokenizer.apply_chat_template(user_turn(text))


def _run(plan: Plan, llm: LLM) -> dict[str, Any]:
    record = run_record(llm, plan.engine.model)
    # The arguments, not the program's path: the command has to work elsewhere.
    command = " ".join(["specla", *sys.argv[1:]])
    device = machine(record)
    head = report.head(
        device=device, versions=record["versions"], command=command, measured=plan.commit
    )
    return head | {
        "model": plan.engine.model,
        "baseline": PLAIN,
        "prompts": f"{len(plan.prompts)}, {prompt_format(llm, None)}",
        "max_tokens": plan.params.max_tokens,
        "threads": llm.config.threads,
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores, at the start",
    }
