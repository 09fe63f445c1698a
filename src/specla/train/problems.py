# SPDX-License-Identifier: Apache-2.0
"""An unlimited generator of grade-school word problems with worked solutions.

Templates live in `problems_*.py`, each file with the table of its own; see `sketch` for what they
are made with. `equations` finds every equation again, so that solutions can be checked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from specla.train import problems_money, problems_motion, problems_quantity
from specla.train.corpus import Problem, digest
from specla.train.sketch import Draw, Sketch, Template, number

HELD_OUT_PERCENT = 2
TEMPLATES: dict[str, Template] = {
    function.__name__: function
    for table in (problems_money, problems_motion, problems_quantity)
    for function in table.TEMPLATES
}

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
