# SPDX-License-Identifier: Apache-2.0
"""Files of a drafter or of its training, which are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place in one rename once the block is over.
    Its mode is that of any new file: safetensors gives its own to their owner alone."""
    part = path.with_suffix(".tmp")
    part.unlink(missing_ok=True)
    part.touch()
    mode = part.stat().st_mode
    yield part
    part.chmod(mode)
    part.rename(path)
