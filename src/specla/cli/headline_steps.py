# SPDX-License-Identifier: Apache-2.0
"""The three steps of `specla bench headline`."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specla.cli.console import Tick, note
from specla.cli.failure import one_line
from specla.cli.headline_contenders import Contender, contenders
from specla.cli.headline_progress import DRAFTERS, MEASURE, STEPS, TARGET, Plan, Progress, origin
from specla.cli.headline_trials import Trials, command
from specla.cli.loading import checked, load, prompt_format, runner, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import dumps
from specla.errors import SpeclaError, what_may_fail
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.bench.headline import Batch
    from specla.bench.measure import Method, Prompt, Sample
    from specla.llm import LLM
    from specla.models.tokenizer import Tokenizer
    from specla.train.entries import LineUp

SIZES = ("gdn-1.3b", "toy")
MAX_NODES = 16
# Of the time for measuring, what may have passed when methods stop that answer one prompt at a
# time, when batches stop, and when fla's loop stops: it needs 10 to 40 seconds per prompt, and
# one that takes longer than those before has to end in time too.
SHARES = 0.62, 0.85, 0.93
NO_TIME = "no time was left; allow the step more minutes"
NOT_REACHED = "the run ended before it"
Run = Callable[[Sequence[str]], Sequence[Completion]]
"""Answers to prompts, all of them decoded together."""
FOREIGN_MINUTES = 10.0
"""What fla's loop gets at most, with --full."""


def run_steps(plan: Plan, wanted: Sequence[str], tick: Tick | None) -> Progress:
    """The wanted steps that are not done, in order.

    Raises:
        ConfigError: a step before them is not done, what is to be measured is not there, or no
            such drafter is known; said before minutes are spent on training.
    """
    progress = Progress(plan)
    for step in wanted:
        for earlier in STEPS[: STEPS.index(step)]:
            if earlier not in wanted:
                progress.need(earlier)
    _line_up(plan)
    if MEASURE in wanted and MEASURE not in progress.steps:
        _prompts(plan)
    for step in STEPS:
        if step not in wanted:
            continue
        if step in progress.steps:
            note(f"{step}: done before; another --work starts anew")
            continue
        began = time.monotonic()
        note(f"{step}: at most {plan.minutes[step]:g} minutes")
        result = _RUN[step](plan, progress, began + 60 * plan.minutes[step], tick)
        progress.finish(step, result | {"wall_s": round(time.monotonic() - began, 1)})
        _free()
    return progress


def _prompts(plan: Plan) -> tuple[dict[str, list[Prompt]], SamplingParams]:
    """What is asked, and how."""
    from specla.cli.headline_suites import suites

    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens)
    return suites(plan.data, plan.prompts), params


def _target(plan: Plan, progress: Progress, deadline: float, tick: Tick | None) -> dict[str, Any]:
    from specla.train import target

    scale = target.Scale() if plan.size == "gdn-1.3b" else target.toy_scale()
    outcome = target.train_target(
        plan.data, plan.work, deadline, scale, plan.device, tick=tick, note=note
    )
    return asdict(outcome)


def _drafters(
    plan: Plan, progress: Progress, deadline: float, tick: Tick | None
) -> dict[str, Any]:
    from specla.bench import fla_sd
    from specla.train import lineup

    line_up = _line_up(plan)
    began = time.monotonic()

    def so_far(found: Sequence[lineup.Trained]) -> None:
        """What a later one breaks, or a machine's time limit ends, does not cost these."""
        wall_s = round(time.monotonic() - began, 1)
        progress.so_far(DRAFTERS, {"entries": lineup.record(found), "wall_s": wall_s})

    tuning = None if plan.device == "cpu" else fla_sd.tune_beside(plan.checkpoint, plan.device)
    try:
        llm = load(_engine(plan, "none", slots=64 if plan.size == "gdn-1.3b" else 8), tick)
        found = lineup.train_line_up(
            llm.engine, llm.tokenizer.digest, plan.work, deadline, line_up, tick=tick, note=note,
            after=so_far,
        )  # fmt: skip
    finally:
        if tuning is not None:
            _end(tuning)
    return {"entries": lineup.record(found)}


def _line_up(plan: Plan) -> LineUp:
    """With what is to be trained also; ConfigError if it is not known."""
    from specla.train.entries import GPU_LINE_UP, TOY_LINE_UP

    return (GPU_LINE_UP if plan.size == "gdn-1.3b" else TOY_LINE_UP).also(plan.also)


def _end(tuning: subprocess.Popen[bytes]) -> None:
    """It has no business in what is measured next. Done it is long before; if not, fla's loop
    tunes what is left in its own time."""
    code = tuning.poll()
    tuning.kill()
    tuning.wait()
    if code != 0:
        why = "was not done" if code is None else f"failed ({code})"
        note(f"tuning fla's kernels beside training {why}: its loop will take longer")


