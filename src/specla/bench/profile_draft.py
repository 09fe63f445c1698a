# SPDX-License-Identifier: Apache-2.0
"""What a call of a drafter costs, for a cost table.

One that drafts on the device is launched alone, for every shape of its rounds; what it reads of a
target is noise, since time does not depend on it. One of the host is called by an engine of its
own, over the target's own features, at the largest number of nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from specla.drafters.base import (
    DeviceDrafter,
    Drafter,
    ResidentDrafter,
    Shape,
    StateDrafter,
    TwofoldDrafter,
    shapes,
)
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.state import State


def placed(
    drafter: Drafter, model: TargetModel, state: State, *, rows: int, nodes: int, exact: bool
) -> Drafter:
    """In the form that an engine on this device takes, and bound where it needs the target, to
    whose states it is attached where it reads them."""
    if model.device.type == "cuda" and isinstance(drafter, TwofoldDrafter):
        drafter = drafter.for_gpu(num_slots=rows, max_nodes=nodes)
    if isinstance(drafter, ResidentDrafter):
        drafter.bind(model, num_slots=rows, max_nodes=nodes, exact=exact)
        if isinstance(drafter, StateDrafter):
            drafter.attach(state)
    return drafter


def asked(drafter: Drafter, nodes: int, *, on_gpu: bool) -> list[Shape]:
    """What its calls are measured for. nodes: of the largest tree, a power of two."""
    if on_gpu and isinstance(drafter, DeviceDrafter):
        return [shape for shape in shapes(drafter, nodes) if shape.depth]
    return [Shape(nodes, nodes - 1)]


def launching(
    drafter: DeviceDrafter, model: TargetModel, arrays: RowArrays, rnd: DeviceRound, depth: int
) -> Callable[[], None]:
    """A call on the device, for live rows in slots 1, 2, ...: each has had half of its deepest
    path accepted in the round before. From the second call on it drafts."""
    num_rows, path = len(rnd.slot), 1 + depth // 2
    ints = torch.arange(max(num_rows + 1, path), dtype=torch.int32, device=model.device)
    rnd.slot.copy_(ints[1 : num_rows + 1])
    rnd.num_nodes.fill_(1)
    rnd.tokens.zero_()
    rnd.path[:, :path] = ints[:path]
    rnd.path_len.fill_(path)
    features = None
    if isinstance(drafter, ResidentDrafter):
        layers, nodes = drafter.feature_layers, rnd.tokens.numel()
        size = len(layers), nodes, model.info.hidden_size
        noise = torch.randn(size, device=model.device).to(model.dtype)
        features = Features(layers, noise)
        for slot in range(1, num_rows + 1):
            drafter.reset(slot)
        drafter.enter(list(range(1, num_rows + 1)))
    return lambda: drafter.launch(arrays, rnd, features, depth=depth)


def drafting(engine: Engine) -> Iterator[float]:
    """Microseconds of the drafter's call in each next round of an engine that has requests."""
    while True:
        before = engine.stats.seconds["draft"]
        engine.step()
        yield 1e6 * (engine.stats.seconds["draft"] - before)


def for_a_while(samples: Iterator[float], *, fewest: int, seconds: float) -> list[float]:
    """Those that come in that time, so many at least."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while len(found) < fewest or time.perf_counter() < until:
        found.append(next(samples))
    return found
