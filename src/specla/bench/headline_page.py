# SPDX-License-Identifier: Apache-2.0
"""The headline's figures under the names of results.csv, its table, and its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from specla.bench import fla_sd
from specla.bench.headline import (
    AR,
    BLOCK_MORE,
    BUDGET,
    CHAIN,
    GOES,
    GSM8K,
    PRUNED,
    READER,
    SUITES,
    TREE,
    Batch,
    Ratio,
    Score,
    part_ratios,
    tau_ratio,
)
from specla.bench.kernel_metrics import Metric
from specla.bench.kernel_report import written
from specla.bench.loops import has_loop
from specla.bench.measure import Sample
from specla.bench.report import markdown

READING, CONTROL = ("reader", "reader-joint"), ("block-first", "block-more")
"""Entries of the line-up: a reader's two stages, and as many without one."""
PLAIN = "own AR, graphed on a GPU, exact, same run"
HEADERS = ("suite", "method", "prompts", "tok/s", "x AR", "95 %", "no loops", "tau",
           "round / AR", "same", "loops", "cut")  # fmt: skip
NOTE = (
    "tau: tokens per round, the bonus counted. round / AR: seconds per round over AR's. loops: "
    "answers with a stretch that repeats; no loops: x AR without them; cut: answers that the "
    "limit ended."
)
BATCH_HEADERS = ("suite", "method", "size", "AR, s", "s", "x AR", "AR, decoding", "decoding",
                 "x AR", "rounds", "tau", "drafts", "drafted", "same", "loops")  # fmt: skip
BATCH_NOTE = (
    f"Medians of {GOES} goes by turns, after one that is not timed; decoding: without prompts. "
    "rounds: of the row that had most; tau and drafts: tokens and verified drafts per round of a "
    "row; drafted: rounds of rows with any."
)


def metrics(
    scores: Sequence[Score],
    batches: Sequence[Batch],
    samples: Sequence[Sample],
    missing: Mapping[str, str],
    trained: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Metric]:
    """Those of the issue first, each of them measured or missing with its reason, then all
    methods on all suites. trained: the line-up's entries by name, as `lineup.record` has them."""
    named = {(score.suite, score.method): score for score in scores}
    found = [_end_to_end(named.get((s, PRUNED)), s, missing) for s in SUITES]
    found.append(_round(named.get((GSM8K, PRUNED)), missing))
    gains = (
        ("tau_tree_over_chain_gsm8k", (TREE, CHAIN), "the chain, same depth"),
        ("reader_tau_gain", (READER, BLOCK_MORE), _equal(trained or {})),
    )
    for name, pair, base in gains:
        ratio = tau_ratio(samples, GSM8K, *pair)
        found.append(_gain(name, ratio, pair, base, named.get((GSM8K, pair[0])), missing))
    parts = part_ratios(samples, BUDGET)
    found += [_in_batch(batches, missing), _worst(named, batches, parts, missing)]
    found += [metric for score in scores for metric in _details(score)]
    found += [
        _over_fla(named[suite, fla_sd.NAME], named[suite, fla_sd.PLAIN])
        for suite in SUITES
        if {(suite, fla_sd.NAME), (suite, fla_sd.PLAIN)} <= named.keys()
    ]
    return found + [metric for batch in batches for metric in _batch_details(batch)]


def _equal(trained: Mapping[str, Mapping[str, Any]]) -> str:
    """What the reader's gain is measured against, and what both were given."""
    told = ["block drafter, no state: same batches, anchors, loss, rates but the new reader's"]
    for what, stages in (("reader", READING), ("without", CONTROL)):
        if found := [trained[name] for name in stages if name in trained]:
            steps = " + ".join(str(one["steps"]) for one in found)
            told.append(f"{what} {steps} steps, {sum(one['seconds'] for one in found):.0f} s")
    return "; ".join(told)


def _end_to_end(score: Score | None, suite: str, missing: Mapping[str, str]) -> Metric:
    name = f"e2e_{suite}_b1"
    if score is None:
        return _missing(name, (PRUNED, f"{PRUNED}, {suite}"), missing)
    return _ratio(name, score.ratio, PLAIN, f"{_clean(score)}; {counts(score)}")


def _clean(score: Score) -> str:
    one = score.ratio_clean
    return "all loop" if one is None else f"{one.value:.3f} without looping answers"


def _round(score: Score | None, missing: Mapping[str, str]) -> Metric:
    if score is None:
        return _missing("round_over_ar", (PRUNED, f"{PRUNED}, {GSM8K}"), missing)
    return Metric(
        name="round_over_ar", value=score.round_over_ar, baseline=PLAIN,
        notes=f"{PRUNED}, {GSM8K}; tau {score.tau:.3f}; {counts(score)}",
    )  # fmt: skip


def _gain(
    name: str,
    ratio: Ratio | None,
    needs: Sequence[str],
    base: str,
    score: Score | None,
    missing: Mapping[str, str],
) -> Metric:
    if ratio is None or score is None:
        return _missing(name, (*needs, *(f"{one}, {GSM8K}" for one in needs)), missing)
    return _ratio(name, ratio, base, f"tokens per round, GSM8K; {counts(score)}")