def _engine(plan: Plan, drafter: str, *, slots: int = 1, budget: str = "off") -> EngineOptions:
    return EngineOptions(
        model=str(plan.checkpoint), drafter=drafter, max_nodes=MAX_NODES, max_slots=slots,
        device=plan.device, budget=budget,
    )  # fmt: skip


def _free() -> None:
    """Graphs, states and weights of what has gone out of scope."""
    import torch

    gc.collect()
    try:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except what_may_fail() as error:
        # A kernel has failed, so that nothing works on this GPU. What was measured still counts.
        note(f"no memory could be given back: {one_line(str(error))}")


def _measure(plan: Plan, progress: Progress, deadline: float, tick: Tick | None) -> dict[str, Any]:
    from specla.bench import fla_sd
    from specla.bench import headline as bench
    from specla.cli.records import run_record

    began = time.monotonic()
    wanted, params = _prompts(plan)
    entries = {one["name"]: one for one in progress.need(DRAFTERS)["entries"]}
    missing: dict[str, str] = {}
    order = bench.in_turn(wanted)
    methods, run = _methods(plan, entries, missing, order[0].text, tick)
    single, batch, foreign = (began + share * (deadline - began) for share in SHARES)
    count = (lambda done, total: tick("measuring", done, total)) if tick else None
    samples = bench.take_turns(methods, order, params, single, count)
    told = partial(_told, run_record(run, str(plan.size)), entries)
    tokenizer = run.tokenizer

    def so_far(batches: list[Batch], more: list[Sample], *still: str) -> None:
        """What fails next, or is ended by a machine's time limit, takes none of it along."""
        _keep_texts(plan.work / "texts.jsonl", [*samples, *more])
        waiting = dict.fromkeys(still, NOT_REACHED)
        result = told(samples, batches, missing | waiting)
        progress.so_far(MEASURE, result | {"wall_s": round(time.monotonic() - began, 1)})

    so_far([], [], f"{bench.BUDGET}, batch", fla_sd.NAME)
    del methods, run
    _free()
    batches, more = _batches(plan, entries, params, batch, missing, tick)
    so_far(batches, more, fla_sd.NAME)
    _free()
    samples += _foreign(plan, tokenizer, order, params, foreign, missing)
    _keep_texts(plan.work / "texts.jsonl", [*samples, *more])
    return told(samples, batches, missing)


