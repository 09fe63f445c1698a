# SPDX-License-Identifier: Apache-2.0
"""The Gated DeltaNet mixer of an EAGLE drafter, over the slots of one engine.

Its state lives in a `State` of one layer, with the target's slot numbers: `encode` is a verify of
one chain per row and commits all of it, `prefill` the chunked form. Drafting starts from what is
committed (`roots`) and carries states of its own, so nothing it computes can reach the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specla.drafters.eagle_mixer import Memory
from specla.models.gdn_decoder import Block
from specla.ops import conv, gdn
from specla.ops.contract import RecurrentShape
from specla.ops.gdn import reference
from specla.state import State
from specla.state.plan import compile_round
from specla.topology.tree import DraftTree


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
        for layer in self.state.layers:
            for tensor in (layer.S, *layer.factors, layer.tail, layer.inputs):
                tensor[to] = tensor[slot]
        log = self.state.logs[slot]
        for name in type(log).__slots__:
            setattr(self.state.logs[to], name, getattr(log, name))

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
        """Accepted tokens; all are committed."""
        logs = [self.state.logs[slot] for slot in slots]
        # Who the tokens are does not matter to the plan.
        chains = [DraftTree.chain(0, [0] * (length - 1)) for length in lengths]
        plan = compile_round(
            slots, logs, chains, conv_width=self._shape.conv_width, device=self.state.device
        )
        layer = self.state.layers[0]
        y = self._block.mix(
            x, partial(conv.verify, layer, plan), partial(reference.verify, layer, plan)
        )
        for log, length in zip(logs, lengths, strict=True):
            log.commit(tuple(range(length)))
        return y

    def roots(self, slots: Sequence[int]) -> Memory:
        """What is committed."""
        states = [self.state.committed_state(slot)[0] for slot in slots]
        return torch.stack([S for S, _ in states]), torch.stack([tail for _, tail in states])

    def step(self, memory: Memory, source: Sequence[int], x: Tensor) -> tuple[Tensor, Memory]:
        """One token below each of some paths."""
        S, above = (part[list(source)] for part in memory)
        below: list[Tensor] = []

        def convolve(raw: Tensor, weight: Tensor) -> Tensor:
            y, window = conv.step(above, raw, weight)
            below.append(window)
            return y

        def recur(given: gdn.Inputs) -> Tensor:
            k = reference.per_value_head(given.k, S.shape[1])
            reference.step_(S, k, given.v, given.g, given.beta)
            return reference.read(S, reference.per_value_head(given.q, S.shape[1]))

        y = self._block.mix(x, convolve, recur)
        return y, (S, below[0])
