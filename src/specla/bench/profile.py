# SPDX-License-Identifier: Apache-2.0
"""Measure a cost table: rounds and state kernels of one model on one device, by size.

On a GPU a time is that of a graph's replays, as everywhere in `bench`; on a CPU it is wall time,
planning included, in several passes over all sizes: what slows a shared machine down for a while
slows all of them. Trees are a chain and a binary tree of each size, every row has the pending
factors of `bench.rounds`, and tokens are chosen greedily. Sizes are the buckets that an engine
would run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from specla.bench import graphs
from specla.bench import profile_draft as draft
from specla.bench.graphs import Timing, time_graph
from specla.bench.kernel_cases import Case, binary, chain, depth_of
from specla.bench.kernel_problem import Problem
from specla.bench.rounds import pend
from specla.bench.table import spread
from specla.drafters.base import DeviceDrafter, Drafter, Shape
from specla.engine.cost import Cost, CostTable, Identity, Part
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.ops.contract import DevicePlan, DeviceRound, LayerState, RoundPlan, RowArrays
from specla.ops.gdn import reference
from specla.request import Request, SamplingParams
from specla.sampling.accept import RowLaw, accept
from specla.state import State
from specla.state.log import Log
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
HISTORY = 512
"""Tokens a drafter can look back on while it is timed."""
PASSES = 3
PLAIN_PATIENCE = 5
Step = Callable[[], object]
# What a measurement came to: on a GPU a summary, on a CPU microseconds of each call so far.
Found = Timing | list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One measurement to make."""

    rows: int
    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def tree(self) -> DraftTree:
        return DraftTree(tuple(range(self.nodes)), self.parents)


