# SPDX-License-Identifier: Apache-2.0
"""The closed form in one kernel, without a device: its source on numpy against the reference, and
what it compiles to. On a GPU (marked gpu): against the reference and the three kernels."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gluon_on_numpy import rounded, run
from torch import Tensor

from specla.bench.kernel_cases import Case, chain_case, tree_case
from specla.bench.kernel_problem import Problem
from specla.ops import conv
from specla.ops.contract import LayerState, RecurrentShape

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from specla.ops.gdn import triton_wy as wy  # noqa: E402
from specla.ops.gdn import (  # noqa: E402
    triton_wy_asks,
    triton_wy_heads,
    triton_wy_inputs,
    triton_wy_operands,
)
from specla.ops.gdn import triton_wy_fused as fused  # noqa: E402
from specla.ops.gdn.triton import Workspace  # noqa: E402
from specla.ops.gdn.triton_wy import compile_masks  # noqa: E402
from specla.ops.gdn.triton_wy_form import ClosedForm  # noqa: E402
from specla.ops.gdn.triton_wy_operands import COLUMNS, ROWS  # noqa: E402
from specla.ops.gdn.triton_wy_solve import BLOCK  # noqa: E402

MODULES = (triton_wy_operands, triton_wy_asks, triton_wy_inputs, triton_wy_heads, fused)
FILES = [Path(m.__file__) for m in MODULES]
SHARED = 228 * 1024  # bytes of a multiprocessor; 1 KiB of each program's is not its own
NAN = float("nan")
LIMIT = 1e-4
"""Of norms. The closed form's errors are 2e-5; an element of q, k or v that is rounded to bfloat16
the other way than in the reference counts for more (3e-5 in a small tree here)."""


def shape(H: int = 1, G: int = 2, K: int = 128, V: int = 128) -> RecurrentShape:
    return RecurrentShape(
        num_layers=1, num_key_heads=H, num_value_heads=G, key_dim=K, value_dim=V, conv_width=4
    )


# Shorter than the convolution: inputs come from the path and from the tail.
FOLDED = replace(tree_case(shape(), 3, 16), path=(0, 1))
WAITING = replace(chain_case(shape(2, 4), 2, 8), log_capacity=8, threshold=8)
PLAIN = replace(chain_case(shape(), 2, 1), log_capacity=8, threshold=8)
FULL = replace(
    tree_case(shape(), 1, 16), ring_len=4, path=tuple(range(12)), log_capacity=4, threshold=4
)


def ask_nothing(x: np.ndarray) -> np.ndarray:
    return x


ASSEMBLY = {
    "_sigmoid": lambda x: (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32),
    "_rounded": rounded,
    "_widened": np.float32,
    "ask_line": ask_nothing,
    "worked_out": ask_nothing,
}


def on_numpy(p: Problem, layer: LayerState, programs: int) -> Tensor:
    """o [B, N, G, V]; the layer is changed in place."""
    case, s, rnd = p.case, p.shape, p.round
    rows, nodes = rnd.parents.shape
    form = ClosedForm.allocate(s, rows, case.max_nodes, BLOCK, "cpu")
    compile_masks(rnd, form, log_capacity=case.log_capacity, max_log=BLOCK)
    o = torch.full((rows * nodes, s.num_value_heads, s.value_dim), NAN)
    w = p.weights
    run(
        FILES, "_fused_kernel", programs, layer.S.view(-1, s.key_dim),
        [
            p.y, w.taps, w.A, w.dt_bias, layer.tail, layer.inputs, *layer.factors, o,
            form.ancestors, form.places, rnd.slot, rnd.num_nodes,
            rnd.parents, rnd.bank, rnd.ring_len, rnd.path_len, rnd.path,
        ],
        [
            rows * s.num_key_heads, nodes, case.max_nodes, layer.factors.k.shape[1],
            case.log_capacity, case.threshold, 1.0,
        ],
        {
            "H": s.num_key_heads, "G": s.num_value_heads, "K": s.key_dim, "V": s.value_dim,
            "W": s.conv_width, "STRIDE": p.y.stride(0), "PDL": True,
        },
        ASSEMBLY,
    )  # fmt: skip
    return o.unflatten(0, (rows, nodes))


def error(got: Tensor, truth: Tensor) -> float:
    """Relative, of the norm."""
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()


@pytest.mark.parametrize(
    ("case", "sizes", "programs"),
    [
        (FOLDED, (16, 0, 5), 2),
        (FOLDED, (0, 11, 0), 1),
        (WAITING, (8, 1), 1),
        (WAITING, (1, 8), 3),
        (PLAIN, (1, 1), 1),
        (FULL, (16,), 1),
    ],
    ids=[
        *("folded, 2 programs", "folded, 1 program", "waits, 1 program", "waits, 3 programs"),
        *("rounds of one node", "a log of 16 entries"),
    ],
)
def test_against_the_reference(case: Case, sizes: tuple[int, ...], programs: int) -> None:
    p = Problem(case, num_layers=1, device=torch.device("cpu"))
    p.round.num_nodes.copy_(torch.tensor(sizes))
    layer = p.fresh_layer()
    check(p, sizes, layer, on_numpy(p, layer, programs))


def check(p: Problem, sizes: Sequence[int], layer: LayerState, o: Tensor) -> None:
    """Of a smaller tree every node is as in the larger one. What no row writes keeps its bits."""
    case, expected, before = p.case, p.fresh_layer(), p.fresh_layer()
    conv.verify(expected, p.plan(), p.y[:, : p.shape.conv_channels], p.weights.conv)
    first = case.log_capacity + case.max_nodes
    for b, n in enumerate(sizes):
        slot = int(p.round.slot[b])
        assert o[b, n:].isnan().all()
        if n:
            check_row(p, b, n, layer, o)
            assert torch.equal(layer.inputs[slot, 1, :n], expected.inputs[slot, 1, :n])
            assert torch.equal(layer.tail[slot, 1], expected.tail[slot, 1])
        if not n or not case.fold_due:
            assert torch.equal(layer.S[slot], before.S[slot])
        moves = n > 0 and not case.fold_due
        for now, then in zip(layer.factors, before.factors, strict=True):
            kept = then[slot, :first].clone()
            if moves:
                kept[case.ring_len : case.log_len] = kept[
                    [case.log_capacity + i for i in case.path]
                ]
            assert torch.equal(now[slot, :first], kept)
    assert all(
        torch.equal(now[0], then[0])
        for now, then in zip(layer.factors, before.factors, strict=True)
    )


def check_row(p: Problem, b: int, n: int, layer: LayerState, o: Tensor) -> None:
    case, truth, slot = p.case, p.truth, int(p.round.slot[b])
    rows = slice(b * case.num_nodes, b * case.num_nodes + n)
    first = case.log_capacity + case.max_nodes
    k, u, g = (f[slot, first : first + n] for f in layer.factors)
    assert error(o[b, :n], truth.o[rows]) < LIMIT
    assert error(u, truth.u[rows]) < LIMIT
    assert error(k, truth.x.k[rows]) < LIMIT
    assert error(g, truth.x.g[rows]) < 1e-6
    if case.fold_due:
        assert error(layer.S[slot], truth.live[b]) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("folds", [True, False])
def test_on_a_device(folds: bool) -> None:
    """Against the reference; bits over numbers of programs, and started early or not."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for compute capability 9.0")
    s = shape(16, 32)
    case = tree_case(s, 24, 16) if folds else replace(WAITING, shape=s, num_rows=24)
    p = Problem(case, num_layers=1, device=torch.device("cuda"))
    sizes = [(7 * b + case.num_nodes) % (case.num_nodes + 1) for b in range(24)]
    p.round.num_nodes.copy_(torch.tensor(sizes))
    form = ClosedForm.allocate(s, 24, case.max_nodes, BLOCK, p.device)
    compile_masks(p.round, form, log_capacity=case.log_capacity, max_log=BLOCK)
    w = p.weights
    runs = []
    for programs, pdl in ((fused.PROGRAMS, True), (fused.PROGRAMS, False), (1, True), (3, True)):
        layer = p.fresh_layer()
        o = torch.full((p.num_nodes, s.num_value_heads, s.value_dim), NAN, device=p.device)
        fused.launch(
            layer, p.round, p.y, w.taps, w.A, w.dt_bias, o, form, shape=s,
            log_capacity=case.log_capacity, max_log=BLOCK, threshold=case.threshold,
            programs=programs, pdl=pdl,
        )  # fmt: skip
        check(p, sizes, layer, o.unflatten(0, (24, -1)))
        runs.append((o.nan_to_num(7), layer.S, *layer.factors))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def compiled() -> Any:
    kernel, s = fused._fused_kernel, shape(16, 32)
    meta = {"H": 16, "G": 32, "K": 128, "V": 128, "W": 4, "STRIDE": s.conv_channels + 64}
    meta["PDL"] = True
    names = kernel.arg_names
    types = {n: "*fp32" if n.endswith("_ptr") else "i32" for n in names}
    types |= dict.fromkeys(meta, "constexpr") | {"beta_scale": "fp32", "ancestors_ptr": "*i64"}
    integers = "places slot num_nodes parents bank ring_len path_len path"
    types |= {f"{name}_ptr": "*i32" for name in integers.split()}
    types |= {f"{name}_ptr": "*bf16" for name in ("y", "taps", "tail", "inputs")}
    layout = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float32)
    types["S_blocks"] = f"tensordesc<fp32[{ROWS}, {COLUMNS}],{layout!r}>"
    places = {n: i for i, n in enumerate(names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")}
    source = GluonASTSource(kernel, types, {(places[n],): v for n, v in meta.items()}, aligned)
    options = {"num_warps": fused.WARPS, "launch_pdl": True, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """S is asked for before the wait; the programs fit a multiprocessor; few spills."""
    kernel = compiled()
    ptx = kernel.asm["ptx"]
    assert ptx.index("cp.async.bulk.tensor") < ptx.index("griddepcontrol.wait")
    assert kernel.metadata.shared <= SHARED // fused.PROGRAMS - 1024
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
    told = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    lines = (told.stdout + told.stderr).splitlines()
    spilt = next(line for line in lines if "spill stores" in line)
    assert int(spilt.split(" bytes spill stores")[0].split()[-1]) <= 128, spilt


def test_where_it_is_used() -> None:
    s = shape(16, 32)
    assert fused.fits(s, 16, 16)
    assert not fused.fits(s, 17, 16)
    assert not fused.fits(s, 16, 17)
    for other in (shape(8, 8), shape(16, 32, 256, 256), shape(16, 32, 128, 64)):
        assert not fused.fits(other, 16, 16)
    assert not fused.pays(s, 16, torch.empty(1, dtype=torch.bfloat16), 16)  # no GPU


@pytest.mark.parametrize(
    ("max_log", "gated", "one"), [(16, False, True), (17, False, False), (16, True, False)]
)
def test_what_a_round_launches(
    monkeypatch: pytest.MonkeyPatch, max_log: int, gated: bool, one: bool
) -> None:
    """On Hopper: one kernel, unless a log may be too long or gates are wanted ready."""
    launched: list[str] = []
    monkeypatch.setattr(fused, "is_hopper", lambda device: True)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for module, name in ((fused, "launch"), (wy, "prepare"), (wy, "walk_wy")):
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: launched.append(name))
    p = Problem(WAITING, num_layers=1, device=torch.device("cpu"), dtype=torch.bfloat16)
    form = ClosedForm.allocate(p.shape, 2, p.case.max_nodes, max_log, p.device)
    room = Workspace.allocate(p.shape, p.num_nodes, p.dtype, p.device)
    w = p.weights
    wy.prepare_and_walk(
        p.layers[0], p.round, p.y, w.taps, w.A, w.dt_bias, room, form, shape=p.shape,
        log_capacity=8, max_log=max_log, threshold=8, gate=room.o if gated else None,
    )  # fmt: skip
    assert launched == (["launch"] if one else ["prepare", "walk_wy"])
