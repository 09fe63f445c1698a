# SPDX-License-Identifier: Apache-2.0
"""CostTable: what rounds and kernels cost on one device, as `specla profile` measured it.

Costs come by (rows, nodes, depth, kernel, mode), in microseconds. A round costs its verify and
its acceptance; what drafting adds stands beside it. Look-ups are conservative: rows and nodes
are rounded up to a measured bucket, since that is what would run, and of the measured depths on
both sides of the one asked for the dearer counts.

A table belongs to one device, one model, one capacity of the state log and the versions it was
measured with, and is refused by name for any other. One JSON file per device, model and capacity,
in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from specla import __version__
from specla.config import CHEAPEST, cache_folder, cpu_name
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.state.rounds import bucket

FORMAT = 2
MAX_BYTES = 16 << 20
Part = Literal["verify", "accept", "draft", "kernel"]
PARTS: tuple[Part, ...] = ("verify", "accept", "draft", "kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One measurement: microseconds, the median and the 10th and 90th percentile.

    part: "verify" is the target's pass over `rows` trees of `nodes` nodes, with the planning it
        needs; "accept" is choosing a token at every node, the walk and the cursors; "draft" is
        one call of a drafter; "kernel" is the state kernel alone, of one layer.
    depth: of the trees' deepest node; node 0 has 0. Of "accept", nodes - 1; of "draft", what the
        drafter was asked for, nodes - 1 where it cannot be asked.
    kernel: the state kernel; of "draft" the drafter, as `DrafterInfo.priced_as` names it; of
        "accept" empty.
    """

    part: Part
    rows: int
    nodes: int
    depth: int
    kernel: str
    mode: str
    us: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a table belongs to.

    model: a digest of shape, dtype and what cheaply tells weights apart (`ModelInfo.fingerprint`).
    log_capacity: factors that a slot's log holds (R): how often S is written, and how much is
        replayed before, is part of what a round costs.
    """

    device: str
    model: str
    log_capacity: int
    torch: str
    triton: str
    specla: str

    @classmethod
    def of(cls, model: TargetModel, log_capacity: int) -> Identity:
        """Of a loaded model where it lies, with the threads that it runs on now and states whose
        logs hold so many factors."""
        info = model.info
        facts = [info.architecture, info.fingerprint, info.vocab_size, info.hidden_size]
        facts += [info.weight_bytes, asdict(info.recurrent), str(model.dtype)]
        return cls(
            device=device_name(model.device),
            model=hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16],
            log_capacity=log_capacity,
            torch=str(torch.__version__),
            triton=_installed("triton"),
            specla=__version__,
        )

    @property
    def path(self) -> Path:
        """Where its table is kept unless somebody says otherwise."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        facts = f"{self.device}\n{self.model}\n{self.log_capacity}"
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        return cache_folder() / "costs" / f"{readable}-{digest}.json"


