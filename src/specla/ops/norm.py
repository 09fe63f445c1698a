# SPDX-License-Identifier: Apache-2.0
"""Norms over the last axis, one row at a time in effect: bits do not depend on row count.

All compute in float32 (float64 stays float64) and return the input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specla.ops.pointwise import silu

L2_EPS = 1e-6


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype. Asking first is a tenth of what `x.to` takes to find nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight; x [..., D], weight [D]."""
    dtype = compute_dtype(x.dtype)
    y = torch.rms_norm(cast(x, dtype), weight.shape, cast(weight, dtype), eps)
    return cast(y, x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Norm first, then gate: rms_norm(x) * silu(gate), rounded once.

    x [..., V] in compute dtype; gate [..., V] in the activation dtype, or None for no gate.
    Returns x's dtype; the caller rounds to the activation dtype.
    """
    y = rms_norm(x, weight, eps)
    return y if gate is None else y * silu(cast(gate, y.dtype))


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) in compute dtype; x [..., K]. The eps is inside the root."""
    y = cast(x, compute_dtype(x.dtype))
    return y / torch.sqrt((y * y).sum(-1, keepdim=True) + L2_EPS)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate_up [..., 2 I] -> [..., I], computed in float32, rounded once."""
    gate, up = cast(gate_up, compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return cast(silu(gate) * up, gate_up.dtype)