def _told(
    record: Mapping[str, Any],
    entries: Mapping[str, Any],
    samples: Sequence[Sample],
    batches: Sequence[Batch],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """What the step came to."""
    from specla.bench import headline as bench
    from specla.bench import headline_page as page
    from specla.cli.records import machine

    scores, unanswered = bench.scores(samples), bench.unanswered(samples)
    missing = {**missing, **unanswered}
    figures = page.metrics(scores, batches, samples, missing, entries)
    return {
        "unanswered": sorted(unanswered),
        "scores": [asdict(one) for one in scores],
        "batches": [asdict(one) for one in batches],
        "metrics": [asdict(one) for one in figures],
        "missing": missing,
        "run": {
            "device": machine(record),
            "versions": record["versions"],
            "prices": bench.prices(samples),
        }
        | origin(),
    }


def _foreign(
    plan: Plan,
    tokenizer: Tokenizer,
    order: Sequence[Prompt],
    params: SamplingParams,
    until: float,
    missing: dict[str, str],
) -> list[Sample]:
    """fla's own model, plainly and in its loop, on the first prompts, as far as the time allows.
    Loading and compiling it may take a minute, so without any time left it is not begun."""
    from specla import drafters
    from specla.bench import fla_sd
    from specla.bench.headline import take_turns
    from specla.bench.measure import Method

    if time.monotonic() > until:
        missing[fla_sd.NAME] = NO_TIME
        return []
    try:
        model = fla_sd.load(plan.checkpoint, plan.device)

        def method(name: str, drafter: str) -> Method:
            loop = fla_sd.FlaSD(
                model, drafters.build(drafter), tokenizer.eos_token_ids, tokenizer.decode,
                plan.device,
            )  # fmt: skip
            asked = tokenizer.apply_chat_template
            return Method(name=name, run=lambda text, params: loop(asked(user_turn(text)), params))

        both = [method(fla_sd.PLAIN, "none"), method(fla_sd.NAME, "ngram")]
        until = min(until, time.monotonic() + 60 * FOREIGN_MINUTES)
        samples = take_turns(both, order, params, until)
        if not any(one.completion for one in samples):
            raise SpeclaError(samples[0].error)
        return samples
    except what_may_fail() as error:
        missing[fla_sd.NAME] = str(error).split("\n")[0]
        note(f"{fla_sd.NAME} is missing: {missing[fla_sd.NAME]}")
        return []


def _options(plan: Plan, one: Contender, entries: Mapping[str, Any], slots: int) -> EngineOptions:
    """Of a contender's engine.

    Raises:
        SpeclaError: it cannot be had; the message says why.
    """
    drafter = one.drafter
    if one.trained is not None:
        entry = entries.get(one.trained)
        if entry is None or entry["missing"] is not None:
            raise SpeclaError(entry["missing"] if entry else f"no {one.trained} was trained")
        drafter = f"{drafter}:{entry['checkpoint']}"
    options = _engine(plan, drafter, slots=slots, budget=one.budget)
    return replace(options, drafter_options=one.options)


def _trials(plan: Plan, entries: Mapping[str, Any], prompt: str) -> Trials:
    """Of the trained ones that there are, on a GPU; AR for control."""
    plain, *others = contenders()
    commands: dict[str, list[str]] = {}
    for one in (plain, *others) if plan.device != "cpu" else ():
        if one is plain or one.trained is not None:
            with suppress(SpeclaError):  # who loads it next says why
                commands[one.name] = command(_options(plan, one, entries, 1), prompt)
    return Trials(commands, control=plain.name)


def _methods(
    plan: Plan, entries: Mapping[str, Any], missing: dict[str, str], prompt: str,
    tick: Tick | None,
) -> tuple[list[Method], LLM]:  # fmt: skip
    """Those that can be loaded, and AR's engine; the others into `missing`. prompt: to try them
    with first, as one that fails on a GPU would take all others with it."""
    from specla.bench.measure import Method

    methods: list[Method] = []
    plain: LLM | None = None
    trials = _trials(plan, entries, prompt)
    try:
        for one in contenders():
            note(f"loading {one.name}")
            try:
                trials.check(one.name)
                llm = load(_options(plan, one, entries, 1), tick)
            except what_may_fail() as error:
                if plain is None:
                    raise
                missing[one.name] = str(error).split("\n")[0]
                note(f"{one.name} is missing: {missing[one.name]}")
                continue
            plain = plain or llm
            methods.append(Method(name=one.name, run=runner(llm, prompt_format(llm, None))))
    finally:
        trials.end()
    assert plain is not None
    return methods, plain


def _batches(
    plan: Plan,
    entries: Mapping[str, Any],
    params: SamplingParams,
    deadline: float,
    missing: dict[str, str],
    tick: Tick | None,
) -> tuple[list[Batch], list[Sample]]:
    """Suites in batches, AR against the tree with its budget; and the latter's answers."""
    from specla.bench import headline as bench

    name = f"{bench.BUDGET}, batch"
    if time.monotonic() > deadline:
        missing[name] = NO_TIME
        return [], []
    if bench.BUDGET in missing:
        missing[name] = missing[bench.BUDGET]
        return [], []
    by_name = {one.name: one for one in contenders()}
    try:
        engines = [
            load(_options(plan, by_name[which], entries, plan.batch), tick)
            for which in (bench.AR, bench.BUDGET)
        ]
    except what_may_fail() as error:
        missing[name] = str(error).split("\n")[0]
        return [], []
    runs = [_all_at_once(llm, params) for llm in engines]
    return _each_batch(plan, runs, deadline, missing)


def _each_batch(
    plan: Plan, runs: Sequence[Run], deadline: float, missing: dict[str, str]
) -> tuple[list[Batch], list[Sample]]:
    """As many as there is time for; the others into `missing`. runs: AR's and the tree's."""
    from specla.bench import headline as bench
    from specla.cli.headline_suites import suites

    batches: list[Batch] = []
    samples: list[Sample] = []
    for suite, size in bench.batch_cases(plan.batch):
        which = f"{bench.BUDGET}, {suite}, batch of {size}"
        if time.monotonic() > deadline:
            missing[which] = NO_TIME
            continue
        prompts = [p.text for p in suites(plan.data, size)[suite]]
        try:
            one, more = bench.in_batch(suite, bench.BUDGET, prompts, *runs)
        except what_may_fail() as error:
            missing[which] = str(error).split("\n")[0]
            continue
        batches.append(one)
        samples += more
    return batches, samples


def _all_at_once(llm: LLM, params: SamplingParams) -> Run:
    form = prompt_format(llm, None)

    def run(prompts: Sequence[str]) -> list[Completion]:
        llm.renew()
        if form == "raw":
            return [checked(one) for one in llm.generate(prompts, params)]
        return [checked(one) for one in llm.chat([user_turn(p) for p in prompts], params)]

    return run


def _keep_texts(path: Path, samples: Sequence[Sample]) -> None:
    from specla.bench import headline_page as page

    lines = [dumps(page.text_record(one)) for one in samples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    note(f"texts in {path}")


_RUN = {TARGET: _target, DRAFTERS: _drafters, MEASURE: _measure}
