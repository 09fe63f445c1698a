# SPDX-License-Identifier: Apache-2.0
"""What a word-problem template is made with: names, things, numbers, and equations that are right.

A template is a function of a `Draw`, which draws names, things and numbers; it returns a `Sketch`:
a question, the steps of its solution, and the answer. Every equation in a step is written by
`Draw.eq`, which computes its right-hand side, so solutions are right by construction.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Sketch(NamedTuple):
    """What a template returns: the question, the solution's lines, the final number."""

    question: str
    steps: list[str]
    answer: float


class Person(NamedTuple):
    """A name with its pronouns: she / her / her, he / him / his."""

    name: str
    they: str
    them: str
    their: str

    @property
    def They(self) -> str:
        """The subject pronoun at the start of a sentence."""
        return self.they.capitalize()


def words(text: str) -> list[str]:
    """The words of a list written as one string."""
    return text.split()


WOMEN = words(
    "Amina Bella Carmen Daria Elena Fatima Greta Hana Ingrid Julia Keiko Leila Mona Nadia Olga "
    "Priya Rosa Sofia Tara Uma Vera Wendy Yara Zoe Alice Beth Clara Diana Emma Grace Helen Isla "
    "Jane Kate Lily Mary Nora Paula Ruth Sara Tina Anna Lucy Maya Linda Susan Karen Amy Ella Mia "
    "Olivia Ava"
)
MEN = words(
    "Ahmed Boris Carlos Diego Emil Felix Goran Hugo Ivan Jamal Kenji Luca Marco Nils Omar Pablo "
    "Quinn Rafael Stefan Tomas Umar Viktor Walter Yusuf Zack Adam Ben Chris David Eric Frank "
    "George Henry Ian Jack Kevin Leo Max Noah Oscar Peter Ryan Sam Tom Will John James Michael "
    "Paul Mark Daniel"
)
SINGLE_WORDS = words(
    "marbles stickers pencils books apples oranges cookies shells stamps coins cards buttons "
    "balloons beads crayons erasers peaches plums pears lemons muffins postcards badges magnets "
    "ribbons candles walnuts pebbles keychains puzzles bracelets tomatoes carrots eggs bagels "
    "notebooks figurines"
)
THINGS = [*SINGLE_WORDS, "toy cars", "seed packets", "comic books"]


class Draw:
    """Random choices for one problem, and the notation its equations are written in."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.times = rng.choice(("*", "*", "*", "x"))
        self.tight = rng.random() < 0.35
        self.names = iter(rng.sample(WOMEN + MEN, 4))

    def pick(self, *options: Any) -> Any:
        """One of the options."""
        return self.rng.choice(options)

    def n(self, low: int, high: int, step: int = 1) -> int:
        """A number from ``low`` to ``high``, both included."""
        return self.rng.randrange(low, high + 1, step)

    def person(self) -> Person:
        """A person not drawn before in this problem."""
        name = next(self.names)
        return (
            Person(name, "she", "her", "her")
            if name in WOMEN
            else Person(name, "he", "him", "his")
        )

    def thing(self) -> str:
        """A plural noun of things one can own."""
        return self.rng.choice(THINGS)

    def two_things(self) -> list[str]:
        """Two different plural nouns."""
        return self.rng.sample(THINGS, 2)

    def eq(self, expression: str, unit: str = "") -> str:
        """``expression = value``, computed; ``unit`` ("$", say) goes before the value."""
        shown = expression.replace("*", self.times)
        if self.tight and self.times == "*":
            shown = re.sub(r" ([*/]) ", r"\1", shown)
            if "*" not in shown and "/" not in shown:
                shown = re.sub(r" ([+-]) ", r"\1", shown)
        return f"{shown} = {unit}{number(eval(expression, {'__builtins__': {}}))}"


def number(value: float) -> str:
    """A number as a pupil writes it: at most four decimals and no trailing zeros."""
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


Template = Callable[[Draw], Sketch]
