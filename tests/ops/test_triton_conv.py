# SPDX-License-Identifier: Apache-2.0
"""The packed convolution by a kernel, against torch's operations."""

from __future__ import annotations

import pytest
import torch

from specla.ops import conv
from specla.train.gdn import pack_masks

pytest.importorskip("triton")
from specla.ops import rows, triton_conv

DEVICE = "cuda" if not rows.INTERPRET else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 4])
def test_a_packed_convolution(dtype: torch.dtype, width: int) -> None:
    """Columns of a wider projection; texts of one token and of many, the first at the start."""
    generator = torch.Generator().manual_seed(width)
    raw = torch.randn(37, 170, generator=generator).to(dtype)
    weight = torch.randn(150, width, generator=generator).to(dtype)
    segments = torch.tensor([[0] * 5 + [1] + [2] * 27 + [-1] * 4])
    same = pack_masks(segments, width, 16).taps.flatten(0, 1)
    want = conv.packed(raw[:, 7:157], weight, same)
    found = triton_conv.packed(*(x.to(DEVICE) for x in (raw[:, 7:157], weight, same)))
    assert found.dtype == dtype
    fine = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    torch.testing.assert_close(found.cpu(), want, **fine)
