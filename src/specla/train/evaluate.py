# SPDX-License-Identifier: Apache-2.0
"""Scores a checkpoint: bits per byte, exact answers, functions that run, loops, samples.

``python -m specla.train.evaluate --model DIR --heldout heldout.json --out evaluation.json``
(heldout.json is written by `specla.train.prepare`). Model-written functions are executed: run it
where that is acceptable.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor

from specla.train.chat import ASSISTANT_ID, render
from specla.train.checkpoint import load_checkpoint
from specla.train.function import Function
from specla.train.functions import third_person
from specla.train.gdn import GDNLanguageModel
from specla.train.greedy import Decoded, decode_all, loops, rambles
from specla.train.sandbox import agrees, passes_tests

PROBLEM_SETS = ("symbolic_new_numbers", "symbolic_new_templates", "gsm8k_test", "generated")
LONGEST_DOCUMENT = 2048


@torch.no_grad()
def token_bits(model: GDNLanguageModel, rows: list[list[int]], batch: int = 32) -> list[Tensor]:
    """Bits of every token after the first, per row."""
    device, order = (
        model.model.embeddings.weight.device,
        sorted(range(len(rows)), key=lambda i: len(rows[i])),
    )
    found: dict[int, Tensor] = {}
    for first in range(0, len(rows), batch):
        part = order[first : first + batch]
        width = len(rows[part[-1]])
        ids = torch.tensor([rows[i] + [0] * (width - len(rows[i])) for i in part], device=device)
        logits = model(ids).float()[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        for i, row in zip(part, nats.view(len(part), -1).cpu(), strict=True):
            found[i] = row[: len(rows[i]) - 1] / math.log(2)
    return [found[i] for i in range(len(rows))]


def problem_bits(
    model: GDNLanguageModel, tokenizer: Tokenizer, problems: list[dict[str, Any]]
) -> dict[str, float]:
    """Bits per byte of whole exchanges and of the answers alone (end token included)."""
    rows = [tokenizer.encode(render(p["question"], p["answer"])).ids for p in problems]
    bits = token_bits(model, rows)
    answers = [
        b[row.index(ASSISTANT_ID) :].sum().item() for row, b in zip(rows, bits, strict=True)
    ]
    whole = sum(b.sum().item() for b in bits)
    return {"bits_per_byte": whole / (size_of(problems, "question") + size_of(problems, "answer")),
            "answer_bits_per_byte": sum(answers) / size_of(problems, "answer")}  # fmt: skip


def size_of(problems: list[dict[str, Any]], key: str) -> int:
    """Bytes of one field of all problems."""
    return sum(len(p[key].encode()) for p in problems)


def python_bits(
    model: GDNLanguageModel, tokenizer: Tokenizer, files: list[str]
) -> dict[str, float]:
    """Bits per byte of files, cut to their first 2,048 tokens."""
    rows = [tokenizer.encode(text).ids[:LONGEST_DOCUMENT] for text in files]
    size = sum(len(tokenizer.decode(row[1:], skip_special_tokens=False).encode()) for row in rows)
    return {"bits_per_byte": sum(b.sum().item() for b in token_bits(model, rows, 8)) / size}


def final_number(text: str) -> float | None:
    """The number after the last ``####``."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return float(found[-1].replace(",", "")) if found else None


def is_right(decoded: Decoded, answer: str) -> bool:
    """Whether the final numbers agree."""
    said, wanted = final_number(decoded.text), final_number(answer)
    return said is not None and wanted is not None and abs(said - wanted) < 1e-3


def summary(outputs: list[Decoded]) -> dict[str, float]:
    """How the continuations of one set end."""
    n = len(outputs)
    return {
        "prompts": n,
        "ended": sum(d.ended for d in outputs) / n,
        "looped": sum(loops(d.tokens) for d in outputs) / n,
        "loop_or_ramble": sum(map(rambles, outputs)) / n,
        "mean_tokens": sum(len(d.tokens) for d in outputs) / n,
    }


