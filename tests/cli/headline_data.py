# SPDX-License-Identifier: Apache-2.0
"""A small folder of data in the form of the headline's, with made-up texts."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

from specla.train import problems

MIXED_KINDS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")


def _lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_data(folder: Path) -> Path:
    """Word problems of our own generator as GSM8K and as gsm_symbolic, a few Python files, six
    kinds of prompts."""
    words = [
        {"question": p["question"], "answer": p["answer"]}
        for p in problems.word_problems(range(90))
    ]
    train, test, symbolic = words[:60], words[60:75], words[:40]
    for name in ("gsm8k", "gsm_symbolic", "humaneval", "python_corpus"):
        (folder / name).mkdir(parents=True)
    (folder / "gsm8k/train.jsonl").write_text(_lines(train))
    (folder / "gsm8k/test.jsonl").write_text(_lines(test))
    (folder / "gsm_symbolic/gsm8k_test_indices_overlapping.json").write_text("[0, 2]")
    packed = lzma.compress(_lines(symbolic).encode())
    (folder / "gsm_symbolic/gsm_symbolic_40k.jsonl.xz").write_bytes(packed)
    source = Path(problems.__file__).parent
    paths = [source / name for name in ("talk.py", "optim.py", "corpus.py")]
    files = [f"<|file|>made{i}/{f.name}\n{f.read_text()}" for i, f in enumerate(paths)]
    (folder / "python_corpus/corpus.txt.xz").write_bytes(lzma.compress("".join(files).encode()))
    stubs = [{"prompt": f'def add{i}(a, b):\n    """Add {i}."""\n'} for i in range(4)]
    with gzip.open(folder / "humaneval/HumanEval.jsonl.gz", "wt") as file:
        file.write(_lines(stubs))
    for kind in MIXED_KINDS:
        asked = (
            [p["question"] for p in test[:4]]
            if kind == "gsm8k"
            else [f"{kind} {i}?" for i in range(4)]
        )
        (folder / "eagle_suite" / kind).mkdir(parents=True)
        rows = [{"question_id": i, "turns": [text]} for i, text in enumerate(asked)]
        (folder / "eagle_suite" / kind / "question.jsonl").write_text(_lines(rows))
    return folder
