# SPDX-License-Identifier: Apache-2.0
"""The block drafter inside a round's CUDA graph: `drafters.block` without the host.

Keys and values of committed tokens lie where `GraphBlock` has them, for `longest` tokens a row and
all rows from the start. Prompts, joins and rounds that the host drafts for stay with it: `enter`
tells the device how long the rows are, `leave` takes that back. What is launched in between:
`block_layer`.

A row with more than `longest` tokens drafts nothing from then on, there or here: its rounds are
of one node. Bits are not the host's, and accepting is lossless whatever is proposed; the same rows
give the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specla.drafters.base import DraftRow
from specla.drafters.block_context import windows
from specla.drafters.block_graph import LEAST_CONTEXT, GraphBlock
from specla.drafters.block_layer import BlockLayer
from specla.drafters.block_model import KeysValues
from specla.drafters.eagle_buffers import Limits, check_limits
from specla.drafters.eagle_device import MAX_TOP_K
from specla.drafters.options import require, require_int
from specla.drafters.reader_device import DeviceReader
from specla.drafters.triton_block import MAX_BLOCK, MAX_HEAD
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.gemm import GROUP, MAX_ROWS
from specla.state import State
from specla.state.rounds import bucket
from specla.topology.tree import DraftTree


class DeviceBlock(GraphBlock):
    """`BlockDrafter` whose rounds on a GPU need no host; the same options, top_k up to MAX_TOP_K.

    Raises:
        ConfigError: it cannot be one: it asks for min_survival, its block, its heads or its
            reader's rank are too large or its MLP's width is not a multiple of 8.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        require_int("top_k", self._top_k, 1, MAX_TOP_K)
        require(not self._min_survival, "min_survival", "0 with on_device", self._min_survival)
        self._refuse("a block of at most", MAX_BLOCK, "positions", self.config.block_size)
        self._refuse("heads of at most", MAX_HEAD, "numbers", self.config.head_dim)
        if self.config.intermediate_size % GROUP:
            raise ConfigError(
                f"drafting on the device needs an intermediate_size in multiples of {GROUP}, got "
                f"{self.config.intermediate_size}; leave on_device out"
            )
        variant = self.info.variant.removesuffix("graphs")
        # For a row that has grown too long.
        info = replace(self.info, variant=f"{variant}on_device", may_return_nothing=True)
        self.info = replace(info, longest=self._longest)
        self._layer: BlockLayer | None = None

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> DeviceBlock:
        """It is that form."""
        return self

    def check_room(self, *, num_slots: int, max_nodes: int) -> None:
        """Refuse what `bind` could not make room for.

        Raises:
            ConfigError: more rows in a launch than the products take.
        """
        limits = self._limits(num_slots, max_nodes)
        check_limits(limits)
        positions = limits.rows * self.config.block_size
        self._refuse("at most", MAX_ROWS, "positions of all slots' blocks", positions)

    def _refuse(self, what: str, most: int, of: str, given: int) -> None:
        if given > most:
            raise ConfigError(
                f"drafting on the device takes {what} {most} {of}, got {given}; leave on_device "
                "out"
            )

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Also make room on the device; see `check_room`."""
        self.check_room(num_slots=num_slots, max_nodes=max_nodes)
        super().bind(model, num_slots=num_slots, max_nodes=max_nodes, exact=exact)
        self._layer = layer = BlockLayer(
            self.model, self._caches, self._limits(num_slots, max_nodes),
            windows=windows(self.config, self._window), longest=self._longest,
        )  # fmt: skip
        self._price(layer)

    def attach(self, state: State) -> None:
        """The target's states, for the reader, whose launches are made now."""
        super().attach(state)
        if self._reads is not None:
            assert self._layer is not None, "bind() first"
            assert self._reader is not None
            most = bucket(self._num_slots) * self.config.block_size
            self._layer.reader = DeviceReader(self._reader, self._reads, most)
            self._price(self._layer)

    def _price(self, layer: BlockLayer) -> None:
        """Prices are told per level: a whole block's share, as deep as it goes."""
        depth = self.info.max_depth
        each = (layer.round_bytes + depth * layer.level_bytes) // (depth + 1)
        self.info = replace(self.info, level_bytes=each)

    def _limits(self, num_slots: int, max_nodes: int) -> Limits:
        depth = min(self.info.max_depth, max_nodes - 1)
        return Limits(bucket(num_slots), max_nodes, depth, self._top_k, self._tau, self._spine)

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """All the way; with a Markov head, where a level is a product, also two thirds of it."""
        most = min(self.info.max_depth, num_nodes - 1)
        return tuple(sorted({-(-2 * most // 3), most})) if self.config.markov_rank else (most,)

    @torch.inference_mode()
    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """See `DeviceDrafter`. features: of the rows' last round."""
        assert self._layer is not None, "bind() first"
        assert features is not None, "it reads features"
        assert self._reader is None or self._layer.reader is not None, "attach() first"
        self._layer(rows, rnd, features.room, depth)

    @torch.inference_mode()
    def enter(self, slots: Sequence[int]) -> None:
        """See `ResidentDrafter`."""
        assert self._layer is not None, "bind() first"
        self._layer.load([self._lengths.get(slot, 0) for slot in slots])

    @torch.inference_mode()
    def leave(self, slots: Sequence[int | None], rnd: DeviceRound, features: Features) -> None:
        """See `ResidentDrafter`."""
        assert self._layer is not None, "bind() first"
        cursors = self._layer.read(len(slots))
        live, counts, paths = (x.tolist() for x in (rnd.num_nodes, rnd.path_len, rnd.path))
        width = rnd.tokens.shape[1]
        waiting: dict[int, list[int]] = {}
        for b, slot in enumerate(slots):
            if slot is None or not live[b]:
                continue
            self._lengths[slot], fed = cursors[b]
            if fed:
                waiting[slot] = [b * width + node for node in paths[b][: counts[b]]]
        if waiting:
            at = [row for path in waiting.values() for row in path]
            self._remember(list(waiting), list(map(len, waiting.values())), features.rows(at))

    def _propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """Nothing for rows that have grown too long."""
        fit = [row for row in rows if self._lengths.get(row.slot, 0) <= self._longest]
        trees = {row.slot: t for row, t in zip(fit, super()._propose(fit), strict=True)}
        return [trees.get(row.slot) or DraftTree.root(row.tokens[-1]) for row in rows]

    def _remember(self, slots: Sequence[int], counts: Sequence[int], features: Tensor) -> None:
        """As far as there is room; tokens past it only count."""
        starts = [self._lengths.get(slot, 0) for slot in slots]
        pairs = list(zip(starts, counts, strict=True))
        room = [max(0, min(count, self._longest - start)) for start, count in pairs]
        parts = features.split(list(counts))
        kept = torch.cat([part[:n] for part, n in zip(parts, room, strict=True)])
        if len(kept):
            super()._remember(slots, room, kept)
        self._lengths.update(zip(slots, (start + count for start, count in pairs), strict=True))

    def _make_room(self, length: int) -> None:
        """Once, for all tokens that there can be."""
        if self._kept:
            return
        config, room = self.config, max(LEAST_CONTEXT, bucket(self._longest))
        self._caches = self.model.weights.fc.new_zeros(
            config.num_layers, 2, self._num_slots + 1, room, config.num_kv_heads, config.head_dim
        )
        self._kept = [KeysValues(*layer) for layer in self._caches]
        self.model.reserve(room + config.block_size)
