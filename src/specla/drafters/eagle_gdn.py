# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet mixer of an EAGLE drafter, over the slots of one engine.

Its state lives in a `State` of one layer, with the target's slot numbers: `encode` takes one run
of tokens per row, `prefill` is the chunked form. Drafting starts from what is committed (`roots`)
and carries states of its own, so nothing it computes can reach the slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specla.drafters.eagle_mixer import Cursor, Memory
from specla.models.gdn_decoder import Block
from specla.ops import conv, gdn
from specla.ops.contract import RecurrentShape
from specla.ops.gdn import reference
from specla.state import State


class GdnMixer:
    """See `eagle_mixer.Mixer`. Memory: S [n, G, V, K], window [n, W-1, C] of raw conv inputs."""

    def __init__(
        self, block: Block, shape: RecurrentShape, *, num_slots: int, max_nodes: int, like: Tensor
    ) -> None:
        self._block, self._shape, self.max_tokens = block, shape, max_nodes
        self.linears = {name: block.linears[name] for name in ("in_proj", "o_proj")}
        self.state = State(
            shape, num_slots=num_slots, max_nodes=max_nodes, dtype=like.dtype, device=like.device
        )

    def reset(self, slot: int) -> None:
        """Back to the empty sequence."""
        self.state.reset(slot)

    def copy(self, slot: int, to: int) -> None:
        """`to` goes on from where `slot` is."""
        self.state.copy(slot, to)

    def slot_bytes(self, slot: int) -> int:
        """The same whatever it has read."""
        return self.state.bytes().total

    def prefill(self, slot: int, x: Tensor) -> Tensor:
        """Tokens of a prompt, in the chunked form."""
        layer, tail = self.state.layers[0], self.state.tail(0, slot)

        def convolve(raw: Tensor, weight: Tensor) -> Tensor:
            y, tail[:] = conv.prefill(raw, weight, tail)
            return y

        def recur(given: gdn.Inputs) -> Tensor:
            o, layer.S[slot] = reference.prefill(layer.S[slot], given)
            return o

        y = self._block.mix(x, convolve, recur)
        self.state.advance(slot, len(x))
        return y

    def encode(self, slots: Sequence[int], lengths: Sequence[int], x: Tensor) -> Tensor:
        """Accepted tokens, folded at once: nothing of them can be rejected."""
        layer, at = self.state.layers[0], self._ints(slots)
        S, tail = self.roots(slots)

        def convolve(raw: Tensor, weight: Tensor) -> Tensor:
            y, layer.tail[at, self._banks(slots)] = conv.runs(raw, lengths, weight, tail)
            return y

        def recur(given: gdn.Inputs) -> Tensor:
            o, ended = reference.runs(S, lengths, given)
            layer.S.index_copy_(0, at, ended)
            return o

        y = self._block.mix(x, convolve, recur)
        for slot, length in zip(slots, lengths, strict=True):
            self.state.advance(slot, length)
        return y

    def roots(self, slots: Sequence[int]) -> Memory:
        """What is committed."""
        if any(self.state.logs[slot].log_len for slot in slots):
            # Encoded by the kernels of `eagle_device`, which fold one run later.
            found = [self.state.committed_state(slot)[0] for slot in slots]
            return torch.stack([S for S, _ in found]), torch.stack([tail for _, tail in found])
        layer, at = self.state.layers[0], self._ints(slots)
        return layer.S.index_select(0, at), layer.tail[at, self._banks(slots)]

    def step(self, memory: Memory, source: Sequence[int], x: Tensor) -> tuple[Tensor, Memory]:
        """One token below each of some paths."""
        at = self._ints(source)
        S, above = (part.index_select(0, at) for part in memory)
        below: list[Tensor] = []

        def convolve(raw: Tensor, weight: Tensor) -> Tensor:
            y, window = conv.step(above, raw, weight)
            below.append(window)
            return y

        def recur(given: gdn.Inputs) -> Tensor:
            k = reference.per_value_head(given.k, S.shape[1])
            q = reference.per_value_head(given.q, S.shape[1])
            o, u = reference.token(S, q, k, given.v, given.g, given.beta)
            reference.replay_(S, k, u, given.g)
            return o

        y = self._block.mix(x, convolve, recur)
        return y, (S, below[0])

    def cursor(self, slot: int) -> Cursor:
        """See `eagle_mixer.DeviceMixer`."""
        log = self.state.logs[slot]
        return Cursor(log.bank, len(log.path), log.committed_len)

    def follow(self, slot: int, cursor: Cursor) -> None:
        """See `eagle_mixer.DeviceMixer`."""
        before = cursor.length - cursor.path_len
        path = range(cursor.path_len)
        self.state.logs[slot].follow(before, bank=cursor.bank, ring_len=0, path=path)

    def commit(self, slot: int, count: int) -> None:
        """See `eagle_mixer.DeviceMixer`."""
        self.state.logs[slot].commit(tuple(range(count)))

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.state.device)

    def _banks(self, slots: Sequence[int]) -> Tensor:
        """Where each slot's tail lies."""
        return self._ints([self.state.logs[slot].bank for slot in slots])
