# SPDX-License-Identifier: Apache-2.0
"""A generator of small Python functions with a description, and ways to ask for a function.

Most functions compose a filter, a mapping and a reduction over a list, so that a share of the
combinations can be held out and a model's answer checked by running it. `ask` turns any function
(generated here or mined from the corpus) into a chat exchange or a plain document.
"""

from __future__ import annotations

import random

from specla.train.chat import render
from specla.train.classics import classic_function
from specla.train.corpus import digest
from specla.train.function import Function

FILTERS = (
    ("even", "even", "{x} % 2 == 0"), ("odd", "odd", "{x} % 2 == 1"),
    ("positive", "positive", "{x} > 0"), ("negative", "negative", "{x} < 0"),
    ("nonzero", "non-zero", "{x} != 0"), ("all", "", ""), ("all", "", ""),
    ("large", "greater than {n}", "{x} > {n}"), ("small", "less than {n}", "{x} < {n}"),
    ("divisible", "divisible by {n}", "{x} % {n} == 0"),
    ("at_least", "at least {n}", "{x} >= {n}"),
    ("two_digit", "between 10 and 99", "10 <= {x} <= 99"),
)  # fmt: skip
MAPS = (
    ("", "", "{x}"), ("", "", "{x}"), ("squares", "the squares of", "{x} * {x}"),
    ("doubles", "the doubles of", "2 * {x}"), ("absolute", "the absolute values of", "abs({x})"),
    ("cubes", "the cubes of", "{x} ** 3"), ("negated", "the negatives of", "-{x}"),
    ("halves", "the halves of", "{x} / 2"),
)  # fmt: skip
REDUCTIONS = ("sum", "list", "count", "product", "largest", "smallest", "average")


def conjunction(noun: str, adjective: str) -> str:
    """``even numbers`` or ``numbers greater than 5``."""
    if not adjective:
        return noun
    after = adjective.split()[0] in ("greater", "less", "divisible", "at", "between")
    return f"{noun} {'that are ' if after else ''}{adjective}" if after else f"{adjective} {noun}"


def list_function(rng: random.Random) -> Function:
    """Filter, map and reduce over a list of numbers, as a loop or as a comprehension."""
    kind, adjective, test = rng.choice(FILTERS)
    word, phrase, value = rng.choice(MAPS)
    how, n = rng.choice(REDUCTIONS), rng.choice((2, 3, 4, 5, 7, 10, 20, 50, 100))
    x, arg = rng.choice(("x", "n", "number", "value", "item")), rng.choice(
        ("numbers", "values", "nums", "items", "data", "xs"))  # fmt: skip
    names = {"x": x, "n": n}
    test, value, adjective = test.format(**names), value.format(**names), adjective.format(**names)
    items = conjunction("numbers", adjective)
    of = f"{phrase} the {items}" if phrase else f"the {items}"
    what = {
        "sum": f"the sum of {of}",
        "list": f"a list of {of}",
        "product": f"the product of {of}",
        "count": f"how many {items} there are",
        "largest": f"the largest of {of}",
        "smallest": f"the smallest of {of}",
        "average": f"the average of {of}",
    }[how]
    value = x if how == "count" else value
    word = "" if how == "count" else word
    name = "_".join(p for p in (how, kind if kind != "all" else "", word) if p)
    name = name if "_" in name else f"{name}_{arg}"
    does = f"return {what} in {arg}" + {"largest": ", or None", "smallest": ", or None",
                                        "average": ", or 0.0"}.get(how, "")  # fmt: skip
    does += " if there is none" if ", or" in does else ""
    body = (loop_body if rng.random() < 0.5 else comprehension_body)(how, x, arg, test, value)
    return Function(name, f"{name}({arg})", does, body)


def choice(name: str) -> dict[str, str]:
    """What is returned of a list that may be empty, by reduction."""
    return {
        "largest": f"max({name}) if {name} else None",
        "smallest": f"min({name}) if {name} else None",
        "average": f"sum({name}) / len({name}) if {name} else 0.0",
    }


def comprehension_body(how: str, x: str, arg: str, test: str, value: str) -> str:
    """The body written with a comprehension."""
    condition = f" if {test}" if test else ""
    inner = f"{value} for {x} in {arg}{condition}"
    if how in ("sum", "list", "count"):
        line = {"sum": f"sum({inner})", "list": f"[{inner}]", "count": f"len([{inner}])"}[how]
        return f"    return {line}\n"
    if how == "product":
        lines = ["result = 1", f"for {x} in [{inner}]:", f"    result *= {x}", "return result"]
        return "".join(f"    {line}\n" for line in lines)
    end = choice("chosen")[how]  # fmt: skip
    return f"    chosen = [{inner}]\n    return {end}\n"


def loop_body(how: str, x: str, arg: str, test: str, value: str) -> str:
    """The body written with a loop."""
    start, step, end = {
        "sum": ("total = 0", f"total += {value}", "total"),
        "count": ("count = 0", "count += 1", "count"),
        "product": ("result = 1", f"result *= {value}", "result"),
    }.get(how, ("result = []", f"result.append({value})", "result"))
    end = choice("result").get(how, end)  # fmt: skip
    lines = [f"    {start}", f"    for {x} in {arg}:"]
    lines += [f"        if {test}:", f"            {step}"] if test else [f"        {step}"]
    return "\n".join([*lines, f"    return {end}", ""])


def generated_function(rng: random.Random) -> Function:
    """A composed list function (most of the time) or one of the classics."""
    return list_function(rng) if rng.random() < 0.6 else classic_function(rng)


def is_held_out(function: Function) -> bool:
    """Whether a combination of name and description is kept for evaluation."""
    return "_" in function.name and digest(function.name + function.does) % 25 == 0


def ask(function: Function, rng: random.Random) -> str:
    """One document about a function: a chat exchange in one of several wordings, or plain
    source."""
    way = rng.random()
    name, does = f"`{function.signature.split(' ->')[0]}`", function.does
    third = third_person(does)
    code = f"```python\n{function.source(doc=way < 0.75)}```"
    if way < 0.35:
        verb = rng.choice(
            ("Write a Python function", "Implement a Python function", "Write a function")
        )
        return render(f"{verb} {name} that {third}.", code)
    if way < 0.45:
        return render(f"Write a Python function {name}.\n\n{does[0].upper() + does[1:]}.", code)
    if way < 0.65:
        stub = f'def {function.signature}:\n    """{does[0].upper() + does[1:]}."""\n'
        wrapped = f"```python\n{stub}```"
        return render(rng.choice((f"Complete this function:\n{wrapped}", stub.rstrip("\n"))), code)
    if way < 0.85:
        return render(f"Write a Python function that {third}.", code)
    return function.source(doc=True)


def third_person(does: str) -> str:
    """``return the sum`` -> ``returns the sum``, for verbs the docstrings here begin with."""
    verb, _, rest = does.partition(" ")
    verb = verb.lower()
    if not verb.isalpha() or verb.endswith("s"):
        return does[0].lower() + does[1:]
    ending = "es" if verb.endswith(("ch", "sh", "x", "z")) else "s"
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        verb, ending = verb[:-1], "ies"
    return f"{verb}{ending} {rest}"
