# SPDX-License-Identifier: Apache-2.0
"""Draw one token per row from the target's own filtered law.

    token = argmax(log p + noise(seed, position, token id)),    temperature 0: argmax(logits)

The Gumbel-max trick: the argmax has exactly the law p, and it is a function of the row's logits,
parameters, history, seed and position alone. Rows share a call, never bits (rule I4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specla.errors import GenerationFailed
from specla.request import SamplingParams, TokenLogprob
from specla.sampling.filters import History, adjust, is_penalised, law, needs_sort
from specla.sampling.noise import gumbel


class InvalidLogits(GenerationFailed):
    """The model returned NaN, +inf or nothing but -inf where a token had to be drawn.

    `rows` are the batch rows it happened to, found so far; other rows are fine to go on.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        names = ", ".join(map(str, rows))
        super().__init__(
            f"logits must have a finite maximum (no NaN, no +inf, not all -inf or forbidden), "
            f"got otherwise at row {names}; fail those requests and reset their slots, and "
            "suspect the checkpoint, its dtype or the row's state"
        )
        self.rows = tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What one draw depends on besides the logits.

    position: absolute position of the token to draw.
    history: tokens seen, needed if the row has penalties.
    forbidden: end tokens while min_tokens is not reached, else empty.
    """

    params: SamplingParams
    seed: int
    position: int
    history: History | None = None
    forbidden: Collection[int] = ()

    @property
    def is_plain(self) -> bool:
        """The logits are used as they are."""
        adjusted = self.params.logit_bias or is_penalised(self.params) or self.forbidden
        return not adjusted


def draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [n, V], unmodified by the call.
        draws: n records.

    Raises:
        InvalidLogits: `rows` index `draws`.
    """
    _check(logits, range(len(draws)))
    logits = _adjusted(logits, draws)
    tokens = [0] * len(draws)
    for members in _alike(draws):
        rows = logits[members]
        _check(rows, members)
        for i, token in zip(members, _choose(rows, [draws[i] for i in members]), strict=True):
            tokens[i] = token
    return tokens


def greedy(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The argmax of every row, lowest index first among equals, and whether it can be trusted
    (the maximum is finite). logits: float32 [n, V]."""
    values, tokens = logits.max(-1)
    return tokens.tolist(), values.isfinite().tolist()


def token_logprobs(
    logits: Tensor, chosen: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities under the model's unmodified distribution.

    Args:
        logits: float32 [n, V], as the model returned them.
        chosen: n emitted tokens.
        num_top: n counts of alternatives to report, most likely first, lower ids first among
            equals.
    """
    logprobs = torch.log_softmax(logits, -1)
    index = torch.tensor(chosen, device=logits.device)
    values = logprobs.gather(1, index[:, None])[:, 0].tolist()
    reports = []
    for i, (token, value, count) in enumerate(zip(chosen, values, num_top, strict=True)):
        ids = _top_ids(logits[i], count)
        top = tuple(zip(ids.tolist(), logprobs[i][ids].tolist(), strict=True))
        reports.append(TokenLogprob(token_id=token, logprob=value, top=top))
    return reports


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Ids of the largest entries of one row. `topk` alone leaves ties open."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    count = min(count, len(logits))
    candidates = (logits >= logits.topk(count).values[-1]).nonzero()[:, 0]
    order = logits[candidates].argsort(descending=True, stable=True)
    return candidates[order[:count]]


def _check(logits: Tensor, rows: Sequence[int]) -> None:
    finite = logits.amax(-1).isfinite().tolist()
    if not all(finite):
        raise InvalidLogits([row for row, ok in zip(rows, finite, strict=True) if not ok])


def _adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    if all(one.is_plain for one in draws):
        return logits
    logits = logits.clone()
    for row, one in zip(logits, draws, strict=True):
        if not one.is_plain:
            adjust(row, one.params, one.history, one.forbidden)
    return logits


def _alike(draws: Sequence[Draw]) -> list[list[int]]:
    """Indices of the greedy, the unsorted and the sorted draws; empty groups left out."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for i, one in enumerate(draws):
        is_greedy = one.params.temperature == 0
        groups.setdefault((is_greedy, not is_greedy and needs_sort(one.params)), []).append(i)
    return list(groups.values())


def _choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw for rows of one kind, logits [n, V] adjusted."""
    params = [one.params for one in draws]
    if params[0].temperature == 0:
        return greedy(logits)[0]
    token_ids, scores = law(logits, params, sort=needs_sort(params[0]))
    noise = gumbel([one.seed for one in draws], [one.position for one in draws], token_ids)
    best = (scores + noise).argmax(-1, keepdim=True)
    tokens: list[int] = token_ids.gather(1, best)[:, 0].tolist()
    return tokens
