# SPDX-License-Identifier: Apache-2.0
"""Completions as an engine would report them, made up for tests of benches and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specla.request import (
    Completion,
    SamplingParams,
    SpeculationReport,
    Timing,
    TokenLogprob,
)


def completion(
    *,
    prompt: str = "a b",
    text: str = "b a",
    ids: tuple[int, ...] = (98, 97),
    params: SamplingParams | None = None,
    options: Mapping[str, Any] | None = None,
    decode_s: float | None = None,
) -> Completion:
    """A consistent completion: completion tokens = rounds + accepted."""
    params, options = params or SamplingParams(), options or {"drafter": "none", "mode": "exact"}
    accepted = 0 if options["drafter"] == "none" else len(ids) // 2
    rounds = len(ids) - accepted
    seconds = rounds * 0.01 if decode_s is None else decode_s
    return Completion(
        request_id="r0",
        prompt=prompt,
        prompt_token_ids=tuple(range(len(prompt.split()))),
        text=text,
        token_ids=ids,
        finish_reason="length" if len(ids) == params.max_tokens else "stop",
        stop_reason=None,
        seed=7 if params.seed is None else params.seed,
        logprobs=(
            None
            if params.logprobs is None
            else tuple(TokenLogprob(token_id=i, logprob=-0.5, top=((i, -0.5),)) for i in ids)
        ),
        speculation=SpeculationReport(
            drafter="suffix" if options["drafter"] == "auto" else options["drafter"],
            mode=options["mode"],
            rounds=rounds,
            drafted=2 * accepted,
            accepted=accepted,
            tokens_per_round=len(ids) / rounds if rounds else 0.0,
            acceptance_by_depth=(0.5,) if accepted else (),
            acceptance_histogram=(rounds - accepted, accepted) if accepted else (rounds,),
        ),
        timing=Timing(
            prefill_s=0.001, decode_s=seconds, tokens_per_s=len(ids) / seconds if seconds else 0.0
        ),
    )
