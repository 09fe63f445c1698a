# SPDX-License-Identifier: Apache-2.0
"""Running model-written functions against a reference, each with a time limit.

The limit stops endless loops; it is no security boundary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import signal
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, cast

Function = Callable[..., Any]
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    ([3, -1, 4, 1, -5, 9, 2, 6, 12, 50, 7, 100], [], [2], [-4, 8, 15, 99, 101, 10]),
    ("Level up the Stairs", "racecar", "a1 b22"),
    (7, 12, 1, 30),
    (["pear", "fig", "banana"], ["a"]),
    ({"a": 3, "b": 9}, {"c": 1}),
)


class Expired(Exception):
    """The time limit of `limited`."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `Expired` in the block after some seconds, and swallows what it prints."""

    def expire(*_: object) -> None:
        raise Expired

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def defined(code: str, name: str) -> Function | None:
    """The function ``name`` that some code defines, or its last function."""
    space: dict[str, Any] = {"__name__": "model"}
    try:
        with limited(1.0):
            exec(code, space)
    except BaseException:  # noqa: BLE001  model-written code may raise anything
        return None
    functions = [value for value in space.values() if inspect.isfunction(value)]
    named = space.get(name)
    if callable(named):
        return cast(Function, named)
    return functions[-1] if functions else None


def result_of(function: Function, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """("value", v) or ("error", "")."""
    try:
        with limited(1.0):
            value = function(*copy.deepcopy(arguments))
    except BaseException:  # noqa: BLE001  model-written code may raise anything
        return "error", ""
    return "value", value


def agrees(code: str, reference: str, name: str) -> bool:
    """Whether code behaves like the reference wherever the reference returns a value."""
    ours, theirs = defined(code, name), defined(reference, name)
    if ours is None or theirs is None:
        return False
    arity, tried = len(inspect.signature(theirs).parameters), 0
    for values in ARGUMENTS:
        for arguments in product(values, repeat=arity):
            wanted = result_of(theirs, arguments)
            if wanted[0] == "value":
                tried += 1
                got = result_of(ours, arguments)
                if got[0] == "error" or repr(got[1]) != repr(wanted[1]):
                    return False
    return tried > 0


def passes_tests(code: str, task: dict[str, str]) -> bool:
    """HumanEval's check of one task; the prompt's imports are put first."""
    imports = task["prompt"].split("def ")[0]
    space: dict[str, Any] = {"__name__": "model"}
    try:
        with limited(2.0):
            exec(f"{imports}\n{code}\n{task['test']}", space)
            space["check"](space[task["entry_point"]])
    except BaseException:  # noqa: BLE001  model-written code may raise anything
        return False
    return True
