# SPDX-License-Identifier: Apache-2.0
"""Prompts that the demo model's drafter is trained and judged on, as JSON lines.

``python -m specla.train.prompts --data DIR --out DIR --count N`` writes train.jsonl and, in a
folder per source, held-out.jsonl: suites for `specla bench`. Lines are as `specla generate
--prompts` and `specla train --prompts` read them; those for training bring the answer of the data,
which the target mostly agrees with and which then need not be decoded. DIR is as for
`specla.train.prepare`. Splits are those of the model's own training: neither it nor its drafter
has seen a held-out prompt.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from specla.train import corpus, functions, problems

SHARES = {"generated": 0.35, "symbolic": 0.25, "gsm8k": 0.3, "functions": 0.1}
HELD_OUT_SEEDS = range(10**9, 10**9 + 60_000)
TRAIN_SEEDS = range(2 * 10**9, 2 * 10**9 + 1_000_000)


Row = tuple[str, str]
"""A question and its answer in the data."""


def distinct(rows: Iterable[corpus.Problem]) -> list[Row]:
    """Every question once, with its first answer."""
    found: dict[str, str] = {}
    for row in rows:
        found.setdefault(row["question"], row["answer"])
    return list(found.items())


def asked_functions(seed: int, count: int, *, held_out: bool) -> list[Row]:
    """Requests for generated functions of one split."""
    rng, found = random.Random(seed), dict[str, str]()
    while len(found) < count:
        function = functions.generated_function(rng)
        if functions.is_held_out(function) == held_out:
            name, does = function.signature.split(" ->")[0], functions.third_person(function.does)
            found[f"Write a Python function `{name}` that {does}."] = (
                f"```python\n{function.source(doc=True)}```"
            )
    return list(found.items())


def train_prompts(data: Path, count: int) -> dict[str, list[Row]]:
    """About `count` prompts by source, of the training splits."""
    symbolic = corpus.split_symbolic(corpus.read_problems(corpus.locate(data, corpus.SYMBOLIC)))
    wanted = {name: round(share * count) for name, share in SHARES.items()}
    words = problems.word_problems(TRAIN_SEEDS)
    sources = {
        "generated": distinct(itertools.islice(words, wanted["generated"])),
        "symbolic": distinct(symbolic["train"]),
        "gsm8k": distinct(corpus.read_problems(corpus.locate(data, corpus.GSM8K_TRAIN))),
        "functions": asked_functions(11, wanted["functions"], held_out=False),
    }
    return {name: shuffled(sources[name])[: wanted[name]] for name in SHARES}


def held_out_prompts(data: Path, count: int) -> dict[str, list[Row]]:
    """`count` prompts by source, of the held-out splits."""
    symbolic = corpus.split_symbolic(corpus.read_problems(corpus.locate(data, corpus.SYMBOLIC)))
    words = problems.word_problems(HELD_OUT_SEEDS, held_out=True)
    sources = {
        "generated": distinct(itertools.islice(words, count)),
        "symbolic": distinct(symbolic["new_numbers"]),
        "gsm8k": distinct(corpus.gsm8k_test(data)),
        "functions": asked_functions(12, count, held_out=True),
    }
    return {name: shuffled(rows)[:count] for name, rows in sources.items()}


def shuffled(rows: list[Row]) -> list[Row]:
    """The same order every time."""
    return sorted(rows, key=lambda row: corpus.digest(row[0]))


def write(path: Path, kind: str, rows: Iterable[Row], *, answers: bool) -> None:
    """Append rows as JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        for question, answer in rows:
            turns = [{"role": "user", "content": question}]
            if answers:
                turns.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"id": kind, "messages": turns}) + "\n")


Given = Annotated[Path, typer.Option()]


def main(data: Given, out: Given, count: int = 4000, held_out: int = 40) -> None:
    """Writes train.jsonl and SOURCE/held-out.jsonl."""
    for source in SHARES:
        (out / source).mkdir(parents=True, exist_ok=True)
    for path in (*out.glob("*.jsonl"), *out.glob("*/held-out.jsonl")):
        path.unlink()
    rows = [(kind, row) for kind, part in train_prompts(data, count).items() for row in part]
    random.Random(0).shuffle(rows)
    for kind, row in rows:
        write(out / "train.jsonl", kind, [row], answers=True)
    for kind, part in held_out_prompts(data, held_out).items():
        write(out / kind / "held-out.jsonl", kind, part, answers=False)
    typer.echo(f"{len(rows)} prompts")


if __name__ == "__main__":
    typer.run(main)
