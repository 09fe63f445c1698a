# SPDX-License-Identifier: Apache-2.0
"""Whole rounds of a whole model: the AR step against the time to read its weights, verification
of trees against the AR step, and whether the host keeps up.

Random weights of GDN-1.3B's shape. Trees are binary, every row has four pending factors in its
log; one graph per size, its replays timed back to back. The AR step is the round of one node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

import torch

from specla.bench.graphs import time_graph
from specla.bench.kernel_metrics import Metric
from specla.bench.kernel_rows import RoundTime
from specla.bench.random_model import RandomGDN
from specla.config import GPU_LOG_CAPACITY
from specla.drafters.base import Drafter
from specla.engine.engine import Engine
from specla.ops.contract import DevicePlan
from specla.request import Request, SamplingParams
from specla.state import State
from specla.state.log import Log
from specla.topology.tree import DraftTree

PENDING = 4
SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (1, 64), (8, 1), (8, 16), (64, 1),
         (64, 2), (64, 4), (64, 8), (64, 16))  # fmt: skip
LOG_SIZES = ((1, 1), (1, 16), (16, 1), (16, 8), (64, 1), (64, 2), (64, 4))
LOG_CAPACITIES = (0, 2, 4, 8, 16)
ARRANGEMENTS = 3
"""Of a batch's logs: the mean counts."""
AR = "own AR step, graphed, exact, same run"
FLOOR = "weights read once at the read bandwidth of the same run"


