# SPDX-License-Identifier: Apache-2.0
"""From options to a loaded `LLM`, and from a prompt to what that model expects of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specla.cli.console import Tick
from specla.cli.options import EngineOptions
from specla.errors import ConfigError, GenerationFailed
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.config import ResolvedConfig
    from specla.llm import LLM
    from specla.models.base import TargetModel

Message = dict[str, str]
RANDOM = "random:"
"""What a model of random weights is called by, with its shape."""


def load(options: EngineOptions, progress: Tick | None = None) -> LLM:
    """Load the model. torch is imported here, and not before the model has been found."""
    from specla.models.resolve import resolve

    resolve(options.model, revision=options.revision)
    from specla.llm import LLM

    return LLM(
        options.model,
        drafter=options.drafter,
        device=options.device,
        dtype=options.dtype,
        mode=options.mode,
        max_nodes=options.max_nodes,
        max_slots=options.max_slots,
        revision=options.revision,
        threads=options.threads,
        kernel=options.kernel,
        costs=options.costs,
        budget=options.budget,
        drafter_options=options.drafter_options,
        progress=_named(progress, "loading"),
        capture_progress=_named(progress, "capturing graphs"),
    )


def load_target(config: ResolvedConfig, progress: Tick | None = None) -> TargetModel:
    """The model alone, as an engine would have it: in exact mode with products that are
    row-invariant. "random:gdn-1.3b" is random weights of that shape.

    Raises:
        ConfigError: a shape that there is not, or a revision of random weights.
        SpeclaError: the model cannot be loaded.
    """
    import torch

    from specla import models
    from specla.config import with_threads

    if config.model.startswith(RANDOM):
        return _random(config)
    target = models.load(
        config.model, revision=config.revision, device=config.device, dtype=config.torch_dtype,
        progress=_named(progress, "loading"),
    )  # fmt: skip
    torch.set_num_threads(with_threads(config, target.info.weight_bytes).threads)
    if config.mode == "exact":
        target.check_rows(min(config.max_slots * config.max_nodes, 64))
    return target


def _random(config: ResolvedConfig) -> TargetModel:
    from specla.bench.random_model import gdn_1_3b

    shape = config.model.removeprefix(RANDOM)
    if shape != "gdn-1.3b":
        raise ConfigError(f"random weights must be of shape gdn-1.3b, got {shape!r}")
    if config.revision is not None:
        raise ConfigError(f"--revision is of a hub id, got {config.revision} for random weights")
    return gdn_1_3b(device=config.device, dtype=config.torch_dtype)


def check_options(names: Iterable[str], target: Path, options: Mapping[str, object]) -> None:
    """Before anything is loaded: every drafter has these options.

    Raises:
        ConfigError: one does not; the message names those that it has.
    """
    from specla.drafters import beside, checked_options, with_folder

    for name in names:
        found = (name == "auto" and beside(target)) or with_folder(name, target)
        checked_options(found, options)


def _named(progress: Tick | None, what: str) -> Callable[[int, int], None] | None:
    return (lambda done, total: progress(what, done, total)) if progress else None


def prompt_format(llm: LLM, wanted: bool | None) -> str:
    """'chat' or 'raw'. Without a wish: chat for every model that has a chat template."""
    known = llm.tokenizer.has_chat_template
    if wanted and not known:
        raise ConfigError(
            "--chat needs a model with a chat template, and this one has none; use --raw"
        )
    return "chat" if known and wanted is not False else "raw"


def user_turn(text: str) -> list[Message]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def checked(completion: Completion) -> Completion:
    """The completion, unless its request failed.

    Raises:
        GenerationFailed: finish_reason is "error"; what was generated before is not a result.
    """
    if completion.finish_reason == "error":
        raise GenerationFailed(str(completion.stop_reason))
    return completion


def runner(llm: LLM, form: str) -> Callable[[str, SamplingParams], Completion]:
    """One prompt in, one completion out, in the given prompt format, for measurements.

    Every run gets a drafter that remembers nothing: one that keeps finished outputs would recite
    them when the same prompt comes again, and the repeats of a benchmark are the same prompt.
    """

    def run(prompt: str, params: SamplingParams) -> Completion:
        llm.renew()
        if form == "raw":
            return checked(llm.generate(prompt, params)[0])
        return checked(llm.chat(user_turn(prompt), params)[0])

    return run
