# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernel for many rows of few nodes, without a device: it compiles, asks for the state
before it waits, keeps barriers out of the log's loop and out of the nodes', does not spill, and
as many programs fit a multiprocessor as are launched. On a device (marked gpu) its bits are those
of the walk."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from random_inputs import random_parents
from torch import Tensor

from specla.ops.contract import RecurrentShape
from specla.state import State
from specla.topology.tree import DraftTree

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops.gdn import triton as kernels  # noqa: E402
from specla.ops.gdn import triton_decode as decode  # noqa: E402
from specla.ops.walk import compile_walks  # noqa: E402

WIDE = RecurrentShape(
    num_layers=1, num_key_heads=8, num_value_heads=8, key_dim=256, value_dim=256, conv_width=4
)
NARROW = replace(WIDE, num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=64)
SHAPES = {
    "8 x 256 x 256": WIDE,
    "16/32 x 128": replace(WIDE, num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
    "4 x 64 x 128": replace(WIDE, num_key_heads=4, num_value_heads=4, key_dim=64, value_dim=128),
    "2/4 x 128 x 64": NARROW,
}
MORE = (WIDE, 2, True), (WIDE, 8, True), (NARROW, 4, False), (SHAPES["16/32 x 128"], 4, True)
SHARED = 228 * 1024  # bytes of a multiprocessor; each program takes another 1024
REGISTERS = 65536
INTEGERS = ("slot", "num_nodes", "bank", "ring_len", "path_len", "path", "walk")


def compiled(
    shape: RecurrentShape, tile: decode.DecodeTile, nodes: int, *, branching: bool, pdl: bool
) -> Any:
    meta = {"H": shape.num_key_heads, "G": shape.num_value_heads}
    meta |= {"K": shape.key_dim, "V": shape.value_dim, "LANES": kernels.lanes_for(shape.key_dim)}
    meta |= decode.constants(tile, nodes, branching=branching)
    meta |= {"PDL": pdl, "num_warps": tile.warps}
    kernel = decode._decode_kernel
    names = kernel.arg_names
    block = [tile.rows * shape.key_dim // decode.WIDTH, decode.WIDTH]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in names}
    types |= dict.fromkeys(meta, "constexpr") | {f"{name}_ptr": "*i32" for name in INTEGERS}
    types |= {"v_ptr": "*bf16", "S_blocks": f"tensordesc<{gl.float32}{block},{layout!r}>"}
    places = {n: i for i, n in enumerate(names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")}
    source = GluonASTSource(kernel, types, {(places[n],): v for n, v in meta.items()}, aligned)
    options = {"num_warps": tile.warps, "launch_pdl": pdl, "enable_fp_fusion": True}
    options["maxnreg"] = tile.registers or None
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("shape", "nodes", "pdl"),
    [
        (WIDE, 1, True),
        (NARROW, 1, True),
        (WIDE, 1, False),
        (WIDE, 4, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_compiles_for_hopper(shape: RecurrentShape, nodes: int, pdl: bool, tmp_path: Path) -> None:
    """Gluon changes between versions of Triton."""
    tile = decode.tile_for(shape, nodes, lanes=kernels.lanes_for(shape.key_dim), pdl=pdl)
    kernel = compiled(shape, tile, nodes, branching=nodes > 2, pdl=pdl)
    ptx = kernel.asm["ptx"]
    if pdl:
        assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")
    assert tile.programs * (kernel.metadata.shared + 1024) <= SHARED
    assert longest_pass_without_barrier(ptx) >= 2 * 2 * shape.key_dim * tile.rows // (
        32 * tile.warps
    )
    assert nodes == 1 or not barrier_after_first_shuffle(ptx)
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
    told = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in told.stdout + told.stderr
    per_thread = REGISTERS // (tile.programs * 32 * tile.warps)
    assert int(told.stderr.split("Used ")[1].split()[0]) <= min(255, per_thread)


def longest_pass_without_barrier(ptx: str) -> int:
    """Multiplications in the longest run of a loop's instructions that no barrier interrupts and
    no label or branch cuts: two entries of the log, if nothing went wrong."""
    longest = run = 0
    for line in ptx.splitlines():
        words = line.split()
        if not words or words[0].startswith("."):
            continue
        if "bar.sync" in line or words[0].startswith("$L__BB") or "bra" in words[:2]:
            run = 0
        run += words[0].startswith(("mul.f32", "fma.rn.f32"))
        longest = max(longest, run)
    return longest


def barrier_after_first_shuffle(ptx: str) -> bool:
    """Whether warps wait for each other between a node's sums and the next unit."""
    nodes = ptx[ptx.index("shfl.sync") :]
    loop = nodes[: nodes.rindex("shfl.sync")]
    return re.search(r"\bbar\.sync", loop) is not None


def test_tiles() -> None:
    """Four rows a lane where there are so many; a head is a whole number of tiles; one node."""
    wide = decode.tile_for(WIDE, 1, lanes=16, pdl=True)
    assert wide.rows == 32
    assert decode.tile_for(NARROW, 4, lanes=8, pdl=False).rows == 64
    cpu = torch.device("cpu")
    assert not decode.pays(WIDE, 64, 1, wide._replace(rows=48), cpu)
    assert not decode.pays(WIDE, 64, decode.MOST_NODES + 1, wide, cpu)


def test_every_program_has_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units taken a few at a time may be fewer than programs that the device holds: 16 rows' 1,024
    are 256 times four, for 264 programs."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(decode, "processors", lambda device: 132)
    tile, units = decode.tile_for(WIDE, 2, lanes=16, pdl=True), 16 * 8 * (256 // 32)
    assert decode.num_programs(units, tile, cpu) == units // tile.chunk == 256
    assert decode.num_programs(4 * units, tile, cpu) == 264
    assert decode.num_programs(units, tile._replace(chunk=0), cpu) == 264


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 16, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_bits_of_the_walk(name: str, rows: int) -> None:
    """What `walk` chooses, the same kernel anyway, other rings and rows a lane; idle rows; empty
    logs, folds due and not, logs longer than what travels ahead."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the decode kernel is for compute capability 9.0")
    shape = SHAPES[name]
    lanes = kernels.lanes_for(shape.key_dim)
    tile, with_pdl = (decode.tile_for(shape, 1, lanes=lanes, pdl=pdl) for pdl in (False, True))
    other = tile._replace(rows=tile.rows // 2, programs=1, stages=3)
    want = few_nodes_each(shape, rows, 1, kernels.Tile(8, 1))
    for choice in (None, tile, with_pdl, other):
        got = few_nodes_each(shape, rows, 1, choice)
        assert all(map(torch.equal, want, got)), choice


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 16, 64])
@pytest.mark.parametrize("name", ["8 x 256 x 256", "16/32 x 128", "2/4 x 128 x 64"])
def test_the_bits_of_the_walk_of_trees(name: str, rows: int) -> None:
    """Random trees of up to so many nodes; chains, without a checkpoint as well."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the decode kernel is for compute capability 9.0")
    shape, lanes = SHAPES[name], kernels.lanes_for(SHAPES[name].key_dim)
    for nodes, branching in ((2, True), (3, True), (4, True), (8, True), (8, False)):
        tile = decode.tile_for(shape, nodes, lanes=lanes, pdl=True)
        small = tile._replace(rows=tile.rows // 2, log=4, rest=2)
        want = few_nodes_each(shape, rows, nodes, kernels.Tile(8, 1), branching=branching)
        for choice in (tile, tile._replace(chunk=2), small if nodes == 4 else tile):
            got = few_nodes_each(shape, rows, nodes, choice, branching=branching)
            assert all(map(torch.equal, want, got)), (nodes, branching, choice)


def few_nodes_each(
    shape: RecurrentShape,
    rows: int,
    nodes: int,
    tile: kernels.Tile | decode.DecodeTile | None,
    *,
    branching: bool = True,
) -> list[Tensor]:
    """A round of 1 to `nodes` nodes a row (chains: not `branching`); every fifth row is idle."""
    generator = torch.Generator("cuda").manual_seed(3)
    normal = partial(torch.randn, generator=generator, device="cuda")
    most = max(nodes, 4)
    state = State(shape, num_slots=rows, max_nodes=most, log_capacity=24, device="cuda")
    layer = state.layers[0]
    for tensor in (layer.S, *layer.factors[:2]):
        tensor.copy_(normal(tensor.shape) * 0.3)
    layer.factors.g.copy_(-normal(layer.factors.g.shape).abs())
    slots = [state.acquire() for _ in range(rows)]
    logs: list[tuple[int, tuple[int, ...]]] = [(0, ()), (17, (0, 2)), (24, (0,)), (7, (1,))]
    for slot in slots:
        state.logs[slot].ring_len, state.logs[slot].path = logs[slot % 4]
    sizes = [max(1, nodes - b % 3 * (nodes // 2)) for b in range(rows)]
    parents = [random_parents(b, n) if branching else (*range(-1, n - 1),)
               for b, n in enumerate(sizes)]  # fmt: skip
    trees = [DraftTree(tuple(range(len(p))), p) for p in parents]
    rnd = state.begin(slots, trees).round  # type: ignore[union-attr]
    rnd.num_nodes[4::5] = 0
    compile_walks(rnd)
    padded, columns = rnd.parents.shape
    workspace = kernels.Workspace.allocate(shape, padded * columns, torch.bfloat16, "cuda")
    for tensor in (workspace.q, workspace.v, workspace.beta):
        tensor.copy_(normal(tensor.shape) * 0.3)
        for b, n in enumerate(rnd.num_nodes.tolist()):
            tensor[b * columns + n : (b + 1) * columns] = float("nan")
    workspace.o.zero_()
    kernels.walk(
        layer, rnd, workspace, shape=shape, log_capacity=24, threshold=24, tile=tile,
        branching=branching,
    )  # fmt: skip
    return [workspace.o, layer.S, *layer.factors]