def _in_batch(batches: Sequence[Batch], missing: Mapping[str, str]) -> Metric:
    """GSM8K in the largest batch."""
    mine = [one for one in batches if one.suite == GSM8K]
    if not mine:
        return _missing("e2e_gsm8k_b64", _about_batches(missing), missing)
    one = max(mine, key=lambda batch: batch.size)
    return _batch(f"e2e_gsm8k_b{one.size}", one)


def _batch(name: str, one: Batch) -> Metric:
    notes = (
        f"batch {one.size}, prefill included: {one.plain_seconds:.3f} s and {one.seconds:.3f}; "
        f"{one.decode_ratio:.3f} without; {_batch_counts(one)}"
    )
    return Metric(name=name, value=one.ratio, baseline=PLAIN, notes=notes)


def _batch_details(one: Batch) -> Iterable[Metric]:
    name = f"headline/{one.suite}/{_where(one)}"
    yield _batch(f"{name}/ratio", one)
    yield Metric(
        name=f"{name}/decode_ratio", value=one.decode_ratio, baseline=PLAIN,
        notes=f"batch {one.size}, decoding alone: {one.plain_decode_s:.3f} s and "
        f"{one.decode_s:.3f}; {_batch_counts(one)}",
    )  # fmt: skip


def _batch_counts(one: Batch) -> str:
    drafted = "" if one.drafted is None else f", drafted in {one.drafted:.0%}"
    return (
        f"same as AR {one.same}; looping {one.looping}; {one.tokens} tokens; {one.rounds} rounds, "
        f"tau {one.tau:.2f}, {one.drafts:.1f} drafts a round and row{drafted}"
    )


def _where(one: Batch) -> str:
    return f"{one.method}, batch of {one.size}"


def _about_batches(missing: Mapping[str, str]) -> list[str]:
    return [name for name in missing if name.startswith(f"{BUDGET}, ") and "batch" in name]


def _worst(
    named: Mapping[tuple[str, str], Score],
    batches: Sequence[Batch],
    parts: Mapping[str, float],
    missing: Mapping[str, str],
) -> Metric:
    """The least ratio with the budget on, of every suite, part of one and batch size that was
    measured; only where all suites were, and GSM8K in a batch."""
    singles = [score for (_, method), score in named.items() if method == BUDGET]
    ratios = {f"{s.suite}, batch 1": s.ratio.value for s in singles}
    ratios |= {f"{part}, batch 1": ratio for part, ratio in parts.items()}
    ratios |= {f"{b.suite}, batch {b.size}": b.ratio for b in batches}
    if not {*SUITES} <= {s.suite for s in singles} or GSM8K not in {b.suite for b in batches}:
        needs = (BUDGET, *(f"{BUDGET}, {s}" for s in SUITES), *_about_batches(missing))
        return _missing("e2e_worst_case", needs, missing)
    worst = min(ratios, key=ratios.__getitem__)
    each = "; ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    notes = f"{worst}; the least of: {each}; no other prompts or sizes were measured"
    return Metric(name="e2e_worst_case", value=ratios[worst], baseline=PLAIN, notes=notes)


def _ratio(name: str, ratio: Ratio, baseline: str, notes: str) -> Metric:
    return Metric(
        name=name, value=ratio.value, p10=ratio.p10, p90=ratio.p90, baseline=baseline,
        notes=f"95 % {ratio.low:.3f} to {ratio.high:.3f}; {notes}",
    )  # fmt: skip


def _missing(name: str, needs: Sequence[str], missing: Mapping[str, str]) -> Metric:
    reasons = [f"{one}: {missing[one]}" for one in needs if one in missing]
    return Metric(name=name, value=None, notes="; ".join(reasons) or "not measured in this run")


def _details(score: Score) -> Iterable[Metric]:
    name, notes = f"headline/{score.suite}/{score.method}", counts(score)
    yield Metric(name=f"{name}/decode", value=score.speed, unit="tokens/s", notes=notes)
    if score.method != AR:
        yield _ratio(f"{name}/ratio", score.ratio, PLAIN, notes)
        if score.ratio_clean is not None:
            yield _ratio(f"{name}/ratio_clean", score.ratio_clean, PLAIN,
                         f"without looping answers; {notes}")  # fmt: skip
        yield Metric(name=f"{name}/tau", value=score.tau, unit="tokens/round", notes=notes,
                     baseline="plain AR, 1 token/round")  # fmt: skip


def _over_fla(loop: Score, plain: Score) -> Metric:
    """What speculation brings to fla's own model, which is not graphed."""
    return Metric(
        name=f"headline/{loop.suite}/{loop.method}/over_fla", value=loop.speed / plain.speed,
        baseline="fla's model, plain, eager, same run", notes=counts(loop),
    )  # fmt: skip


def counts(score: Score) -> str:
    """What a reader needs to judge a figure."""
    return (
        f"{score.prompts} prompts; same as AR {score.same}; looping {score.looping}; cut "
        f"{score.unended}; failed {score.failed}"
    )


