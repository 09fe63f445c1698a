# SPDX-License-Identifier: Apache-2.0
"""A completion as JSON, and as the three summary lines people read."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

from specla import __version__
from specla.errors import RequestRejected, SpeclaError
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.config import ResolvedConfig
    from specla.models.base import TargetModel

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def dumps(record: object) -> str:
    """One line of strict JSON: no NaN, text unescaped."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def versions() -> dict[str, str | None]:
    """What ran. Read from package metadata: importing them would take seconds."""
    found: dict[str, str | None] = {"specla": __version__, "python": platform.python_version()}
    return found | {name: _installed(name) for name in PACKAGES}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def completion_record(completion: Completion, form: str) -> dict[str, Any]:
    """The part of a result that is about one request."""
    prompt, output = len(completion.prompt_token_ids), len(completion.token_ids)
    record: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "prompt_format": form,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        },
        "speculation": asdict(completion.speculation),
        "timing": asdict(completion.timing),
    }
    if completion.logprobs is not None:
        record["logprobs"] = [asdict(x) for x in completion.logprobs]
    return record


class Loaded(Protocol):
    """A model and how it runs; an `LLM` is one."""

    @property
    def model(self) -> TargetModel:
        """The weights."""
        ...

    @property
    def config(self) -> ResolvedConfig:
        """The settings."""
        ...


def run_record(loaded: Loaded, model: str) -> dict[str, Any]:
    """The part of a result that is about the run. `engine` has every setting as it ran, and in
    `reasons` why the ones that were left open came out as they did."""
    # Imports torch, which is loaded by now.
    from specla.engine.cost import device_name

    return {
        "model": model,
        "architecture": loaded.model.info.architecture,
        "device": str(loaded.model.device),
        "device_name": device_name(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "fingerprint": loaded.model.info.fingerprint,
        "engine": loaded.config.summary(),
        "versions": versions(),
    }


def machine(run: Mapping[str, Any]) -> str:
    """The column `device` of results.csv, of what `run_record` gave: a row without the GPU's name
    says nothing."""
    device = run["device_name"] if run["device"].startswith("cuda") else run["device"]
    return f"{device} {run['dtype']} {run['model']}"


def error_record(error: Exception, line: int, name: str | int | None) -> dict[str, Any]:
    """What stands in the output where a prompt could not be run."""
    ours = isinstance(error, SpeclaError)
    message = str(error) if ours else f"a line must be valid JSON, got: {error}"
    detail = {
        "type": type(error).__name__,
        "message": message.encode("utf-8", "backslashreplace").decode(),
        "param": error.param if isinstance(error, RequestRejected) else None,
        "line": line,
    }
    return {"id": name, "line": line, "error": detail}


def summary(completion: Completion, params: SamplingParams) -> list[str]:
    """Prompt speed, generation speed with what speculation brought, and what is promised."""
    timing, spec = completion.timing, completion.speculation
    prompt, output = len(completion.prompt_token_ids), len(completion.token_ids)
    speed = f"{prompt / timing.prefill_s:.1f} tokens/s" if timing.prefill_s > 0 else "no prefill"
    rate = f"{spec.accepted / spec.drafted:.0%}" if spec.drafted else "nothing drafted"
    because = f"; {spec.fallback}" if spec.fallback else ""
    if spec.budget is not None:
        rounds = ", ".join(f"{reason} {count}" for reason, count in spec.budget.reasons.items())
        because += f"; budget {spec.budget.policy}: {rounds}"
    # Greedy decoding reads no noise: a seed would only look as if it mattered.
    seed = f", seed {completion.seed}" if params.temperature > 0 else ""
    return [
        f"prompt:     {prompt} tokens, {speed}",
        f"generation: {output} tokens, {timing.tokens_per_s:.1f} tokens/s, "
        f"{spec.tokens_per_round:.2f} tokens/round, acceptance {rate} "
        f"(drafter {spec.drafter}, {completion.finish_reason}{seed}){because}",
        f"contract:   {contract(spec.mode)}",
    ]


def contract(mode: str) -> str:
    """What the mode promises about the output."""
    if mode == "exact":
        return "exact: the tokens of plain decoding, whatever the drafter (--compare checks it)"
    return f"{mode}: not bit-identical to exact decoding"
