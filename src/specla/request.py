# SPDX-License-Identifier: Apache-2.0
"""What a user asks for and gets back: SamplingParams, Request, Completion.

Plain Python records: none of them may hold a tensor. Names and defaults are vLLM's.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specla.errors import RequestRejected

FinishReason = Literal["stop", "length", "abort", "error"]


def _require(ok: bool, param: str, must: str, given: object) -> None:
    if not ok:
        raise RequestRejected(f"{param} must be {must}, got {given!r}", param=param)


def _as_tuple(param: str, values: object, what: str) -> tuple[object, ...]:
    ok = isinstance(values, Iterable) and not isinstance(values, bytes)
    _require(ok, param, what, values)
    return (values,) if isinstance(values, str) else tuple(values)  # type: ignore[arg-type]


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_finite(x: object) -> bool:
    """Written so that NaN fails, and integers too large for a float do not raise."""
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return is_number and -sys.float_info.max <= x <= sys.float_info.max  # type: ignore[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Args:
        n: completions per prompt (1..128); completion i uses seed + i.
        temperature: 0 is greedy (lowest index wins ties); finite and >= 0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set with this much probability; in (0, 1].
        min_p: drop tokens below this fraction of the most likely one; in [0, 1].
        presence_penalty, frequency_penalty: subtracted for tokens already generated; [-2, 2].
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens seen in
            prompt or output; > 0.
        logit_bias: token id -> value in [-100, 100] added to the logit.
        seed: noise key; None draws one per request and reports it in the completion.
        max_tokens: most tokens to generate; >= 1.
        min_tokens: no stop or end token before this many tokens.
        stop: strings that end the text (the text before the first one is returned).
        stop_token_ids: token ids that end generation.
        ignore_eos: keep going past the model's own end token.
        logprobs: None, or how many alternatives (0..20) to report beside each chosen token,
            as log-probabilities of the model's unmodified distribution.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestRejected: a value is out of range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, "non-empty strings"))
        ids = _as_tuple("stop_token_ids", self.stop_token_ids, "token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", "a mapping", self.logit_bias)
        self._check_law()
        self._check_ends()

    def _check_law(self) -> None:
        _require(
            _is_finite(self.temperature) and self.temperature >= 0,
            "temperature",
            "a finite number >= 0",
            self.temperature,
        )
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", "an integer >= -1", self.top_k)
        _require(_is_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(_is_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_finite(value) and -2 <= value <= 2, name, "in [-2, 2]", value)
        rp = self.repetition_penalty
        _require(_is_finite(rp) and rp > 0, "repetition_penalty", "a finite number > 0", rp)
        for token, value in self.logit_bias.items():
            _require(_is_int(token) and token >= 0, "logit_bias", "keyed by token ids", token)
            _require(
                _is_finite(value) and -100 <= value <= 100, "logit_bias", "in [-100, 100]", value
            )
        ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64)
        _require(ok, "seed", "None or an integer in [0, 2**64)", self.seed)

    def _check_ends(self) -> None:
        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", "an integer in [1, 128]", self.n)
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            "an integer >= 1",
            self.max_tokens,
        )
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            "an integer in [0, max_tokens]",
            self.min_tokens,
        )
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", "non-empty strings", text)
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", "token ids", token)
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "True or False", value)
        ok = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20)
        _require(ok, "logprobs", "None or an integer in [0, 20]", self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. `request_id` is unique in its engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one emitted token, and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """What the budget decided, over the rounds of one request.

    policy: "paying", or a number of drafts. proposed: drafts of the drafter; chosen: those that
    were verified; expected: how many of them were expected to be accepted. reasons: rounds by why
    ("pays", "declined", "nothing", "probe", "off", "fixed"); shapes: rounds by what was verified
    ("none", "chain", "tree"); last: the latest decision with its figures.
    """

    policy: str
    proposed: int
    chosen: int
    expected: float
    reasons: Mapping[str, int]
    shapes: Mapping[str, int]
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """What ran and what it brought, for one request.

    `drafted` counts tree nodes verified below node 0 and not past a cut; `accepted` the drafts
    on committed paths; `acceptance_by_depth[d]` is the fraction of rounds that offered a draft
    at depth d + 1 in which that depth was accepted. `fallback` is None or says why a round ran
    otherwise than asked. `kernels`: rounds by the state kernel that verified them; `costs`: what
    it was chosen by, "measured" (a cost table) or "default". `budget`: None where there is none.
    """

    drafter: str
    mode: str
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float
    acceptance_by_depth: tuple[float, ...]
    acceptance_histogram: tuple[int, ...]
    fallback: str | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    costs: str = "default"
    budget: BudgetReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of wall time this request spent in prefill and decode rounds."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one request.

    `token_ids` excludes nothing the text includes and ends with the end token where one was
    generated. `stop_reason` is the stop string or the id in stop_token_ids that ended it, None
    for the model's own end token, and what went wrong where `finish_reason` is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None
    speculation: SpeculationReport
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDelta:
    """What became certain since the last delta: text, token ids; `completion` on the last one."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


def requests_of(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    name: Callable[[int], str],
    *,
    prompt: str | None = None,
) -> list[Request]:
    """The n completions of one prompt: completion i is called name(i) and draws with seed + i.
    Where none is given one is drawn."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [
        Request(
            request_id=name(i),
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            seed=(seed + i) % 2**64,
        )
        for i in range(params.n)
    ]
