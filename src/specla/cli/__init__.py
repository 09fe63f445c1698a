# SPDX-License-Identifier: Apache-2.0
"""The `specla` command: one file per sub-command, and `main`, which owns every exit code.

Text goes to stdout; progress, summaries and errors go to stderr. A failure is one line,
`specla: error: ...`, saying what must hold, what was given and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from specla.cli.app import app
from specla.cli.failure import report
from specla.cli.options import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (see `specla --help`)."""
    settings = Settings()
    try:
        code = app(args=argv, obj=settings, standalone_mode=False, prog_name="specla")
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the end of the line)
        return report(error, debug=settings.debug)
    return code if isinstance(code, int) else 0
