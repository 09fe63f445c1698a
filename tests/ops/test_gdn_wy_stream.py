# SPDX-License-Identifier: Apache-2.0
"""Hopper's second kernel of the closed form, without a device: it compiles, asks for the state
before it waits, does not spill, and two programs fit a multiprocessor. What it computes is
compared in tests/ops/test_gdn_wy.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specla.ops.contract import RecurrentShape

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops.gdn import triton_wy_stream as stream  # noqa: E402
from specla.ops.gdn.triton_wy_operands import COLUMNS, ROWS  # noqa: E402

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_width=4
)
SHARED = 228 * 1024 // 2 - 1024  # bytes that each of two programs may have
INTEGERS = ("places", "slot", "num_nodes", "bank", "ring_len", "path_len")


def blocks(rows: int, columns: int, dtype: Any = gl.bfloat16) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def compiled(fold: int) -> Any:
    nodes, kernel = 16, stream._stream_kernel
    meta = {"H": SHAPE.num_key_heads, "G": SHAPE.num_value_heads, "K": 128, "V": 128}
    meta |= {"NODES": nodes, "LOG": 32, "FOLD": fold, "PDL": True}
    names = kernel.arg_names
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in names}
    types |= dict.fromkeys(meta, "constexpr") | {f"{name}_ptr": "*i32" for name in INTEGERS}
    types |= dict.fromkeys(("v_ptr", "e_ptr", "reads_ptr"), "*bf16")
    types |= {
        "S_blocks": blocks(ROWS, COLUMNS, gl.float32),
        "x_blocks": blocks(2 * nodes, COLUMNS),
        "e_blocks": blocks(fold, COLUMNS),
        "solution_blocks": blocks(2 * nodes, nodes),
        "reads_blocks": blocks(2 * nodes, 16),
    }
    places = {n: i for i, n in enumerate(names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")}
    source = GluonASTSource(kernel, types, {(places[n],): v for n, v in meta.items()}, aligned)
    options = {"num_warps": stream.WARPS, "launch_pdl": True, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("fold", [16, 32])
def test_compiles_for_hopper(fold: int, tmp_path: Path) -> None:
    """Gluon changes between versions of Triton."""
    kernel = compiled(fold)
    ptx = kernel.asm["ptx"]
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")
    assert kernel.metadata.shared <= SHARED
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
    told = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in told.stdout + told.stderr


def test_where_it_is_used() -> None:
    assert stream.fits(128, 128, 16, 16)
    assert stream.fits(128, 128, 16, stream.MAX_FOLD)
    for sizes in ((256, 256, 16, 16), (128, 64, 16, 16), (128, 128, 32, 16), (128, 128, 16, 64)):
        assert not stream.fits(*sizes)
    assert not stream.pays(SHAPE, 64, 16, 16, torch.device("cpu"))
