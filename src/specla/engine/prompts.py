# SPDX-License-Identifier: Apache-2.0
"""Prompts: what an engine does before a row's rounds, for the target and for a drafter that reads
its features. Several prompts may be on their way at once; none changes another's bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from specla.drafters.base import Drafter, FeatureDrafter
from specla.engine.running import Running
from specla.engine.scheduler import Scheduler
from specla.engine.stats import EngineStats
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.transfer import mark
from specla.state import State

Dropping = Callable[[Sequence[Running]], AbstractContextManager[None]]
"""What raises inside ends these rows."""


class Prompts:
    """Of one engine. chunk: prompt tokens per model call (a multiple of 64)."""

    def __init__(
        self,
        model: TargetModel,
        state: State,
        scheduler: Scheduler,
        stats: EngineStats,
        *,
        chunk: int,
    ) -> None:
        self._model, self._state, self._scheduler = model, state, scheduler
        self._stats, self._chunk = stats, chunk
        # Waits for the last prompts that were launched; and since when they are under way.
        self._through, self._began = mark(state.device), 0.0

    def advance(self, drafter: Drafter, features: Features | None, dropping: Dropping) -> None:
        """One chunk of every prompt that is not in the state yet, all but its last token.
        features: for a drafter that reads them."""
        rows = list(self._scheduler.prefilling())
        with self._model.side_by_side() if len(rows) > 1 else nullcontext():
            for row in rows:
                with dropping([row]), self._stats.phase("prefill"), row.timing("prefill"):
                    self._take_in(row, drafter, features)
                if row.ready:
                    self._share(row, drafter)
        if rows:
            self._through, self._began = mark(self._state.device), time.perf_counter()

    def _take_in(self, row: Running, drafter: Drafter, features: Features | None) -> None:
        chunk = row.next_chunk(self._chunk)
        self._model.prefill(chunk, row.slot, self._state, features)
        if isinstance(drafter, FeatureDrafter) and features is not None:
            start = row.num_prefilled + 1
            drafter.prefill(row.slot, row.prompt[start : start + len(chunk)], features.rows())
        row.num_prefilled += len(chunk)
        self._stats.prefill_tokens += len(chunk)

    def _share(self, row: Running, drafter: Drafter) -> None:
        for slot in self._scheduler.share_prefill(row):
            if isinstance(drafter, FeatureDrafter):
                drafter.fork(row.slot, slot)

    def start_decoding(self, rows: Sequence[Running]) -> None:
        """The clock of new rows' rounds starts when the device is through their prompts, which so
        far may only have been launched. They were on their way together, and share the time that
        has gone by since by their tokens. Rounds may have been launched behind them."""
        new = [row for row in rows if row.decode_start is None]
        if not new:
            return
        self._through()
        # Prompts of one token are none.
        waited = time.perf_counter() - self._began if any(row.num_prefilled for row in new) else 0
        self._stats.seconds["prefill"] += waited
        total = sum(len(row.prompt) for row in new)
        for row in new:
            row.seconds["prefill"] += waited * len(row.prompt) / total
            row.start_decoding()
