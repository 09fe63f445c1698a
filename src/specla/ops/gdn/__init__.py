# SPDX-License-Identifier: Apache-2.0
"""Gated delta rule: scalar decay per value head, delta correction.

Gates from raw projections live here; the recurrence itself in `reference` (torch, any device).

Capabilities: K != V; value heads a multiple of key heads; beta in (0, 2) (negative
eigenvalues); trees and chains of any shape up to the bank's capacity; float32 or float64 state.
"""

from __future__ import annotations

from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import Inputs
from specla.ops.norm import cast, compute_dtype, l2_norm
from specla.ops.pointwise import sigmoid, softplus


def inputs(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A: Tensor,
    dt_bias: Tensor,
    shape: RecurrentShape,
    beta_scale: float = 1.0,
) -> Inputs:
    """Raw projections of one layer -> what the recurrence reads.

    qkv [M, C] after conv and SiLU, a and b [M, G] raw gate logits (activation dtype);
    A [G] = -exp(A_log), dt_bias [G] (compute dtype). beta_scale is 2 where negative
    eigenvalues are allowed. g = A softplus(a + dt_bias), beta = scale * sigmoid(b), each
    rounded once, in compute dtype.
    """
    dtype = compute_dtype(qkv.dtype)
    keys, values = shape.num_key_heads, shape.num_value_heads
    width = keys * shape.key_dim
    qk, v = qkv.split_with_sizes([2 * width, values * shape.value_dim], -1)
    q, k = l2_norm(qk.unflatten(-1, (2, keys, shape.key_dim))).unbind(-3)
    v = cast(v.unflatten(-1, (values, shape.value_dim)), dtype)
    g = A * softplus(cast(a, dtype) + dt_bias)
    beta = sigmoid(cast(b, dtype))
    q = q * shape.key_dim**-0.5
    return Inputs(
        q, k.contiguous(), v.contiguous(), g, beta if beta_scale == 1.0 else beta * beta_scale
    )


__all__ = ["Inputs", "inputs"]
