# SPDX-License-Identifier: Apache-2.0
"""EngineConfig and resolve(): every "auto" becomes a value, once, and is reported.

The only module that reads the environment.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from specla.errors import ConfigError, KernelUnavailable

Mode = Literal["exact", "fast", "plain"]
PrefillKernels = Literal["fla", "reference"]
MODES: tuple[Mode, ...] = ("exact", "fast", "plain")
KERNELS = ("auto", "reference", "walk", "closed")
CHEAPEST = "cheapest"
PAYING, OFF = "paying", "off"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}
PREFILL_UNIT = 64
CPU_PREFILL_CHUNK, GPU_PREFILL_CHUNK = 256, 4096
# The series of fla-core whose kernels prefill launches; they are not part of its interface.
FLA_CORE = "0.6"
GPU_MAX_NODES = 64
TRITON = (3, 6)
GPU_LOG_CAPACITY = 4
# Bytes of weights below which a second CPU thread brought nothing on idle cores and made decoding
# several times slower on shared ones (docs/log.md, 2026-11-29).
ONE_THREAD_BELOW = 256 * 2**20
DEFAULT_DRAFTER = "suffix"
TORCH_CHOSE = "torch's own choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user may set. `None` and "auto" mean: choose, and report the choice.

    mode: "exact" (speculative output is bit-identical to plain decoding), "fast" (on a GPU, trees
        in batch may run in closed form on tensor cores: no promise about bits) or "plain" (the
        fastest autoregressive decoding, no drafter, bits may depend on batching: a baseline).
    max_slots: sequences decoded together. max_nodes: most nodes of one tree, node 0 included.
    log_capacity: accepted tokens kept as factors before they are folded into the state.
    prefill_chunk: prompt tokens per call, a multiple of 64; rounds of other requests run between
        two chunks. threads: CPU threads; None means one for small models and torch's choice for
        others.
    kernel: what verifies, on a GPU "walk" or (mode fast) "closed", on a CPU "reference"; "auto":
        the one that costs less. costs: a cost table's path (`specla profile` writes it), "none",
        or "auto": the one in the cache folder, if it is of this device, model and versions.
    budget: "auto": in each round draft and verify what pays, or nothing; a number: so many drafts
        per row, the most probable; "off": whatever the drafter proposes.
    """

    model: str = "demo"
    revision: str | None = None
    drafter: str = "auto"
    drafter_options: Mapping[str, object] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "exact"
    max_slots: int = 8
    max_nodes: int = 16
    log_capacity: int | None = None
    prefill_chunk: int | None = None
    threads: int | None = None
    kernel: str = "auto"
    costs: str = "auto"
    budget: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """EngineConfig with every choice made. `reasons` says why, per setting chosen for the user."""

    model: str
    revision: str | None
    drafter: str
    drafter_options: Mapping[str, object]
    device: str
    dtype: str
    mode: Mode
    max_slots: int
    max_nodes: int
    log_capacity: int
    prefill_chunk: int
    threads: int
    kernel: str
    costs: str
    budget: str
    reasons: Mapping[str, str]

    def summary(self) -> dict[str, object]:
        """Plain values, for reports."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The activations' dtype."""
        return DTYPES[self.dtype]


def resolve(config: EngineConfig) -> ResolvedConfig:
    """Check every setting and choose what was left open.

    Raises:
        ConfigError: a setting is out of range or would have no effect.
        KernelUnavailable: the device asked for has no kernels in this version.
    """
    _check(config)
    reasons: dict[str, str] = {}
    drafter = _drafter(config, reasons)
    if drafter == "none" and config.max_nodes > 1:
        reasons["max_nodes"] = "1: drafter none proposes nothing, and candidates cost memory"
    device = _device(config.device, reasons)
    if device != "cpu" and config.max_nodes > GPU_MAX_NODES:
        raise ConfigError(
            f"max_nodes must be at most {GPU_MAX_NODES} on a GPU, got {config.max_nodes}"
        )
    if config.threads is None:
        reasons["threads"] = TORCH_CHOSE
    dtype = _dtype(config.dtype, device, reasons)
    if device != "cpu":
        kernels, why = prefill_kernels(dtype)
        reasons["prefill"] = f"{kernels}: {why}"
    return ResolvedConfig(
        model=config.model,
        revision=config.revision,
        drafter=drafter,
        drafter_options=dict(config.drafter_options),
        device=device,
        dtype=dtype,
        mode=_mode(config.mode, device),
        max_slots=config.max_slots,
        max_nodes=1 if drafter == "none" else config.max_nodes,
        log_capacity=_log_capacity(config.log_capacity, device, reasons),
        prefill_chunk=_prefill_chunk(config.prefill_chunk, device, reasons),
        threads=config.threads or torch.get_num_threads(),
        kernel=_kernel(config, device, reasons),
        costs=_costs(config, reasons),
        budget=_budget(config, drafter, reasons),
        reasons=reasons,
    )


