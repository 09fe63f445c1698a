# SPDX-License-Identifier: Apache-2.0
"""Training-time test of a drafter with a gated delta rule: as many steps ahead as in use.

A *pair* t is a token x_{t+1} and the feature g_t before it; its output guesses x_{t+2}. At step 0
the features are the target's. At step s pair t has the drafter's own output of pair t - 1 at step
s - 1 for its feature, and its state is the one after pair t - s with true features, then pairs
(t-s+1, 1) .. (t-1, s-1), just as s drafts below an accepted token. No state per pair is kept: the
rule read at t - s by another query (two reads per step of one scan), and s dot products, give the
same output:

    S_{t,s} = a (A S_{t-s} + sum_i D_i u_i k_i^T) + u k^T,  A, D_i: decays along the path

Source: EAGLE-3 (arXiv 2503.01840) for the test; the factor form is our own, checked against
explicit states in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specla.train.delta_rule import Scan, scan
from specla.train.gdn import Mixer, Packing


def push(x: Tensor, steps: int) -> Tensor:
    """[B, T, ...] moved later by `steps`; zeros come in."""
    if steps == 0:
        return x
    moved: Tensor = F.pad(x, (0, 0) * (x.dim() - 2) + (steps, 0))
    return moved[:, : x.shape[1]]


def pull(x: Tensor, steps: int) -> Tensor:
    """[B, T, ...] moved earlier by `steps`."""
    moved: Tensor = F.pad(x, (0, 0) * (x.dim() - 2) + (0, steps))
    return moved[:, steps:]


def convolution(sources: Sequence[Tensor], taps: Tensor, weight: Tensor) -> Tensor:
    """Depthwise, then SiLU: of each of W taps, oldest first, the raw inputs [B, T, C], taps [B, T,
    W] bool, weight [C, W] -> [B, T, C]."""
    total = torch.zeros_like(sources[0], dtype=weight.dtype)
    for j, source in enumerate(sources):
        moved = push(source, len(sources) - 1 - j)
        total = total + moved * taps[..., j : j + 1] * weight[:, j]
    return F.silu(total)


def descend(
    reads: Sequence[Tensor], given: Sequence[Tensor], above: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(o, u) [B, T, H, V] of step s.

    Args:
        reads: what the state with true features gives k and q, [B, T, H, V].
        given: q, k, v, g and beta, as in `Mixer`.
        above: k, u and g of the steps 1 .. s - 1, one after the other.
    """
    (read_k, read_q), (q, k, v, g, beta), s = reads, given, len(above) // 3 + 1
    # From the oldest ancestor down: decay what has been read, then add what it wrote.
    for i in range(1, s):
        k_i, u_i, g_i = (push(x, s - i) for x in above[3 * i - 3 : 3 * i])
        decay = g_i.exp()[..., None]
        read_k = decay * read_k + u_i * (k_i * k).sum(-1, keepdim=True)
        read_q = decay * read_q + u_i * (k_i * q).sum(-1, keepdim=True)
    decay = g.exp()[..., None]
    u = beta[..., None] * (v - decay * read_k)
    return decay * read_q + u * (k * q).sum(-1, keepdim=True), u


class _Descent(torch.autograd.Function):
    """`descend` in one kernel each way: reads, given and above, one after the other."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        from specla.train import triton_unroll

        inputs = tuple(x.contiguous() for x in inputs)
        ctx.save_for_backward(*inputs)
        return triton_unroll.descend(inputs[:2], inputs[2:7], inputs[7:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from specla.train import triton_unroll

        x, grads = ctx.saved_tensors, tuple(grad.contiguous() for grad in grads)
        return tuple(triton_unroll.descend_gradients(x[:2], x[2:7], x[7:], grads))


class _Convolution(torch.autograd.Function):
    """`convolution` in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, taps: Tensor, weight: Tensor, *sources: Tensor) -> Tensor:
        from specla.train import triton_fused

        ctx.save_for_backward(taps, weight, *sources)
        return triton_fused.convolution(sources, taps, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from specla.train import triton_fused

        taps, weight, *sources = ctx.saved_tensors
        grads, of_weight = triton_fused.convolution_gradients(sources, taps, weight, grad)
        return None, of_weight, *grads


FUSED_STEPS = 5
"""The deepest step whose descent has a kernel."""


class Step(NamedTuple):
    """What later steps need of one: raw conv inputs [B, T, C], k [B, T, H, K], u [B, T, H, V],
    log decay g [B, T, H]."""

    raw: Tensor
    k: Tensor
    u: Tensor
    g: Tensor


class MixerUnroll:
    """The mixer over packed pairs, step after step: call it with each step's normed inputs."""

    def __init__(self, mixer: Mixer, packing: Packing, compute: torch.dtype) -> None:
        self._mixer, self._packing, self._compute = mixer, packing, compute
        self._scan: Scan | None = None
        self.steps: list[Step] = []

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, T, inputs] of the next step -> [B, T, D]."""
        raw, gate, a, b = self._mixer.project(x, self._compute)
        q, k, v = self._mixer.heads(self._convolve(raw))
        g, beta = self._mixer.gates(a, b)
        if self._scan is None:
            self._scan = scan(k, v, g, beta, self._packing.chunk)
            o, u = self._scan.read(q), self._scan.u
        else:
            o, u = self._below(q, k, v, g, beta)
        self.steps.append(Step(raw, k, u, g))
        return self._mixer.finish(o, gate, self._compute)

    def _convolve(self, raw: Tensor) -> Tensor:
        """The window of (t, s) holds the raw inputs of (t - i, max(s - i, 0))."""
        weight, s = self._mixer.conv_weight(), len(self.steps)
        raws = [*(step.raw for step in self.steps), raw]
        sources = [raws[max(s - back, 0)] for back in reversed(range(weight.shape[1]))]
        if raw.is_cuda and weight.dtype == torch.float32 and len(sources) == 4:
            return cast(Tensor, _Convolution.apply(self._packing.taps, weight, *sources))  # type: ignore[no-untyped-call]
        return convolution(sources, self._packing.taps, weight)

    def _below(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(o, u) of step s >= 1; see the module's formula. Arguments as in `Mixer`."""
        assert self._scan is not None
        s = len(self.steps)
        reads = [push(x, s) for x in self._scan.read_all(pull(k, s), pull(q, s))]
        above = [x for step in self.steps[1:] for x in (step.k, step.u, step.g)]
        if k.is_cuda and k.dtype == torch.float32 and s <= FUSED_STEPS:
            given = *reads, q, k, v, g, beta
            return cast(tuple[Tensor, Tensor], _Descent.apply(*given, *above))  # type: ignore[no-untyped-call]
        return descend(reads, (q, k, v, g, beta), above)


def valid_steps(segments: Tensor, steps: int) -> Tensor:
    """[steps, B, T] bool: whether pair t - s is of the same document as pair t."""
    return torch.stack([push(segments + 1, s) == segments + 1 for s in range(steps)])
