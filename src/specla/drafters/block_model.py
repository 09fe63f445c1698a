# SPDX-License-Identifier: Apache-2.0
"""The layers of a block drafter: all positions of a block in one pass.

    c_t = RN(fc [h^a_t; h^b_t; ...])                 a committed token's target outputs
    x = [embed(anchor), embed(mask), embed(mask), ...]
    per layer: x += attention(RN(x) over (c, block)); x += mlp(RN(x))
    base logits of a position = head(RN(x))

A context token never runs through the layers: each layer has its own keys and values of c. The
same code drafts (`block_context`) and trains (`train.block`): they differ in `attend` only.

Letters: M positions of all blocks end to end, D width, Q query heads, H key heads, d head width.

Source: DFlash (arXiv 2602.06036); the heads are DSpark's (arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specla.drafters.block_config import BlockConfig
from specla.ops.linear import Linear
from specla.ops.norm import compute_dtype, rms_norm, swiglu


class KeysValues(NamedTuple):
    """k [T, H, d], rotated to their positions, and v [T, H, d]."""

    k: Tensor
    v: Tensor


Attend = Callable[[int, Tensor, KeysValues], Tensor]
"""(layer, queries [M, Q, d], the block's own) -> [M, Q d]; the context is the caller's."""
Inject = Callable[[Tensor], Tensor]
"""The last layer's normed MLP input [M, D] -> what is added to it."""
_PAGE = 1024  # positions


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """q [Q d, D], kv [2 H d, D] with keys first, o [D, Q d]; q_norm, k_norm [d]; gate_up [2 F, D];
    down [D, F]; attn_norm, mlp_norm [D]."""

    attn_norm: Tensor
    q: Tensor
    kv: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraftWeights:
    """fc [D, F * D]; context_norm, norm [D]; embeddings, head [vocab, D]; markov: W1 and W2
    [vocab, r] each, or None; confidence: weight [D (+ r)] and bias [1], or None."""

    fc: Tensor
    context_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    embeddings: Tensor
    head: Tensor
    markov: tuple[Tensor, Tensor] | None
    confidence: tuple[Tensor, Tensor] | None


def weights_from(
    tensors: Mapping[str, Tensor], config: BlockConfig, embeddings: Tensor, head: Tensor
) -> BlockDraftWeights:
    """Fuse tensors (names and shapes of `block_config.expected_tensors`). Differentiable."""
    markov = confidence = None
    if config.markov_rank:
        markov = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    if config.confidence_head:
        weight = tensors["confidence_head.proj.weight"][0]
        confidence = weight, tensors["confidence_head.proj.bias"]
    return BlockDraftWeights(
        fc=tensors["fc.weight"],
        context_norm=tensors["hidden_norm.weight"],
        layers=tuple(_layer(tensors, f"layers.{i}.") for i in range(config.num_layers)),
        norm=tensors["norm.weight"],
        embeddings=embeddings,
        head=head,
        markov=markov,
        confidence=confidence,
    )


def _layer(tensors: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    def get(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    return LayerWeights(
        attn_norm=get("input_layernorm"),
        q=get("self_attn.q_proj"),
        kv=torch.cat([get("self_attn.k_proj"), get("self_attn.v_proj")]),
        o=get("self_attn.o_proj"),
        q_norm=get("self_attn.q_norm"),
        k_norm=get("self_attn.k_norm"),
        mlp_norm=get("post_attention_layernorm"),
        gate_up=torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
        down=get("mlp.down_proj"),
    )


class BlockModel:
    """The forward of one drafter. Products are row-invariant after `check_rows`."""

    def __init__(self, config: BlockConfig, weights: BlockDraftWeights) -> None:
        self.config, self.weights = config, weights
        self.layers = [
            {n: Linear(getattr(w, n)) for n in ("q", "kv", "o", "gate_up", "down")}
            for w in weights.layers
        ]
        self._fc, self._head = Linear(weights.fc), Linear(weights.head)
        self._markov = None if weights.markov is None else Linear(weights.markov[1])
        self._turns = Turns(config.rope_theta, config.head_dim, weights.fc.device)

    def linears(self) -> Iterable[tuple[str, Linear]]:
        """Every product, by name."""
        for i, layer in enumerate(self.layers):
            yield from ((f"layers.{i}.{name}", linear) for name, linear in layer.items())
        yield from (("fc", self._fc), ("lm_head", self._head))
        if self._markov is not None:
            yield "markov_head.markov_w2", self._markov

    def check_rows(self) -> None:
        """Make every product row-invariant, so that a row's tree does not depend on others.

        Raises:
            ExactnessUnavailable: no such product exists here.
        """
        for name, linear in self.linears():
            linear.check(f"drafter {name}")

    def reserve(self, end: int) -> Tensor:
        """Make ready for positions below `end`, whatever `end` later calls give. Returns their
        cosines and sines, see `Turns`."""
        return self._turns.reserve(end)

    def context(
        self, features: Tensor, positions: Tensor, *, end: int | None = None
    ) -> list[KeysValues]:
        """Per layer, keys and values of committed tokens: features [T, F * D] (the target's
        outputs side by side), positions [T] int64, all below `end` (None: looked up)."""
        c = rms_norm(self._fc(features), self.weights.context_norm, self.config.norm_eps)
        turns = self._turns(positions, end)
        return [self._keys_values(i, c, turns) for i in range(len(self.layers))]

    def inputs(self, anchors: Tensor) -> Tensor:
        """anchors [n] int64 -> block inputs [n * block_size, D]."""
        ids = anchors.new_full((len(anchors), self.config.block_size), self.config.mask_token_id)
        ids[:, 0] = anchors
        return self.weights.embeddings[ids.flatten()]

    def outputs(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        inject: Inject | None = None,
        *,
        end: int | None = None,
    ) -> Tensor:
        """Block inputs x [M, D] at positions [M], all below `end` (None: looked up) -> normed
        outputs [M, D]."""
        eps, turns = self.config.norm_eps, self._turns(positions, end)
        for i, (w, linear) in enumerate(zip(self.weights.layers, self.layers, strict=True)):
            h = rms_norm(x, w.attn_norm, eps)
            q = linear["q"](h).unflatten(-1, (self.config.num_heads, -1))
            q = rotate(rms_norm(q, w.q_norm, eps), turns)
            x = x + linear["o"](attend(i, q, self._keys_values(i, h, turns)))
            h = rms_norm(x, w.mlp_norm, eps)
            if inject is not None and i == len(self.layers) - 1:
                h = h + inject(h)
            x = x + linear["down"](swiglu(linear["gate_up"](h)))
        return rms_norm(x, self.weights.norm, eps)

    def drafting(self, outputs: Tensor) -> Tensor:
        """Outputs [n * block_size, D] -> those that predict drafts, [n, num_drafts, D]."""
        blocks: Tensor = outputs.unflatten(0, (-1, self.config.block_size))
        return blocks if self.config.shift_label else blocks[:, 1:]

    def logits(self, h: Tensor) -> Tensor:
        """Base logits [..., vocab] of outputs h [..., D], at least float32."""
        base: Tensor = self._head(h.reshape(-1, h.shape[-1])).unflatten(0, h.shape[:-1])
        return base.to(compute_dtype(base.dtype))

    def correction(self, previous: Tensor) -> Tensor:
        """What a position's base logits get for the token before it: previous [n] int64 ->
        [n, vocab]; W2 W1[previous]. Only with a Markov head."""
        assert self._markov is not None
        assert self.weights.markov is not None
        bias = self._markov(self.weights.markov[0][previous])
        return bias.to(compute_dtype(bias.dtype))

    def confidence(self, h: Tensor, previous: Tensor) -> Tensor:
        """Logits [n, num_drafts] of drafts being accepted if all before them are; h [n,
        num_drafts, D], previous [n, num_drafts] int64. Only with a confidence head."""
        assert self.weights.confidence is not None
        weight, bias = (x.to(compute_dtype(x.dtype)) for x in self.weights.confidence)
        if self.config.confidence_with_markov:
            assert self.weights.markov is not None
            h = torch.cat([h, self.weights.markov[0][previous].to(h.dtype)], dim=-1)
        return (h.to(weight.dtype) * weight).sum(-1) + bias

    def _keys_values(self, layer: int, h: Tensor, turns: Tensor) -> KeysValues:
        kv = self.layers[layer]["kv"](h).unflatten(-1, (2, self.config.num_kv_heads, -1))
        k, v = kv.unbind(1)
        k_norm = self.weights.layers[layer].k_norm
        return KeysValues(rotate(rms_norm(k, k_norm, self.config.norm_eps), turns), v)


class Turns:
    """Cosines and sines of rotary position embedding, by position. Whole pages are computed at a
    time: an elementwise function's bits can depend on where in a tensor a number stands."""

    def __init__(self, theta: float, head_dim: int, device: torch.device) -> None:
        half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
        self._rates = theta ** (-half / head_dim)
        self._pages: list[Tensor] = []
        self._table = self._rates.new_empty(0, 2, len(half))

    def __call__(self, positions: Tensor, end: int | None = None) -> Tensor:
        """positions [M] int64 -> [M, 2, d / 2] float64. end: above all of them; None: the device
        is asked."""
        if end is None:
            end = 1 + int(positions.max()) if len(positions) else 0
        return self.reserve(end)[positions]

    def reserve(self, end: int) -> Tensor:
        """Know all positions below `end`, and maybe more: [positions, 2, d / 2] float64."""
        if end > len(self._table):
            while len(self._pages) * _PAGE < end:
                start = len(self._pages) * _PAGE
                turns = torch.arange(start, start + _PAGE, device=self._rates.device)
                turns = turns.to(self._rates.dtype)[:, None] * self._rates
                self._pages.append(torch.stack([turns.cos(), turns.sin()], dim=1))
            self._table = torch.cat(self._pages)
        return self._table


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary position embedding, first half against second half: x [M, heads, d], turns [M, 2,
    d / 2]."""
    wide = compute_dtype(x.dtype)
    cos, sin = turns.to(wide)[:, :, None].unbind(1)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def visible(query: Tensor, key: Tensor, *, window: int | None, causal: bool) -> Tensor | None:
    """Which keys of which positions a query sees: [..., queries, keys] bool, or None for all.

    query [..., n], key [..., T] int64: positions; the last n keys are the block's own.
    """
    if window is None and not causal:
        return None
    gap = query.unsqueeze(-1) - key.unsqueeze(-2)
    seen = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    return seen if window is None else seen & (gap.abs() < window)


def attention(q: Tensor, kv: KeysValues, seen: Tensor | None) -> Tensor:
    """One row: q [n, Q, d] over kv [T, H, d] -> [n, Q d]. seen [n, T] or None."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, *kv))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)
    return o[0].transpose(0, 1).flatten(1)
