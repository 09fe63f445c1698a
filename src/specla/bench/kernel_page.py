# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark's report: ours, the baselines and what papers claim, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specla.bench import papers
from specla.bench.bytes import transient_bytes
from specla.bench.kernel_cases import MEMORY_NODES, SHAPES, label, tree_case
from specla.bench.kernel_metrics import HYBRID, STATE_ONLY, Measured, Metric, metrics
from specla.bench.kernel_plots import draw
from specla.bench.kernel_report import Run, cells, written
from specla.bench.kernel_rows import Row

METHOD = """\
One CUDA graph holds the launches of all layers and is replayed; a time is a replay's over the
number of layers: the median of 20 to 200 samples of at least 0.4 ms, p10 and p90 over samples.
Every layer has its own states, together at least three times the L2 cache, so states come from
memory; activations are shared by all layers and may be cached, for every method alike. Before it
is timed, every method runs once on inputs whose outputs are known (torch reference, itself
tested against a float64 replay of every path), and its largest error relative to the largest
output is kept: outputs in bf16 may differ by 2e-2, tf32 products by 5e-3, float32 and pairs of
bf16 by 1e-4. "MB" counts what a method must read and write by its algorithm; "of BW" is those
bytes over its time, as a fraction of what a kernel that only reads reaches in the same run.
Nothing here is an eager
launch."""

SCOPES = """\
Ours with "conv, gates, state" includes the tree convolution, norms and gates; SGLang's kernels
include norms and gates but not the convolution, so ratios against them are on the low side.
"State only" is our state kernel on prepared inputs, as all of our own baselines are; "fast" with
convolution and gates is one kernel where that fits, "fast, state only" always the two that take
prepared inputs. A fold is
inside our times. What a step does once for all layers is in nobody's time where it is small
(walk lists, masks, cursors); SGLang's scatter of states is not small and is counted. SGLang
packs all rows into one sequence; a second row calls the same kernel unpacked, and the faster of
the two counts. "Hybrid in waves" is a launch per wave, and a state through memory wherever a
branch begins; all layers share the buffer of these states, so that they stay in the cache where
they fit. "Portable walk" is the state kernel that we run where there is no Hopper: the hybrid's
layout and arithmetic, but branches replayed from a checkpoint."""

DIFFERENCES = """\
- **Table 1.** The paper's times are 7 to 91 ms for 16 to 32 nodes. One layer's state is 2 MiB,
  under a microsecond of memory time on either device, so launches and host work must dominate
  those times (our reading; the paper's code is not public). Replayed from a graph, what is left
  is what the kernels do: root-to-leaf replay pays no launch from the host, and a walk reads the
  state once however many leaves there are. The trees are ours too: best-first with the given
  top-k, depth and number of nodes; the paper's are not known.
  "Hybrid in waves" is the paper's third form on these trees: where our walk replays factors to
  get a branch's state again, it loads the state, a wave later.
- **Recovery (figure 11a).** The paper's token replay runs projections again. Only "tokens and
  projections" does that here, for one layer, with its weights from memory. Replaying the
  recurrence alone and folding factors both read and write the state once; what separates them is
  a reduction per token.
- **Fused against separate (figure 11b).** Fusing saves one launch and one read of the state. For
  one row the launch is most of it, and in a graph it is about a microsecond; for 64 rows it is
  the state's traffic.
- **DeltaLog.** Only the write of the state can go, so a kernel gains at most 2x, less what
  reading the log costs. Our exact kernel replays the log entry by entry, in the order of plain
  decoding, where a matrix product would be cheaper per entry and change bits. The cut of bytes
  written depends on the record: ours is float32 and written twice, to the candidate bank and,
  once accepted, to the ring; DeltaLog's 7.83x is near the bound of a log of 8 with
  half-precision records.
- **Memory.** Same arithmetic, same result: without conv inputs, which every method keeps per
  candidate and the paper leaves out, a tree's factors are two orders smaller than its states."""


