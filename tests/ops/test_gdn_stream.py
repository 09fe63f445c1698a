# SPDX-License-Identifier: Apache-2.0
"""Hopper's walk with operands in shared memory, without a device: that it compiles, keeps the
barriers out of the walk and fits. Its bits are compared in tests/ops/test_gdn_triton.py."""

from __future__ import annotations

from typing import Any

import pytest

from specla.ops.contract import RecurrentShape

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops.gdn import triton_stream as stream  # noqa: E402
from specla.ops.gdn.triton import lanes_for  # noqa: E402
from specla.ops.gdn.triton_stream import StreamTile  # noqa: E402

WIDE = RecurrentShape(
    num_layers=1, num_key_heads=8, num_value_heads=8, key_dim=256, value_dim=256, conv_width=4
)
FLOATS = ("S", "k", "u", "g", "q", "v", "beta", "o")
INTEGERS = ("arrivals", "slot", "num_nodes", "bank", "ring_len", "path_len", "path", "walk")


def compiled(shape: RecurrentShape, num_nodes: int, tile: StreamTile, branching: bool) -> Any:
    meta = {
        "H": shape.num_key_heads,
        "G": shape.num_value_heads,
        "K": shape.key_dim,
        "V": shape.value_dim,
        "NODES": num_nodes,
        "LOG": stream.LOG,
        "TILE": tile.rows,
        "LANES": lanes_for(shape.key_dim),
        "PARTS": 1,
        "BRANCHING": branching,
        "SHARED": tile.shared,
        "PDL": True,
        "num_warps": tile.warps,
    }
    kernel = stream._stream_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(meta, "constexpr")
    types |= {f"{name}_ptr": "*fp32" for name in FLOATS} | {"v_ptr": "*bf16"}
    types |= {f"{name}_ptr": "*i32" for name in INTEGERS}
    places = {n: i for i, n in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n in types if n.endswith("_ptr")}
    source = GluonASTSource(kernel, types, {(places[n],): v for n, v in meta.items()}, aligned)
    options = {"num_warps": tile.warps, "launch_pdl": True, "enable_fp_fusion": True}
    options["maxnreg"] = tile.registers or None
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("tile", "branching"),
    [
        (StreamTile(16, 8), True),
        (StreamTile(32, 4, registers=168), True),
        (StreamTile(32, 4), False),
    ],
)
def test_compiles_for_hopper_without_barriers_in_the_walk(
    tile: StreamTile, branching: bool
) -> None:
    """Gluon changes between versions of Triton."""
    kernel = compiled(WIDE, 8, tile, branching)
    ptx = kernel.asm["ptx"]
    nodes, walk = ptx.rindex("cp.async.commit_group"), ptx.rindex("cp.async.wait_group")
    assert ptx.index("ld.global.v4") < ptx.rindex("griddepcontrol.wait", 0, nodes) < walk
    assert ptx[walk:].count("bar.sync") == 1
    assert kernel.metadata.shared <= stream.bytes_for(WIDE, 8, tile, branching)


def test_fits() -> None:
    assert stream.fits(WIDE, 64, StreamTile(64, 8), True)
    assert not stream.fits(WIDE, 64, StreamTile(128, 16, shared=True), True)
    assert stream.fits(WIDE, 64, StreamTile(128, 16, shared=True), False)
