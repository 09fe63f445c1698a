# SPDX-License-Identifier: Apache-2.0
"""SGLang's kernels are called with what they mean: stand-ins with their signatures and the torch
reference inside are loaded by file path, like the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specla.bench import sglang
from specla.bench.kernel_cases import Case, binary, chain, path_to
from specla.bench.kernel_problem import Problem
from specla.errors import ConfigError, KernelUnavailable
from specla.ops.contract import RecurrentShape

SHAPE = RecurrentShape(
    num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=32, value_dim=8, conv_width=4
)
TREE = Case(
    name="tree", shape=SHAPE, num_rows=2, parents=binary(5), path=(0, 1), log_capacity=4,
    accepted=path_to(binary(5), 4),
)  # fmt: skip
CHAIN = Case(
    name="chain", shape=SHAPE, num_rows=2, parents=chain(3), ring_len=1, path=(0, 1),
    log_capacity=4, threshold=4, accepted=(0, 1),
)  # fmt: skip

# Written from the documented signatures (0.5.17), in terms of our reference.
STAND_INS = {
    "common": """
import torch
from specla.ops.gdn.reference import per_value_head, read, step_
from specla.ops.norm import l2_norm


def gates(A_log, a, dt_bias, b):
    return -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.float().sigmoid()


def heads(x, count):
    return per_value_head(l2_norm(x.float()), count)
""",
    sglang.VERIFY: """
import torch
from sglang_common import gates, heads, read, step_


def fused_sigmoid_gating_delta_rule_update(
    A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source,
    initial_state_indices, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
    is_kda=False, lower_bound=None, disable_state_update=False, intermediate_states_buffer=None,
    intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None,
    cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None,
    replayssm_beta=None,
):
    assert use_qk_l2norm_in_kernel and disable_state_update
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0)
    rows, count = initial_state_indices.numel(), v.shape[2]
    if cu_seqlens is not None:
        assert q.shape[0] == 1 and len(cu_seqlens) == rows + 1
        n = int(cu_seqlens[1])
        assert cu_seqlens.tolist() == [n * i for i in range(rows + 1)]
    else:
        assert q.shape[0] == rows
        n = q.shape[1]
    flat = lambda x: x.reshape(rows, n, *x.shape[2 if x.ndim == 4 else -1:])
    g, beta = (flat(x) for x in gates(A_log, a, dt_bias, b))
    raw_k, raw_v = flat(k), flat(v)
    q, k = (heads(flat(x), count) for x in (q, k))
    out = torch.empty(rows, n, *v.shape[2:])
    for r in range(rows):
        slot, states = int(initial_state_indices[r]), []
        for i in range(n):
            parent = i - 1 if retrieve_parent_token is None else int(retrieve_parent_token[r, i])
            S = (states[parent] if i else initial_state_source[slot]).clone()
            step_(S, k[r, i], raw_v[r, i].float(), g[r, i], beta[r, i])
            out[r, i] = read(S, q[r, i]) * q.shape[-1] ** -0.5
            states.append(S)
            if intermediate_states_buffer is not None:
                assert cache_steps == n
                intermediate_states_buffer[int(intermediate_state_indices[r]), i] = S
        if cache_ring:
            replayssm_rawk[slot] = raw_k[r].transpose(0, 1)
            replayssm_rawv[slot] = raw_v[r].transpose(0, 1)
            replayssm_g[slot], replayssm_beta[slot] = g[r].T, beta[r].T
    return out.reshape(v.shape).to(q.dtype)
""",
    sglang.SCATTER: """
def fused_mamba_state_scatter_with_mask(dst, src, dst_indices_raw, step_indices_raw):
    assert dst.shape[0] == src.shape[0] and dst.is_contiguous() and src.is_contiguous()
    for row, (slot, node) in enumerate(zip(dst_indices_raw, step_indices_raw)):
        dst[:, slot] = src[:, row, node]
""",
    sglang.RING: """
import torch
from sglang_common import gates, heads, per_value_head, read, step_
from specla.ops.gdn.reference import replay_