def device_name(device: torch.device) -> str:
    """As tables name it; a CPU with its number of threads, which its speed depends on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class CostTable:
    """Costs of one identity.

    Args:
        identity: what they were measured on.
        costs: one per (part, rows, nodes, depth, kernel, mode).
    """

    def __init__(self, identity: Identity, costs: Iterable[Cost]) -> None:
        self.identity, self.costs = identity, tuple(costs)
        # (part, kernel, mode) -> (rows, nodes) -> depth -> cost.
        self._found: dict[tuple[str, str, str], dict[tuple[int, int], dict[int, Cost]]] = {}
        for cost in self.costs:
            buckets = self._found.setdefault((cost.part, cost.kernel, cost.mode), {})
            buckets.setdefault((cost.rows, cost.nodes), {})[cost.depth] = cost

    # ---- what the engine and the budget ask

    def round_us(
        self,
        rows: int,
        nodes: int,
        *,
        depth: int | None = None,
        mode: str = "exact",
        kernel: str | None = None,
    ) -> float:
        """Verifying and accepting `rows` trees of up to `nodes` nodes.

        Args:
            depth: of the trees; None: the dearest one measured.
            kernel: None: the one that an engine with this table runs.

        Raises:
            ConfigError: no such round was measured; the message says what to run.
        """
        kernel = kernel or self.best_kernel(rows, nodes, mode)
        verify = self.find("verify", rows, nodes, depth=depth, kernel=kernel, mode=mode)
        return verify.us + self.find("accept", rows, nodes, mode=mode).us

    def ar_us(self, rows: int, *, mode: str = "exact") -> float:
        """A round of plain decoding: one node per row."""
        return self.round_us(rows, 1, mode=mode)

    def draft_us(
        self, rows: int, nodes: int, drafter: str, *, depth: int | None = None,
        mode: str = "exact",
    ) -> float:  # fmt: skip
        """One call of a drafter that may propose `nodes` - 1 nodes to each row.

        Args:
            depth: of the deepest draft it makes; None: the dearest one measured.
            drafter: `DrafterInfo.priced_as`; the same drafter with other options is another one.

        Raises:
            ConfigError: it was not measured.
        """
        return self.find("draft", rows, nodes, depth=depth, kernel=drafter, mode=mode).us

    def best_kernel(self, rows: int, nodes: int, mode: str) -> str:
        """The kernel whose dearest verify of such rounds is cheapest; of equals the first.

        Raises:
            ConfigError: no kernel was measured there.
        """
        kernels = self.kernels(mode)
        if not kernels:
            raise self._missing("verify", rows, nodes, "", mode)
        return min(
            kernels,
            key=lambda name: self.find("verify", rows, nodes, kernel=name, mode=mode).us,
        )

    def kernels(self, mode: str) -> tuple[str, ...]:
        """State kernels whose rounds were measured in `mode`, in the order of the table."""
        return tuple(name for part, name, m in self._found if (part, m) == ("verify", mode))

    def find(
        self,
        part: Part,
        rows: int,
        nodes: int,
        *,
        depth: int | None = None,
        kernel: str = "",
        mode: str = "exact",
    ) -> Cost:
        """The measurement that stands for a size: of the smallest rows, then nodes, that hold it.

        Raises:
            ConfigError: none does.
        """
        buckets = self._found.get((part, kernel, mode), {})
        fitting = sorted(key for key in buckets if key[0] >= rows and key[1] >= nodes)
        if not fitting:
            raise self._missing(part, rows, nodes, kernel, mode)
        by_depth = buckets[fitting[0]]
        return max((by_depth[d] for d in _around(by_depth, depth)), key=lambda cost: cost.us)

    def _missing(self, part: str, rows: int, nodes: int, kernel: str, mode: str) -> ConfigError:
        what = " ".join(filter(None, (part, kernel and f"({kernel})", "in mode", mode)))
        most = self.most(mode)
        return ConfigError(
            f"the cost table must cover {rows} rows of {nodes} nodes for {what}, and has at most "
            f"{most[0]} rows of {most[1]}; run specla profile with --max-batch {rows} "
            f"--max-nodes {nodes} --mode {mode}"
        )

    def most(self, mode: str) -> tuple[int, int]:
        """(rows, nodes) of the largest rounds measured in `mode`; zeros where none were."""
        sizes = [(c.rows, c.nodes) for c in self.costs if (c.part, c.mode) == ("verify", mode)]
        return (max(r for r, _ in sizes), max(n for _, n in sizes)) if sizes else (0, 0)

    # ---- files

    def save(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            ConfigError: the file cannot be written.
        """
        record = {"format": FORMAT, "identity": asdict(self.identity)}
        record["costs"] = [asdict(cost) for cost in self.costs]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"the cost table must be written to {path}: {error.strerror or error}; "
                "give another --output"
            ) from error

    @classmethod
    def load(cls, path: Path, identity: Identity) -> CostTable:
        """Read the table of `identity`.

        Raises:
            ConfigError: there is none, the file is no table, of another format, or of another
                device, model, log capacity or version.
        """
        record = _read(path)
        if record.get("format") != FORMAT:
            raise ConfigError(
                f"{path} must be a cost table of format {FORMAT}, got format "
                f"{record.get('format')!r}; run specla profile again"
            )
        try:
            table = cls(Identity(**record["identity"]), [_cost(item) for item in record["costs"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} must hold an identity and costs ({error}); run specla profile again"
            ) from error
        table._require(identity, path)
        return table

    def _require(self, identity: Identity, path: Path) -> None:
        for field in fields(Identity):
            theirs, ours = getattr(self.identity, field.name), getattr(identity, field.name)
            if theirs != ours:
                raise ConfigError(
                    f"{path} must be a cost table for {field.name} {ours!r}, but was measured for "
                    f"{field.name} {theirs!r}; run specla profile here"
                )

    def replacing(self, older: CostTable | None) -> CostTable:
        """This table, and of an older one of the same identity the modes that this one lacks."""
        if older is None or older.identity != self.identity:
            return self
        mine = {cost.mode for cost in self.costs}
        kept = [cost for cost in older.costs if cost.mode not in mine]
        return CostTable(self.identity, [*kept, *self.costs])


def find_table(
    asked: str, identity: Identity, *, rows: int, nodes: int, mode: str, kernel: str = CHEAPEST
) -> tuple[CostTable | None, str]:
    """The table that an engine of up to `rows` rows of `nodes` nodes goes by, or None, and why.

    asked: "none", the path of a table, or "auto" for the one in the cache folder, if that is
    there and fits. kernel: the only one that will verify, or "cheapest".

    Raises:
        ConfigError: a table asked for by path that does not fit.
    """
    if asked == "none":
        return None, "default: costs none"
    if mode == "plain":
        return None, "default: plain decoding has no rounds to choose between"
    try:
        path = identity.path if asked == "auto" else Path(asked)
        table = CostTable.load(path, identity)
        # What cannot be looked up is refused here and not in the middle of a round.
        only = None if kernel == CHEAPEST else kernel
        table.round_us(bucket(rows), bucket(nodes), mode=mode, kernel=only)
    except ConfigError as error:
        if asked != "auto":
            raise
        return None, f"default: {error}"
    return table, f"measured: {path}"


def _around(depths: Mapping[int, Cost], depth: int | None) -> list[int]:
    """The measured depths on both sides of `depth`, or all."""
    if depth is None or depth in depths:
        return list(depths) if depth is None else [depth]
    below = [max(d for d in depths if d < depth)] if min(depths) < depth else []
    above = [min(d for d in depths if d > depth)] if max(depths) > depth else []
    return below + above


def _write(path: Path, text: str) -> None:
    """In one step: a reader sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there must be a cost table at {path}, and there is none; run specla profile"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} must be a readable cost table ({error}); run specla profile again"
        ) from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} must hold a JSON object; run specla profile again")
    return record


def _cost(item: Any) -> Cost:
    """One entry, checked: look-ups compare what stands here.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    cost = Cost(**item)
    for name in ("rows", "nodes", "depth"):
        if type(getattr(cost, name)) is not int or getattr(cost, name) < (name != "depth"):
            raise ValueError(f"{name} must be a count, got {getattr(cost, name)!r}")
    for name in ("us", "p10", "p90"):
        if type(getattr(cost, name)) not in (int, float) or not 0 < getattr(cost, name) < 1e12:
            raise ValueError(f"{name} must be microseconds, got {getattr(cost, name)!r}")
    if cost.part not in PARTS or not all(isinstance(x, str) for x in (cost.kernel, cost.mode)):
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {cost.part!r}")
    return cost
