# SPDX-License-Identifier: Apache-2.0
"""resolve(): every choice is made and explained, every bad value is refused with a cure."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from specla.config import (
    DEFAULT_DRAFTER,
    DTYPES,
    ONE_THREAD_BELOW,
    EngineConfig,
    ResolvedConfig,
    prefill_kernels,
    resolve,
    with_costs,
    with_threads,
)
from specla.errors import ConfigError, KernelUnavailable

# What is chosen when nothing is said, and has to be explained.
CHOSEN = (
    "drafter", "device", "dtype", "log_capacity", "prefill_chunk", "threads", "kernel", "costs",
    "budget",
)  # fmt: skip


def test_every_choice_is_made_and_explained() -> None:
    config = resolve(EngineConfig())
    assert "auto" not in config.summary().values()
    assert None not in (getattr(config, name) for name in CHOSEN)
    assert set(config.reasons) == set(CHOSEN)
    for name in (name for name in CHOSEN if name != "threads"):
        assert config.reasons[name].startswith(str(getattr(config, name)))


def test_what_is_asked_for_is_kept_and_needs_no_reason() -> None:
    asked = EngineConfig(
        model="somewhere",
        revision="main",
        drafter="ngram",
        drafter_options={"num_draft_tokens": 3},
        device="cpu",
        dtype="float64",
        max_slots=3,
        max_nodes=5,
        log_capacity=7,
        prefill_chunk=128,
        threads=1,
        kernel="reference",
        costs="none",
        budget="3",
    )
    config = resolve(asked)
    for field in fields(asked):
        assert getattr(config, field.name) == getattr(asked, field.name)
    assert not config.reasons


@pytest.mark.parametrize(
    ("drafter", "max_nodes", "budget", "runs"),
    [
        ("suffix", 16, "auto", "paying"), ("suffix", 16, "off", "off"), ("ngram", 16, "14", "14"),
        ("none", 16, "auto", "off"), ("suffix", 1, "auto", "off"), ("none", 1, "off", "off"),
    ],
)  # fmt: skip
def test_budgets_that_can_be_honoured(
    drafter: str, max_nodes: int, budget: str, runs: str
) -> None:
    config = resolve(EngineConfig(drafter=drafter, max_nodes=max_nodes, budget=budget))
    assert config.budget == runs
    assert ("budget" in config.reasons) == (budget == "auto")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"budget": "much"}, "budget must be auto, off or a number of drafts >= 1, got 'much'"),
        ({"budget": "0"}, "budget must be auto, off or a number"),
        ({"budget": "-1"}, "budget must be auto, off or a number"),
        ({"budget": "9" * 18}, "9{18} drafts must be below the 15"),
        ({"budget": 3}, "budget must be a string"),
        ({"budget": "15", "max_nodes": 16}, "15 that a tree .* effect .max_nodes 16.; use"),
        ({"budget": "1", "drafter": "none"}, "has no effect .drafter none"),
        ({"budget": "4", "mode": "plain"}, "has no effect .drafter none"),
        ({"budget": "4", "max_nodes": 1}, "has no effect .max_nodes 1."),
    ],
)
def test_budgets_that_cannot_be(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(EngineConfig(**settings))  # type: ignore[arg-type]


def test_both_records_have_the_same_settings() -> None:
    asked = {field.name for field in fields(EngineConfig)}
    assert {field.name for field in fields(ResolvedConfig)} == {*asked, "reasons"}


@pytest.mark.parametrize("drafter", ["auto", "none"])
def test_plain_mode_drafts_nothing(drafter: str) -> None:
    config = resolve(EngineConfig(mode="plain", drafter=drafter))
    assert (config.mode, config.drafter, config.max_nodes) == ("plain", "none", 1)
    assert ("drafter" in config.reasons) == (drafter == "auto")


def test_without_a_drafter_there_is_no_room_for_candidates() -> None:
    config = resolve(EngineConfig(drafter="none", max_nodes=16))
    assert config.max_nodes == 1
    assert config.reasons["max_nodes"].startswith("1: ")
    assert "max_nodes" not in resolve(EngineConfig(drafter="none", max_nodes=1)).reasons


def test_auto_is_a_drafter_that_exists() -> None:
    from specla import drafters

    assert resolve(EngineConfig()).drafter == DEFAULT_DRAFTER == drafters.resolve_name("auto")


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name: str) -> None:
    assert resolve(EngineConfig(dtype=name)).torch_dtype == getattr(torch, name)


BAD_SIZES = (0, -1, 1.5, True, False, "8", None)
BAD: list[tuple[str, object]] = [
    *((name, bad) for name in ("max_slots", "max_nodes") for bad in BAD_SIZES),
    *(("log_capacity", bad) for bad in (-1, 1.5, True, "3")),
    *(("threads", bad) for bad in (0, -1, 1.5, True, "3")),
    *(("prefill_chunk", bad) for bad in (0, -64, 64.0, True, "64", 1, 63, 65, 100)),
    *(("mode", bad) for bad in ("quick", "", "EXACT", None)),
    *(("dtype", bad) for bad in ("fp32", "float16", "", None, torch.float32)),
    *(("device", bad) for bad in ("gpu", "mps", "", "cpu:0", None, 0)),
    *(("drafter", bad) for bad in (None, 3)),
    *(("model", bad) for bad in (None, 3)),
]


@pytest.mark.parametrize(("name", "bad"), BAD, ids=lambda x: str(x))
def test_bad_values_are_refused(name: str, bad: object) -> None:
    """What must hold, and what was given."""
    with pytest.raises(ConfigError) as refused:
        resolve(replace(EngineConfig(), **{name: bad}))
    message = str(refused.value)
    assert message.startswith(f"{name} must be")
    assert f"got {bad!r}" in message
    assert "\n" not in message
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("dtype", "installed", "kernels", "why"),
    [
        ("bfloat16", "0.6.0", "fla", "0.6.0"),
        ("bfloat16", "0.6.3", "fla", "0.6.3"),
        ("bfloat16", "0.7.0", "reference", "0.7.0 is not of the 0.6 series"),
        ("bfloat16", None, "reference", "not installed"),
        ("float32", "0.6.0", "reference", "tf32"),
    ],
)
def test_what_computes_prompts_on_a_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, dtype: str, installed: str | None, kernels: str, why: str
) -> None:
    def version(name: str) -> str:
        assert name == "fla-core"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("specla.config.version", version)
    assert prefill_kernels(dtype)[0] == kernels
    assert why in prefill_kernels(dtype)[1]
    monkeypatch.setattr("specla.config._why_no_gpu", lambda: "")
    config = resolve(EngineConfig(dtype=dtype))
    assert config.reasons["prefill"] == ": ".join(prefill_kernels(dtype))
    assert config.prefill_chunk == 4096
    assert config.reasons["prefill_chunk"].startswith("4096 on a GPU")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_without_kernels_is_not_replaced(device: str) -> None:
    with pytest.raises(KernelUnavailable, match="use --device cpu") as refused:
        resolve(EngineConfig(device=device))
    assert repr(device) in str(refused.value)


def test_the_gpu_asked_for_is_the_one_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two GPUs is too old."""
    ages = {None: (9, 0), 0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_capability", ages.get)
    monkeypatch.setattr("torch.cuda.get_device_name", "GPU {}".format)
    monkeypatch.setattr("specla.config.find_spec", lambda name: name)
    for device in ("cuda", "cuda:0"):
        assert resolve(EngineConfig(device=device)).device == device
    for device, why in (("cuda:1", "GPU 1 is older"), ("cuda:2", "torch sees 2 of them")):
        with pytest.raises(KernelUnavailable, match=why):
            resolve(EngineConfig(device=device))


def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: (9, 0))
    old = SimpleNamespace(__version__="3.5.1")
    monkeypatch.setattr("specla.config.import_module", lambda name: old)
    with pytest.raises(KernelUnavailable, match=r"triton 3\.5\.1 is older than 3\.6"):
        resolve(EngineConfig(device="cuda"))
    assert resolve(EngineConfig()).reasons["device"].startswith("cpu: triton 3.5.1")


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cuda:-1", "cuda0", "gpu", "cuda:0:1"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(ConfigError, match="cuda or cuda:N") as refused:
        resolve(EngineConfig(device=device))
    assert repr(device) in str(refused.value)