class Profile:
    """Everything that is measured for one model and mode.

    Args:
        model: loaded; in exact mode checked (`check_rows`).
        max_batch, max_nodes: the largest round; sizes are powers of two up to there.
        log_capacity: of the engine that the table is for.
        drafter: one more column: what a call of it costs (`bench.profile_draft`). In mode fast
            trees are no deeper than its own: that decides how the closed form runs.
        budget_s: seconds per measurement.
    """

    def __init__(
        self,
        model: TargetModel,
        *,
        mode: str,
        max_batch: int,
        max_nodes: int,
        log_capacity: int,
        drafter: Drafter | None = None,
        budget_s: float = 0.05,
    ) -> None:
        self._model, self._mode, self._budget = model, mode, budget_s
        self._nodes, self._log_capacity = bucket(max_nodes), log_capacity
        self._max_path = self._nodes
        if mode == "fast" and drafter is not None:  # binary trees are measured in any case
            deepest = max(drafter.info.max_depth + 1, self._nodes.bit_length())
            self._max_path = min(deepest, self._nodes)
        self._on_gpu = model.device.type == "cuda"
        self._batches = [1 << i for i in range(bucket(max_batch).bit_length())]
        self._sizes = [Size(rows=b, parents=p) for b in self._batches for p in self._trees()]
        self._state = self._new_state(self._batches[-1])
        self._slots = [self._state.acquire() for _ in range(self._batches[-1])]
        model.reserve(self._batches[-1] * self._nodes)
        self.drafter = drafter and draft.placed(
            drafter, model, self._state,
            rows=self._batches[-1], nodes=self._nodes, exact=mode == "exact",
        )  # fmt: skip
        """In the form that is measured."""
        self._passes = 1 if self._on_gpu else PASSES
        self._cold = True  # nothing has been run yet, a first call does not count
        self._problems: dict[Size, tuple[LayerState, RoundPlan, reference.Inputs]] = {}
        self._found: dict[tuple[Part, int, int, int, str], Found] = {}

    def __len__(self) -> int:
        """Sizes of every pass, and drafts: the steps of `run`."""
        return self._passes * len(self._sizes) + len(self._drafts())

    def run(self) -> Iterator[int]:
        """Measure. Yields how many steps are done."""
        steps = [partial(self._measure, size) for size in self._sizes] * self._passes
        steps += [partial(self._measure_draft, *one) for one in self._drafts()]
        for done, step in enumerate(steps, 1):
            self._cold = done <= len(self._sizes)
            step()
            yield done

    def table(self) -> CostTable:
        """What was measured."""
        return CostTable(Identity.of(self._model, self._log_capacity), self.measured)

    @property
    def measured(self) -> list[Cost]:
        """One cost per measurement."""
        return [self._cost(*key, found) for key, found in self._found.items()]

    def _cost(
        self, part: Part, rows: int, nodes: int, depth: int, kernel: str, found: Found
    ) -> Cost:
        timing = _timing(found) if isinstance(found, list) else found
        return Cost(
            part=part, rows=rows, nodes=nodes, depth=depth, kernel=kernel, mode=self._mode,
            us=timing.us, p10=timing.p10, p90=timing.p90,
        )  # fmt: skip

    # ---- the target

    def _trees(self) -> list[tuple[int, ...]]:
        """Of each size the chain, as deep as trees may be, and, where it is less deep, the binary
        tree: sizes are told apart by depth."""
        found: list[tuple[int, ...]] = []
        for nodes in (1 << i for i in range(self._nodes.bit_length())):
            tree, deep = binary(nodes), self._chain(nodes)
            found += [tree] if depth_of(tree) == depth_of(deep) else [tree, deep]
        return found

    def _chain(self, nodes: int) -> tuple[int, ...]:
        """What is too much for one hangs below node 0."""
        deep = chain(min(nodes, self._max_path))
        return deep + (0,) * (nodes - len(deep))

    def _measure(self, size: Size) -> None:
        slots, trees = self._slots[: size.rows], [size.tree] * size.rows
        for slot in slots:
            pend(self._state.logs[slot], size.nodes)
        depth = depth_of(size.parents)
        for kernel in self._model.kernels(self._mode):
            # Every other round is given in plain steps: those are measured longer.
            patience = PLAIN_PATIENCE if size.nodes == 1 else 1
            verify = self._time(self._verify(slots, trees, kernel), patience=patience)
            self._add("verify", size.rows, size.nodes, depth, verify, kernel)
            alone = self._time_kernel(size, kernel)
            self._add("kernel", size.rows, size.nodes, depth, alone, kernel)
        if depth == depth_of(self._chain(size.nodes)):
            timing = self._time_accept(slots, trees)
            self._add("accept", size.rows, size.nodes, depth, timing)

    def _verify(self, slots: Sequence[int], trees: Sequence[DraftTree], kernel: str) -> Step:
        """One pass of the target; on a CPU with the planning, which is what a round does there."""
        plan = self._state.begin(slots, trees)
        if isinstance(plan, DevicePlan):
            plan = plan._replace(kernel=kernel)
            return lambda: self._model.verify(plan, self._state)
        return lambda: self._model.verify(self._state.begin(slots, trees), self._state)

    def _time_accept(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> Found:
        plan = self._state.begin(slots, trees)
        logits = self._model.verify(plan, self._state)
        if isinstance(plan, DevicePlan):
            return self._time(*self._device_accept(plan.round, logits))
        laws = [_law() for _ in slots]
        return self._time(lambda: accept(logits.float(), trees, plan.offsets, laws))

    def _device_accept(self, rnd: DeviceRound, logits: Tensor) -> list[Step]:
        """Accepting leaves trees of one node: the next replay gets this one's sizes back."""
        from specla.sampling.triton import VERDICT_HEADER, choose, new_choices
        from specla.sampling.triton import accept as accept_on_device

        rows, nodes = rnd.tokens.shape
        choices = new_choices(logits.shape[0], logits.shape[1], logits.device)
        words = torch.zeros(
            rows, VERDICT_HEADER + nodes + 1, dtype=torch.int32, device=logits.device
        )
        arrays, full = self._rows(rows, 1), rnd.num_nodes.clone()
        threshold = self._state.fold_threshold
        return [
            lambda: rnd.num_nodes.copy_(full),
            lambda: choose(logits, arrays, rnd, choices),
            lambda: accept_on_device(choices, arrays, rnd, words, fold_threshold=threshold),
        ]

    def _time_kernel(self, size: Size, kernel: str) -> Found:
        """One layer's state kernel, over states that are in no cache on a GPU."""
        model, shape = self._model, self._model.info.recurrent
        log = Log(self._log_capacity, self._nodes, self._log_capacity)
        pend(log, size.nodes)
        case = Case(
            name=kernel, shape=shape, num_rows=size.rows, parents=size.parents,
            ring_len=log.ring_len, path=log.path, log_capacity=log.capacity,
            threshold=log.threshold,
        )  # fmt: skip
        if self._on_gpu:
            return self._time_on_cold_layers(case, kernel)
        if size not in self._problems:
            problem = Problem(case, num_layers=1, device=model.device, dtype=model.dtype)
            self._problems[size] = problem.layers[0], problem.plan(), problem.truth.x
        layer, plan, x = self._problems[size]
        return self._time(lambda: reference.verify(layer, plan, x))

    def _time_on_cold_layers(self, case: Case, kernel: str) -> Timing:
        model, s = self._model, case.shape
        layer_bytes = 4 * case.num_rows * s.num_value_heads * s.value_dim * s.key_dim
        layers = graphs.cold_layers(layer_bytes, graphs.l2_bytes(model.device))
        problem = Problem(case, num_layers=layers, device=model.device, dtype=model.dtype)
        pdl = torch.cuda.get_device_capability(model.device) >= (9, 0)
        calls = {"walk": _walks, "closed": _closed_forms}[kernel](problem, pdl)
        return time_graph(calls, parts=layers, budget_s=self._budget)

    # ---- the drafter

    def _drafts(self) -> list[tuple[int, Shape]]:
        """Rows and shapes of the calls to measure."""
        if self.drafter is None:
            return []
        wanted = draft.asked(self.drafter, self._nodes, on_gpu=self._on_gpu)
        return [(rows, shape) for rows in self._batches for shape in wanted]

    def _measure_draft(self, rows: int, shape: Shape) -> None:
        assert self.drafter is not None
        found = self._time_draft(self.drafter, rows, shape)
        self._add("draft", rows, *shape, found, self.drafter.info.priced_as)

    def _time_draft(self, drafter: Drafter, rows: int, shape: Shape) -> Found:
        if not (self._on_gpu and isinstance(drafter, DeviceDrafter)):
            return self._time_host_draft(drafter, rows)
        arrays, rnd = self._rows(rows, HISTORY), self._state.rounds.round(rows, shape.nodes)
        return self._time(draft.launching(drafter, self._model, arrays, rnd, shape.depth))

    def _time_host_draft(self, drafter: Drafter, rows: int) -> Found:
        """In an engine of its own, which is what hands a drafter its rows."""
        engine = Engine(
            self._model, self._new_state(rows), drafter, mode=self._mode, prefill_chunk=HISTORY,
        )  # fmt: skip
        for row in range(rows):
            prompt = tuple(_tokens(row, self._model.info.vocab_size))
            engine.add(
                Request(request_id=str(row), prompt_token_ids=prompt, params=GREEDY, seed=row)
            )
        engine.step()  # prefills
        calls = draft.drafting(engine)
        samples = draft.for_a_while(calls, fewest=PASSES, seconds=4 * self._budget)
        for row in range(rows):
            engine.abort(str(row))
        return samples

    # ---- common

    def _time(self, *calls: Step, patience: int = 1) -> Found:
        budget = patience * self._budget / self._passes
        if self._on_gpu:
            return time_graph(list(calls), parts=1, budget_s=budget)  # type: ignore[arg-type]
        (call,) = calls
        if self._cold:
            call()
        return _wall(call, budget)

    def _rows(self, rows: int, history: int) -> RowArrays:
        """Live greedy rows, on the device."""
        device, tokens = self._model.device, self._model.info.vocab_size
        text = [_tokens(row, tokens)[:history] for row in range(rows)]

        def full(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return RowArrays(
            seed=full(0, torch.int64),
            len_tokens=full(history),
            remaining=full(2**31 - 1),
            temperature=full(0, torch.float64),
            ends=full(-1).unsqueeze(1),
            history=torch.tensor(text, dtype=torch.int32, device=device),
        )

    def _new_state(self, rows: int) -> State:
        return State(
            self._model.info.recurrent,
            num_slots=rows,
            max_nodes=self._nodes,
            max_path=self._max_path,
            log_capacity=self._log_capacity,
            dtype=self._model.dtype,
            device=self._model.device,
        )

    def _add(
        self, part: Part, rows: int, nodes: int, depth: int, found: Found, kernel: str = ""
    ) -> None:
        key = part, rows, nodes, depth, kernel
        before = self._found.get(key)
        if isinstance(found, list) and isinstance(before, list):
            found = before + found
        self._found[key] = found


def _walks(problem: Problem, pdl: bool) -> list[graphs.Call]:
    """As a model launches them, that is for any tree, a chain too."""
    from specla.bench.methods import Launch
    from specla.ops.gdn.triton import walk

    launch, case = Launch.bind(problem, pdl=pdl), problem.case
    for layer in problem.layers:
        launch.prepare(layer)

    def verify(index: int, layer: LayerState) -> None:
        walk(
            layer, problem.round, launch.workspace.of_layer(index, case.num_rows),
            shape=case.shape, log_capacity=case.log_capacity, threshold=case.threshold, pdl=pdl,
        )  # fmt: skip

    return [partial(verify, index, layer) for index, layer in enumerate(problem.layers)]


def _closed_forms(problem: Problem, pdl: bool) -> list[graphs.Call]:
    from specla.bench.methods import fast

    return fast(pdl=pdl, with_prepare=False).build(problem).calls


def _tokens(row: int, vocab_size: int) -> list[int]:
    """A text that repeats itself now and then, another one for each row."""
    return [(7 * row + i * i) % vocab_size for i in range(HISTORY)]


def _law() -> RowLaw:
    return RowLaw(
        params=GREEDY, seed=0, history=[0], num_prompt_tokens=1, end_token_ids=(),
        remaining=GREEDY.max_tokens,
    )  # fmt: skip


def _wall(call: Step, budget_s: float) -> list[float]:
    """Wall time of each call, microseconds, until the budget is spent; once at least."""
    samples: list[float] = []
    until = time.perf_counter() + budget_s
    while not samples or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - start))
    return samples


def _timing(samples: Sequence[float]) -> Timing:
    p10, p90 = spread(samples)
    return Timing(us=median(samples), p10=p10, p90=p90)
