# SPDX-License-Identifier: Apache-2.0
"""How far a way of decoding is from exact autoregressive decoding: per prompt the first token that
differs, and by how much exact decoding preferred its own there.

Greedy only: with a temperature a pair of logits would not say who wins. The margin is the
difference of two float32 logits, in exact mode's own bits: the sequence up to there is decoded
once more, in exact mode, alone, as chains of accepted drafts (rule I4 makes that the same).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from specla.bench.kernel_metrics import Metric
from specla.bench.report import head
from specla.config import CHEAPEST, CPU_PREFILL_CHUNK, GPU_LOG_CAPACITY, GPU_PREFILL_CHUNK
from specla.drafters.base import Drafter, DraftRow
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.errors import ExactnessUnavailable, GenerationFailed
from specla.models.base import TargetModel
from specla.request import Completion, Request, SamplingParams
from specla.state import State
from specla.topology.tree import DraftTree

# Nodes of a replayed chain; a power of two.
CHAIN = 16
BASELINE = "exact AR, greedy, same run"

Truth = Callable[[DraftRow], Sequence[int]]
"""Exact AR's whole output for a row's prompt."""
LogitsAt = Callable[[Sequence[int], Sequence[int]], Tensor]
"""Prompt and output so far in; exact mode's logits [V] for the next token out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """index: of the first output token that differs. expected, got: exact AR's and the other's.
    margin: by how much exact AR's logits prefer its own, >= 0."""

    index: int
    expected: int
    got: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt. num_tokens: of exact AR's output. kernels: rounds of the other way of decoding
    by the kernel that verified them; accepted: its accepted drafts."""

    prompt: int
    kind: str
    num_tokens: int
    divergence: Divergence | None
    accepted: int
    kernels: dict[str, int]


def compare(
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str],
    exact: Sequence[Completion],
    other: Sequence[Completion],
    logits_at: LogitsAt,
) -> list[Comparison]:
    """One comparison per prompt.

    Raises:
        GenerationFailed: a request came to no result.
        ExactnessUnavailable: exact mode does not give its own token when asked again.
    """
    rows = zip(prompts, kinds, exact, other, strict=True)
    return [
        Comparison(
            prompt=i,
            kind=kind,
            num_tokens=len(_tokens(a)),
            divergence=_divergence(prompt, _tokens(a), _tokens(b), logits_at),
            accepted=b.speculation.accepted,
            kernels=dict(b.speculation.kernels),
        )
        for i, (prompt, kind, a, b) in enumerate(rows)
    ]


def _tokens(completion: Completion) -> tuple[int, ...]:
    if completion.finish_reason == "error":
        raise GenerationFailed(str(completion.stop_reason))
    return completion.token_ids


def _divergence(
    prompt: Sequence[int], exact: Sequence[int], other: Sequence[int], logits_at: LogitsAt
) -> Divergence | None:
    # Equal until one ends: then both have ended, as ends follow from tokens and their number.
    pairs = enumerate(zip(exact, other, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), None)
    if index is None:
        assert len(exact) == len(other), "the same tokens end in the same place"
        return None
    logits, a, b = logits_at(prompt, exact[:index]), exact[index], other[index]
    if (again := int(logits.argmax())) != a:
        raise ExactnessUnavailable(
            f"exact mode must choose the same token every time, got {a} and then {again} as "
            f"output token {index}; please report this with the command"
        )
    return Divergence(index=index, expected=a, got=b, margin=float(logits[a] - logits[b]))


def exact_logits(
    model: TargetModel,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    prefill_chunk: int,
    log_capacity: int,
) -> Tensor:
    """Exact mode's logits [V], float32, for the token after `prompt` and `output`: a slot of its
    own, the prompt in an engine's chunks, the output as accepted chains."""
    state = State(
        model.info.recurrent,
        num_slots=1,
        max_nodes=CHAIN,
        log_capacity=log_capacity,
        dtype=model.dtype,
        device=model.device,
    )
    model.reserve(CHAIN)
    slot, head = state.acquire(), prompt[:-1]
    for start in range(0, len(head), prefill_chunk):
        model.prefill(head[start : start + prefill_chunk], slot, state)
    tokens = [prompt[-1], *output]
    for start in range(0, len(tokens), CHAIN):
        root, *drafts = tokens[start : start + CHAIN]
        plan = state.begin([slot], [DraftTree.chain(root, drafts)])
        last = model.verify(plan, state)[plan.offsets[0] + len(drafts)]
        state.commit([slot], [range(len(drafts) + 1)])
    return last.float().clone()


