# SPDX-License-Identifier: Apache-2.0
"""What a record says about the machine."""

from __future__ import annotations

from specla.cli import records


def test_a_row_names_the_gpu() -> None:
    run = {"device": "cuda:0", "device_name": "NVIDIA H200", "dtype": "bfloat16", "model": "x"}
    assert records.machine(run) == "NVIDIA H200 bfloat16 x"
    run |= {"device": "cpu", "device_name": "some CPU, 1 thread"}
    assert records.machine(run) == "cpu bfloat16 x"
