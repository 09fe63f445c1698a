# SPDX-License-Identifier: Apache-2.0
"""What machine and which versions a result came from."""

from __future__ import annotations

import os
import platform

from specla.cli.records import versions


def describe() -> dict[str, str]:
    """Short facts, in the order they are printed."""
    import torch

    from specla.config import cpu_name

    found = {name: version for name, version in versions().items() if version is not None}
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    found["cpu"] = f"{cpu_name()}, {os.cpu_count()} cores, {_memory_gib()} GiB memory"
    capability = torch.backends.cpu.get_cpu_capability()
    found["torch cpu"] = f"{capability}, {torch.get_num_threads()} threads"
    found["gpu"] = _gpus()
    return found


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names)


def _memory_gib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
