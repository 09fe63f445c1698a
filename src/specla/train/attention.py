# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a drafter in training: packed rows, several steps ahead.

At step s pair t attends to the pairs up to t - s with true features, and to what the steps before
it made of pairs (t-s+1, 1) .. (t-1, s-1), itself included: one masked product with step 0's keys
and a dot product per later step, as in EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specla.drafters.eagle_attention import rotate
from specla.train.unroll import push


class Attention(nn.Module):
    """Weights, named as Llama's."""

    def __init__(self, inputs: int, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def project(self, x: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, inputs] -> q, k, v [B, T, H, hd] in x's dtype, keys repeated for all heads."""
        found = []
        for linear, count in (
            (self.q_proj, self.heads),
            (self.k_proj, self.kv_heads),
            (self.v_proj, self.kv_heads),
        ):
            y = F.linear(x.to(compute), linear.weight.to(compute)).to(x.dtype)
            heads = y.unflatten(-1, (count, -1))
            found.append(heads.repeat_interleave(self.heads // count, dim=-2))
        q, k, v = found
        return q, k, v

    def finish(self, o: Tensor, compute: torch.dtype) -> Tensor:
        """o [B, T, H, hd] -> [B, T, D]."""
        return F.linear(o.flatten(-2).to(compute), self.o_proj.weight.to(compute))


class Step(NamedTuple):
    """Keys and values of one step, [B, T, H, hd]."""

    k: Tensor
    v: Tensor


class AttentionUnroll:
    """Attention over packed pairs, step after step: see `unroll.MixerUnroll`."""

    def __init__(
        self, attention: Attention, segments: Tensor, theta: float, compute: torch.dtype
    ) -> None:
        self._attention, self._theta, self._compute = attention, theta, compute
        place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
        starts = segments != F.pad(segments, (1, 0), value=-2)[:, :-1]
        self._positions = place - torch.where(starts, place, 0).cummax(1).values
        self._same = segments[:, :, None] == segments[:, None, :]
        self._gap = place[:, :, None] - place[:, None, :]
        self.steps: list[Step] = []

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, T, inputs] of the next step -> [B, T, D]."""
        q, k, v = self._attention.project(x, self._compute)
        q, k = (rotate(y, self._positions, self._theta) for y in (q, k))
        self.steps.append(Step(k, v))
        s, scale = len(self.steps) - 1, q.shape[-1] ** -0.5
        seen = self._same & (self._gap >= s)
        root = torch.einsum("bthd,bjhd->bthj", q, self.steps[0].k) * scale
        scores = [root.masked_fill(~seen[:, :, None], -torch.inf)]
        later = [Step(*(push(y, s - i) for y in self.steps[i])) for i in range(1, s + 1)]
        scores += [(q * one.k).sum(-1, keepdim=True) * scale for one in later]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
        length = root.shape[-1]
        o = torch.einsum("bthj,bjhd->bthd", weights[..., :length], self.steps[0].v)
        for i, one in enumerate(later):
            o = o + weights[..., length + i : length + i + 1] * one.v
        return self._attention.finish(o, self._compute)
