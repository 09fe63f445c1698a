# SPDX-License-Identifier: Apache-2.0
"""A block drafter written down naively: one token, one head, one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specla.drafters.block_config import BlockConfig


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean() + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head's vector: pairs (i, i + d / 2)."""
    half = len(x) // 2
    y = x.clone()
    for i in range(half):
        angle = position / theta ** (2 * i / len(x))
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return y


class Naive:
    """tensors: of the checkpoint, and embeddings and head; everything is float64."""

    def __init__(
        self, config: BlockConfig, tensors: Mapping[str, Tensor], embeddings: Tensor, head: Tensor
    ) -> None:
        self.c = config
        self.w = {name: x.double() for name, x in tensors.items()}
        self.embeddings, self.head = embeddings.double(), head.double()

    def outputs(
        self,
        anchor: int,
        features: Tensor,
        *,
        window: int | None = None,
        change: Callable[[int, Tensor], Tensor] = lambda i, h: h,
    ) -> Tensor:
        """Normed outputs of a block after len(features) committed tokens. change(i, h): of the
        last layer's MLP input at block position i."""
        c, w, eps = self.c, self.w, self.c.norm_eps
        start = len(features)
        context = [
            norm(w["fc.weight"] @ f, w["hidden_norm.weight"], eps) for f in features.double()
        ]
        ids = [anchor] + [c.mask_token_id] * (c.block_size - 1)
        x = [self.embeddings[i] for i in ids]
        for layer in range(c.num_layers):
            h = [norm(v, self._of(layer, "input_layernorm"), eps) for v in x]
            tokens = [*enumerate(context), *enumerate(h, start)]
            o = [self._attend(layer, start + i, v, tokens, start, window) for i, v in enumerate(h)]
            x = [v + self._of(layer, "self_attn.o_proj") @ u for v, u in zip(x, o, strict=True)]
            h = [norm(v, self._of(layer, "post_attention_layernorm"), eps) for v in x]
            if layer == c.num_layers - 1:
                h = [change(i, v) for i, v in enumerate(h)]
            x = [v + self._mlp(layer, u) for v, u in zip(x, h, strict=True)]
        return torch.stack([norm(v, w["norm.weight"], eps) for v in x])

    def chain(self, anchor: int, outputs: Tensor) -> tuple[list[int], list[float]]:
        """The likeliest chain, left to right, and its log-probabilities."""
        drafts, logprobs = [anchor], []
        for h in outputs if self.c.shift_label else outputs[1:]:
            law = self.law(h, drafts[-1])
            drafts.append(int(law.argmax()))
            logprobs.append(float(law.max()))
        return drafts[1:], logprobs

    def law(self, h: Tensor, previous: int) -> Tensor:
        """Log-probabilities after one token."""
        logits = self.head @ h
        if self.c.markov_rank:
            w1, w2 = (self.w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            logits = logits + w2 @ w1[previous]
        return torch.log_softmax(logits, -1)

    def confidence(self, h: Tensor, previous: int) -> float:
        """Logit of a draft being accepted."""
        if self.c.confidence_with_markov:
            h = torch.cat([h, self.w["markov_head.markov_w1.weight"][previous]])
        weight, bias = (self.w[f"confidence_head.proj.{x}"] for x in ("weight", "bias"))
        return float(weight[0] @ h + bias)

    def _of(self, layer: int, name: str) -> Tensor:
        return self.w[f"layers.{layer}.{name}.weight"]

    def _mlp(self, layer: int, h: Tensor) -> Tensor:
        gate = self._of(layer, "mlp.gate_proj") @ h
        up = self._of(layer, "mlp.up_proj") @ h
        return self._of(layer, "mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up)

    def _attend(
        self,
        layer: int,
        at: int,
        h: Tensor,
        tokens: Sequence[tuple[int, Tensor]],
        start: int,
        window: int | None,
    ) -> Tensor:
        c, heads = self.c, []
        limit = min((w for w in (c.windows[layer], window) if w), default=None)
        q = (self._of(layer, "self_attn.q_proj") @ h).view(c.num_heads, c.head_dim)
        for head in range(c.num_heads):
            own = turn(self._normed(layer, "q", q[head]), at, c.rope_theta)
            scores, values = [], []
            for position, token in tokens:
                inside = position >= start
                if limit is not None and abs(at - position) >= limit:
                    continue
                if inside and position > at and c.causal(layer):
                    continue
                k, v = self._keys_values(layer, head // (c.num_heads // c.num_kv_heads), token)
                scores.append(own @ turn(k, position, c.rope_theta) / math.sqrt(c.head_dim))
                values.append(v)
            heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        return torch.cat(heads)

    def _keys_values(self, layer: int, head: int, token: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.c.num_kv_heads, self.c.head_dim
        k = (self._of(layer, "self_attn.k_proj") @ token).view(shape)[head]
        v = (self._of(layer, "self_attn.v_proj") @ token).view(shape)[head]
        return self._normed(layer, "k", k), v

    def _normed(self, layer: int, which: str, x: Tensor) -> Tensor:
        return norm(x, self._of(layer, f"self_attn.{which}_norm"), self.c.norm_eps)
