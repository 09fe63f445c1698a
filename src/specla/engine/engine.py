# SPDX-License-Identifier: Apache-2.0
"""Engine: owns model, state, drafter and scheduler; `step` is one round of the whole mechanism.

    draft -> verify -> accept -> commit

Plain decoding is the same loop with trees of one node. The engine names no drafter, model or
recurrence family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from specla.config import CHEAPEST, OFF
from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    FeatureDrafter,
    Observation,
    Shape,
    StateDrafter,
    TwofoldDrafter,
)
from specla.engine.cost import CostTable
from specla.engine.drafts import check_drafts
from specla.engine.kernels import Kernels
from specla.engine.prices import Prices
from specla.engine.prompts import Prompts
from specla.engine.running import Running
from specla.engine.scheduler import Scheduler, request_fits
from specla.engine.spending import Spending
from specla.engine.stats import EngineStats
from specla.engine.text import Decoder
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.request import Request, StreamDelta
from specla.sampling.accept import Verdict, accept
from specla.sampling.filters import validate
from specla.state import State
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.engine.graphs import GraphRounds


class Engine:
    """Batched speculative decoding over a fixed set of slots.

    Args:
        model, state, drafter: the three that a round needs; state belongs to this engine.
        mode: reported with every result.
        prefill_chunk: prompt tokens per model call (a multiple of 64).
        tokenizer: turns tokens into text; None leaves text empty and refuses stop strings.
        end_token_ids: what ends a request unless it ignores them; None means the model's.
        kernel: what verifies: one of `model.kernels(mode)`, or "cheapest".
        costs: measured costs to choose by; None: the model's defaults.
        budget: "paying": draft what pays; a number: so many drafts per row; "off": all there are.
    """

    def __init__(
        self,
        model: TargetModel,
        state: State,
        drafter: Drafter,
        *,
        mode: str,
        prefill_chunk: int,
        tokenizer: Decoder | None = None,
        end_token_ids: Sequence[int] | None = None,
        kernel: str = CHEAPEST,
        costs: CostTable | None = None,
        budget: str = OFF,
    ) -> None:
        self.model, self.state = model, state
        self._on_gpu = state.device.type == "cuda"
        self.mode, self._tokenizer = mode, tokenizer
        self._ends = model.info.eos_token_ids if end_token_ids is None else end_token_ids
        self._budget = budget
        self.watch: Callable[[Sequence[tuple[str, Observation]]], None] | None = None
        """Called after every round that the host takes part in, with requests' ids."""
        self.stats = EngineStats()
        self.kernels = Kernels(model, mode, kernel=kernel, costs=costs)
        self._graphs: GraphRounds | None = None
        self.use(drafter)
        self.scheduler = Scheduler(state)
        self._prompts = Prompts(model, state, self.scheduler, self.stats, chunk=prefill_chunk)
        # Refused here rather than in the middle of a round.
        self.kernels.of(state.pool.num_slots, state.max_nodes)
        self._size = (1, 1)  # rows and nodes of the last round without a GPU
        if self._on_gpu:
            # Triton is imported where there is a GPU only.
            from specla.engine.graphs import GraphRounds

            free = self.spending is not None and self.spending.free is not None
            self._graphs = GraphRounds(
                model, state, self.drafter, kernel=self.kernels.of,
                width=self._width if free else None,
            )  # fmt: skip

    def use(self, drafter: Drafter) -> None:
        """Draft with this one from now on, or on a GPU with its form for there; no request may be
        running. With the one that there is already, only the budget starts anew.

        Raises:
            ConfigError: it was trained for another target, drafts deeper than the state's logs
                allow, or on a GPU is of another kind than the one before, or cannot draft there as
                it was asked to.
        """
        if drafter is getattr(self, "drafter", None):
            self.spending = self._new_spending()
            return
        self._check_depth(drafter)
        if self._on_gpu and isinstance(drafter, TwofoldDrafter):
            drafter = drafter.for_gpu(
                num_slots=self.state.pool.num_slots, max_nodes=self.state.max_nodes
            )
        if self._graphs is not None:
            self._graphs.use(drafter)
        self.drafter = drafter
        self._features: Features | None = None
        if isinstance(drafter, FeatureDrafter):
            drafter.bind(
                self.model,
                num_slots=self.state.pool.num_slots,
                max_nodes=self.state.max_nodes,
                exact=self.mode == "exact",
            )
            self._features = Features(drafter.feature_layers)
        if isinstance(drafter, StateDrafter):
            drafter.attach(self.state)
        self.spending = self._new_spending()

    def _check_depth(self, drafter: Drafter) -> None:
        """Trees made on the device are seen by nobody before they are verified."""
        deepest = min(drafter.info.max_depth + 1, self.state.max_nodes)
        if deepest > self.state.max_path:
            raise ConfigError(
                f"the state's max_path must hold the drafter's paths of {deepest} nodes, it is "
                f"{self.state.max_path}; make the State with max_path={deepest} or more"
            )

    def _new_spending(self) -> Spending | None:
        if self._budget == OFF or not self.drafter.info.max_depth:
            return None
        self.stats.decisions.policy = self._budget
        prices = Prices(
            self.kernels, mode=self.mode, device=self.state.device.type,
            drafter=self.drafter.info.priced_as,
            level=self.drafter.info.level_bytes / self.model.info.weight_bytes,
        )  # fmt: skip
        return Spending(
            self._budget, self.drafter, self.state.max_nodes, prices, self.stats.decisions,
            on_device=self._on_gpu and isinstance(self.drafter, DeviceDrafter),
        )  # fmt: skip

    def _width(self, rows: Sequence[Running]) -> Shape:
        """Of the next round that drafts on the device, or might."""
        assert self.spending is not None
        return self.spending.width(rows)

    def capture(self, tick: Callable[[int, int], None] | None = None) -> None:
        """On a GPU: make the graphs of every round size now. tick: (done, in all)."""
        if self._graphs is not None:
            self._graphs.capture(tick)

    def last_graph(self) -> Callable[[], None]:
        """On a GPU: replays the last free round's graph, for measuring it."""
        assert self._graphs is not None, "there are no graphs without a GPU"
        return self._graphs.replay()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejected: the engine cannot serve it as asked; the message says why.
        """
        request_fits(request, self.model.info.vocab_size)
        validate(request.params, self.model.info.vocab_size)
        self.scheduler.add(Running.start(request, self._tokenizer, self._ends))

    def abort(self, request_id: str) -> StreamDelta | None:
        """Stop a request now and free its slot; None if there is no such live request."""
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        sequence.end("abort", None)
        return self._leave(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> list[StreamDelta]:
        """Prefill what is new, then one round over every ready row. Returns what became certain.

        If anything raises, the rows it happened to are dropped and their slots freed, so that the
        engine can go on with the others.
        """
        self.stats.steps += 1
        self.scheduler.admit()
        self._prompts.advance(self.drafter, self._features, self._dropping)
        rows = self.scheduler.ready()
        if not rows:
            return []
        with self._dropping(rows):
            # A device with rows of its own need not be idle until the host has seen to the new
            # ones' clocks: their round is launched first.
            if self._graphs is None or self._graphs.is_idle:
                self._prompts.start_decoding(rows)
            if self._graphs is None:
                return self._finish(rows, self._round(rows))
            with self.stats.phase("verify"):
                resting = self.spending is not None and self.spending.rests(rows)
                self._graphs.resting = resting
                free = self._graphs.is_free(rows)
                ended = self._graphs.advance(rows) if free else self._graphs.settle()
            self._prompts.start_decoding(rows)
            if free or ended:
                if self.spending is not None:
                    shape = Shape(self._graphs.size[1], self._graphs.depth)
                    self.spending.landed(ended, shape)
                return self._finish([row for row, _ in ended], [verdict for _, verdict in ended])
            return self._finish(rows, self._round(rows))

    @contextmanager
    def _dropping(self, rows: Sequence[Running]) -> Iterator[None]:
        """What raises leaves rows half done: neither state nor tokens can be trusted. They end,
        so that a round which the device still has under way is not taken for theirs."""
        try:
            yield
        except BaseException:
            # All of them, whatever a drafter makes of forgetting one.
            with ExitStack() as each:
                for row in rows:
                    if self.scheduler.find(row.request.request_id) is row:
                        if row.finish_reason is None:
                            row.end("abort", None)
                        each.callback(self._free, row)
            raise

    def _round(self, rows: Sequence[Running]) -> list[Verdict]:
        phase, slots = self.stats.phase, [row.slot for row in rows]
        before = self.stats.round_seconds
        with phase("draft"):
            trees = self._draft(rows)
        with phase("verify"):
            judged, logits, offsets = self._verify(rows, trees)
        with phase("accept"):
            verdicts = self._judge(judged, logits.float(), trees, offsets, rows)
        with phase("commit"):
            self.state.commit(slots, [verdict.path for verdict in verdicts])
            seen = [
                Observation(slot=slot, tree=tree, path=v.path, emitted=v.emitted)
                for slot, tree, v in zip(slots, trees, verdicts, strict=True)
                if v.emitted
            ]
            self.drafter.observe(seen)
            self._feed(seen, dict(zip(slots, offsets, strict=False)))
            if self.watch is not None:
                names = {row.slot: row.request.request_id for row in rows}
                self.watch([(names[one.slot], one) for one in seen])
            if self.spending is not None:
                us = 1e6 * (self.stats.round_seconds - before)
                self.spending.observe(seen, dict(zip(slots, rows, strict=True)), us)
        return verdicts

    def _feed(self, seen: Sequence[Observation], starts: Mapping[int, int]) -> None:
        """Features of the committed paths, for a drafter that reads them. starts: where each
        slot's nodes start in the round's."""
        if not (seen and isinstance(self.drafter, FeatureDrafter)):
            return
        features = self._features if self._graphs is None else self._graphs.features
        assert features is not None
        at = [starts[one.slot] + node for one in seen for node in one.path[: len(one.emitted)]]
        self.drafter.feed(seen, features.rows(at))

    def _verify(
        self, rows: Sequence[Running], trees: Sequence[DraftTree]
    ) -> tuple[list[Verdict | None], Tensor, tuple[int, ...]]:
        """Verdicts of the rows that a GPU has judged by itself, the logits, and where each row's
        nodes start in them."""
        if self._graphs is not None:
            return self._graphs.drive(rows, trees)
        plan = self.state.begin([row.slot for row in rows], trees)
        self._size = len(rows), max(tree.num_nodes for tree in trees)
        logits = self.model.verify(plan, self.state, self._features)
        return [None] * len(rows), logits, plan.offsets

    def _judge(
        self,
        judged: Sequence[Verdict | None],
        logits: Tensor,
        trees: Sequence[DraftTree],
        offsets: Sequence[int],
        rows: Sequence[Running],
    ) -> list[Verdict]:
        """The host's acceptance for every row that has no verdict yet."""
        open_ = [b for b, verdict in enumerate(judged) if verdict is None]
        found = accept(
            logits,
            [trees[b] for b in open_],
            [offsets[b] for b in open_],
            [rows[b].law() for b in open_],
        )
        mine = dict(zip(open_, found, strict=True))
        return [mine[b] if v is None else v for b, v in enumerate(judged)]

    def _draft(self, rows: Sequence[Running]) -> list[DraftTree]:
        """The drafter's trees."""
        lengths = [len(row.tokens) for row in rows]
        asked = [row.draft_row(self.state.max_nodes) for row in rows]
        trees = (self.spending or self.drafter).draft(asked)
        check_drafts(
            trees, rows, lengths, vocab_size=self.model.info.vocab_size,
            drafter=self.drafter.info.name,
        )  # fmt: skip
        if self.spending is not None:
            return self.spending.choose([row.slot for row in rows], trees)
        return trees

    def _finish(self, rows: Sequence[Running], verdicts: Sequence[Verdict]) -> list[StreamDelta]:
        # Of the round that these verdicts are about: the device may be at another one by now.
        kernel = self.kernels.of(*(self._size if self._graphs is None else self._graphs.size))
        deltas = []
        for row, verdict in zip(rows, verdicts, strict=True):
            counts = row.take(verdict, kernel)
            self.stats.acceptance.add(**counts, kernel=kernel)
            deltas.append(self._leave(row) if row.finish_reason else row.delta())
        return deltas

    def _leave(self, row: Running) -> StreamDelta:
        self._free(row)
        return row.last_delta(self.drafter.info, self.mode, self.kernels.source)

    def _free(self, row: Running) -> None:
        try:
            if row.slot:
                self.drafter.reset(row.slot)
                if self.spending is not None:
                    self.spending.reset(row.slot)
        finally:
            self.scheduler.remove(row)
            reason = row.finish_reason or "abort"
            self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