def binary_tree(num_nodes: int) -> DraftTree:
    """parent(i) = (i - 1) // 2; tokens do not matter."""
    return DraftTree(tuple(range(num_nodes)), (-1, *((i - 1) // 2 for i in range(1, num_nodes))))


def pend(log: Log, nodes: int) -> None:
    """Give a log PENDING factors: in the ring and node 0 of the last round; without a ring what
    the last round can have left, `nodes` at most."""
    in_ring = PENDING - 1 if log.capacity >= PENDING - 1 else 0
    log.ring_len, log.path = in_ring, tuple(range(1 if in_ring else min(PENDING, nodes)))


def time_round(
    model: RandomGDN, rows: int, nodes: int, *, log_capacity: int = GPU_LOG_CAPACITY
) -> RoundTime:
    """One verify of `rows` binary trees, replayed."""
    state = State(
        model.info.recurrent,
        num_slots=rows,
        max_nodes=max(nodes, PENDING),
        log_capacity=log_capacity,
        dtype=model.dtype,
        device=model.device,
    )
    slots = [state.acquire() for _ in range(rows)]
    for slot in slots:
        pend(state.logs[slot], nodes)
    plan = state.begin(slots, [binary_tree(nodes)] * rows)
    assert isinstance(plan, DevicePlan)
    model.reserve(plan.round.tokens.numel())
    timing = time_graph([lambda: model.verify(plan, state)], parts=1)  # type: ignore[list-item]
    return RoundTime(rows=rows, nodes=nodes, us=timing.us, p10=timing.p10, p90=timing.p90)


def phases(capacity: int, step: int) -> list[tuple[int, int]]:
    """Entries of the ring and of the path when a round begins, from one fold to the next, of a
    row whose rounds append `step` factors each."""
    return [(ring, step) for ring in range(0, capacity + 1, step)]


def arrangements(capacity: int, rows: int, step: int) -> list[list[tuple[int, int]]]:
    """Logs of `rows` rows that are out of step, every phase as often as another, but for one."""
    cycle = phases(capacity, step)
    count = len(cycle) if rows < len(cycle) else min(ARRANGEMENTS, len(cycle))
    logs = [cycle[i % len(cycle)] for i in range(count * rows)]
    Random(0).shuffle(logs)
    return [logs[i * rows : (i + 1) * rows] for i in range(count)]


def time_logs(model: RandomGDN, rows: int, nodes: int, capacity: int) -> float:
    """Microseconds of a verify of `rows` binary trees of which all levels but one are accepted,
    round after round: of every phase of a log that holds `capacity`."""
    step = max(1, nodes.bit_length() - 1)
    found = []
    for logs in arrangements(capacity, rows, step):
        state = State(
            model.info.recurrent, num_slots=rows, max_nodes=nodes, log_capacity=capacity,
            dtype=model.dtype, device=model.device,
        )  # fmt: skip
        slots = [state.acquire() for _ in range(rows)]
        for slot, (ring, path) in zip(slots, logs, strict=True):
            state.logs[slot].ring_len, state.logs[slot].path = ring, tuple(range(path))
        plan = state.begin(slots, [binary_tree(nodes)] * rows)
        assert isinstance(plan, DevicePlan)
        verify = partial(model.verify, plan, state)
        found.append(time_graph([verify], parts=1, budget_s=0.1).us)  # type: ignore[list-item]
    return sum(found) / len(found)


def log_metrics(
    model: RandomGDN,
    sizes: Sequence[tuple[int, int]] = LOG_SIZES,
    capacities: Sequence[int] = LOG_CAPACITIES,
) -> Iterator[Metric]:
    """Rounds whose logs are as long as they come, by how many factors a log holds."""
    model.reserve(max(rows * nodes for rows, nodes in sizes))
    for rows, nodes in sizes:
        for capacity in capacities:
            yield Metric(
                name=f"log{capacity}_round_b{rows}_n{nodes}_us", unit="us", baseline="none",
                value=time_logs(model, rows, nodes, capacity), notes="rows out of step",
            )  # fmt: skip


def busy_fraction(
    model: RandomGDN, drafter: Drafter, *, max_nodes: int, rounds: int = 500
) -> tuple[float, float, float]:
    """(GPU time / wall time, wall, GPU seconds) of an engine over `rounds` rounds at batch 1.

    GPU time is that of as many later replays of the same graph with nothing between them: a
    little above 1 means that the host is hidden and those rounds were the longer ones.
    """
    state = State(
        model.info.recurrent,
        num_slots=1,
        max_nodes=max_nodes,
        log_capacity=GPU_LOG_CAPACITY,
        dtype=model.dtype,
        device=model.device,
    )
    engine = Engine(model, state, drafter, mode="exact", prefill_chunk=256)
    engine.capture()
    warm = 20
    params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    engine.add(Request(request_id="busy", prompt=None, prompt_token_ids=(1, 2, 3), params=params,
                       seed=0))  # fmt: skip
    for _ in range(warm):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    replay = engine.last_graph()
    replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        replay()
    end.record()
    torch.cuda.synchronize()
    gpu = begin.elapsed_time(end) * 1e-3
    return gpu / wall, wall, gpu


def metrics(times: Sequence[RoundTime], read_bytes: int, bandwidth: float) -> list[Metric]:
    """The figures of the issue's table that follow from the times."""
    us = {(t.rows, t.nodes): t for t in times}
    floor = read_bytes / bandwidth * 1e6
    found: list[Metric] = []
    if (1, 1) in us:
        step = us[1, 1]
        found += [
            Metric(name="ar_step_us", value=step.us, unit="us", p10=step.p10, p90=step.p90,
                   baseline=FLOOR, notes=f"floor {floor:.1f} us, {read_bytes / 1e9:.3f} GB"),
            Metric(name="ar_step_over_floor", value=step.us / floor, p10=step.p10 / floor,
                   p90=step.p90 / floor, baseline=FLOOR, notes=f"step {step.us:.1f} us"),
        ]  # fmt: skip
        for rows, nodes in us:
            if rows == 1 and nodes > 1:
                t = us[rows, nodes]
                found.append(
                    Metric(name=f"verify{nodes}_over_ar", value=t.us / step.us,
                           p10=t.p10 / step.us, p90=t.p90 / step.us, baseline=AR,
                           notes=f"{t.us:.1f} us"))  # fmt: skip
    for (rows, nodes), t in us.items():
        if rows > 1:
            found.append(Metric(name=f"round_b{rows}_n{nodes}_us", value=t.us, unit="us",
                                p10=t.p10, p90=t.p90, baseline="none"))  # fmt: skip
    return found


def busy_metrics(model: RandomGDN, *, max_nodes: int = 16) -> list[Metric]:
    """500 rounds of an engine whose drafter is on the device: random trees, then prompt lookup."""
    from specla.drafters.ngram import NgramDrafter
    from specla.testing_device import DeviceRandomTrees

    drafters: dict[str, Drafter] = {
        "random trees": DeviceRandomTrees(vocab_size=model.info.vocab_size),
        "ngram": NgramDrafter(),
    }
    found: list[Metric] = []
    for name, drafter in drafters.items():
        busy, wall, gpu = busy_fraction(model, drafter, max_nodes=max_nodes)
        notes = f"{name}, 500 rounds: wall {wall:.4f} s, GPU {gpu:.4f} s"
        suffix = "" if not found else "_ngram"
        found.append(Metric(name=f"gpu_busy_b1{suffix}", value=busy, unit="fraction",
                            baseline="wall time of 500 rounds", notes=notes))  # fmt: skip
    return found


def fla_metrics(step_us: float) -> list[Metric]:
    """The AR step against fla's generate."""
    from specla.bench.fla_generate import ms_per_token

    ms = ms_per_token()
    return [Metric(name="ar_speed_over_fla_generate", value=1e3 * ms / step_us,
                   baseline="fla 0.6.0 generate (eager), batch 1, bfloat16",
                   notes=f"fla {ms:.2f} ms/token; graphed AR step {step_us:.1f} us")]  # fmt: skip


def run(
    model: RandomGDN,
    sizes: Sequence[tuple[int, int]] = SIZES,
    tick: Callable[[RoundTime], None] | None = None,
) -> list[RoundTime]:
    """All sizes."""
    model.reserve(max(rows * nodes for rows, nodes in sizes))
    times = []
    for rows, nodes in sizes:
        times.append(time_round(model, rows, nodes))
        if tick:
            tick(times[-1])
    return times