def prefill_kernels(dtype: str) -> tuple[PrefillKernels, str]:
    """What computes a prompt's recurrence on a GPU, and why: fla-core's chunked kernels, or the
    torch reference, several times slower. Both leave the same bits for a prompt every time, but
    not the same as each other: a process uses one."""
    if dtype != "bfloat16":
        return "reference", f"fla's kernels would round {dtype} to tf32"
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return "reference", "fla-core is not installed (pip install 'specla[gpu]')"
    if found.split(".")[:2] != FLA_CORE.split("."):
        return "reference", f"fla-core {found} is not of the {FLA_CORE} series"
    return "fla", f"fla-core {found} is installed"


def with_threads(config: ResolvedConfig, weight_bytes: int) -> ResolvedConfig:
    """The number of threads for a model of this size, where it was left open."""
    if config.reasons.get("threads") != TORCH_CHOSE or weight_bytes >= ONE_THREAD_BELOW:
        return config
    reason = f"1: below {ONE_THREAD_BELOW >> 20} MiB of weights a second one does not pay"
    return replace(config, threads=1, reasons={**config.reasons, "threads": reason})


def with_costs(config: ResolvedConfig, reason: str) -> ResolvedConfig:
    """Where costs came from, once the model is known. reason: "measured: PATH" or "default: why"
    (see `engine.cost.find_table`)."""
    source, _, what = reason.partition(": ")
    costs = what if source == "measured" else "none"
    return replace(config, costs=costs, reasons={**config.reasons, "costs": reason})


