# SPDX-License-Identifier: Apache-2.0
"""From rows to named figures. A figure whose rows are missing is reported as missing.

Ratios compare medians of one run; their p10 and p90 are ours against the baseline's median. Ours
includes the convolution, which SGLang's kernels do not; the state kernel alone stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specla.bench.bytes import transient_bytes
from specla.bench.kernel_cases import (
    BATCH,
    CAPACITIES,
    LENGTHS,
    LOG_BATCHES,
    MEMORY_NODES,
    SHAPES,
    WAVE_BATCHES,
    WAVE_NODES,
    label,
    tree_case,
)
from specla.bench.kernel_rows import Row
from specla.bench.papers import TABLE_1

MODES = ("exact", "fast")
STATE_ONLY = "exact, state only, no overlap"
HYBRID, PORTABLE = "hybrid in waves", "portable walk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure. value is None where rows are missing, and notes says which."""

    name: str
    value: float | None
    unit: str = "x"
    p10: float | None = None
    p90: float | None = None
    baseline: str = ""
    notes: str = ""


class Measured:
    """Timed rows by case and method."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def fastest(self, case: str, wanted: Callable[[str], bool]) -> Row | None:
        """The fastest timed row of a case among the methods wanted."""
        found = [r for r in self.rows if r.case == case and r.us is not None and wanted(r.method)]
        return min(found, key=lambda row: row.us or 0.0, default=None)

    def one(self, case: str, *names: str) -> Row | None:
        """The fastest of the methods named."""
        return self.fastest(case, lambda name: name in names)

    def labels(self, suite: str) -> list[str]:
        """Shapes a suite ran on."""
        return list(dict.fromkeys(row.shape for row in self.rows if row.suite == suite))


def metrics(rows: Sequence[Row]) -> list[Metric]:
    """Every figure of the suites that ran."""
    found = Measured(rows)
    parts = (_trees, _chains, _single, _commits, _logs, _tables, _waves, _recoveries, _memory)
    return [metric for part in parts for metric in part(found)]


def _trees(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("tree"):
        case = f"tree_n16_b{BATCH}_{shape}"
        theirs = found.fastest(case, _is_sglang)
        for mode in MODES:
            ours = found.one(case, mode, f"{mode}, no overlap")
            yield speedup(f"{case}_{mode}_over_sglang", ours, theirs)
        ours = found.one(case, STATE_ONLY)
        yield speedup(f"{case}_exact_state_only_over_sglang", ours, theirs)


def _chains(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("chain"):
        case = f"chain_n8_b{BATCH}_{shape}"
        theirs = found.fastest(case, lambda name: "ReplaySSM, ring" in name)
        for mode in MODES:
            ours = found.one(case, mode, f"{mode}, no overlap")
            yield cost(f"{case}_{mode}_over_replayssm", ours, theirs)
        ours = found.one(case, STATE_ONLY)
        yield cost(f"{case}_exact_state_only_over_replayssm", ours, theirs)


def _single(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("single"):
        case = f"tree_n16_b1_{shape}"
        theirs = found.fastest(case, _is_sglang) or found.one(case, "snapshot per node")
        for mode in MODES:
            ours = found.one(case, mode, f"{mode}, no overlap")
            yield time_of(f"{case}_{mode}_us", ours, theirs)
        yield time_of(f"{case}_exact_state_only_us", found.one(case, STATE_ONLY), theirs)


def _commits(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("commit"):
        for rows in (1, BATCH):
            for n in LENGTHS:
                case = f"pending{n}_n16_b{rows}_{shape}"
                name = f"fused_over_separate_len{n}" + ("" if rows == 1 else f"_b{rows}")
                separate = found.one(case, "separate commit")
                yield speedup(name, found.one(case, STATE_ONLY), separate)


def _logs(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("log"):
        for rows in LOG_BATCHES:
            base = f"log0_b{rows}_{shape}"
            # The stronger of two ways to fold every token: ours with a log of 0, and in place.
            every = found.one(base, "log of 0", "decode in place")
            for capacity in CAPACITIES[1:]:
                ours = found.one(f"log{capacity}_b{rows}_{shape}", f"log of {capacity}")
                yield speedup(f"log{capacity}_ar_b{rows}_speedup", ours, every)
                yield _write_cut(f"log{capacity}_ar_b{rows}_write_cut", ours, every)


def _tables(found: Measured) -> Iterator[Metric]:
    methods = {
        "serial": STATE_ONLY,
        "wy": "fast, state only, no overlap",
        "hybrid": HYBRID,
        "snapshots": "snapshot per node",
    }
    for shape in found.labels("table1"):
        for k, depth, nodes in TABLE_1:
            case = f"top{k}_depth{depth}_n{nodes}_{shape}"
            slow = found.one(case, "root to leaf")
            for name, method in methods.items():
                yield speedup(
                    f"table1_{k}_{depth}_{nodes}_{name}_over_r2l", found.one(case, method), slow
                )


def _waves(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("waves"):
        for rows in WAVE_BATCHES:
            for nodes in WAVE_NODES:
                case = f"waves_n{nodes}_b{rows}_{shape}"
                theirs = found.one(case, HYBRID)
                for name, method in (("exact", STATE_ONLY), ("portable", PORTABLE)):
                    yield speedup(f"{case}_{name}_over_hybrid", found.one(case, method), theirs)


def _recoveries(found: Measured) -> Iterator[Metric]:
    for shape in found.labels("recovery"):
        for n in LENGTHS:
            case = f"pending{n}_n16_b1_{shape}"
            ours = found.one(case, "recover from factors")
            for name in ("tokens", "tokens and projections"):
                theirs = found.one(case, f"recover from {name}")
                word = name.replace(" and ", "_")
                yield speedup(f"recovery_{word}_over_factors_len{n}", ours, theirs)


def _memory(found: Measured) -> Iterator[Metric]:
    """Of the presets that ran one row. Counted: the recurrent part is what SpecLA counts."""
    shapes = {label(shape): shape for shape in SHAPES.values()}
    for name in found.labels("single"):
        for nodes in MEMORY_NODES if name in shapes else ():
            size = transient_bytes(tree_case(shapes[name], 1, nodes))
            for part in ("", "recurrent "):
                states, factors = size[f"{part}snapshots"], size[f"{part}factors"]
                yield Metric(
                    name=f"state_memory_n{nodes}_{name}_{part.strip() or 'whole'}_cut",
                    value=states / factors,
                    baseline=f"a state per node: {states / 2**20:.2f} MiB",
                    notes=f"factors: {factors / 2**10:.1f} KiB per row and layer; conv inputs "
                    f"{'left out' if part else 'included'}; counted, not measured",
                )


def speedup(name: str, ours: Row | None, theirs: Row | None) -> Metric:
    """theirs / ours."""
    if ours is None or theirs is None:
        return _missing(name, ours, theirs)
    us, p10, p90, base = _times(ours, theirs)
    return Metric(
        name=name,
        value=base / us,
        p10=base / p90,
        p90=base / p10,
        baseline=_side(theirs),
        notes=_notes(ours, theirs),
    )


def cost(name: str, ours: Row | None, theirs: Row | None) -> Metric:
    """ours / theirs."""
    if ours is None or theirs is None:
        return _missing(name, ours, theirs)
    us, p10, p90, base = _times(ours, theirs)
    return Metric(
        name=name,
        value=us / base,
        p10=p10 / base,
        p90=p90 / base,
        baseline=_side(theirs),
        notes=_notes(ours, theirs),
    )


def time_of(name: str, ours: Row | None, theirs: Row | None) -> Metric:
    """Our microseconds; the baseline's are named."""
    if ours is None:
        return _missing(name, ours, theirs)
    return Metric(
        name=name,
        value=ours.us,
        unit="us",
        p10=ours.p10,
        p90=ours.p90,
        baseline=_side(theirs) if theirs else "none in this run",
        notes=_notes(ours, theirs),
    )


