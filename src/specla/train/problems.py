# SPDX-License-Identifier: Apache-2.0
"""An unlimited generator of grade-school word problems with worked solutions.

A template is a function of a `Draw`: it draws names, things and numbers, and returns a question,
the
steps of its solution, and the answer. Every equation in a step is written by `Draw.eq`, which
computes
its right-hand side, so solutions are right by construction; `equations` finds them again for
checking.
Templates live in ``problems_*.py`` and register themselves with ``@template``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from specla.train.corpus import Problem, digest

HELD_OUT_PERCENT = 2


class Sketch(NamedTuple):
    """What a template returns: the question, the solution's lines, the final number."""

    question: str
    steps: list[str]
    answer: float


Template = Callable[["Draw"], Sketch]
TEMPLATES: dict[str, Template] = {}


def template(function: Template) -> Template:
    """Registers a template under its function name."""
    TEMPLATES[function.__name__] = function
    return function


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


EQUATION = re.compile(r"([\d.]+(?: ?[-+*/x] ?[\d.]+)+) ?= ?\$?(-?[\d.]*\d)")


def equations(text: str) -> list[tuple[str, float, float]]:
    """(expression, its value, the value written) for every equation in a text."""
    found = []
    for left, right in EQUATION.findall(text):
        value = eval(left.replace("x", "*"), {"__builtins__": {}})
        found.append((left, float(value), float(right)))
    return found


def sketch_problem(seed: int) -> tuple[str, Sketch]:
    """Template name and sketch of one seed."""
    rng = random.Random(seed)
    name = rng.choice(sorted(TEMPLATES))
    return name, TEMPLATES[name](Draw(rng))


def word_problem(seed: int) -> Problem:
    """The problem of one seed; the answer ends with GSM8K's ``#### N`` line."""
    _, sketch = sketch_problem(seed)
    lines = [*sketch.steps, f"#### {number(sketch.answer)}"]
    return {"question": " ".join(sketch.question.split()), "answer": "\n".join(lines)}


def is_held_out(question: str) -> bool:
    """Whether a generated question belongs to the held-out split; a function of its text."""
    return digest(question) % 100 < HELD_OUT_PERCENT


def word_problems(seeds: range, held_out: bool = False) -> Iterator[Problem]:
    """The problems of some seeds that belong to one split."""
    from specla.train import problems_money, problems_motion, problems_quantity  # noqa: F401

    for seed in seeds:
        problem = word_problem(seed)
        if is_held_out(problem["question"]) == held_out:
            yield problem


def arithmetic(seed: int) -> Problem:
    """A short exchange on plain arithmetic: sums, products, exact quotients, percentages."""
    draw = Draw(random.Random(seed))
    draw.tight = False
    a, b = draw.n(2, draw.pick(20, 100, 1000)), draw.n(2, draw.pick(12, 100, 1000))
    c = draw.n(2, 12)
    expression, words = draw.pick(
        (f"{a} + {b}", f"the sum of {a} and {b}"),
        (f"{max(a, b)} - {min(a, b)}", f"{max(a, b)} minus {min(a, b)}"),
        (f"{a} * {c}", f"{a} times {c}"),
        (f"{a * c} / {c}", f"{a * c} divided by {c}"),
        (f"{a} * {b % 90 + 10}", f"the product of {a} and {b % 90 + 10}"),
        (f"{a * 20} * 0.{c * 5:02d}", f"{c * 5}% of {a * 20}"),
        (f"{a} + {b} - {min(c, a)}", f"{a} plus {b} minus {min(c, a)}"),
    )
    asked = draw.pick(words, words, expression.replace("*", draw.pick("*", "x", "times")))
    question = draw.pick(
        "What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "{} = ?"
    )
    equation = draw.eq(expression)
    value = equation.split("= ")[1]
    answer = draw.pick(
        equation, f"{equation}\n#### {value}", f"{equation}\nThe answer is {value}."
    )
    return {"question": question.format(asked), "answer": answer}
