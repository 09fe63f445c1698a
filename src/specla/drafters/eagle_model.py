# SPDX-License-Identifier: Apache-2.0
"""The layer of an EAGLE drafter.

    g_t = fc [RN_1(h^a_t); RN_2(h^b_t); ...]         the target's outputs; or y of the step above
    r_t = g_t + mixer([RN(e(x_{t+1})); RN(g_t)])     e: the target's embeddings
    y_t = r_t + mlp(RN(r_t))                         not normed: the next step's feature
    logits of x_{t+2} = head(RN(y_t))

The mixer, with its memory of every slot, is `eagle_gdn` or `eagle_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specla.drafters.eagle_attention import AttentionMixer, KeptAttention
from specla.drafters.eagle_config import EagleConfig
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_mixer import Memory, Mixer
from specla.models.gdn_decoder import Block
from specla.models.gdn_weights import BlockWeights
from specla.ops.linear import Linear
from specla.ops.norm import rms_norm, swiglu
from specla.ops.transfer import ints


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """fc [D, F * target]; fc_norms [F, target] or None; embed_norm [target], feature_norm,
    mlp_norm, norm [D]; gate_up [2 I, D], down [D, I]; mixer: the recurrent mixer's weights (its
    in_proj reads target + D columns), or attention's q, k, v, o; head [draft vocabulary, D];
    embeddings [vocab, target], the target's; d2t [draft vocabulary] int64, target ids of the
    head's rows, or None where they are the same."""

    fc: Tensor
    fc_norms: Tensor | None
    embed_norm: Tensor
    feature_norm: Tensor
    mixer: BlockWeights | dict[str, Tensor]
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    head: Tensor
    embeddings: Tensor
    d2t: Tensor | None


class Tips(NamedTuple):
    """Where n paths have got to: y [n, D] of their last token, and what the mixer remembers."""

    y: Tensor
    memory: Memory


class EagleModel:
    """The forward of one drafter over the slots of one engine.

    Args:
        num_slots, max_nodes: as the target's state has them.
        longest: tokens per slot that attention has room for, at fixed addresses; None: it makes
            room as texts grow.
    """

    def __init__(
        self, config: EagleConfig, weights: EagleWeights, *, num_slots: int, max_nodes: int,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        self.config, self.weights = config, weights
        self.mixer = _mixer(config, weights, num_slots, max_nodes, longest)
        self._linears = {
            "fc": Linear(weights.fc),
            "gate_up": Linear(weights.gate_up),
            "down": Linear(weights.down),
            "lm_head": Linear(weights.head),
            **self.mixer.linears,
        }
        # The last output of each slot: what its next tree grows from.
        self.last = weights.fc.new_zeros(num_slots + 1, config.hidden_size)

    def check_rows(self) -> None:
        """Make every product row-invariant, so that a row's tree does not depend on others.

        Raises:
            ExactnessUnavailable: no such product exists here.
        """
        for name, linear in self._linears.items():
            linear.check(f"drafter {name}")

    def features(self, rows: Tensor) -> Tensor:
        """The target's outputs, side by side [T, F * target] -> g [T, D]."""
        norms = self.weights.fc_norms
        if norms is not None:
            parts = rows.unflatten(-1, norms.shape).unbind(1)
            eps = self.config.norm_eps
            rows = torch.cat(
                [rms_norm(x, norm, eps) for x, norm in zip(parts, norms, strict=True)], dim=-1
            )
        return self._linears["fc"](rows.contiguous())

    def logits(self, y: Tensor) -> Tensor:
        """y [n, D] -> [n, draft vocabulary], compute dtype."""
        y = rms_norm(y, self.weights.norm, self.config.norm_eps)
        return self._linears["lm_head"](y)

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's token ids of the head's rows `ids`."""
        d2t = self.weights.d2t
        return ids if d2t is None else d2t[ids]

    def reset(self, slot: int) -> None:
        """Back to the empty sequence (rule I6)."""
        self.mixer.reset(slot)
        self.last[slot].zero_()

    def copy(self, slot: int, to: int) -> None:
        """`to` goes on from where `slot` is."""
        self.mixer.copy(slot, to)
        self.last[to] = self.last[slot]

    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk of the prompt: tokens[i] follows the token whose outputs are features[i]."""
        y = self._forward(tokens, self.features(features), lambda x: self.mixer.prefill(slot, x))
        self.last[slot] = y[-1]

    def encode(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
    ) -> None:
        """Accepted tokens of several rows, with the target's true outputs; all are committed.

        tokens[b]: 1 .. `mixer.max_tokens` of row b, in order; features: their rows end to end,
        each the outputs of the token before.
        """
        lengths = [len(row) for row in tokens]
        flat = [token for row in tokens for token in row]
        y = self._forward(
            flat, self.features(features), lambda x: self.mixer.encode(slots, lengths, x)
        )
        ends = torch.tensor(lengths).cumsum(0) - 1
        self.last[list(slots)] = y[ends.to(y.device)]

    def roots(self, slots: Sequence[int]) -> Tips:
        """What is committed, a path per slot."""
        return Tips(self.last[list(slots)], self.mixer.roots(slots))

    def step(self, tips: Tips, source: Sequence[int], ids: Sequence[int]) -> Tips:
        """One token below each of some paths: ids[i] (target ids) below path source[i], with
        that path's y as its feature."""
        memories: list[Memory] = []

        def mix(x: Tensor) -> Tensor:
            y, memory = self.mixer.step(tips.memory, source, x)
            memories.append(memory)
            return y

        y = self._forward(ids, tips.y[list(source)], mix)
        return Tips(y, memories[0])

    def _forward(
        self, tokens: Sequence[int], g: Tensor, mix: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """tokens [T], g [T, D] -> y [T, D]."""
        w, eps = self.weights, self.config.norm_eps
        e = rms_norm(w.embeddings[ints(tokens, g.device)], w.embed_norm, eps)
        r = g + mix(torch.cat([e, rms_norm(g, w.feature_norm, eps)], dim=-1))
        hidden = self._linears["gate_up"](rms_norm(r, w.mlp_norm, eps))
        return r + self._linears["down"](swiglu(hidden))


def _mixer(
    config: EagleConfig, w: EagleWeights, num_slots: int, max_nodes: int, longest: int | None
) -> Mixer:
    if isinstance(w.mixer, BlockWeights):
        block = Block(w.mixer, config.recurrent, eps=config.norm_eps, gated=True, beta_scale=1.0)
        return GdnMixer(
            block, config.recurrent, num_slots=num_slots, max_nodes=max_nodes, like=w.fc
        )
    make = AttentionMixer if longest is None else partial(KeptAttention, longest=longest)
    return make(
        w.mixer,
        heads=config.num_heads,
        kv_heads=config.num_v_heads,
        theta=config.rope_theta,
        num_slots=num_slots,
    )