def gdn_replayssm_spec_decode(
    q, k, v, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, rawv_cache,
    rawk_cache, beta_cache, out, query_start_loc, ssm_state_indices, write_pos, cache_base,
    is_flush, max_cache_len, max_spec_len, scale=None, use_qk_l2norm_in_kernel=True,
    null_block_id=0,
):
    assert null_block_id == -1 and not is_flush.any() and not cache_base.any()
    assert d_cache.shape[2] == k_cache.shape[2] == g_cache.shape[2] == max_cache_len
    assert rawv_cache.shape == d_cache.shape and rawk_cache.shape == k_cache.shape
    g, beta = gates(A_log, a, dt_bias, b)
    q, k = (heads(x, v.shape[1]) for x in (q, k))
    for r, slot in enumerate(ssm_state_indices.tolist()):
        S, first = checkpoint_state[slot].clone(), int(query_start_loc[r])
        for j in range(int(write_pos[slot])):
            replay_(
                S, per_value_head(k_cache[slot, :, j].float(), v.shape[1]),
                d_cache[slot, :, j].float(), g_cache[slot, :, j],
            )
        for i in range(first, first + max_spec_len):
            step_(S, k[i], v[i].float(), g[i], beta[i])
            out[i] = read(S, q[i]) * scale
""",
    sglang.FOLD: """
from sglang_common import heads, step_


def commit_gdn_replayssm_fold_all_layers(
    checkpoint_state, rawv_cache, rawk_cache, g_cache, beta_cache, ssm_state_indices,
    accept_lens, max_cache_len, num_k_heads, mamba_track_indices=None,
    mamba_steps_to_track=None, use_qk_l2norm_in_kernel=True, null_block_id=-1,
):
    assert rawk_cache.shape[2:4] == (num_k_heads, max_cache_len)
    layer = 0
    for slot, count in zip(ssm_state_indices.tolist(), accept_lens.tolist()):
        for i in range(count):
            step_(
                checkpoint_state[layer, slot],
                heads(rawk_cache[layer, slot, :, i], rawv_cache.shape[2]),
                rawv_cache[layer, slot, :, i].float(),
                g_cache[layer, slot, :, i], beta_cache[layer, slot, :, i],
            )
""",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sglang.Folder]:
    deep = tmp_path / "sglang" / "kernels"
    deep.mkdir(parents=True)
    for stem, text in STAND_INS.items():
        name = "sglang_common" if stem == "common" else stem
        (deep / f"{name}.py").write_text(text)
    (tmp_path / "sglang-0.5.17.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(deep))
    yield sglang.Folder(tmp_path)
    for name in [n for n in sys.modules if n.startswith("specla_bench_sglang_")]:
        del sys.modules[name]
    sys.modules.pop("sglang_common", None)


def problem(case: Case) -> Problem:
    return Problem(case, num_layers=2, device=torch.device("cpu"))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("case", [TREE, CHAIN], ids=["tree", "chain"])
def test_tree_verify(folder: sglang.Folder, case: Case, packed: bool) -> None:
    method = sglang.tree_verify(folder, packed=packed)
    assert method.name.startswith("SGLang 0.5.17 tree")
    runner = method.build(problem(case))
    assert runner.check() <= method.tolerance
    # One verify per layer, then one scatter for all of them.
    assert (len(runner.calls), runner.parts) == (3, 2)
    for call in runner.calls:
        call()


def test_the_ring(folder: sglang.Folder) -> None:
    method = sglang.ring_verify(folder, 8)
    runner = method.build(problem(CHAIN))
    assert runner.check() <= method.tolerance
    assert len(runner.calls) == runner.parts == 2


def test_the_fold(folder: sglang.Folder) -> None:
    method = sglang.fold_verify(folder)
    runner = method.build(problem(CHAIN))
    assert runner.check() <= method.tolerance


@pytest.mark.parametrize(
    ("method", "case", "reason"),
    [
        (lambda f: sglang.ring_verify(f, 8), TREE, "chains"),
        (lambda f: sglang.ring_verify(f, 8), replace(CHAIN, threshold=0), "without a flush"),
        (lambda f: sglang.ring_verify(f, 4), CHAIN, "exceed 4"),
        (sglang.fold_verify, TREE, "chains"),
    ],
)
def test_what_they_do_not_do(folder: sglang.Folder, method, case: Case, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelUnavailable, match=reason):
        method(folder).build(problem(case))


def test_a_folder_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sglang must be a folder"):
        sglang.Folder(tmp_path / "nowhere")
    empty = sglang.Folder(tmp_path)
    assert empty.name == "SGLang ?"
    with pytest.raises(KernelUnavailable, match="must be below"):
        empty.load(sglang.RING)
    (tmp_path / f"{sglang.RING}.py").write_text("import there_is_no_such_module\n")
    with pytest.raises(KernelUnavailable, match="cannot be imported here"):
        empty.load(sglang.RING)
    assert f"specla_bench_sglang_{sglang.RING}" not in sys.modules