def code_of(text: str) -> str:
    """The content of the first ``python`` block, or the text."""
    found = re.search(r"```python\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return found.group(1) if found else text


def described_prompt(function: Function) -> str:
    """The wording used to score functions."""
    return render(
        f"Write a Python function `{function.signature}` that {third_person(function.does)}."
    )


def stub_of(function: Function) -> str:
    """Signature and docstring, as a raw completion prompt."""
    return function.source().removesuffix(function.body)


class Evaluation:
    """A checkpoint, its tokenizer, and the report they fill."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model = load_checkpoint(folder, device).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.report: dict[str, dict[str, Any]] = {}
        self.samples: list[dict[str, Any]] = []

    def decode(self, name: str, prompts: list[str], shown: int = 3) -> list[Decoded]:
        """Greedy continuations; records how they end and the first few."""
        outputs = decode_all(self.model, self.tokenizer, prompts)
        self.report.setdefault(name, {}).update(summary(outputs))
        for prompt, output in list(zip(prompts, outputs, strict=True))[:shown]:
            self.samples.append({"set": name, "prompt": prompt, "output": output.text,
                                 "ended": output.ended})  # fmt: skip
        return outputs

    def problems(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Bits per byte and exact answers of one set of problems."""
        self.report[name] = problem_bits(self.model, self.tokenizer, rows)
        outputs = self.decode(name, [render(p["question"]) for p in rows])
        right = [is_right(d, p["answer"]) for d, p in zip(outputs, rows, strict=True)]
        self.report[name]["exact_answers"] = sum(right) / len(right)

    def functions(self, rows: list[dict[str, Any]]) -> None:
        """Held-out combinations of generated functions: does the answer behave like the
        reference?"""
        asked = [Function(**row) for row in rows]
        outputs = self.decode("functions", [described_prompt(f) for f in asked])
        right = [
            agrees(code_of(d.text), f.source(), f.name)
            for d, f in zip(outputs, asked, strict=True)
        ]
        self.report["functions"]["behave_alike"] = sum(right) / len(right)

    def mined(self, rows: list[dict[str, Any]]) -> None:
        """Functions of held-out packages: asked in chat, and as raw signature + docstring."""
        asked = [Function(**row) for row in rows]
        self.decode("mined_chat", [described_prompt(f) for f in asked])
        self.decode("mined_raw", [stub_of(f) for f in asked])

    def humaneval(self, path: Path) -> None:
        """HumanEval, evaluation only: one greedy answer per task."""
        with gzip.open(path, "rt") as lines:
            tasks = [json.loads(line) for line in lines]
        prompts = [
            render(f"Complete this function:\n```python\n{t['prompt'].rstrip()}\n```")
            for t in tasks
        ]
        outputs = self.decode("humaneval", prompts)
        passed = [passes_tests(code_of(d.text), t) for d, t in zip(outputs, tasks, strict=True)]
        self.report["humaneval"]["pass_at_1"] = sum(passed) / len(passed)

    def run(self, held: dict[str, list[Any]], humaneval: Path | None) -> None:
        """Every set that is there."""
        for name in PROBLEM_SETS:
            self.problems(name, held[name])
        self.report["python"] = python_bits(self.model, self.tokenizer, held["python"])
        self.functions(held["functions"])
        self.mined(held["mined"])
        if humaneval:
            self.humaneval(humaneval)


Given = Annotated[Path, typer.Option()]


def main(
    model: Given, heldout: Given, out: Given, humaneval: Path | None = None, limit: int = 1000
) -> None:
    """Writes the report and samples as JSON."""
    torch.set_float32_matmul_precision("highest")
    began, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    held = {name: rows[:limit] for name, rows in json.loads(heldout.read_text()).items()}
    evaluation = Evaluation(model, device)
    evaluation.run(held, humaneval)
    result = {"report": evaluation.report, "samples": evaluation.samples}
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for name, row in evaluation.report.items():
        typer.echo(f"{name:24s} { {k: round(v, 4) for k, v in row.items()} }")
    typer.echo(f"evaluated in {time.time() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
