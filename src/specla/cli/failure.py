# SPDX-License-Identifier: Apache-2.0
"""From an exception to one line on stderr and an exit code."""

from __future__ import annotations

import sys
import traceback

import typer

from specla.errors import SpeclaError

OUT_OF_MEMORY, INCORRECT, INTERRUPTED = 4, 5, 130

# The common base of all of click's errors, without naming click: newer typers carry their own.
_ClickError = typer.BadParameter.__mro__[2]


def report(error: BaseException, *, debug: bool) -> int:
    """Tell the user what went wrong and return the exit code."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    code, message = describe(error)
    if message:
        typer.echo(f"specla: error: {message}", err=True)
    return code


def describe(error: BaseException) -> tuple[int, str]:
    """Exit code and one-line message of an exception; no message means say nothing."""
    if isinstance(error, SpeclaError):
        return error.exit_code, one_line(str(error))
    if isinstance(error, _ClickError):
        return _usage(error)
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED, "interrupted"
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, (
            f"the model and its state must fit in memory, got: {one_line(str(error))}; "
            "try --dtype bfloat16, a smaller --max-nodes or --max-slots, or --device cpu"
        )
    return 1, f"{type(error).__name__}: {one_line(str(error))} (--debug shows where)"


def _usage(error: BaseException) -> tuple[int, str]:
    code, message = getattr(error, "exit_code", 2), getattr(error, "format_message", str)()
    context = getattr(error, "ctx", None)
    # An empty message is click's way of having printed the help already.
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return code, one_line(message) + hint if message else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's and torch's CPU allocator's ways to say it, without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def one_line(text: str) -> str:
    """White space squeezed; characters a terminal cannot show replaced."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode("utf-8")