def decode(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
    """Greedy completions of all prompts, past any end token."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(
            Request(request_id=str(i), prompt_token_ids=tuple(prompt), params=params, seed=0)
        )
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {d.request_id: d.completion for d in engine.step() if d.completion is not None}
    return [done[str(i)] for i in range(len(prompts))]


def compare_decoding(
    model: TargetModel,
    prompts: Sequence[Sequence[int]],
    drafter: Callable[[Truth], Drafter],
    *,
    mode: str,
    kernel: str = CHEAPEST,
    batch: int,
    max_nodes: int,
    max_tokens: int,
) -> list[Comparison]:
    """Distinct prompts in exact AR and in `mode`, in engines of `batch` slots on one model.

    drafter: makes the drafter of `mode`, given exact AR's output of every row.
    """
    on_gpu = model.device.type == "cuda"
    chunk = GPU_PREFILL_CHUNK if on_gpu else CPU_PREFILL_CHUNK
    capacity = GPU_LOG_CAPACITY if on_gpu else 0

    def engine(drafter: Drafter, mode: str, kernel: str, max_nodes: int) -> Engine:
        state = State(
            model.info.recurrent, num_slots=batch, max_nodes=max_nodes, log_capacity=capacity,
            dtype=model.dtype, device=model.device,
        )  # fmt: skip
        return Engine(model, state, drafter, mode=mode, kernel=kernel, prefill_chunk=chunk)

    alone = engine(NoDrafter(), "exact", CHEAPEST, 1)
    exact = decode(alone, prompts, max_tokens)
    known = {tuple(p): done.token_ids for p, done in zip(prompts, exact, strict=True)}
    guesser = drafter(lambda row: known[tuple(row.tokens[: row.num_prompt_tokens])])
    other = decode(engine(guesser, mode, kernel, max_nodes), prompts, max_tokens)
    logits_at = partial(exact_logits, model, prefill_chunk=chunk, log_capacity=capacity)
    return compare(prompts, ["random"] * len(prompts), exact, other, logits_at)


def metrics(rows: Sequence[Comparison], what: str) -> list[Metric]:
    """The summary. what: the mode, drafter and batch that were compared; margins are left out
    where nothing diverged."""
    found = [row.divergence for row in rows if row.divergence is not None]
    same, num_tokens = len(rows) - len(found), sum(row.num_tokens for row in rows)
    notes = f"{what}; {same} of {len(rows)} prompts identical, {num_tokens} tokens"
    summary = [
        Metric(name="exactness_identical", value=same / len(rows), unit="fraction",
               baseline=BASELINE, notes=notes),
    ]  # fmt: skip
    if found:
        margins = [one.margin for one in found]
        figures = {
            "exactness_margin_median": (median(margins), "logits"),
            "exactness_margin_smallest": (min(margins), "logits"),
            "exactness_margin_largest": (max(margins), "logits"),
            "exactness_first_divergence_median": (median(one.index for one in found), "tokens"),
        }
        summary += [
            Metric(name=name, value=value, unit=unit, baseline=BASELINE, notes=notes)
            for name, (value, unit) in figures.items()
        ]
    return summary


def random_prompts(count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of 4 to 95 tokens for a model of random weights."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 96, (count,), generator=generator).tolist()
    return [
        tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())
        for length in lengths
    ]


def csv_rows(
    found: Sequence[Metric],
    *,
    device: str,
    versions: Mapping[str, str | None],
    command: str,
    commit: str | None = None,
) -> list[dict[str, object]]:
    """Rows of results.csv. commit: the one that was measured; None: this checkout's."""
    first = head(device=device, versions=versions, command=command, measured=commit)
    blank: dict[str, object] = {"p10": "", "p90": ""}
    return [
        {
            **first,
            **blank,
            "metric": one.name,
            "value": f"{one.value:.4g}",
            "unit": one.unit,
            "baseline": one.baseline,
            "notes": one.notes,
        }
        for one in found
    ]
