# SPDX-License-Identifier: Apache-2.0
"""The cost table: what is looked up, what is refused, and what the engine makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from behind import behind
from engine_harness import check_counts, drive, make_engine, request
from engine_requests import LOOP, WALK

from specla import drafters
from specla.config import CHEAPEST
from specla.engine.cost import Cost, CostTable, Identity, device_name, find_table
from specla.engine.engine import Engine
from specla.engine.kernels import Kernels
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.ops.contract import DevicePlan

HERE = Identity(device="GPU", model="0123", log_capacity=16, torch="2", triton="3", specla="0")


def cost(
    rows: int,
    nodes: int,
    us: float,
    *,
    part: str = "verify",
    kernel: str = "walk",
    mode: str = "exact",
    depth: int | None = None,
) -> Cost:
    return Cost(
        part=part, rows=rows, nodes=nodes, depth=nodes - 1 if depth is None else depth,
        kernel=kernel, mode=mode, us=us, p10=0.9 * us, p90=1.1 * us,
    )  # fmt: skip


def accepts(mode: str = "exact") -> list[Cost]:
    return [
        cost(rows, nodes, 1.0 * rows, part="accept", kernel="", mode=mode)
        for rows in (1, 2, 4, 8)
        for nodes in (1, 4, 8)
    ]


def table(*costs: Cost, mode: str = "exact") -> CostTable:
    return CostTable(HERE, [*costs, *accepts(mode)])


PLAYED = table(
    cost(1, 1, 100), cost(1, 4, 120, depth=2), cost(1, 4, 150, depth=3), cost(8, 1, 110),
    cost(8, 4, 300),
)  # fmt: skip


# ---- look-ups


@pytest.mark.parametrize(
    ("rows", "nodes", "depth", "us"),
    [
        (1, 1, 0, 101),
        (1, 2, None, 151),  # the bucket of 4 would run, in its dearest shape
        (1, 3, 2, 121),
        (1, 4, 3, 151),
        (1, 4, 1, 121),  # less deep than any: the nearest
        (1, 4, 9, 151),
        (2, 1, 0, 112),  # up to 8 rows of verify, 2 of accept
        (5, 4, 3, 308),
    ],
)
def test_sizes_are_rounded_up(rows: int, nodes: int, depth: int | None, us: float) -> None:
    assert PLAYED.round_us(rows, nodes, depth=depth) == us
    if nodes == 1:
        assert PLAYED.ar_us(rows) == us


def test_between_two_depths_the_dearer_counts() -> None:
    dip = table(cost(1, 8, 200, depth=3), cost(1, 8, 150, depth=7))
    assert [dip.round_us(1, 8, depth=d) for d in (3, 4, 7)] == [201, 201, 151]


@pytest.mark.parametrize(
    ("rows", "nodes", "mode"), [(9, 1, "exact"), (1, 5, "exact"), (1, 1, "fast")]
)
def test_what_was_not_measured_is_refused(rows: int, nodes: int, mode: str) -> None:
    with pytest.raises(ConfigError, match=rf"cover {rows} rows of {nodes} nodes .*--mode {mode}"):
        PLAYED.round_us(rows, nodes, mode=mode)


def test_drafts_stand_beside_rounds() -> None:
    drawn = table(cost(2, 8, 30, part="draft", kernel="ngram"))
    assert drawn.draft_us(1, 8, "ngram") == 30
    with pytest.raises(ConfigError, match=r"draft \(suffix\)"):
        drawn.draft_us(1, 8, "suffix")


# ---- files


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    PLAYED.save(path)
    again = CostTable.load(path, HERE)
    assert (again.identity, again.costs) == (HERE, PLAYED.costs)
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_another_ones_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    PLAYED.save(tmp_path / "costs.json")
    other = replace(HERE, **{name: 0 if name == "log_capacity" else "other"})
    says = rf"for {name} ('other'|0), but was measured for {name}.*run specla profile here"
    with pytest.raises(ConfigError, match=says):
        CostTable.load(tmp_path / "costs.json", other)


def test_a_table_of_the_format_before_logs_were_told_apart_is_measured_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "costs.json"
    PLAYED.save(path)
    record = json.loads(path.read_text())
    del record["identity"]["log_capacity"]
    path.write_text(json.dumps(record | {"format": 1}))
    with pytest.raises(ConfigError, match="format 2, got format 1; run specla profile again"):
        CostTable.load(path, HERE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.update(format=99), "format 2, got format 99"),
        (lambda r: r.pop("costs"), "identity and costs"),
        (lambda r: r["identity"].pop("device"), "identity and costs"),
        (lambda r: r["costs"][0].update(us="fast"), "us must be microseconds"),
        (lambda r: r["costs"][0].update(us=float("nan")), "us must be microseconds"),
        (lambda r: r["costs"][0].update(rows=0), "rows must be a count"),
        (lambda r: r["costs"][0].update(part="guess"), "part must be one of"),
        (lambda r: r["costs"][0].update(extra=1), "extra"),
    ],
)
def test_a_damaged_table_is_refused(
    tmp_path: Path, change: Callable[[dict], object], says: str
) -> None:
    path = tmp_path / "costs.json"
    PLAYED.save(path)
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=says):
        CostTable.load(path, HERE)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match="specla profile again"):
        CostTable.load(tmp_path / "costs.json", HERE)


def test_a_write_that_fails_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.json"
    PLAYED.save(path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match="No space left"):
        CostTable(HERE, []).save(path)
    assert CostTable.load(path, HERE).costs == PLAYED.costs
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def test_a_new_mode_joins_and_a_known_one_is_replaced() -> None:
    fast = table(cost(1, 1, 90, mode="fast"), mode="fast")
    both = fast.replacing(PLAYED)
    assert (both.ar_us(1), both.ar_us(1, mode="fast")) == (101, 91)
    later = table(cost(1, 1, 70)).replacing(both)
    assert (later.ar_us(1), later.ar_us(1, mode="fast")) == (71, 91)
    with pytest.raises(ConfigError):
        later.round_us(1, 4)
    elsewhere = CostTable(replace(HERE, device="another"), PLAYED.costs)
    assert fast.replacing(elsewhere) is fast


# ---- whose it is and where it lies


def test_identity_of_a_model(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Identity.of(target, 16)
    assert one == Identity.of(target, 16)
    assert replace(one, log_capacity=0) == Identity.of(target, 0) != one
    assert one.device == device_name(torch.device("cpu"))
    assert one.device.endswith(", 1 thread")
    for change in ({"fingerprint": "other"}, {"vocab_size": 7}):
        info = replace(target.info, **change)
        monkeypatch.setattr(target, "info", info)
        assert Identity.of(target, 16).model != one.model


def test_its_place_follows_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert HERE.path.parent == tmp_path / "specla" / "costs"
    assert HERE.path != replace(HERE, model="else").path
    assert HERE.path != replace(HERE, log_capacity=0).path, "both are kept"
    assert HERE.path == replace(HERE, torch="else").path, "a new version replaces the old table"
    for ignored in ("", "relative"):  # as the XDG specification asks
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert HERE.path.parent == Path.home() / ".cache" / "specla" / "costs"


def find(
    asked: str, *, rows: int = 8, nodes: int = 4, mode: str = "exact", kernel: str = CHEAPEST
) -> tuple[bool, str]:
    found, why = find_table(asked, HERE, rows=rows, nodes=nodes, mode=mode, kernel=kernel)
    return found is not None, why


def test_auto_takes_what_fits_and_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find("auto")[1].startswith("default: there must be a cost table at")
    PLAYED.save(HERE.path)
    assert find("auto") == (True, f"measured: {HERE.path}")
    assert find("none") == (False, "default: costs none")
    assert find("auto", rows=9)[1].startswith("default: the cost table must cover 16 rows of 4")
    assert find("auto", mode="plain")[1].startswith("default: plain")
    assert find("auto", kernel=PLAYED.kernels("exact")[0])[0]
    assert "verify (other) in mode exact" in find("auto", kernel="other")[1]
    CostTable(replace(HERE, torch="1"), PLAYED.costs).save(HERE.path)
    assert "measured for torch '1'" in find("auto")[1]


def test_without_a_home_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert find("auto")[1].startswith("default: measurements need a folder")


@pytest.mark.parametrize(
    "size", [{"rows": 16}, {"nodes": 5}, {"mode": "fast"}, {"kernel": "other"}]
)
def test_a_path_must_fit(tmp_path: Path, size: dict[str, object]) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match="there is none"):
        find(str(path))
    PLAYED.save(path)
    assert find(str(path)) == (True, f"measured: {path}")
    with pytest.raises(ConfigError, match="must cover"):
        find(str(path), **size)  # type: ignore[arg-type]


# ---- the engine's choice

CROSSING = table(
    *(cost(b, n, 100 + 10 * b * n, mode="fast") for b in (1, 2, 4) for n in (1, 8)),
    *(cost(b, n, 200 + b * n, kernel="closed", mode="fast") for b in (1, 2, 4) for n in (1, 8)),
    mode="fast",
)  # closed is cheaper from two rows of eight nodes on


@pytest.fixture
def two_kernels(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> TargetModel:
    """The target as if it had two, by default the walk."""
    monkeypatch.setattr(target, "kernels", lambda mode: ("walk", "closed"), raising=False)
    monkeypatch.setattr(target, "default_kernel", lambda b, n, mode: "walk", raising=False)
    return target


def test_the_cheaper_kernel_is_chosen(two_kernels: TargetModel) -> None:
    chosen = Kernels(two_kernels, "fast", costs=CROSSING)
    assert chosen.source == "measured"
    assert [chosen.of(b, n) for b, n in ((1, 1), (1, 8), (2, 8), (3, 2), (4, 1))] == [
        "walk", "walk", "closed", "closed", "walk",
    ]  # fmt: skip
    even = table(
        cost(1, 1, 50, mode="fast"), cost(1, 1, 50, kernel="closed", mode="fast"), mode="fast"
    )
    assert Kernels(two_kernels, "fast", costs=even).of(1, 1) == "walk"


def test_defaults_and_overrides(two_kernels: TargetModel) -> None:
    default = Kernels(two_kernels, "fast", costs=None)
    assert (default.of(4, 8), default.source) == ("walk", "default")
    forced = Kernels(two_kernels, "fast", kernel="closed", costs=CROSSING)
    assert {forced.of(b, n) for b in (1, 4) for n in (1, 8)} == {"closed"}
    only = table(cost(4, 8, 50, mode="fast"), mode="fast")
    with pytest.raises(ConfigError, match=r"must cover 4 rows of 8 nodes for verify \(closed\)"):
        Kernels(two_kernels, "fast", kernel="closed", costs=only).of(4, 8)


def test_kernels_that_are_not_there_are_refused(target: TargetModel) -> None:
    with pytest.raises(ConfigError, match=r"in mode fast \(reference\), got 'closed'"):
        Kernels(target, "fast", kernel="closed", costs=None)
    with pytest.raises(ConfigError, match=r"about kernels of mode fast \(reference\), got closed"):
        Kernels(target, "fast", costs=CROSSING)
    with pytest.raises(ConfigError, match="must cover 4 rows of 8 nodes"):
        Engine(
            target, make_engine(target).state, drafters.build("none"), mode="exact",
            prefill_chunk=64, costs=table(cost(1, 1, 5, kernel="reference")),
        )  # fmt: skip


def fast_engine(target: TargetModel, drafter: str, costs: CostTable | None) -> Engine:
    made = make_engine(target, drafters.build(drafter))
    return Engine(
        target, made.state, made.drafter, mode="fast", prefill_chunk=64,
        tokenizer=made._tokenizer, costs=costs,
    )  # fmt: skip


REQUESTS = [
    request("one", LOOP, seed=1, max_tokens=30),
    request("two", WALK, seed=2, max_tokens=9, temperature=0.9),
    request("three", LOOP[:3], seed=3, max_tokens=4, top_k=3),
]


@pytest.mark.parametrize("on_device", [False, True])
def test_results_say_which_kernels_ran(two_kernels: TargetModel, on_device: bool) -> None:
    engine = fast_engine(two_kernels, "ngram", CROSSING)
    if on_device:
        rounds = behind(engine)
    run = _drive_behind(engine, REQUESTS) if on_device else drive(engine, REQUESTS).completions
    reports = {name: c.speculation for name, c in run.items()}
    for completion in run.values():
        check_counts(completion)
        assert completion.speculation.costs == "measured"
    assert {*reports["one"].kernels} == {"walk", "closed"}, "with others, then alone"
    assert all(sum(r.kernels.values()) == r.rounds for r in reports.values())
    total = engine.stats.summary()["kernels"]
    assert total == {
        k: sum(r.kernels.get(k, 0) for r in reports.values()) for k in ("walk", "closed")
    }
    if on_device:
        assert rounds.launches > 0


def _drive_behind(engine: Engine, requests: list) -> dict:
    for one in requests:
        engine.add(one)
    done = {}
    while engine.has_work:
        done |= {d.request_id: d.completion for d in engine.step() if d.completion}
    return done


def test_nothing_measured_is_reported(target: TargetModel) -> None:
    run = drive(make_engine(target, drafters.build("ngram")), REQUESTS[:1])
    report = run.completions["one"].speculation
    assert (report.costs, report.kernels) == ("default", {"reference": report.rounds})
    assert asdict(report)["kernels"] == {"reference": report.rounds}


def test_graphs_say_what_verifies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines on one model: each one's graphs have its own kernels, whoever came last."""
    from specla.engine import buckets

    asked: list[str | None] = []

    class Model:
        def verify(self, plan: DevicePlan, *_: object) -> None:
            asked.append(plan.kernel)

    monkeypatch.setattr(buckets, "choose", lambda *_: None)
    monkeypatch.setattr(buckets, "accept", lambda *_, **__: None)
    tokens = SimpleNamespace(tokens=torch.zeros(2, 8))
    for kernel in ("walk", "closed"):
        rounds = object.__new__(buckets.Buckets)
        rounds._kernel = lambda rows, nodes, kernel=kernel: f"{kernel} {rows} {nodes}"
        rounds._model, rounds._choices = Model(), None  # type: ignore[assignment]
        rounds._state = SimpleNamespace(fold_threshold=0)  # type: ignore[assignment]
        rounds.resting = None
        one = SimpleNamespace(rnd=tokens, rows=None, verdicts=None, features=None, logits=None)
        rounds._launches(one, depth=0)  # type: ignore[arg-type]
    assert asked == ["walk 2 8", "closed 2 8"]
