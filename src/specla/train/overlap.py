# SPDX-License-Identifier: Apache-2.0
"""How many word 8-grams of the evaluation sets occur in each source of training text.

``python -m specla.train.overlap --data DIR --humaneval HumanEval.jsonl.gz --out overlap.json``
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from specla.train import corpus, functions, mining, problems, talk

Grams = set[tuple[str, ...]]


def eight_grams(text: str) -> Grams:
    """Word 8-grams, case and punctuation ignored."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[i : i + 8]) for i in range(len(words) - 7)}


def shared(texts: Iterable[str], wanted: Grams) -> int:
    """How many of the wanted 8-grams occur in some text."""
    found: Grams = set()
    for text in texts:
        found |= eight_grams(text) & wanted
    return len(found)


def test_grams(data: Path, humaneval: Path) -> dict[str, Grams]:
    """8-grams of GSM8K's test questions (overlapping ones left out) and HumanEval's tasks."""
    with gzip.open(humaneval, "rt") as lines:
        tasks = [json.loads(line) for line in lines]
    code = [t["prompt"] + t["canonical_solution"] for t in tasks]
    questions = [p["question"] for p in corpus.gsm8k_test(data)]
    return {
        "gsm8k_test": set().union(*map(eight_grams, questions)),
        "humaneval": set().union(*map(eight_grams, code)),
    }


def generated_texts(count: int) -> Iterable[str]:
    """Questions of the generator and documents about generated functions, chats among them."""
    rng = random.Random(3)
    for problem in problems.word_problems(range(count)):
        yield problem["question"] + "\n" + problem["answer"]
    for _ in range(count // 2):
        yield functions.ask(functions.generated_function(rng), rng)
        yield talk.small_talk(rng)


def main(
    data: Annotated[Path, typer.Option()],
    humaneval: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    count: int = 50_000,
) -> None:
    """Counts and writes the overlaps."""
    wanted = test_grams(data, humaneval)
    symbolic = corpus.split_symbolic(corpus.read_problems(corpus.locate(data, corpus.SYMBOLIC)))
    python = corpus.python_documents(corpus.locate(data, corpus.PYTHON))["train"]
    texts = {
        "generated": list(generated_texts(count)),
        "gsm_symbolic train": [p["question"] for p in symbolic["train"]],
        "gsm8k train": [
            p["question"] for p in corpus.read_problems(corpus.locate(data, corpus.GSM8K_TRAIN))
        ],
        "mined functions": [f.source() for s in python for f in mining.mine_functions(s)],
    }
    report = {
        test: {"eight_grams": len(grams)} | {name: shared(t, grams) for name, t in texts.items()}
        for test, grams in wanted.items()
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
