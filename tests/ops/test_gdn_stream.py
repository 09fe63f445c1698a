# SPDX-License-Identifier: Apache-2.0
"""Hopper's walk with operands in shared memory, without a device: that it compiles, keeps the
barriers out of the walk and fits, whatever the round. Its bits are compared in
tests/ops/test_gdn_triton.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from specla.ops.contract import RecurrentShape

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops.gdn import triton_stream as stream  # noqa: E402
from specla.ops.gdn.triton import lanes_for, stream_for  # noqa: E402
from specla.ops.gdn.triton_stream import StreamTile  # noqa: E402

WIDE = RecurrentShape(
    num_layers=1, num_key_heads=8, num_value_heads=8, key_dim=256, value_dim=256, conv_width=4
)
SHARED = 227 * 1024  # bytes that a program may have
FLOATS = ("S", "k", "u", "g", "q", "v", "beta", "o")
INTEGERS = ("arrivals", "slot", "num_nodes", "bank", "ring_len", "path_len", "path", "walk")


def compiled(
    shape: RecurrentShape, num_nodes: int, tile: StreamTile, branching: bool, parts: int = 1
) -> Any:
    meta = {
        "H": shape.num_key_heads,
        "G": shape.num_value_heads,
        "K": shape.key_dim,
        "V": shape.value_dim,
        "NODES": num_nodes,
        "LOG": stream.LOG,
        "TILE": tile.rows,
        "LANES": lanes_for(shape.key_dim),
        "PARTS": parts,
        "BRANCHING": branching,
        "PDL": True,
        "LATE": tile.late,
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
    ("tile", "num_nodes", "branching", "parts"),
    [
        (StreamTile(64, 16), 64, True, 1),
        (StreamTile(64, 8, late=True), 64, True, 4),
        (StreamTile(16, 4, late=True), 8, False, 2),
        (StreamTile(32, 4, registers=168), 8, True, 1),
        (StreamTile(32, 4), 8, False, 1),
        (StreamTile(16, 4, late=True), 16, True, 2),
        (StreamTile(32, 4, late=True), 32, True, 4),
    ],
)
def test_compiles_for_hopper_without_barriers_in_the_walk(
    tile: StreamTile, num_nodes: int, branching: bool, parts: int
) -> None:
    """Gluon changes between versions of Triton."""
    kernel = compiled(WIDE, num_nodes, tile, branching, parts)
    ptx = kernel.asm["ptx"]
    nodes, walk = ptx.rindex("cp.async.commit_group"), ptx.rindex("cp.async.wait_group")
    assert ptx.index("ld.global.v4") < ptx.rindex("griddepcontrol.wait", 0, nodes) < walk
    assert ptx[walk:].count("bar.sync") == 1
    assert kernel.metadata.shared <= SHARED


def test_a_few_rows_trees_have_their_outputs_summed_late() -> None:
    """Where more warps share a scheduler, they fill the time as it is."""
    for programs, nodes, late in ((2, 16, True), (4, 32, True), (64, 16, False), (1, 1, False)):
        assert stream_for(WIDE, programs, nodes, branching=nodes > 2).late == late


@pytest.mark.parametrize(("K", "V"), [(256, 16), (256, 48), (256, 96), (128, 96)])
def test_tiles_are_the_whole_of_a_value_head_of_any_width(K: int, V: int) -> None:
    shape = replace(WIDE, key_dim=K, value_dim=V)
    for programs, nodes, branching in product((1, 8, 64, 512), (1, 16, 32, 64), (True, False)):
        tile = stream_for(shape, programs, nodes, branching=branching)
        assert V % tile.rows == 0, (programs, nodes, branching, tile)
        assert tile.rows * lanes_for(K) in (tile.warps * 32 * rows for rows in (1, 2, 4))


@pytest.mark.parametrize("heads", [(8, 8, 256, 256), (16, 32, 128, 128), (4, 4, 64, 64)])
def test_a_tile_for_every_round(heads: tuple[int, int, int, int]) -> None:
    """It divides a value head, has 1, 2 or 4 rows a lane, and enough warps find room beside it."""
    H, G, K, V = heads
    shape = replace(WIDE, num_key_heads=H, num_value_heads=G, key_dim=K, value_dim=V)
    lanes = lanes_for(K)
    for programs, nodes, branching in product((1, 2, 4, 8, 64), (1, 2, 16, 32, 64), (True, False)):
        tile = stream_for(shape, programs, nodes, branching=branching)
        assert V % tile.rows == 0
        assert tile.rows * lanes in (tile.warps * 32 * rows for rows in (1, 2, 4))
        programs_beside = SHARED // (nodes * (8 * K + 2 * tile.rows + 8))
        least = 8 if nodes == 64 and programs <= 4 else 12
        assert programs_beside * tile.warps >= least, (programs, nodes, branching, tile)


def test_the_tiles_that_were_fastest() -> None:
    """docs/adr/0015."""
    narrow = replace(WIDE, num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128)
    best = {
        (WIDE, 1, 1, False): StreamTile(32, 4),
        (WIDE, 2, 8, True): StreamTile(16, 4, late=True),
        (WIDE, 2, 16, True): StreamTile(16, 4, late=True),
        (WIDE, 4, 32, True): StreamTile(32, 4, late=True),
        (WIDE, 4, 64, True): StreamTile(64, 8, late=True),
        (WIDE, 8, 16, True): StreamTile(32, 8),
        (WIDE, 64, 16, True): StreamTile(32, 4, registers=168),
        (WIDE, 64, 8, False): StreamTile(32, 4),
        (narrow, 2, 16, True): StreamTile(32, 4),
        (narrow, 64, 16, True): StreamTile(32, 4),
        (narrow, 64, 8, False): StreamTile(64, 4),
    }
    for (shape, programs, nodes, branching), tile in best.items():
        assert stream_for(shape, programs, nodes, branching=branching) == tile


def test_a_restored_state_is_multiplied_and_not_copied_first() -> None:
    """A copy is as many instructions again: one in eighteen of a tree's."""
    tile = StreamTile(32, 4, late=True)
    elements = tile.rows * WIDE.key_dim // (32 * tile.warps)
    products = [
        compiled(WIDE, 16, tile, branching).asm["ptx"].count("mul.f32")
        for branching in (False, True)
    ]
    assert products[1] - products[0] >= elements
