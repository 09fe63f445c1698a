# SPDX-License-Identifier: Apache-2.0
"""From the host to the device without waiting for it.

A copy from pageable memory holds the host until the device has come to it; one from pinned memory
only takes its place behind what was launched before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on `device`, or on its way there."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def send(x: Tensor, into: Tensor) -> None:
    """A host's tensor to where there is room for it on a device."""
    into.copy_(x.pin_memory() if into.is_cuda else x, non_blocking=True)


def ints(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on `device`, or on their way there."""
    return sent(torch.tensor(values, dtype=torch.int64), device)


def mark(device: torch.device) -> Callable[[], None]:
    """Waits until `device` is through what has been launched there by now; a CPU is."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