def test_a_number_longer_than_python_reads_is_refused_as_any_other() -> None:
    with pytest.raises(ConfigError, match=r"cuda or cuda:N, got 'cuda:9{74}$"):
        resolve(EngineConfig(device="cuda:" + 5000 * "9"))
    with pytest.raises(ConfigError, match=r"a number of drafts >= 1, got '9{79}$"):
        resolve(EngineConfig(budget=5000 * "9"))


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "eagle"])
def test_plain_mode_with_a_drafter_has_no_meaning(drafter: str) -> None:
    with pytest.raises(ConfigError, match="use drafter none, or mode exact") as refused:
        resolve(EngineConfig(mode="plain", drafter=drafter))
    assert drafter in str(refused.value)


def test_resolving_twice_gives_the_same() -> None:
    assert resolve(EngineConfig()) == resolve(EngineConfig())


def test_options_are_a_copy() -> None:
    options: dict[str, object] = {"num_draft_tokens": 3}
    config = resolve(EngineConfig(drafter="ngram", drafter_options=options))
    options["num_draft_tokens"] = 4
    assert config.drafter_options == {"num_draft_tokens": 3}


def test_small_models_get_one_thread_unless_asked_otherwise() -> None:
    left_open = resolve(EngineConfig())
    small = with_threads(left_open, ONE_THREAD_BELOW - 1)
    assert (small.threads, small.reasons["threads"][0]) == (1, "1")
    assert with_threads(left_open, ONE_THREAD_BELOW) == left_open
    asked = resolve(EngineConfig(threads=3))
    assert with_threads(asked, 1) == asked