def write(folder: Path, run: Run, rows: Sequence[Row], *, plots: bool = True) -> list[Path]:
    """README.md and, with matplotlib, its plots. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    found = metrics(rows)
    images = draw(folder, rows, found) if plots else []
    page = folder / "README.md"
    page.write_text("\n".join(_page(run, rows, found, images)).rstrip() + "\n", encoding="utf-8")
    return [page, *images]


def _page(
    run: Run, rows: Sequence[Row], found: Sequence[Metric], images: Sequence[Path]
) -> Iterator[str]:
    yield "# Kernel benchmark"
    yield ""
    yield (
        f"{run.device}, torch {run.torch}, triton {run.triton}, commit {run.commit}, {run.date}; "
        f"reads {run.bandwidth / 1e12:.2f} TB/s. Generated by `{run.command}`."
    )
    yield from ("", METHOD, "", SCOPES, "")
    yield from figures(found)
    for image in images:
        yield from (f"![{image.stem}]({image.name})", "")
    yield from _papers(rows, found)
    yield from ("## Why they differ", "", DIFFERENCES, "")
    for suite in dict.fromkeys(row.suite for row in rows):
        yield from _suite(suite, [row for row in rows if row.suite == suite])


def figures(found: Sequence[Metric]) -> Iterator[str]:
    """Lines of a page: every figure, and what it is against."""
    yield from ("## Figures", "", "| metric | value | p10 - p90 | against |", "|---|---|---|---|")
    for metric in found:
        spread = "" if metric.p10 is None else f"{metric.p10:.2f} - {metric.p90:.2f}"
        against = metric.baseline if metric.value is not None else metric.notes
        yield f"| `{metric.name}` | {written(metric)} | {spread} | {against} |"
    yield ""


def _suite(name: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"## Rows: {name}", "")
    yield "| case | method | includes | us | p10-p90 | MB | of BW | vs base | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        method, *numbers = cells(row, rows)
        yield f"| {row.case} | {method} | {row.scope} | {' | '.join(numbers)} |"
    yield ""


def _papers(rows: Sequence[Row], found: Sequence[Metric]) -> Iterator[str]:
    known = {metric.name: metric for metric in found if metric.value is not None}
    yield from ("## Beside the papers", "")
    yield from _table_1(Measured(rows))
    yield from _recovery(Measured(rows))
    yield from _fused(known)
    yield from _delta_log(known)
    yield from _memory()


def _table_1(found: Measured) -> Iterator[str]:
    yield "SpecLA, table 1: speedup over root-to-leaf replay (their ms; our us for one layer)."
    yield ""
    yield (
        "| top-k, depth, nodes | their r2l | serial | parallel | hybrid | our r2l | exact walk | "
        "WY | hybrid in waves | snapshots |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for shape in found.labels("table1"):
        for (k, depth, nodes), paper in papers.TABLE_1.items():
            case = f"top{k}_depth{depth}_n{nodes}_{shape}"
            slow = found.one(case, "root to leaf")
            names = (
                STATE_ONLY,
                "fast, state only, no overlap",
                HYBRID,
                "snapshot per node",
            )
            ours = [_ratio(slow, found.one(case, name)) for name in names]
            yield (
                f"| {k}, {depth}, {nodes} | {paper.root_to_leaf_ms} ms | {paper.serial}x | "
                f"{paper.parallel}x | {paper.hybrid}x | {_us(slow)} | {' | '.join(ours)} |"
            )
    yield ""


def _recovery(found: Measured) -> Iterator[str]:
    first, last = papers.RECOVERY_TOKENS_MS, papers.RECOVERY_FACTORS_MS
    yield (
        f"SpecLA, figure 11a: recovering 1 to 8 tokens takes {first[0]} to {first[1]} ms from "
        f"tokens, {last[0]} to {last[1]} ms from factors. Ours, one layer:"
    )
    yield from (
        "",
        "| accepted | factors | tokens | tokens and projections |",
        "|---|---|---|---|",
    )
    for shape in found.labels("recovery"):
        for n in range(1, 9):
            case = f"pending{n}_n16_b1_{shape}"
            names = ("factors", "tokens", "tokens and projections")
            times = [_us(found.one(case, f"recover from {name}")) for name in names]
            yield f"| {n} | {' | '.join(times)} |"
    yield ""


def _fused(known: dict[str, Metric]) -> Iterator[str]:
    low, high = papers.FUSED_RATIO
    yield f"SpecLA, figure 11b: fused commit and verify is {low}x to {high}x faster. Ours:"
    yield from ("", "| accepted | 1 row | 64 rows |", "|---|---|---|")
    for n in range(1, 9):
        names = (f"fused_over_separate_len{n}", f"fused_over_separate_len{n}_b64")
        yield f"| {n} | {' | '.join(_known(known, name) for name in names)} |"
    yield ""


def _delta_log(known: dict[str, Metric]) -> Iterator[str]:
    yield (
        f"DeltaLog: up to {papers.DELTALOG_KERNEL}x per kernel and {papers.DELTALOG_WRITE_CUT}x "
        "fewer bytes written. Ours, against the faster way to fold every token (bytes counted):"
    )
    rows = (1, 4, 16, 64)
    head = " | ".join(f"{b} rows: time, writes" for b in rows)
    yield from ("", f"| log | {head} |", "|---" * (len(rows) + 1) + "|")
    for capacity in (4, 8, 16, 32):
        pairs = [
            ", ".join(
                _known(known, f"log{capacity}_ar_b{b}_{what}") for what in ("speedup", "write_cut")
            )
            for b in rows
        ]
        yield f"| {capacity} | {' | '.join(pairs)} |"
    yield ""


def _memory() -> Iterator[str]:
    paper = papers.STATE_BYTES * 8 / papers.FACTOR_BYTES_8
    yield (
        "Memory per sequence and layer for the candidates of one verify (counted). The whole "
        "includes conv inputs on both sides; SpecLA's figure for 8 tokens at 8x256, "
        f"{paper:.0f}x, is of the recurrent part:"
    )
    yield from (
        "",
        "| shape | nodes | state | snapshots | factors | ratio | recurrent: snapshots | factors "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    for shape in SHAPES.values():
        for nodes in MEMORY_NODES:
            size = transient_bytes(tree_case(shape, 1, nodes))
            parts = (
                f"{size[f'{part}snapshots'] / 2**20:.1f} MiB | "
                f"{size[f'{part}factors'] / 2**10:.1f} KiB | "
                f"{size[f'{part}snapshots'] / size[f'{part}factors']:.0f}x"
                for part in ("", "recurrent ")
            )
            state = f"{size['state'] / 2**20:.1f} MiB"
            yield f"| {label(shape)} | {nodes} | {state} | {' | '.join(parts)} |"
    yield ""


def _known(known: dict[str, Metric], name: str) -> str:
    return written(known[name]) if name in known else "missing"


def _ratio(slow: Row | None, row: Row | None) -> str:
    if slow is None or row is None or not row.us or slow.us is None:
        return "missing"
    return f"{slow.us / row.us:.2f}x"


def _us(row: Row | None) -> str:
    return "missing" if row is None else f"{row.us:.1f} us"
