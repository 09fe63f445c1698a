# SPDX-License-Identifier: Apache-2.0
"""`python -m specla` is the `specla` command."""

from __future__ import annotations

import sys


def run() -> int:
    """The command line of this process; its exit code. Ctrl-C is an error in one line as well
    while `specla.cli` is still being imported, which takes some tenths of a second."""
    try:
        from specla.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("specla: error: interrupted\n")
        return 130


if __name__ == "__main__":
    raise SystemExit(run())
