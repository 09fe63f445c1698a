# SPDX-License-Identifier: Apache-2.0
"""State: what survives a round, for every slot. One object per engine.

Per layer and slot: a durable base S, a log of accepted tokens' factors not yet in it, two
banks for candidates, a conv tail. `begin` fixes the round, the model's verify fills the bank,
`commit` moves cursors. No state is copied, nothing is ever undone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specla.errors import CapacityExceeded, ConfigError
from specla.ops.contract import DevicePlan, Factors, LayerState, RecurrentShape, RoundPlan
from specla.ops.gdn.reference import fold
from specla.ops.norm import compute_dtype
from specla.ops.transfer import ints
from specla.state.log import Log
from specla.state.plan import compile_round
from specla.state.rounds import DeviceRounds, folded
from specla.state.slots import SlotPool
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.ops.slots import SlotKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes by purpose: over all layers, of one slot. `candidate` is one tree node."""

    base: int
    log: int
    candidates: int
    conv: int
    candidate: int
    candidate_conv: int
    total: int


class State:
    """Recurrent state of `num_slots` sequences (slot 0 is padding and exists besides).

    Args:
        shape: the model's recurrent layers.
        num_slots: sequences that can run at once.
        max_nodes: N, most nodes of one tree, node 0 included.
        log_capacity: R, ring entries; 0 folds every round.
        fold_threshold: a fold is due when the log is longer; None means R.
        max_path: most nodes of a tree's path, node 0 included; None: as many as a tree has.
        dtype: the activations' (conv inputs); factors and S are float32 (float64 if it is).

    Raises:
        ConfigError: a size is out of range.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        *,
        num_slots: int,
        max_nodes: int,
        log_capacity: int = 0,
        fold_threshold: int | None = None,
        max_path: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        threshold = log_capacity if fold_threshold is None else fold_threshold
        longest = max_nodes if max_path is None else min(max_path, max_nodes)
        _check_sizes(num_slots, max_nodes, log_capacity, threshold, longest)
        self.shape, self.max_nodes = shape, max_nodes
        self.max_path = longest
        self.log_capacity, self.fold_threshold = log_capacity, threshold
        self.pool = SlotPool(num_slots)
        self.device = torch.device(device)
        self._dtype = dtype
        self._check_memory()
        self.rounds = DeviceRounds(max_nodes, self.device)
        self.layers = [self._new_layer() for _ in range(shape.num_layers)]
        self._kernels = _slot_kernels(self.layers) if self.device.type == "cuda" else None
        self.logs = [self._new_log() for _ in range(num_slots + 1)]

    def acquire(self) -> int:
        """A fresh slot: empty state, nothing of any earlier request (rule I6)."""
        return self.pool.acquire()

    def release(self, slot: int) -> None:
        """Give a slot back, erased."""
        self.pool.release(slot)
        self.reset(slot)

    def reset(self, slot: int) -> None:
        """Back to the empty sequence: every tensor of the slot is zeroed."""
        if self._kernels is not None:
            self._kernels.reset(self._kernels.number(slot))
        else:
            for tensor in self._tensors():
                tensor[slot].zero_()
        self.logs[slot] = self._new_log()

    def fork(self, slot: int) -> int:
        """A new slot that continues from the same committed state."""
        to = self.acquire()
        self.copy(slot, to)
        return to

    def copy(self, slot: int, to: int) -> None:
        """Slot `to` continues from where `slot` is, whatever it held."""
        if self._kernels is not None:
            number = self._kernels.number
            self._kernels.fork(number(slot), number(to))
        else:
            for tensor in self._tensors():
                tensor[to] = tensor[slot]
        self.logs[to] = replace(self.logs[slot])

    def begin(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> RoundPlan | DevicePlan:
        """Fix one round over these slots. Nothing moves until `commit`. On a GPU the plan is
        device tensors, padded to a bucket.

        Raises:
            CapacityExceeded: a tree has more than `max_nodes` nodes, or a longer path than
                `max_path`.
        """
        self.check_round(slots, trees)
        logs = [self.logs[slot] for slot in slots]
        if self.device.type == "cuda":
            return self.rounds.plan(slots, logs, trees)
        return compile_round(
            slots,
            logs,
            trees,
            conv_width=self.shape.conv_width,
            device=self.device,
        )

    def check_round(self, slots: Sequence[int], trees: Sequence[DraftTree]) -> None:
        """What `begin` asks of its arguments.

        Raises:
            CapacityExceeded: a tree has more than `max_nodes` nodes, or a longer path than
                `max_path`.
        """
        assert slots, "a round needs at least one row"
        assert len(set(slots)) == len(slots) == len(trees), "one row per slot"
        for slot, tree in zip(slots, trees, strict=True):
            assert self.pool.in_use(slot), f"slot {slot} is free"
            if tree.num_nodes > self.max_nodes:
                raise CapacityExceeded(
                    f"a tree may have {self.max_nodes} nodes (max_nodes), slot {slot}'s has "
                    f"{tree.num_nodes}; draft less or raise max_nodes"
                )
            if tree.num_nodes > self.max_path <= tree.depth:
                raise CapacityExceeded(
                    f"a path may have {self.max_path} nodes (max_path), slot {slot}'s tree has "
                    f"one of {tree.depth + 1}; draft less deep, or have the drafter's "
                    "info.max_depth say how deep it goes"
                )

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """End the round that `begin` fixed: each row's accepted path becomes its log's tail.

        paths[b]: node indices from node 0 down, never empty.
        """
        for slot, path in zip(slots, paths, strict=True):
            assert tuple(path[:1]) == (0,), f"a path starts at node 0, slot {slot} got {path}"
            self.logs[slot].commit(tuple(path))

    def advance(self, slot: int, num_tokens: int) -> None:
        """Account for a prefill that has written S and tail directly."""
        log = self.logs[slot]
        assert log.log_len == 0, "prefill needs an empty log"
        log.durable_len += num_tokens

    def tail(self, layer: int, slot: int) -> Tensor:
        """The conv tail a prefill reads and writes, [W-1, C] (a view)."""
        return self.layers[layer].tail[slot, self.logs[slot].bank]

    def materialise(self, slot: int) -> None:
        """Fold the whole log into S and the tail, outside any round."""
        log = self.logs[slot]
        for layer, (S, tail) in zip(self.layers, self.committed_state(slot), strict=True):
            layer.S[slot], layer.tail[slot, log.bank] = S, tail
        log.folded()

    def committed(self, layer: int, slot: int) -> tuple[Tensor, Factors]:
        """What is committed, as it lies there: the base S [G, V, K] (a view) and the log's
        factors in order, not folded into it. What a drafter reads states through."""
        entries = ints(self.logs[slot].entries(), self.device)
        stored = self.layers[layer]
        return stored.S[slot], Factors(*(x[slot, entries] for x in stored.factors))

    def committed_state(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """What the committed tokens amount to, per layer: (S [G, V, K] with the log folded in,
        tail [W-1, C] with the path's inputs shifted in). Reads only."""
        log = self.logs[slot]
        nodes = torch.tensor(log.path, dtype=torch.int64, device=self.device)
        states = []
        for i, layer in enumerate(self.layers):
            inputs = torch.cat([layer.tail[slot, log.bank], layer.inputs[slot, log.bank, nodes]])
            tail = inputs[inputs.shape[0] - self.shape.conv_width + 1 :]
            if self.device.type == "cuda":
                S = folded(layer, slot, log, self.shape)
            else:
                S = fold(*self.committed(i, slot))
            states.append((S, tail.clone()))
        return states

    def check_integrity(self) -> None:
        """Assert I1 and the cursors' ranges on every slot; free slots must be empty (I6)."""
        for slot, log in enumerate(self.logs):
            assert log.durable_len + log.log_len == log.committed_len
            assert 0 <= log.ring_len <= self.log_capacity
            assert len(log.path) <= self.max_path
            assert all(0 <= node < self.max_nodes for node in log.path)
            if not self.pool.in_use(slot):
                assert log == self._new_log(), f"free slot {slot} has a log"

    def bytes(self) -> StateBytes:
        """Bytes of one slot over all layers, measured on the tensors."""
        layer, layers = self.layers[0], self.shape.num_layers
        entry = sum(store[0, 0].nbytes for store in layer.factors) if self.num_entries else 0
        conv = layer.tail[0].nbytes + layer.inputs[0].nbytes
        return StateBytes(
            base=layers * layer.S[0].nbytes,
            log=layers * entry * self.log_capacity,
            candidates=layers * entry * 2 * self.max_nodes,
            conv=layers * conv,
            candidate=layers * entry,
            candidate_conv=layers * layer.inputs[0, 0, 0].nbytes,
            total=sum(tensor[0].nbytes for tensor in self._tensors()),
        )

    @property
    def max_log(self) -> int:
        """Most entries of a log: one more path than a fold is due for."""
        return self.fold_threshold + self.max_path

    @property
    def num_entries(self) -> int:
        """E: ring and both candidate banks."""
        return self.log_capacity + 2 * self.max_nodes

    def _tensors(self) -> Iterator[Tensor]:
        """All that a state holds; axis 0 is the slot."""
        for layer in self.layers:
            yield from (layer.S, *layer.factors, layer.tail, layer.inputs)

    def _check_memory(self) -> None:
        """A CPU's memory is given out before it is there, and who then uses it is killed."""
        if self.device.type != "cpu":
            return
        s, wide, narrow = self.shape, compute_dtype(self._dtype).itemsize, self._dtype.itemsize
        heads, values = s.num_value_heads, s.num_value_heads * s.value_dim
        entry = s.num_key_heads * s.key_dim + values + heads
        conv = 2 * (s.conv_width - 1 + self.max_nodes) * s.conv_channels
        layer = wide * (values * s.key_dim + self.num_entries * entry) + narrow * conv
        needed, slots = layer * s.num_layers * (self.pool.num_slots + 1), self.pool.num_slots
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > there:
            raise ConfigError(
                f"the state of {slots} sequences (max_slots) must fit into memory, "
                f"{there / 2**30:.0f} GiB; it takes {needed / 2**30:.0f}: use fewer, or smaller "
                "trees (max_nodes)"
            )

    def _new_log(self) -> Log:
        return Log(self.log_capacity, self.max_nodes, self.fold_threshold)

    def _new_layer(self) -> LayerState:
        s, slots, nodes = self.shape, self.pool.num_slots + 1, self.max_nodes
        wide, entries = compute_dtype(self._dtype), (self.pool.num_slots + 1, self.num_entries)

        def zeros(*size: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        return LayerState(
            S=zeros(slots, s.num_value_heads, s.value_dim, s.key_dim),
            factors=Factors(
                zeros(*entries, s.num_key_heads, s.key_dim),
                zeros(*entries, s.num_value_heads, s.value_dim),
                zeros(*entries, s.num_value_heads),
            ),
            tail=zeros(slots, 2, s.conv_width - 1, s.conv_channels, dtype=self._dtype),
            inputs=zeros(slots, 2, nodes, s.conv_channels, dtype=self._dtype),
        )


def _slot_kernels(layers: Sequence[LayerState]) -> SlotKernels:
    # Triton is imported where there is a GPU only.
    from specla.ops.slots import SlotKernels

    return SlotKernels(layers)


def _check_sizes(
    num_slots: int, max_nodes: int, capacity: int, threshold: int, longest: int
) -> None:
    for name, value, least in (
        ("max_slots", num_slots, 1),
        ("max_nodes", max_nodes, 1),
        ("log_capacity", capacity, 0),
        ("max_path", longest, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}")
    if not 0 <= threshold <= capacity:
        raise ConfigError(
            f"fold_threshold must be between 0 and log_capacity ({capacity}), got {threshold}"
        )
