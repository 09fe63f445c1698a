# SPDX-License-Identifier: Apache-2.0
"""Running: one live sequence, from the queue to its completion. Host side only, no tensors.

Prefill stops one token short, so node 0 of the first round is the last prompt token, and from
then on `committed_len == prompt + output - 1` between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from specla.drafters.base import DrafterInfo, DraftRow
from specla.engine.stats import Acceptance, Decisions
from specla.engine.text import Decoder, TextDelta, TextStream
from specla.errors import RequestRejected
from specla.request import (
    Completion,
    FinishReason,
    Request,
    SpeculationReport,
    StreamDelta,
    Timing,
    TokenLogprob,
)
from specla.sampling.accept import RowLaw, Verdict

NOTHING_TO_DRAW = (
    "some token must have a finite logit after all filters, got none: the sampling parameters "
    "forbid every token, or the model returned NaN; check penalties, min_tokens, the checkpoint"
)


@dataclass(slots=True, eq=False)
class Running:
    """A request and everything it has produced so far.

    tokens: prompt, then output. num_prefilled: prompt tokens in the state. slot: 0 while waiting.
    """

    request: Request
    tokens: list[int]
    end_token_ids: frozenset[int]
    text: TextStream | None
    slot: int = 0
    num_prefilled: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    decisions: Decisions | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    decode_start: float | None = None
    full_text: str = ""
    _new_text: str = ""
    _num_delivered: int = 0
    # Tokens that had been committed when the latest round began.
    _num_committed: int = 0

    @classmethod
    def start(cls, request: Request, tokenizer: Decoder | None, eos: Sequence[int]) -> Running:
        """A sequence with nothing done yet.

        Raises:
            RequestRejected: stop strings without a tokenizer.
        """
        params = request.params
        if tokenizer is None and params.stop:
            raise RequestRejected(
                "stop strings need a tokenizer, the model has none; use stop_token_ids",
                param="stop",
            )
        stream = (
            None
            if tokenizer is None
            else TextStream(
                tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        return cls(request, list(request.prompt_token_ids), frozenset(ends), stream)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.request.prompt_token_ids

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was generated yet."""
        return len(self.tokens) == len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.params.max_tokens - (len(self.tokens) - len(self.prompt))

    @property
    def ready(self) -> bool:
        """Whether the whole prompt but its last token is in the state."""
        return self.num_prefilled >= len(self.prompt) - 1

    def next_chunk(self, size: int) -> tuple[int, ...]:
        """The next prompt tokens to prefill, at most `size`, never the last of the prompt."""
        end = min(self.num_prefilled + size, len(self.prompt) - 1)
        return self.prompt[self.num_prefilled : end]

    def start_decoding(self) -> None:
        """The clock of the decode rounds starts, if it has not."""
        if self.decode_start is None:
            self.decode_start = time.perf_counter()

    def draft_row(self, max_nodes: int) -> DraftRow:
        """What the drafter sees. A row that may emit one more token has no use for a draft."""
        return DraftRow(
            slot=self.slot,
            tokens=self.tokens,
            num_prompt_tokens=len(self.prompt),
            max_drafts=0 if self.remaining == 1 else max_nodes - 1,
            seed=self.request.seed,
        )

    def law(self) -> RowLaw:
        """What acceptance sees."""
        return RowLaw(
            params=self.request.params,
            seed=self.request.seed,
            history=self.tokens,
            num_prompt_tokens=len(self.prompt),
            end_token_ids=self.end_token_ids,
            remaining=self.remaining,
        )

    def take(self, verdict: Verdict, kernel: str) -> dict[str, int]:
        """Record one round that `kernel` verified; returns its counts (of Acceptance.add)."""
        self._num_committed = len(self.tokens) - 1
        self.tokens += verdict.emitted
        self.logprobs += verdict.logprobs or ()
        counts = {
            "drafted": verdict.num_drafted,
            "offered_depth": verdict.offered_depth,
            "accepted": verdict.num_accepted,
            "emitted": len(verdict.emitted),
        }
        self.acceptance.add(**counts, kernel=kernel)
        if verdict.finish in ("stop", "length"):
            # The model's own end token is no reason to name: it is the ordinary end (vLLM too).
            named = verdict.stop_token in self.request.params.stop_token_ids
            self.end(verdict.finish, verdict.stop_token if named else None)
        if self.text is not None:
            self._take_text(self.text.put(verdict.emitted))
        if verdict.finish == "error" and self.finish_reason is None:
            # Plain decoding would have come to a stop string before it failed.
            self.end("error", NOTHING_TO_DRAW)
        return counts

    def end(self, reason: FinishReason, stop: str | int | None) -> None:
        """Mark the sequence finished; it leaves at the end of the step."""
        self.finish_reason, self.stop_reason = reason, stop
        if self.decode_start is not None:
            self.seconds["decode"] = time.perf_counter() - self.decode_start

    def delta(self) -> StreamDelta:
        """What became certain since the last delta."""
        text, self._new_text = self._new_text, ""
        certain = len(self.output)
        if self.text is not None and self.text.holds_back:
            certain = self._num_delivered
        return self._deliver(text, certain, None)

    def last_delta(self, drafter: DrafterInfo, mode: str, costs: str) -> StreamDelta:
        """The rest, and the completion."""
        if self.text is not None:
            self._take_text(self.text.finish())
        text, self._new_text = self._new_text, ""
        completion = self._completion(drafter, mode, costs)
        return self._deliver(text, len(completion.token_ids), completion)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the block's wall time to this request."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def _take_text(self, delta: TextDelta) -> None:
        """Text so far; a stop string cuts tokens and beats every later end."""
        self.full_text += delta.text
        self._new_text += delta.text
        if delta.stop_reason is not None and self.stop_reason != delta.stop_reason:
            del self.tokens[len(self.prompt) + delta.num_tokens :]
            del self.logprobs[delta.num_tokens :]
            if self.finish_reason not in ("abort", "error"):
                self.end("stop", delta.stop_reason)

    def _deliver(self, text: str, count: int, completion: Completion | None) -> StreamDelta:
        new = tuple(self.output[self._num_delivered : count])
        self._num_delivered = count
        return StreamDelta(
            request_id=self.request.request_id, text=text, token_ids=new, completion=completion
        )

    def _completion(self, drafter: DrafterInfo, mode: str, costs: str) -> Completion:
        a, decode = self.acceptance, self.seconds["decode"]
        wanted = self.request.params.logprobs is not None
        return Completion(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.prompt,
            text=self.full_text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            seed=self.request.seed,
            logprobs=tuple(self.logprobs) if wanted else None,
            speculation=SpeculationReport(
                drafter=drafter.name,
                mode=mode,
                rounds=a.rounds,
                drafted=a.drafted,
                accepted=a.accepted,
                tokens_per_round=a.tokens_per_round,
                acceptance_by_depth=a.by_depth,
                acceptance_histogram=tuple(a.histogram),
                fallback=self._fallback(drafter),
                kernels=dict(a.kernels),
                costs=costs,
                budget=None if self.decisions is None else self.decisions.report(),
            ),
            timing=Timing(
                prefill_s=self.seconds["prefill"],
                decode_s=decode,
                tokens_per_s=a.emitted / decode if decode else 0.0,
            ),
        )

    def _fallback(self, drafter: DrafterInfo) -> str | None:
        """Why rounds ran otherwise than asked: the drafter's reason, and this text's."""
        reasons = [drafter.fallback]
        if drafter.longest is not None and self._num_committed > drafter.longest:
            reasons.append(
                f"no drafts after {drafter.longest} tokens of prompt and output: drafter option "
                "longest says how many it has room for"
            )
        return "; ".join(filter(None, reasons)) or None
