# SPDX-License-Identifier: Apache-2.0
"""A small Python function as a request and its answer see it."""

from __future__ import annotations

from typing import NamedTuple


class Function(NamedTuple):
    """A function as a request sees it: name, signature, what it does, and its indented body."""

    name: str
    signature: str
    does: str
    body: str

    def source(self, doc: bool = True) -> str:
        """The function's source, with its description as docstring unless ``doc`` is false."""
        quoted = f'    """{self.does[0].upper() + self.does[1:]}."""\n' if doc else ""
        return f"def {self.signature}:\n{quoted}{self.body}"