def read(measured: Mapping[str, Any]) -> tuple[list[Score], list[Batch], list[Metric]]:
    """Scores, batches and figures from their JSON objects."""
    return (
        [Score(**one | _ratios(one)) for one in measured["scores"]],
        [Batch(**one) for one in measured["batches"]],
        [Metric(**one) for one in measured["metrics"]],
    )


def _ratios(one: Mapping[str, Any]) -> dict[str, Ratio | None]:
    names = ("ratio", "ratio_clean")
    return {name: None if one[name] is None else Ratio(**one[name]) for name in names}


def csv_rows(found: Sequence[Metric], head: Mapping[str, str]) -> list[dict[str, object]]:
    """results.csv rows of what was measured. head: date, commit, device, torch, triton,
    command."""
    return [
        {
            **head,
            "metric": one.name,
            "value": f"{one.value:.4f}",
            "unit": one.unit,
            "p10": "" if one.p10 is None else f"{one.p10:.4f}",
            "p90": "" if one.p90 is None else f"{one.p90:.4f}",
            "baseline": one.baseline,
            "notes": one.notes,
        }
        for one in found
        if one.value is not None
    ]


def cells(score: Score) -> list[str]:
    """One row of the table."""
    return [
        score.suite,
        score.method,
        f"{score.prompts}" + (f" ({score.failed} failed)" if score.failed else ""),
        f"{score.speed:.1f}",
        f"{score.ratio.value:.2f}",
        f"{score.ratio.low:.2f}-{score.ratio.high:.2f}",
        "-" if score.ratio_clean is None else f"{score.ratio_clean.value:.2f}",
        f"{score.tau:.2f}",
        f"{score.round_over_ar:.2f}",
        f"{score.same}",
        f"{score.looping}",
        f"{score.unended}",
    ]


def batch_cells(one: Batch) -> list[str]:
    """One row of the table of batches."""
    return [
        one.suite,
        one.method,
        f"{one.size}",
        f"{one.plain_seconds:.3f}",
        f"{one.seconds:.3f}",
        f"{one.ratio:.2f}",
        f"{one.plain_decode_s:.3f}",
        f"{one.decode_s:.3f}",
        f"{one.decode_ratio:.2f}",
        f"{one.rounds}",
        f"{one.tau:.2f}",
        f"{one.drafts:.1f}",
        "-" if one.drafted is None else f"{one.drafted:.0%}",
        f"{one.same}",
        f"{one.looping}",
    ]


def render_batches(batches: Sequence[Batch]) -> Table:
    """Their table, for a terminal."""
    table = Table(title="In batches", title_justify="left", pad_edge=False, caption=BATCH_NOTE)
    for name in BATCH_HEADERS:
        left = name in BATCH_HEADERS[:2]
        table.add_column(name, no_wrap=True, justify="left" if left else "right")
    for one in batches:
        table.add_row(*batch_cells(one))
    return table


def render(scores: Sequence[Score], title: str) -> Table:
    """The table, for a terminal."""
    table = Table(title=title, title_justify="left", pad_edge=False, caption=NOTE)
    for name in HEADERS:
        table.add_column(name, no_wrap=True, justify="left" if name in HEADERS[:2] else "right")
    for score in scores:
        table.add_row(*cells(score))
    return table


def page(
    scores: Sequence[Score],
    batches: Sequence[Batch],
    found: Sequence[Metric],
    missing: Mapping[str, str],
    run: Mapping[str, Any],
) -> str:
    """results/headline/README.md. run: what is said about target, drafters and machine."""
    named = [one for one in found if not one.name.startswith("headline/")]
    parts = ["# The headline", "Written by `specla bench headline --record`.", "## Figures"]
    parts.append(
        markdown(("metric", "value", "95 % and counts, or why it is missing"),
               [(f"`{m.name}`", written(m), m.notes) for m in named])
    )  # fmt: skip
    parts += ["## All methods", markdown(HEADERS, [cells(score) for score in scores]), NOTE]
    if batches:
        rows = [batch_cells(one) for one in batches]
        parts += ["## In batches", markdown(BATCH_HEADERS, rows), BATCH_NOTE]
    if missing:
        parts += ["## Missing", markdown(("what", "why"), sorted(missing.items()))]
    parts += ["## What ran", markdown(("what", "value"), [(k, str(v)) for k, v in run.items()])]
    return "\n\n".join(parts) + "\n"


def text_record(one: Sample) -> dict[str, object]:
    """An answer, to look at."""
    done = one.completion
    return {
        "suite": one.prompt.kind,
        "part": one.prompt.part,
        "method": one.method,
        "prompt": one.prompt.text,
        "text": None if done is None else done.text,
        "tokens": 0 if done is None else len(done.token_ids),
        "rounds": 0 if done is None else done.speculation.rounds,
        "loops": None if done is None else has_loop(done.token_ids),
        "decode_s": round(one.decode_s, 6),
        "finish_reason": None if done is None else done.finish_reason,
        "error": one.error,
    }
