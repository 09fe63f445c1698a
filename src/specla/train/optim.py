# SPDX-License-Identifier: Apache-2.0
"""Muon for the weight matrices, AdamW for everything else, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Pushes the singular values of [n, rows, cols] towards 1 by Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    low = torch.bfloat16 if matrices.is_cuda else matrices.dtype
    x = matrices.to(low)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised per matrix (Jordan et al., 2024), matrices of one shape as one
    batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95,
                 weight_decay: float = 0.0) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of dense 2-D parameters; those that the loss did not use stay."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self.update(params, shape, group)

    def update(self, params: list[nn.Parameter], shape: torch.Size, group: dict[str, Any]) -> None:
        """One shape's parameters, all with gradients."""
        grads = [p.grad for p in params if p.grad is not None]
        weights: list[Tensor] = list(params)
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        updates = orthogonalise(torch.stack(nesterov)).unbind()
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, list(updates), alpha=-group["lr"] * scale)


VOCABULARY = ("embeddings.weight", "lm_head.weight", "markov_w1.weight", "markov_w2.weight")
"""Ends of names of matrices with a row per token: most rows get no gradient in a step."""


def build_optimizers(model: nn.Module, muon_lr: float, adam_lr: float, weight_decay: float = 0.0,
                     use_muon: bool = True) -> list[torch.optim.Optimizer]:  # fmt: skip
    """Muon on projections, AdamW on embeddings and an untied head (decayed) and on vectors and
    convolutions (not); of parameters that are trained. Groups keep their "peak" rate."""
    matrices: list[nn.Parameter] = []
    embeddings: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            small = p.dim() != 2 or "a_proj" in name or "b_proj" in name
            vocabulary = name.endswith(VOCABULARY)
            (embeddings if vocabulary else rest if small else matrices).append(p)
    fused = next(model.parameters()).is_cuda
    groups = [{"params": rest, "weight_decay": 0.0},
              {"params": embeddings, "weight_decay": weight_decay}]  # fmt: skip
    if not use_muon:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    groups = [group for group in groups if group["params"]]
    adam = torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)
    found: list[torch.optim.Optimizer] = [adam]
    if use_muon and matrices:
        found.insert(0, Muon(matrices, muon_lr, weight_decay=weight_decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def step_all(optimizers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    """One step of each at `scale` times its peak rates; gradients are gone after it."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def rate(progress: float, step: int, warmup: int = 100, floor: float = 0.01) -> float:
    """Share of the peak rate: linear warm-up in steps, then cosine in ``progress`` (0 to 1)."""
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return cosine * min(1.0, (step + 1) / warmup)


def optimizer_tensors(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Every tensor of the optimisers' states as ``optimizer.KEY.PARAMETER``."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"optimizer.{key}.{names[p]}": value
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizers(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """The counterpart of `optimizer_tensors`; other tensors are left alone."""
    owner = {p: o for o in optimizers for g in o.param_groups for p in g["params"]}
    params = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, key, parameter = name.split(".", 2)
            p = params[parameter]
            owner[p].state[p][key] = tensor
