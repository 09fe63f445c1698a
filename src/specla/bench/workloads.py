# SPDX-License-Identifier: Apache-2.0
"""Prompts by kind. How well drafts are accepted depends on the kind more than on anything else.

All are written for this file; none comes from an evaluation set. `copy` is the easy end (the
answer stands in the prompt), `prose` the hard one.
"""

from __future__ import annotations

from collections.abc import Iterable

from specla.bench.measure import Prompt
from specla.errors import ConfigError

WORKLOADS: dict[str, tuple[str, ...]] = {
    "problems": (
        "Liam has 14 apples. He buys 3 bags with 6 apples in each bag. How many apples does he "
        "have now?",
        "A baker makes 8 trays of rolls with 12 rolls on each tray. She sells 57 rolls in the "
        "morning. How many rolls are left?",
        "Nora reads 15 pages every day for 9 days. Her book has 180 pages. How many pages does "
        "she still have to read?",
        "A ticket to the zoo costs $7 for a child and $12 for an adult. What do 4 children and 2 "
        "adults pay together?",
        "Omar runs 5 kilometers on each of 6 days and rests on Sunday. How many kilometers does "
        "he run in 4 weeks?",
        "A tank holds 240 liters of water. It loses 3 liters every hour. How much water is left "
        "after 2 days?",
    ),
    "python": (
        "Write a Python function that returns the largest number in a list without using max.",
        "Write a Python function that counts how often each word appears in a text.",
        "Write a Python function that checks whether a string reads the same in both directions.",
        "Write a Python function that returns the first n square numbers as a list.",
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python class Stack with the methods push, pop, peek and is_empty.",
    ),
    "copy": (
        "Repeat this sentence three times: The old ferry crosses the river every morning.",
        "Copy this list and change every 'red' to 'blue': red chair, red table, green lamp, red "
        "door, white wall, red carpet.",
        "Write this code again with the variable total renamed to result:\n"
        "total = 0\nfor item in basket:\n    total += item.price * item.count\nprint(total)",
        "Repeat every line twice:\nfirst the wheel\nthen the frame\nthen the chain",
        "Copy this address exactly: Mara Lindqvist, Harbour Street 48, second floor, 20457 "
        "Hamburg, Germany.",
        "Write this text again in the past tense: The gardener opens the gate, waters the roses, "
        "opens the gate again and leaves.",
    ),
    "chat": (
        "Hello! Who are you and what can you help me with?",
        "What is the difference between a number and a digit?",
        "Can you explain what a fraction is with a short example?",
        "I have a test tomorrow. How should I practice my times tables?",
        "What does a for loop do in Python?",
        "Give me three small word problems about money that I can solve myself.",
    ),
    "prose": (
        "Write a short story about a lighthouse keeper who finds a bottle on the beach.",
        "Describe a market street on a rainy morning.",
        "Write a letter to a friend about moving to a new town.",
        "Tell me about a dog who learned to open doors.",
        "Describe how bread is made, from grain to oven.",
        "Write a short speech that opens a school sports day.",
    ),
}


def prompts(kinds: Iterable[str] = (), per_kind: int | None = None) -> list[Prompt]:
    """The first `per_kind` prompts of each wanted kind; no kinds means all of them."""
    wanted = list(kinds) or list(WORKLOADS)
    for kind in wanted:
        if kind not in WORKLOADS:
            raise ConfigError(f"--kind must be one of {', '.join(WORKLOADS)}, got {kind!r}")
    if per_kind is not None and per_kind < 1:
        raise ConfigError(f"--per-kind must be >= 1, got {per_kind}")
    return [Prompt(kind=k, text=t) for k in wanted for t in WORKLOADS[k][:per_kind]]
