# SPDX-License-Identifier: Apache-2.0
"""The layer of an EAGLE drafter with a Gated DeltaNet mixer, and its state.

    g_t = fc [RN_1(h^a_t); RN_2(h^b_t); ...]         the target's outputs; or y of the step above
    r_t = g_t + mixer([RN(e(x_{t+1})); RN(g_t)])     e: the target's embeddings
    y_t = r_t + mlp(RN(r_t))                         not normed: the next step's feature
    logits of x_{t+2} = head(RN(y_t))

Its state lives in a `State` of one layer, with the target's slot numbers: `encode` is a verify of
one chain per row and commits all of it, `prefill` the chunked form. Drafting starts from what is
committed (`roots`) and carries states of its own, so nothing it computes can reach the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters.eagle_config import EagleConfig
from specla.models.gdn_decoder import Block, Convolve, Recur
from specla.models.gdn_weights import BlockWeights
from specla.ops import conv, gdn
from specla.ops.gdn import reference
from specla.ops.linear import Linear
from specla.ops.norm import rms_norm
from specla.state import State
from specla.state.plan import compile_round
from specla.topology.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """fc [D, F * target]; fc_norms [F, target] or None; embed_norm [target], feature_norm [D];
    block: its in_proj reads target + D columns, its attn_norm is feature_norm; norm [D]; head
    [draft vocabulary, D]; embeddings [vocab, target], the target's; d2t [draft vocabulary] int64,
    target ids of the head's rows, or None where they are the same."""

    fc: Tensor
    fc_norms: Tensor | None
    embed_norm: Tensor
    block: BlockWeights
    norm: Tensor
    head: Tensor
    embeddings: Tensor
    d2t: Tensor | None


class Tips(NamedTuple):
    """Where n paths have got to: S [n, G, V, K], window [n, W-1, C] of raw conv inputs, y [n, D].
    Every tensor is the drafter's own: nothing here is a view of the state."""

    S: Tensor
    window: Tensor
    y: Tensor


class EagleModel:
    """The forward of one drafter over the slots of one engine.

    Args:
        num_slots, max_nodes: as the target's state has them; `encode` takes at most max_nodes
            tokens per row.
    """

    def __init__(
        self, config: EagleConfig, weights: EagleWeights, *, num_slots: int, max_nodes: int
    ) -> None:
        self.config, self._weights = config, weights
        dtype, device = weights.fc.dtype, weights.fc.device
        self._block = Block(
            weights.block, config.recurrent, eps=config.norm_eps, gated=True, beta_scale=1.0
        )
        self._fc, self._head = Linear(weights.fc), Linear(weights.head)
        self.state = State(
            config.recurrent, num_slots=num_slots, max_nodes=max_nodes, dtype=dtype, device=device
        )
        # The last output of each slot: what its next tree grows from.
        self._last = torch.zeros(num_slots + 1, config.hidden_size, dtype=dtype, device=device)

    def check_rows(self) -> None:
        """Make every product row-invariant, so that a row's tree does not depend on others.

        Raises:
            ExactnessUnavailable: no such product exists here.
        """
        for name, linear in self._block.linears.items():
            linear.check(f"drafter midlayer.{name}")
        self._fc.check("drafter fc")
        self._head.check("drafter lm_head")

    def features(self, rows: Tensor) -> Tensor:
        """The target's outputs, side by side [T, F * target] -> g [T, D]."""
        norms = self._weights.fc_norms
        if norms is not None:
            parts = rows.unflatten(-1, norms.shape).unbind(1)
            eps = self.config.norm_eps
            rows = torch.cat(
                [rms_norm(x, norm, eps) for x, norm in zip(parts, norms, strict=True)], dim=-1
            )
        return self._fc(rows.contiguous())

    def logits(self, y: Tensor) -> Tensor:
        """y [n, D] -> [n, draft vocabulary], compute dtype."""
        return self._head(rms_norm(y, self._weights.norm, self.config.norm_eps))

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's token ids of the head's rows `ids`."""
        d2t = self._weights.d2t
        return ids if d2t is None else d2t[ids]

    def reset(self, slot: int) -> None:
        """Back to the empty sequence (rule I6)."""
        self.state.reset(slot)
        self._last[slot].zero_()

    def copy(self, slot: int, to: int) -> None:
        """`to` goes on from where `slot` is."""
        for layer in self.state.layers:
            for tensor in (layer.S, *layer.factors, layer.tail, layer.inputs):
                tensor[to] = tensor[slot]
        log = self.state.logs[slot]
        for name in type(log).__slots__:
            setattr(self.state.logs[to], name, getattr(log, name))
        self._last[to] = self._last[slot]

    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk of the prompt: tokens[i] follows the token whose outputs are features[i]."""
        layer, tail = self.state.layers[0], self.state.tail(0, slot)

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            y, tail[:] = conv.prefill(x, weight, tail)
            return y

        def recur(x: gdn.Inputs) -> Tensor:
            o, layer.S[slot] = reference.prefill(layer.S[slot], x)
            return o

        y = self._forward(self._ids(tokens), self.features(features), convolve, recur)
        self._last[slot] = y[-1]
        self.state.advance(slot, len(tokens))

    def encode(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
    ) -> None:
        """Accepted tokens of several rows, with the target's true outputs; all are committed.

        tokens[b]: 1 .. max_nodes of row b, in order; features: their rows end to end, each the
        outputs of the token before.
        """
        logs = [self.state.logs[slot] for slot in slots]
        chains = [DraftTree.chain(row[0], row[1:]) for row in tokens]
        plan = compile_round(
            slots, logs, chains, conv_width=self.config.conv_size, device=self.state.device
        )
        layer = self.state.layers[0]
        y = self._forward(
            plan.tokens,
            self.features(features),
            partial(conv.verify, layer, plan),
            partial(reference.verify, layer, plan),
        )
        self._last[plan.slots] = y[[end - 1 for end in plan.offsets[1:]]]
        for log, chain in zip(logs, chains, strict=True):
            log.commit(tuple(range(chain.num_nodes)))

    def roots(self, slots: Sequence[int]) -> Tips:
        """What is committed, a path per slot."""
        states = [self.state.committed_state(slot)[0] for slot in slots]
        return Tips(
            torch.stack([S for S, _ in states]),
            torch.stack([window for _, window in states]),
            self._last[list(slots)],
        )

    def step(self, tips: Tips, source: Sequence[int], ids: Sequence[int]) -> Tips:
        """One token below each of some paths: ids[i] (target ids) below path source[i], with
        that path's y as its feature."""
        above = Tips(*(x[list(source)] for x in tips))
        S, windows = above.S, []

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            y, below = conv.step(above.window, x, weight)
            windows.append(below)
            return y

        def recur(x: gdn.Inputs) -> Tensor:
            k = reference.per_value_head(x.k, S.shape[1])
            reference.step_(S, k, x.v, x.g, x.beta)
            return reference.read(S, reference.per_value_head(x.q, S.shape[1]))

        y = self._forward(self._ids(ids), above.y, convolve, recur)
        return Tips(S, windows[0], y)

    def _forward(self, tokens: Tensor, g: Tensor, convolve: Convolve, recur: Recur) -> Tensor:
        """tokens [T], g [T, D] -> y [T, D]."""
        w, eps = self._weights, self.config.norm_eps
        e = rms_norm(w.embeddings[tokens], w.embed_norm, eps)
        x = torch.cat([e, rms_norm(g, w.block.attn_norm, eps)], dim=-1)
        return self._block.feed_forward(g + self._block.mix(x, convolve, recur))

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=self._last.device)
