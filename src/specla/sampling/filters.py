# SPDX-License-Identifier: Apache-2.0
"""From the target's logits to the law a token is drawn from, per node.

Order: logit bias; repetition, frequency, presence penalties; min_tokens; then temperature, min-p,
top-k, top-p. Order and meanings are vLLM's, ties go to the lower token id. Penalties count the
node's own history: prompt and output plus the drafts on the path to the node, never a sibling's.

Invariant (rule I4): a row's law has the same bits alone and in any batch. So every reduction here
is a maximum or a sum of integers, which no order of evaluation can change; everything else is
elementwise. Top-p works on weights in fixed point for that reason.

Letters: V vocabulary, n rows, m candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specla.errors import RequestRejected
from specla.request import SamplingParams

# Weights relative to the most likely token, in units of 2^-43: the sum over up to 2^19 tokens
# fits in int64, and what rounding loses is below a float32 cumsum's error.
_FIXED_POINT = 2.0**43


class Law(NamedTuple):
    """What remains of each row's distribution.

    token_ids: int64 [n, m], candidates; most likely first where `sort`ed, else by token id.
    scores: float64 [n, m], log-probabilities up to a constant per row, the largest one 0;
        -inf where filtered out.
    """

    token_ids: Tensor
    scores: Tensor


class History:
    """Tokens seen along one path: prompt and output, then drafts as the walk accepts them."""

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self.prompt = frozenset(tokens[:num_prompt_tokens])
        self.output = Counter(tokens[num_prompt_tokens:])

    def append(self, token: int) -> None:
        """Count one more output token."""
        self.output[token] += 1


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary: they would index past the logits.

    Raises:
        RequestRejected: `.param` is logit_bias or stop_token_ids.
    """
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"token ids in {param} must be in [0, {vocab_size}), the model's vocabulary, got "
                f"{token}; remove it",
                param=param,
            )


def is_penalised(params: SamplingParams) -> bool:
    """Do this row's logits depend on the tokens seen so far?"""
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def needs_sort(params: SamplingParams) -> bool:
    """Top-k and top-p look at ranks; without them a law stays in token order."""
    return params.top_k > 0 or params.top_p < 1


def is_unfiltered(params: SamplingParams) -> bool:
    """Greedy or temperature alone, nothing to report: what the device can draw by itself."""
    return not (
        needs_sort(params)
        or is_penalised(params)
        or params.min_p > 0
        or params.min_tokens > 0
        or params.logit_bias
        or params.logprobs is not None
    )


def adjust(
    logits: Tensor,
    params: SamplingParams,
    history: History | None,
    forbidden: Collection[int] = (),
) -> None:
    """Apply bias, penalties and min_tokens to one row, in place.

    Args:
        logits: float32 [V], the caller's own copy.
        history: tokens up to and including the node; needed if `is_penalised(params)`.
        forbidden: the end tokens while min_tokens is not reached, else nothing.
    """
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += logits.new_tensor(list(params.logit_bias.values()))
    if is_penalised(params):
        assert history is not None
        _penalise(logits, params, history)
    if forbidden:
        logits[torch.tensor(list(forbidden), device=logits.device)] = -torch.inf


def _penalise(logits: Tensor, params: SamplingParams, history: History) -> None:
    """Repetition over prompt and output, then frequency and presence over output."""
    seen = sorted(history.prompt.union(history.output))
    if not seen:
        return
    ids = torch.tensor(seen, device=logits.device)
    counts = logits.new_tensor([history.output[token] for token in seen])
    x = logits[ids]
    rate = params.repetition_penalty
    x = torch.where(x > 0, x / rate, x * rate)
    x = x - counts * params.frequency_penalty
    x = x - (counts > 0) * params.presence_penalty
    logits[ids] = x


def law(logits: Tensor, params: Sequence[SamplingParams], *, sort: bool) -> Law:
    """Temperature, min-p, top-k and top-p.

    Args:
        logits: float32 [n, V], adjusted; every row's maximum finite.
        params: one per row, every temperature > 0.
        sort: True if the rows use top-k or top-p (all rows of a call alike: see `needs_sort`).

    Returns:
        The candidates. Each row's candidates and scores depend on that row alone; only the
        number of -inf columns at the end depends on the others.
    """
    temperature = _column(logits, [p.temperature for p in params])
    min_p = _column(logits, [p.min_p for p in params])
    if sort:
        logits, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    else:
        token_ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    # In float64 and relative to the maximum, so that no temperature > 0 overflows.
    scores = logits.to(torch.float64)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    scores.masked_fill_(scores.exp() < min_p, -torch.inf)
    if sort:
        _keep_top_k(scores, params)
        _keep_top_p(scores, params)
    # All three keep a prefix of the ranking, so a sorted law can be cut.
    width = int((scores > -torch.inf).sum(-1).max()) if sort else scores.shape[1]
    return Law(token_ids[:, :width], scores[:, :width])


def _keep_top_k(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Ranked scores: exactly k stay, so of equal ones the lower token ids."""
    vocab_size = scores.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    rank = torch.arange(vocab_size, device=scores.device)
    scores.masked_fill_(rank >= torch.tensor(limits, device=scores.device)[:, None], -torch.inf)


def _keep_top_p(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Ranked scores: a token stays while those before it have not reached top_p of the total."""
    weights = (scores.exp() * _FIXED_POINT).round_().to(torch.int64)
    before = weights.cumsum(-1) - weights
    # 1 means off: then even tokens whose weight rounds to nothing stay.
    top_p = _column(scores, [p.top_p if p.top_p < 1 else torch.inf for p in params])
    reached = before.to(torch.float64) >= top_p * weights.sum(-1, keepdim=True)
    scores.masked_fill_(reached, -torch.inf)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
