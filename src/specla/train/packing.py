# SPDX-License-Identifier: Apache-2.0
"""Token pools and the sampler that packs their documents into rows.

A pool is one uint32 array. Bits 0-29 hold the token, bit 30 marks a token whose loss counts little
(a user's turn), bit 31 the first token of a document. Rows are filled with whole documents one
after
another; the document that meets a row's end is cut there, so a row never starts inside one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specla.errors import ConfigError

TOKEN_BITS, LIGHT_BIT, START_BIT = (1 << 30) - 1, 1 << 30, 1 << 31


@dataclass
class Pool:
    """Documents of one source: ``tokens`` uint32, ``starts`` int64 [n + 1] with the end as
    sentinel."""

    name: str
    tokens: np.ndarray
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        marks = np.flatnonzero(self.tokens & START_BIT)
        self.starts = np.append(marks, len(self.tokens)).astype(np.int64)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def mean_length(self, row: int) -> float:
        """Mean tokens of a document once packed: one that meets the row's end is cut, half on
        average."""
        lengths = np.minimum(np.diff(self.starts), row)
        return float((lengths * (1 - lengths / (2 * row))).mean())


def load_pools(folder: Path, names: list[str]) -> list[Pool]:
    """The pools ``NAME.npy`` of a folder.

    Raises:
        ConfigError: one is in another format.
    """
    return [_load(folder / f"{name}.npy") for name in names]


def _load(path: Path) -> Pool:
    tokens = np.load(path, mmap_mode="r")
    if tokens.dtype != np.uint32:
        raise ConfigError(
            f"a pool must hold uint32 words, {path} holds {tokens.dtype}; write the pools again "
            "with python -m specla.train.prepare"
        )
    return Pool(path.stem, tokens)


class Sampler:
    """Draws batches of packed rows; its whole state is (seed, step, one cursor a pool)."""

    def __init__(self, pools: list[Pool], shares: list[float], rows: int, length: int, seed: int,
                 device: str = "cpu") -> None:  # fmt: skip
        self.pools, self.rows, self.length, self.seed = pools, rows, length, seed
        self.step, self.cursors = 0, [0] * len(pools)
        weights = np.array([s / p.mean_length(length) for s, p in zip(shares, pools, strict=True)])
        self.odds = weights / weights.sum()
        self.mean = float(
            sum(o * p.mean_length(length) for o, p in zip(self.odds, pools, strict=True))
        )
        self.offsets = np.cumsum([0] + [len(p.tokens) for p in pools])[:-1]
        everything = np.concatenate([p.tokens for p in pools]).view(np.int32)
        self.tokens = torch.from_numpy(everything).to(device)
        self.orders: dict[tuple[int, int], np.ndarray] = {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue with the very next document."""
        return {"step": self.step, "cursors": list(self.cursors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The counterpart of `state_dict`."""
        self.step, self.cursors = state["step"], list(state["cursors"])

    def order(self, pool: int, epoch: int) -> np.ndarray:
        """The permutation of a pool's documents in one epoch."""
        key = (pool, epoch)
        if key not in self.orders:
            self.orders = {
                k: v for k, v in self.orders.items() if k[0] != pool or k[1] == epoch - 1
            }
            rng = np.random.default_rng((self.seed, pool, epoch))
            self.orders[key] = rng.permutation(self.pools[pool].documents)
        return self.orders[key]

    def take(self, pool: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts (in the joint array) and lengths of a pool's next documents."""
        picked, starts = [], self.pools[pool].starts
        while count:
            epoch, at = divmod(self.cursors[pool], self.pools[pool].documents)
            part = self.order(pool, epoch)[at : at + count]
            picked.append(part)
            count -= len(part)
            self.cursors[pool] += len(part)
        ids = np.concatenate(picked) if picked else np.zeros(0, np.int64)
        return starts[ids] + self.offsets[pool], starts[ids + 1] - starts[ids]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """``count`` documents of mixed sources."""
        sources = rng.choice(len(self.pools), count, p=self.odds)
        starts, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        for pool in range(len(self.pools)):
            where = np.flatnonzero(sources == pool)
            starts[where], lengths[where] = self.take(pool, len(where))
        return starts, np.minimum(lengths, self.length)

    def positions(self) -> np.ndarray:
        """The next batch as positions in the joint token array, [rows, length]."""
        rng = np.random.default_rng((self.seed, 1 << 20, self.step))
        self.step += 1
        need = self.rows * self.length
        starts, lengths = self.draw(int(1.2 * need / self.mean) + 8, rng)
        while (fitted := fill_rows(lengths, self.rows, self.length)) is None:
            more = self.draw(int(0.2 * need / self.mean) + 8, rng)
            starts, lengths = np.append(starts, more[0]), np.append(lengths, more[1])
        lengths = fitted
        starts = starts[: len(lengths)]
        before = np.cumsum(lengths) - lengths
        flat = np.repeat(starts - before, lengths) + np.arange(need)
        return flat.reshape(self.rows, self.length)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """tokens int64, segments int32, loss weights float32 of the target after each token: [B,
        T]."""
        device = self.tokens.device
        at = torch.from_numpy(self.positions())
        at = at.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else at
        return unpack(self.tokens[at])


def fill_rows(lengths: np.ndarray, rows: int, length: int) -> np.ndarray | None:
    """Cuts documents so that they fill rows exactly; None if there are too few of them."""
    ends, done, taken, cut = np.cumsum(lengths), 0, 0, []
    for _ in range(rows):
        last = int(np.searchsorted(ends, done + length))
        if last >= len(lengths):
            return None
        part = lengths[taken : last + 1].copy()
        part[-1] = length - part[:-1].sum()
        cut.append(part)
        taken, done = last + 1, int(ends[last])
    return np.concatenate(cut)


def unpack(packed: Tensor, light: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
    """Packed words [B, T] int32 -> tokens, segments, weights; see `Sampler.batch`."""
    starts = packed < 0  # bit 31
    segments = starts.int().cumsum(1, dtype=torch.int32)
    weights = torch.where((packed & LIGHT_BIT) != 0, light, 1.0)
    weights = weights.masked_fill(starts, 0.0)[:, 1:]
    weights = torch.nn.functional.pad(weights, (0, 1))
    return (packed & TOKEN_BITS).long(), segments, weights
