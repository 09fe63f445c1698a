# SPDX-License-Identifier: Apache-2.0
"""The demo model's card, written from the result files of its training and evaluation.

``python -m specla.train.card --results results/demo --model src/specla/assets/demo``
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer

SETS = {
    "symbolic_new_numbers": "gsm_symbolic, known templates, new numbers",
    "symbolic_new_templates": "gsm_symbolic, eight templates never trained on",
    "gsm8k_test": "GSM8K test without the overlapping problems",
    "generated": "own generator, held-out problems",
    "python": "Python, held-out packages and files",
    "functions": "own function generator, held-out functions",
    "mined_chat": "functions of held-out packages, asked in chat",
    "mined_raw": "the same, as signature and docstring",
    "humaneval": "HumanEval, asked in chat",
}
SHOWN = (
    ("symbolic_new_numbers", 0),
    ("symbolic_new_numbers", 1),
    ("symbolic_new_templates", 0),
    ("gsm8k_test", 0),
    ("generated", 0),
    ("generated", 1),
    ("functions", 0),
    ("functions", 1),
    ("mined_chat", 0),
    ("mined_raw", 0),
)


def read_loss(path: Path) -> list[dict[str, float]]:
    """Rows of loss.csv: step, tokens, seconds, loss."""
    with path.open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def plot_loss(rows: list[dict[str, float]], path: Path) -> None:
    """Training loss over tokens as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["tokens"] / 1e6 for r in rows], [r["loss"] for r in rows], linewidth=1.2)
    axes.set(xlabel="tokens (millions)", ylabel="training loss (nats per weighted token)")
    axes.set_ylim(0.5, 3.0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def percent(row: dict[str, Any], *keys: str) -> str:
    """The first of some shares that a row has, as a percentage."""
    found = [row[k] for k in keys if k in row]
    return f"{100 * found[0]:.1f} %" if found else "-"


def number(row: dict[str, Any], key: str) -> str:
    """A bits-per-byte figure or a dash."""
    return f"{row[key]:.3f}" if key in row else "-"


def score_table(report: dict[str, dict[str, Any]]) -> str:
    """One line per evaluation set."""
    lines = [
        "| held-out text | prompts | bits/byte | answers only | right | ended | loop or ramble |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, title in SETS.items():
        row = report[key]
        right = percent(row, "exact_answers", "behave_alike", "pass_at_1")
        cells = [
            title, str(row.get("prompts", "-")), number(row, "bits_per_byte"),
            number(row, "answer_bits_per_byte"), right, percent(row, "ended"),
            percent(row, "loop_or_ramble"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def pool_table(pools: dict[str, dict[str, int]], shares: dict[str, float], seen: float) -> str:
    """Size, share and number of passes of every training pool."""
    lines = ["| pool | documents | tokens | share | passes |", "|---|---|---|---|---|"]
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        size = pools[name]
        passes = share * seen / size["tokens"]
        lines.append(
            f"| {name} | {size['documents']:,} | {size['tokens']:,} | {share:.0%} | {passes:.1f} |"
        )
    return "\n".join(lines)


def sample_text(samples: list[dict[str, Any]]) -> str:
    """The chosen samples, unedited, each in a fence longer than any it holds."""
    parts = []
    for number, (name, index) in enumerate(SHOWN, 1):
        sample = [s for s in samples if s["set"] == name][index]
        end = "ended by itself" if sample["ended"] else "cut after 400 tokens"
        body = f"{sample['prompt']}\n----\n{sample['output']}"
        parts.append(f"{number}. {SETS[name]} ({end})\n\n````text\n{body}\n````")
    return "\n\n".join(parts)


def main(results: Annotated[Path, typer.Option()], model: Annotated[Path, typer.Option()]) -> None:
    """Writes README.md and loss.png into the model's folder."""
    from specla.train.pretrain import SHARES

    evaluation = json.loads((results / "evaluation.json").read_text())
    pools = json.loads((results / "pools.json").read_text())
    overlap = json.loads((results / "overlap.json").read_text())
    loss = read_loss(results / "loss.csv")
    run = json.loads((results / "run.json").read_text())
    plot_loss(loss, model / "loss.png")
    text = Template((Path(__file__).parent / "card.md.in").read_text()).substitute(
        scores=score_table(evaluation["report"]),
        pools=pool_table(pools, SHARES, run["tokens"]),
        samples=sample_text(evaluation["samples"]),
        tokens=f"{run['tokens'] / 1e9:.2f} billion",
        steps=f"{run['steps']:,}",
        minutes=f"{run['seconds'] / 60:.1f}",
        speed=f"{run['tokens'] / run['seconds'] / 1e6:.2f}",
        last=f"{loss[-1]['loss']:.3f}",
        gsm8k_shared=overlap["gsm8k_test"]["generated"],
        humaneval_shared=overlap["humaneval"]["generated"],
        mined_shared=overlap["humaneval"]["mined functions"],
    )
    (model / "README.md").write_text(text)


if __name__ == "__main__":
    typer.run(main)