def test_fast_mode_is_refused_on_a_cpu() -> None:
    with pytest.raises(KernelUnavailable, match="needs a GPU"):
        resolve(EngineConfig(mode="fast", device="cpu"))


@pytest.mark.parametrize(
    ("device", "mode", "kernel", "runs"),
    [
        ("cpu", "exact", "auto", "reference"),
        ("cpu", "exact", "reference", "reference"),
        ("cuda", "exact", "auto", "cheapest"),
        ("cuda", "exact", "walk", "walk"),
        ("cuda", "fast", "closed", "closed"),
    ],
)
def test_kernels_that_can_be_honoured(
    monkeypatch: pytest.MonkeyPatch, device: str, mode: str, kernel: str, runs: str
) -> None:
    monkeypatch.setattr("specla.config._why_no_gpu", lambda index=None: "")
    config = resolve(EngineConfig(device=device, mode=mode, kernel=kernel))
    assert config.kernel == runs
    assert ("kernel" in config.reasons) == (kernel == "auto")


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"kernel": "wy"}, ConfigError, "kernel must be one of auto, reference, walk, closed"),
        ({"kernel": "closed"}, ConfigError, "kernel closed needs mode fast"),
        ({"kernel": "walk"}, KernelUnavailable, "got walk for cpu"),
        ({"kernel": "reference", "device": "cuda"}, KernelUnavailable, "got reference for cuda"),
        ({"costs": "x.json", "mode": "plain"}, ConfigError, "mode plain has no rounds"),
        ({"costs": None}, ConfigError, "costs must be a string"),
    ],
)
def test_kernels_and_costs_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, settings: dict, error: type[Exception], says: str
) -> None:
    monkeypatch.setattr("specla.config._why_no_gpu", lambda index=None: "")
    with pytest.raises(error, match=says):
        resolve(EngineConfig(**{"device": "cpu", **settings}))


def test_where_costs_came_from_is_kept() -> None:
    config = resolve(EngineConfig())
    measured = with_costs(config, "measured: some/where.json")
    assert (measured.costs, measured.reasons["costs"]) == (
        "some/where.json", "measured: some/where.json",
    )  # fmt: skip
    assert with_costs(config, "default: no: file").costs == "none"
