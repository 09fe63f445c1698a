# SPDX-License-Identifier: Apache-2.0
"""Run `ops.gdn.fla_chunks` where fla is installed, on the CPU; write what it did as JSON.

    PYTHONPATH=src python fla_chunks_run.py OUT.json

Like tests/models/fla_reference.py this needs an environment of its own, and runs fla's kernels in
Triton's interpreter. There a kernel's `range` is Python's and gives integers, while fla's state
kernel asks its counter for another type: here the counter has that method.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch.nn.functional import normalize
from triton.runtime.autotuner import Autotuner, Heuristics

from specla.ops.contract import RecurrentShape
from specla.ops.gdn import reference
from specla.ops.gdn.fla_chunks import KERNELS, ChunkedRule, Workspace, configurations, load

# H, G, K, V
SHAPES = ((1, 2, 64, 32), (2, 2, 32, 64))
LENGTHS = (1, 5, 64, 70, 129)


class Counter(int):
    def to(self, dtype: Any) -> Counter:
        return self


def autotuners() -> dict[str, list[Any]]:
    """fla's own choices of each kernel: what is around the function that we launch."""
    found: dict[str, list[Any]] = {}
    for name, (module, function) in KERNELS.items():
        kernel = getattr(import_module(module), function)
        while isinstance(kernel, Autotuner | Heuristics):
            if isinstance(kernel, Autotuner):
                found[name] = kernel.configs
            kernel = kernel.fn
    return found


def is_among(pinned: dict[str, int], configs: list[Any]) -> bool:
    return any(
        pinned["num_warps"] == config.num_warps
        and all(pinned[name] == value for name, value in config.kwargs.items())
        for config in configs
    )


def inputs(seed: int, length: int, heads: tuple[int, int, int, int]) -> reference.Inputs:
    generator = torch.Generator().manual_seed(seed)
    H, G, K, V = heads
    q, k = (normalize(torch.randn(length, H, K, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(length, G, V, generator=generator)
    g = -3 * torch.rand(length, G, generator=generator)
    return reference.Inputs(q * K**-0.5, k, v, g, 2 * torch.rand(length, G, generator=generator))


def error(heads: tuple[int, int, int, int], length: int) -> float:
    """The largest difference to the reference, in o and in S, over the largest value."""
    H, G, K, V = heads
    shape = RecurrentShape(
        num_layers=1, num_key_heads=H, num_value_heads=G, key_dim=K, value_dim=V, conv_width=4
    )
    x, S = inputs(length, length, heads), inputs(0, G, (V, V, K, V)).q * K**0.5
    o, want = reference.prefill(S, x)
    space = Workspace.allocate(shape, length, torch.float32, torch.device("cpu"))
    got = ChunkedRule(shape, shared_memory=2**18)(S, x, space)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in ((got, o), (S, want)))


def main() -> None:
    kernels, tuned = load(), autotuners()
    import_module("fla.ops.common.chunk_delta_h").range = lambda *a: map(  # type: ignore[attr-defined]
        Counter, builtins.range(*a)
    )
    pinned = [configurations(key_dim, 2**18) for key_dim in (64, 128, 256)]
    report = {
        "tuned by fla": sorted(tuned),
        "launched": {name: type(kernel).__name__ for name, kernel in kernels.items()},
        "tuned when launched": [n for n, k in kernels.items() if hasattr(k, "configs")],
        "foreign": [n for p in pinned for n in tuned if not is_among(dict(p[n]), tuned[n])],
        "errors": [error(heads, length) for heads in SHAPES for length in LENGTHS],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
