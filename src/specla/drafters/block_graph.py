# SPDX-License-Identifier: Apache-2.0
"""A block drafter on a GPU: what it computes as CUDA graphs, trees grown by the host as before.

Launched one by one, a block's two hundred operations take the host longer than a target of a
billion parameters takes to verify it. So each of the three things that are computed is a graph,
over keys and values at fixed addresses and integers that are sent without waiting:

    remember   features of committed tokens -> their keys and values, where they belong
    forward    anchors (and, with a reader, committed states) -> base logits of every position
    children   positions and the tokens before them -> the likeliest tokens, one copy to the host

Rows, tokens and the context are padded to powers of two, a graph for each. Bits are not those of
`BlockDrafter`, whose rows are attended one by one; accepting is lossless whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specla.drafters.block import BlockDrafter
from specla.drafters.block_context import windows
from specla.drafters.block_model import Inject, KeysValues
from specla.drafters.reader import check_rank
from specla.models.base import TargetModel
from specla.ops.capture import captured
from specla.state import State
from specla.state.rounds import DeviceRounds, bucket
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.drafters.reader_device import StateReads

LEAST_CONTEXT = 256  # tokens per slot at first; twice as many whenever they do not suffice
MOST_AT_ONCE = 512  # committed tokens of one graph; longer chunks of prompts are launched


class GraphBlock(BlockDrafter):
    """`BlockDrafter` for a GPU; the same options.

    Raises:
        ConfigError: it reads states with a rank that the kernels do not have.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        check_rank(self._reader_config)
        self._reads: StateReads | None = None
        self.info = replace(self.info, variant=f"{self.info.variant} graphs")

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> GraphBlock:
        """It is that form."""
        return self

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Also make room on the device."""
        super().bind(model, num_slots=num_slots, max_nodes=max_nodes, exact=exact)
        config, weights, rows = self.config, self.model.weights, bucket(num_slots)
        self._num_slots, self._windows = num_slots, windows(config, self._window)
        self._lengths: dict[int, int] = {}
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=weights.fc.device)

        wide = self.model.logits(weights.fc.new_zeros(1, 1, config.hidden_size)).dtype
        self._rows, self._where = zeros(3, rows), zeros(2, MOST_AT_ONCE)
        self._level = zeros(2, bucket(rows * self._top_k))
        self._given = zeros(MOST_AT_ONCE, weights.fc.shape[1], dtype=weights.fc.dtype)
        outputs = rows, config.num_drafts, config.hidden_size
        self._h = zeros(*outputs, dtype=weights.fc.dtype)
        self._base = zeros(rows, self.info.max_depth, weights.head.shape[0], dtype=wide)
        self._kept: list[KeysValues] = []
        self._make_room(LEAST_CONTEXT)

    def attach(self, state: State) -> None:
        """The target's states, for the reader; what was captured read others."""
        super().attach(state)
        self._drop("forward")
        if self._reader is not None:
            # Triton is imported where there is a GPU only.
            from specla.drafters.reader_device import StateReads

            self._reads = StateReads(self._reader, state, bucket(self._num_slots))
            self._logs = DeviceRounds(state.max_nodes, state.device)

    @torch.inference_mode()
    def fork(self, slot: int, to: int) -> None:
        """Copy a slot that has been prefilled."""
        self._lengths[to] = self._lengths.get(slot, 0)
        for layer in self._kept:
            for tensor in layer:
                tensor[to] = tensor[slot]

    def reset(self, slot: int) -> None:
        """Forget a slot: what is past its length is not seen."""
        self._lengths.pop(slot, None)

    # ---- the three graphs

    def _remember(self, slots: Sequence[int], counts: Sequence[int], features: Tensor) -> None:
        starts = [self._lengths.get(slot, 0) for slot in slots]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self._make_room(max(ends))
        places = [slot for slot, n in zip(slots, counts, strict=True) for _ in range(n)]
        spans = zip(starts, ends, strict=True)
        where = self._ints(places, [t for a, b in spans for t in range(a, b)])
        self._lengths.update(zip(slots, ends, strict=True))
        count = len(features)
        if count > MOST_AT_ONCE:
            self._write(features, *where)
            return
        self._given[:count] = features
        self._where[:, :count] = where
        # Padding belongs to slot 0, which is nobody's.
        self._where[0, count:] = 0
        size = bucket(count)
        self._replay(
            ("remember", size), lambda: self._write(self._given[:size], *self._where[:, :size])
        )

    def _write(self, features: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        new = self.model.context(features, positions, end=0)
        for layer, rows in zip(self._kept, new, strict=True):
            for tensor, values in zip(layer, rows, strict=True):
                tensor[slots, positions] = values
        return features

    def _bases(self, slots: Sequence[int], anchors: Tensor) -> tuple[Tensor, Tensor]:
        starts, count = [self._lengths.get(slot, 0) for slot in slots], len(slots)
        rows, length = bucket(count), max(LEAST_CONTEXT, bucket(max(1, *starts)))
        self._make_room(max(starts))
        self._rows[:2] = 0
        self._rows[:2, :count] = self._ints(slots, starts)
        self._rows[2, :count] = anchors
        if self._reads is not None:
            assert self._state is not None
            trees = [DraftTree.root(0)] * count
            self._logs.plan(slots, [self._state.logs[slot] for slot in slots], trees)
        self._replay(("forward", rows, length), partial(self._forward, rows, length))
        return self._h[:count], self._base[:count]

    def _forward(self, rows: int, length: int) -> Tensor:
        slots, starts, anchors = self._rows[:, :rows]
        size = self.config.block_size
        own = starts[:, None] + torch.arange(size, device=starts.device)
        seen = [self._seen(i, own, starts, length) for i in range(self.config.num_layers)]

        def attend(layer: int, q: Tensor, new: KeysValues) -> Tensor:
            kept = (x[slots, :length] for x in self._kept[layer])
            k, v = (
                torch.cat((old, x.unflatten(0, (rows, size))), dim=1).transpose(1, 2)
                for old, x in zip(kept, new, strict=True)
            )
            q = q.unflatten(0, (rows, size)).transpose(1, 2)
            o = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen[layer], enable_gqa=q.shape[1] != k.shape[1]
            )
            return o.transpose(1, 2).flatten(0, 1).flatten(1)

        x = self.model.inputs(anchors)
        found = self.model.outputs(x, own.flatten(), attend, self._asking(rows), end=0)
        h = self.model.drafting(found)
        self._h[:rows] = h
        self._base[:rows] = self.model.logits(h[:, : self.info.max_depth])
        return self._base

    def _asking(self, rows: int) -> Inject | None:
        """The reader over states that are read now: `_bases` has sent where they lie."""
        if self._reader is None:
            return None
        assert self._reads is not None, "attach() first"
        rnd = self._logs.round(rows, 1)
        self._reads(rnd, rnd.num_nodes)
        return partial(self._reader.delta, reading=self._reads.reading(rows))

    def _seen(self, layer: int, own: Tensor, starts: Tensor, length: int) -> Tensor:
        """Which keys a layer's positions see, [rows, 1, block, length + block]."""
        old = torch.arange(length, device=own.device).expand(len(own), -1)
        key = torch.cat((old, own), dim=1)
        gap = own.unsqueeze(-1) - key.unsqueeze(1)
        there = torch.cat((old < starts[:, None], torch.ones_like(own, dtype=torch.bool)), dim=1)
        seen = there.unsqueeze(1).expand_as(gap)
        if self.config.causal(layer):
            seen = seen & (gap >= 0)
        if (window := self._windows[layer]) is not None:
            seen = seen & (gap.abs() < window)
        return seen.unsqueeze(1)

    def _children(self, base: Tensor, rows: Tensor, previous: Tensor) -> Tensor:
        count = len(rows)
        size = bucket(count)
        self._level[0, :count], self._level[1, :count] = rows, previous
        flat = self._base.flatten(0, 1)
        found = self._replay(
            ("children", size),
            lambda: BlockDrafter._children(self, flat, *self._level[:, :size]),
        )
        return found[:, :count]

    # ---- common

    def _replay(self, key: tuple[Any, ...], launch: Callable[[], Tensor]) -> Tensor:
        if key not in self._graphs:
            self._graphs[key] = captured(launch)
        graph, found = self._graphs[key]
        graph.replay()
        return found

    def _make_room(self, length: int) -> None:
        """For so many tokens of every slot; graphs over the old addresses are dropped."""
        config, kept = self.config, self._kept
        if kept and length <= kept[0].k.shape[1]:
            return
        size = self._num_slots + 1, max(LEAST_CONTEXT, bucket(length))
        like = self.model.weights.fc

        def larger(old: Tensor | None) -> Tensor:
            new = like.new_zeros(*size, config.num_kv_heads, config.head_dim)
            if old is not None:
                new[:, : old.shape[1]] = old
            return new

        self._kept = (
            [KeysValues(*map(larger, layer)) for layer in kept]
            if kept
            else [KeysValues(larger(None), larger(None)) for _ in range(config.num_layers)]
        )
        self.model.reserve(size[1] + config.block_size)
        # A level reads neither keys nor values.
        self._drop("remember", "forward")

    def _drop(self, *names: str) -> None:
        """Graphs over addresses that are no longer right."""
        self._graphs = {key: one for key, one in self._graphs.items() if key[0] not in names}