def cache_folder() -> Path:
    """Where measurements of this machine are kept: XDG_CACHE_HOME if that is an absolute path,
    else ~/.cache, and specla in there.

    Raises:
        ConfigError: there is neither.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "specla"
    except RuntimeError as error:
        raise ConfigError(
            f"measurements need a folder, and this user has no home ({error}); set "
            "XDG_CACHE_HOME to an absolute path"
        ) from error


def launched_processes() -> str:
    """How many processes a launcher (`accelerate launch`, torchrun) has started, this one among
    them, as it says so; "1" without one. Both names: clusters set the first alone, for others."""
    return os.environ.get("WORLD_SIZE", "1") if "LOCAL_RANK" in os.environ else "1"


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _check(config: EngineConfig) -> None:
    if config.mode not in MODES:
        raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {config.mode!r}")
    for name in ("model", "drafter", "device", "dtype", "costs", "budget"):
        if not isinstance(getattr(config, name), str):
            raise ConfigError(f"{name} must be a string, got {getattr(config, name)!r}")
    _check_kernel(config)
    for name in ("max_slots", "max_nodes"):
        value = getattr(config, name)
        if not _is_int(value) or value < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
    chunk = config.prefill_chunk
    if chunk is not None and (not _is_int(chunk) or chunk < 1 or chunk % PREFILL_UNIT):
        raise ConfigError(
            f"prefill_chunk must be None or a multiple of {PREFILL_UNIT}, the recurrence's own "
            f"chunk; got {chunk!r}"
        )
    for name in ("log_capacity", "threads"):
        value, least = getattr(config, name), 0 if name == "log_capacity" else 1
        if value is not None and (not _is_int(value) or value < least):
            raise ConfigError(f"{name} must be None or an integer >= {least}, got {value!r}")


def _check_kernel(config: EngineConfig) -> None:
    if config.kernel not in KERNELS:
        raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {config.kernel!r}")
    if config.kernel == "closed" and config.mode != "fast":
        raise ConfigError(
            f"kernel closed needs mode fast, whose bits are its own; got mode {config.mode}"
        )
    if config.mode == "plain" and config.costs not in ("auto", "none"):
        raise ConfigError(
            f"mode plain has no rounds to choose between, got costs {config.costs!r}; leave it out"
        )


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _drafter(config: EngineConfig, reasons: dict[str, str]) -> str:
    if config.mode == "plain":
        if config.drafter not in ("auto", "none"):
            raise ConfigError(
                f"mode plain is plain autoregressive decoding, got drafter {config.drafter!r}; "
                "use drafter none, or mode exact"
            )
        if config.drafter == "auto":
            reasons["drafter"] = "none: mode plain is plain autoregressive decoding"
        return "none"
    if config.drafter != "auto":
        return config.drafter
    reasons["drafter"] = f"{DEFAULT_DRAFTER}: no trained drafter names this target"
    return DEFAULT_DRAFTER


def _device(device: str, reasons: dict[str, str]) -> str:
    if device == "auto":
        missing = _why_no_gpu()
        reasons["device"] = f"cpu: {missing}" if missing else "cuda: there is a GPU"
        return "cpu" if missing else "cuda"
    if device == "cpu":
        return device
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and _count(index) is None):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r:.80}")
    if missing := _why_no_gpu(_count(index)):
        raise KernelUnavailable(
            f"device {device!r} needs an NVIDIA GPU of compute capability 8.0 or later and "
            f"triton: {missing}; use --device cpu"
        )
    return device


def _mode(mode: str, device: str) -> Mode:
    if mode == "fast" and device == "cpu":
        raise KernelUnavailable(
            "mode fast is the tensor cores' closed form and needs a GPU; on a CPU use mode exact"
        )
    return next(known for known in MODES if known == mode)


def _kernel(config: EngineConfig, device: str, reasons: dict[str, str]) -> str:
    if config.kernel != "auto":
        if (config.kernel == "reference") != (device == "cpu"):
            raise KernelUnavailable(
                f"kernel reference is for a CPU and the others for a GPU, got {config.kernel} for "
                f"{device}; leave kernel auto"
            )
        return config.kernel
    if device == "cpu":
        reasons["kernel"] = "reference: the torch form is what a CPU has"
        return "reference"
    reasons["kernel"] = f"{CHEAPEST}: of those of mode {config.mode}, by rows and nodes"
    return CHEAPEST


def _costs(config: EngineConfig, reasons: dict[str, str]) -> str:
    if config.costs != "auto":
        return config.costs
    reasons["costs"] = "none: they belong to a model, and it has not been loaded yet"
    return "none"


def _budget(config: EngineConfig, drafter: str, reasons: dict[str, str]) -> str:
    asked, drafts = config.budget, 0 if drafter == "none" else config.max_nodes - 1
    if asked == "auto" and not drafts:
        reasons["budget"] = f"{OFF}: nothing is drafted"
        return OFF
    if asked == "auto":
        reasons["budget"] = f"{PAYING}: what each round's drafts should bring against their cost"
        return PAYING
    if asked == OFF:
        return OFF
    if not (number := _count(asked)):
        asked = f"{asked!r:.80}"
        raise ConfigError(f"budget must be auto, off or a number of drafts >= 1, got {asked}")
    if number >= drafts:
        why = "drafter none" if drafter == "none" else f"max_nodes {config.max_nodes}"
        raise ConfigError(
            f"a budget of {number} drafts must be below the {drafts} that a tree may have, or it "
            f"has no effect ({why}); use budget off"
        )
    return str(number)


def _count(text: str) -> int | None:
    """What decimal digits say; None: it is something else, or longer than any count here."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _why_no_gpu(index: int | None = None) -> str:
    """What is missing for the CUDA kernels; empty if nothing is. None: the current GPU."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if index is not None and index >= (count := torch.cuda.device_count()):
        return f"torch sees {count} of them, counted from 0"
    if torch.cuda.get_device_capability(index) < (8, 0):
        return f"{torch.cuda.get_device_name(index)} is older than compute capability 8.0"
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'specla[gpu]')"
    found: str = import_module("triton").__version__
    if tuple(map(int, found.split(".")[:2])) < TRITON:
        return f"triton {found} is older than {'.'.join(map(str, TRITON))}"
    return ""


def _log_capacity(asked: int | None, device: str, reasons: dict[str, str]) -> int:
    if asked is not None:
        return asked
    if device == "cpu":
        reasons["log_capacity"] = "0 on a CPU: replaying a factor costs as much as writing S"
        return 0
    reasons["log_capacity"] = f"{GPU_LOG_CAPACITY} on a GPU: a longer log's replays cost more"
    return GPU_LOG_CAPACITY


def _prefill_chunk(asked: int | None, device: str, reasons: dict[str, str]) -> int:
    if asked is not None:
        return asked
    chunk = CPU_PREFILL_CHUNK if device == "cpu" else GPU_PREFILL_CHUNK
    reasons["prefill_chunk"] = f"{chunk} on a {'CPU' if device == 'cpu' else 'GPU'}: " + (
        "the rounds of other requests wait for one chunk"
        if device == "cpu"
        else "fewer tokens leave it idle between launches, more keep other requests waiting"
    )
    return chunk


def _dtype(dtype: str, device: str, reasons: dict[str, str]) -> str:
    if dtype == "auto" and device != "cpu":
        reasons["dtype"] = "bfloat16: a GPU's tensor cores read half the bytes"
        return "bfloat16"
    if dtype == "float64" and device != "cpu":
        raise ConfigError("dtype float64 has no GPU kernels; use float32, or --device cpu")
    if dtype == "auto":
        reasons["dtype"] = "float32: prompts and trees took 2 to 4 times longer in bfloat16 (AVX2)"
        return "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    return dtype
