# SPDX-License-Identifier: Apache-2.0
"""A short run through every kernel that an H200 takes between a prompt and its tokens, to be
watched by compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -m gpu tests/engine/test_gpu_memory.py

Two layers of GDN-1.3B's shape, and of narrow models with two shapes of heads; a log of four, so
that rounds fold and rounds do not; odd row counts, rows that join and leave, prompts side by side.
Which kernels a case is for is part of it, and the last test counts them up. Without the tool it
checks tokens and states, in seconds once kernels are compiled.

racecheck (2025.3.1) fails inside cuBLAS, which prompts need. It watches kernels one test at a time
(with -p no:xdist; 16 to 143 seconds each on an H200):

    compute-sanitizer --tool racecheck --error-exitcode 9 python -m pytest -m gpu "tests/ops/test_gdn_triton.py::test_the_stream_kernel_gives_the_same_bits[2/4 x 128 x 64]"
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from gpu_drafters import made
from gpu_rows import Rows

from specla import models
from specla.bench.random_model import gdn_1_3b
from specla.drafters.base import Drafter
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.models.base import TargetModel
from specla.models.toy import write_toy_checkpoint
from specla.testing import OracleDrafter, RandomTreeDrafter

pytestmark = pytest.mark.gpu
TOKENS, FEW = 12, 3
# Sixteen rows of four prompts.
MANY = [row % 4 for row in range(16)]
HEADS: dict[str, dict[str, Any]] = {
    "8x256": {"heads": 8, "head_dim": 256},
    "16/32x128": {"heads": 16, "num_v_heads": 32, "head_dim": 128},
}
EAGLE = {
    **{"hidden_size": 128, "intermediate_size": 128, "num_heads": 1, "num_v_heads": 2},
    **{"head_dim": 64, "head_v_dim": 64},
}
BLOCK = {"head_dim": 64, "intermediate_size": 128}


def narrow(heads: str) -> TargetModel:
    sizes = {"hidden": 256, "intermediate": 512, "vocab": 256, "expand_v": 1.0, **HEADS[heads]}
    with TemporaryDirectory() as folder:
        write_toy_checkpoint(Path(folder), **sizes)
        return models.load(folder, device="cuda", dtype=torch.bfloat16)


def short(make: Callable[[], TargetModel], chunk: int) -> Rows:
    return Rows(make, tokens=TOKENS, chunk=chunk, log=4, lengths=lambda row: 5 + 70 * (row % 3))


# Prompts in chunks; and at once, so that many rows keep step.
GDN = short(partial(gdn_1_3b, layers=2), 64)
NARROW = {heads: short(partial(narrow, heads), 256) for heads in HEADS}

PROMPTS = {"prefill._prepare_kernel", "swiglu._swiglu_kernel", "rows._gated_norm_kernel"}
PREPARE = {"triton_prepare._prepare_kernel"}
ROUNDS = PREPARE | {
    *("slots._slots_kernel", "walk._compile_kernel"),
    *("rows._embed_norm_kernel", "rows._add_partials_norm_kernel"),
    *("triton._choose_kernel", "triton._accept_kernel"),
}
FEW_ROWS, MANY_ROWS = {"gemm_stream._stream_kernel"}, {"gemm_wide._wide_kernel"}
WALK = {"triton_stream._stream_kernel"}
DECODE = {"triton_decode._decode_kernel"}
SOLVE = {"triton_wy_solve.mask_kernel", "triton_wy_solve.solve_kernel"}
APPLY, APPLY_STREAM = {"triton_wy._apply_kernel"}, {"triton_wy_stream._stream_kernel"}
FUSED = {"triton_wy_solve.mask_kernel", "triton_wy_fused._fused_kernel"}
GROW = {"triton_grow._top_kernel", "triton_grow._extend_kernel"}
BLOCKS = {f"triton_block._{name}_kernel" for name in ("begin", "append", "attend", "combine")}
EAGLES = GROW | {
    f"triton_eagle._{name}_kernel" for name in ("begin", "features", "inputs", "settle")
}
BRANCH = {"triton_branch._branch_kernel"}
DRAFTERS = {
    "ngram": {"ngram_device._draft_kernel"},
    "eagle": EAGLES | {"triton_eagle._mix_kernel"},
    "eagle-attention": EAGLES | BLOCKS - {"triton_block._begin_kernel"} | BRANCH,
    "block": BLOCKS | GROW,
    "dflash": BLOCKS | {"triton_grow._top_kernel", "triton_marginals._best_first_kernel"},
    "block+reader": BLOCKS | GROW | {"triton_reader._read_kernel", "triton_reader._ask_kernel"},
}
# Other devices' (triton, gemm), training's, and what resting launches.
ELSEWHERE = {
    *("triton._walk_kernel", "gemm._gemm_kernel"),
    *("triton_conv._packed_kernel", "rows._keep_kernel"),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that a test has launched, or captured: module and name."""
    from triton.runtime.jit import JITFunction

    names, run = set[str](), JITFunction.run

    def watched(kernel: Any, *args: Any, **options: Any) -> Any:
        names.add(name_of(kernel))
        return run(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", watched)
    return names


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


@pytest.mark.parametrize("heads", HEADS)
def test_prompts(heads: str, seen: set[str]) -> None:
    """Of a model that has no graphs yet: three at once, in lanes, then each alone."""
    target = short(partial(narrow, heads), 64)
    target.check(range(FEW), target.decode(range(FEW), NoDrafter(), max_nodes=1))
    assert seen >= PROMPTS | ROUNDS | FEW_ROWS


@pytest.mark.parametrize("kind", ["ngram", "trees"])
def test_exact_rounds(kind: str, seen: set[str]) -> None:
    """Of a real width, whose products are cut as they are there."""
    drafter: Drafter = NgramDrafter()
    if kind == "trees":
        drafter = RandomTreeDrafter(3, GDN.vocab_size, max_depth=6)
    GDN.check(range(FEW), GDN.decode(range(FEW), drafter, max_nodes=16, at_once=2))
    assert seen >= ROUNDS | FEW_ROWS | WALK | DRAFTERS.get(kind, set())


def test_rounds_in_closed_form(seen: set[str]) -> None:
    """Their own roundings: lengths are what can be held against exact decoding."""
    drafter = RandomTreeDrafter(3, GDN.vocab_size, max_depth=6)
    got = GDN.decode(range(FEW), drafter, max_nodes=64, at_once=2, kernel="closed")
    assert [len(one.tokens) for one in got] == [TOKENS] * FEW
    assert seen >= ROUNDS | MANY_ROWS | SOLVE | APPLY


@pytest.mark.parametrize("heads", HEADS)
def test_plain_rounds_of_many_rows(heads: str, seen: set[str]) -> None:
    """Enough of them for the kernel of one node a row; prompts side by side, and forked."""
    target = NARROW[heads]
    target.check(MANY, target.decode(MANY, NoDrafter(), max_nodes=1, at_once=len(MANY)))
    assert seen >= ROUNDS | FEW_ROWS | DECODE


def trees_of_many(target: Rows, kernel: str, depth: int) -> list[Any]:
    drafter = OracleDrafter(target.truth, depth=depth, decoys=2, vocab_size=target.vocab_size)
    return target.decode(MANY, drafter, max_nodes=16, at_once=len(MANY), kernel=kernel)


@pytest.mark.parametrize("kernel", ["walk", "closed"])
@pytest.mark.parametrize("heads", HEADS)
def test_trees_of_many_rows(heads: str, kernel: str, seen: set[str]) -> None:
    """Rounds of ten nodes that accept three drafts: nothing to replay; a path, which moves to the
    ring; ring and path, which are folded."""
    target = NARROW[heads]
    got = trees_of_many(target, kernel, 3)
    assert [len(one.tokens) for one in got] == [TOKENS] * len(MANY)
    if kernel == "walk":
        target.check(MANY, got)
        assert {one.rounds for one in got} == {TOKENS // 4}
        assert seen >= ROUNDS | MANY_ROWS | WALK
    else:
        here = FUSED if heads == "16/32x128" else PREPARE | SOLVE | APPLY
        assert seen >= ROUNDS - PREPARE | MANY_ROWS | here
        assert not seen & APPLY_STREAM


def test_trees_whose_logs_are_long(seen: set[str]) -> None:
    """Trees may go deeper, and logs be too long for the closed form in one kernel."""
    got = trees_of_many(NARROW["16/32x128"], "closed", 15)
    assert [len(one.tokens) for one in got] == [TOKENS] * len(MANY)
    assert seen >= ROUNDS | MANY_ROWS | SOLVE | APPLY_STREAM
    assert not seen & (FUSED - SOLVE)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "ngram"])
def test_drafters(name: str, tmp_path: Path, seen: set[str]) -> None:
    target = NARROW["8x256"]
    drafter = made(name, target.model.info, tmp_path, eagle=EAGLE, block=BLOCK)
    target.check(range(FEW), target.decode(range(FEW), drafter, max_nodes=8, at_once=2))
    assert seen >= ROUNDS | FEW_ROWS | WALK | DRAFTERS[name]


def test_no_kernel_is_left_out() -> None:
    """Each of the package's belongs to a case above, or elsewhere."""
    from triton.runtime.jit import JITFunction

    found = set[str]()
    for name in ("ops", "sampling", "drafters"):
        package = import_module(f"specla.{name}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            kernels = vars(import_module(module.name)).values()
            found |= {name_of(x) for x in kernels if isinstance(x, JITFunction)}
    found = {name for name in found if name.endswith("_kernel")}
    here = PROMPTS | ROUNDS | FEW_ROWS | MANY_ROWS | WALK | DECODE | SOLVE | APPLY | APPLY_STREAM
    here |= FUSED
    assert found == here.union(*DRAFTERS.values(), ELSEWHERE)