def _write_cut(name: str, ours: Row | None, theirs: Row | None) -> Metric:
    if ours is None or theirs is None or not ours.written or theirs.written is None:
        return _missing(name, ours, theirs)
    return Metric(
        name=name,
        value=theirs.written / ours.written,
        baseline=f"{theirs.method}: {theirs.written / 1e6:.2f} MB written",
        notes=f"{ours.written / 1e6:.2f} MB written per token and layer; counted, not measured",
    )


def _missing(name: str, ours: Row | None, theirs: Row | None) -> Metric:
    absent = [side for side, row in (("ours", ours), ("the baseline", theirs)) if row is None]
    return Metric(name=name, value=None, notes=f"missing: {' and '.join(absent) or 'bytes'}")


def _times(ours: Row, theirs: Row) -> tuple[float, float, float, float]:
    assert ours.us is not None
    assert ours.p10 is not None
    assert ours.p90 is not None
    assert theirs.us is not None
    return ours.us, ours.p10, ours.p90, theirs.us


def _side(row: Row) -> str:
    return f"{row.method}: {row.us:.2f} us"


def _notes(ours: Row, theirs: Row | None) -> str:
    moved = (ours.read or 0.0) + (ours.written or 0.0)
    text = (
        f"{ours.method}: {ours.us:.2f} us ({ours.scope}); {moved / 1e6:.1f} MB = "
        f"{ours.bandwidth or 0:.0%} of read bandwidth; error {ours.error or 0:.0e}"
    )
    return text if theirs is None else f"{text}; baseline has {theirs.scope}"


def _is_sglang(name: str) -> bool:
    return name.startswith("SGLang") and " tree" in name
