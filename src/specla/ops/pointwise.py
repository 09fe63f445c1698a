# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions whose bits do not depend on how many rows ride along (rule I4).

PyTorch's CPU loops hand the elements left over after the last full vector to scalar code, and
for sigmoid, silu, softplus and exp2 that code rounds differently: the same number then gives
other bits when its position in the tensor changes. exp and log1p go through one vector library
call for every element and do not have this property, so everything here is built from them and
from exactly rounded arithmetic. `ops.linear.check` and `tests/ops/test_rows.py` guard it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x); x any shape, float."""
    return 1 / (1 + torch.exp(-x.contiguous()))


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x); x any shape, float."""
    x = x.contiguous()
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), linear above 20 as in fla; x any shape, float."""
    x = x.contiguous()
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
