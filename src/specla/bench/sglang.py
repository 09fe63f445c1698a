# SPDX-License-Identifier: Apache-2.0
"""SGLang's Triton kernels as baselines, loaded by file path from a folder the user names.

Nothing of SGLang is part of this package. The folder holds the unpacked wheel, or just the files
named below, which import only torch and triton; `import sglang` would pull the whole engine.
Checked against 0.5.17: tree verify (a state per node, the parent's read back) with its state
scatter, and the ReplaySSM chain kernels.

What is called the way SGLang's own backend calls it: varlen packing of all rows' tokens, q, k, v
after the convolution in the activation dtype, gates and l2 norm inside, one scatter for all
layers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from specla.bench import bytes as traffic
from specla.bench.graphs import Call
from specla.bench.kernel_problem import Problem, error
from specla.bench.methods import HALF_PRECISION, Method, Runner, poison
from specla.errors import ConfigError, KernelUnavailable

VERIFY = "fused_sigmoid_gating_recurrent"
SCATTER = "mamba_state_scatter_triton"
RING = "gdn_replayssm_spec_decode"
FOLD = "gdn_replayssm_spec_fold"
SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0}


class Folder:
    """SGLang's files, found anywhere below a folder and loaded when first asked for."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(
                f"--sglang must be a folder with SGLang's kernel files, got {path}; unpack the "
                "wheel there"
            )
        self._path = path
        found = sorted(path.rglob("sglang-*.dist-info"))
        self.version = found[0].name.split("-")[1].removesuffix(".dist") if found else "?"

    @property
    def name(self) -> str:
        """For tables: SGLang and its version, as far as the folder tells."""
        return f"SGLang {self.version}"

    def load(self, stem: str) -> ModuleType:
        """The module of one file.

        Raises:
            KernelUnavailable: the folder has no such file, or it cannot be imported here.
        """
        name = f"specla_bench_sglang_{stem}"
        if name in sys.modules:
            return sys.modules[name]
        files = sorted(self._path.rglob(f"{stem}.py"))
        if not files:
            raise KernelUnavailable(
                f"{stem}.py must be below {self._path}; unpack the wheel there"
            )
        spec = importlib.util.spec_from_file_location(name, files[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Before it runs: Triton finds a kernel's globals through its module.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except ImportError as failure:
            del sys.modules[name]
            raise KernelUnavailable(f"{files[0]} cannot be imported here: {failure}") from failure
        return module


class Tokens:
    """A problem's tokens as SGLang's backend passes them.

    q, k, v [1, M, heads, dim] and a, b [M, G] in the activation dtype; A_log, dt_bias [G]
    float32; slots [B] int32, starts [B + 1] int32.
    """

    def __init__(self, problem: Problem) -> None:
        s, truth = problem.shape, problem.truth
        rows, keys = problem.case.num_rows, s.num_key_heads * s.key_dim
        q, k, v = truth.qkv.split([keys, keys, s.num_value_heads * s.value_dim], dim=-1)
        self.q = q.unflatten(-1, (s.num_key_heads, s.key_dim)).contiguous()[None]
        self.k = k.unflatten(-1, (s.num_key_heads, s.key_dim)).contiguous()[None]
        self.v = v.unflatten(-1, (s.num_value_heads, s.value_dim)).contiguous()[None]
        self.a, self.b = truth.a, truth.b
        self.A_log = torch.log(-problem.weights.A)
        self.dt_bias = problem.weights.dt_bias
        self.slots = problem.slots
        self.rows = torch.arange(rows, dtype=torch.int32, device=problem.device)
        step = problem.case.num_nodes
        self.starts = torch.arange(0, (rows + 1) * step, step, dtype=torch.int32).to(
            problem.device
        )
        self.num_rows = rows

    def verify_arguments(self, S: Tensor, *, packed: bool) -> dict[str, object]:
        """Arguments of the recurrent verify. packed: as SGLang packs rows (cu_seqlens); else
        [B, N, ...], which spares the kernel a wide parent table."""
        shared: dict[str, object] = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            **SOFTPLUS,
            "initial_state_source": S,
            "initial_state_indices": self.slots,
            "use_qk_l2norm_in_kernel": True,
            "disable_state_update": True,
        }
        tokens = {name: getattr(self, name) for name in ("q", "k", "v", "a", "b")}
        if packed:
            return shared | tokens | {"cu_seqlens": self.starts}
        split = {
            name: x.reshape(self.num_rows, -1, *x.shape[2 if name in "qkv" else 1 :])
            for name, x in tokens.items()
        }
        return shared | split


def tree_verify(folder: Folder, *, packed: bool = True) -> Method:
    """Tree verify per layer, then one scatter of the accepted states for all layers."""

    def build(problem: Problem) -> Runner:
        verify = folder.load(VERIFY).fused_sigmoid_gating_delta_rule_update
        scatter = folder.load(SCATTER).fused_mamba_state_scatter_with_mask
        tokens, case, layers = Tokens(problem), problem.case, len(problem.layers)
        pool = torch.stack([layer.S for layer in problem.layers])
        saved = torch.empty(
            (layers, case.num_rows, case.num_nodes, *pool.shape[2:]), device=problem.device
        )
        accepted = torch.full_like(problem.slots, case.accepted[-1])

        def run(layer: int) -> Tensor:
            out: Tensor = verify(
                **tokens.verify_arguments(pool[layer], packed=packed),
                intermediate_states_buffer=saved[layer],
                intermediate_state_indices=tokens.rows,
                cache_steps=case.num_nodes,
                retrieve_parent_token=problem.round.parents,
            )
            return out

        def commit() -> None:
            scatter(pool, saved, problem.slots, accepted)

        def check() -> float:
            pool[0, problem.slots.long()] = problem.truth.live
            poison(saved[0])
            o = run(0).reshape(problem.truth.o.shape)
            commit()
            after = problem.after(case.accepted)
            return max(error(o, problem.truth.o), error(pool[0, 1], after))

        calls: list[Call] = [lambda i=i: run(i) for i in range(layers)]  # type: ignore[misc]
        moved = traffic.snapshots(case, commit=True)
        return Runner([*calls, commit], layers, check, moved)

    return Method(
        name=f"{folder.name} tree" + ("" if packed else ", unpacked"),
        scope="gates, state, state copy",
        build=build,
        tolerance=HALF_PRECISION,
    )


def ring_verify(folder: Folder, ring_len: int) -> Method:
    """ReplaySSM's circular ring, no row flushing: base state and history read, the window's
    records written. Its three launches are what a step costs; the cursors move once per step,
    for all layers, and are left out, as ours are."""

    def build(problem: Problem) -> Runner:
        module, case = folder.load(RING), problem.case
        if case.fold_due or not case.is_chain:
            raise KernelUnavailable("the ring verifies chains, here without a flush")
        if case.log_len + case.num_nodes > ring_len:
            raise KernelUnavailable(f"{case.log_len} + {case.num_nodes} tokens exceed {ring_len}")
        tokens = Tokens(problem)
        rings = [Ring(problem, i, ring_len) for i in range(len(problem.layers))]
        out = torch.empty_like(tokens.v[0])

        def run(ring: Ring) -> None:
            ring.verify(module.gdn_replayssm_spec_decode, tokens, case.num_nodes, out)

        def check() -> float:
            poison(out)
            run(Ring(problem, 0, ring_len))
            return error(out, problem.truth.o)

        calls: list[Call] = [lambda ring=ring: run(ring) for ring in rings]  # type: ignore[misc]
        return Runner(calls, len(rings), check, traffic.ring_chain(case, case.log_len))

    return Method(
        name=f"{folder.name} ReplaySSM, ring {ring_len}",
        scope="gates, state",
        build=build,
        tolerance=HALF_PRECISION,
    )


class Ring:
    """One layer's ring buffers, with the problem's pending log as the history, and cursors.

    d [slots, G, L, V], k [slots, H, L, K] in the activation dtype, g [slots, G, L] float32, and
    the raw copies that only a flush reads.
    """

    def __init__(self, problem: Problem, layer: int, ring_len: int) -> None:
        source = problem.fresh_layer() if layer == 0 else problem.layers[layer]
        entries = problem.entries()[0].long()
        self.S, dtype, pending = source.S, problem.dtype, entries.numel()

        def ring(history: Tensor, kept: torch.dtype) -> Tensor:
            """[slots, E, heads, ...] log -> [slots, heads, L, ...] ring."""
            found = history[:, entries].transpose(1, 2).to(kept)
            size = (found.shape[0], found.shape[1], ring_len, *found.shape[3:])
            store = torch.zeros(size, dtype=kept, device=problem.device)
            store[:, :, :pending] = found
            return store

        self.d = ring(source.factors.u, dtype)
        self.k = ring(source.factors.k, dtype)
        self.g = ring(source.factors.g, torch.float32)
        self.raw_v, self.raw_k = self.d.clone(), self.k.clone()
        self.beta = torch.ones_like(self.g)
        slots = self.S.shape[0]
        self.write_pos = torch.full((slots,), pending, dtype=torch.int32, device=problem.device)
        self.cache_base = torch.zeros_like(self.write_pos)
        self.is_flush = torch.zeros(slots, dtype=torch.int8, device=problem.device)
        self.ring_len = ring_len

    def verify(
        self, kernel: Callable[..., object], tokens: Tokens, num_nodes: int, out: Tensor
    ) -> None:
        """Launch on this layer, with the backend's arguments."""
        kernel(
            q=tokens.q[0],
            k=tokens.k[0],
            v=tokens.v[0],
            a=tokens.a,
            b=tokens.b,
            A_log=tokens.A_log,
            dt_bias=tokens.dt_bias,
            checkpoint_state=self.S,
            d_cache=self.d,
            k_cache=self.k,
            g_cache=self.g,
            rawv_cache=self.raw_v,
            rawk_cache=self.raw_k,
            beta_cache=self.beta,
            out=out,
            query_start_loc=tokens.starts,
            ssm_state_indices=tokens.slots,
            write_pos=self.write_pos,
            cache_base=self.cache_base,
            is_flush=self.is_flush,
            max_cache_len=self.ring_len,
            max_spec_len=num_nodes,
            scale=tokens.k.shape[-1] ** -0.5,
            use_qk_l2norm_in_kernel=True,
            null_block_id=-1,
        )


def fold_verify(folder: Folder) -> Method:
    """ReplaySSM's other protocol, the one 0.5.17 switches on: a chain verify that records raw
    inputs, then a fold of the accepted ones in every step, one launch for all layers."""

    def build(problem: Problem) -> Runner:
        verify = folder.load(VERIFY).fused_sigmoid_gating_delta_rule_update
        fold = folder.load(FOLD).commit_gdn_replayssm_fold_all_layers
        case, layers, tokens = problem.case, len(problem.layers), Tokens(problem)
        if not case.is_chain:
            raise KernelUnavailable("the fold protocol verifies chains")
        pool = torch.stack([layer.S for layer in problem.layers])
        rings = _fold_rings(problem)
        accepted = torch.full_like(problem.slots, len(case.accepted))

        def run(layer: int) -> Tensor:
            out: Tensor = verify(
                **tokens.verify_arguments(pool[layer], packed=True),
                cache_ring=True,
                **{f"replayssm_{name}": ring[layer] for name, ring in rings.items()},
            )
            return out

        def commit() -> None:
            fold(
                checkpoint_state=pool,
                **{f"{name}_cache": ring for name, ring in rings.items()},
                ssm_state_indices=problem.slots,
                accept_lens=accepted,
                max_cache_len=case.num_nodes,
                num_k_heads=problem.shape.num_key_heads,
            )

        def check() -> float:
            pool[0, problem.slots.long()] = problem.truth.live
            o = run(0).reshape(problem.truth.o.shape)
            commit()
            after = problem.after(range(len(case.accepted)))
            return max(error(o, problem.truth.o), error(pool[0, 1], after))

        calls: list[Call] = [lambda i=i: run(i) for i in range(layers)]  # type: ignore[misc]
        moved = traffic.read_only_verify(case) + traffic.token_replay(case)
        return Runner([*calls, commit], layers, check, moved)

    return Method(
        name=f"{folder.name} ReplaySSM, fold every step",
        scope="gates, state, fold",
        build=build,
        tolerance=HALF_PRECISION,
    )


def _fold_rings(problem: Problem) -> dict[str, Tensor]:
    """Raw inputs of one window, [layers, slots, heads, N, ...]."""
    s, n = problem.shape, problem.case.num_nodes
    first = (len(problem.layers), problem.case.num_rows + 1)

    def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros((*first, *size), dtype=dtype, device=problem.device)

    return {
        "rawv": zeros(s.num_value_heads, n, s.value_dim, dtype=problem.dtype),
        "rawk": zeros(s.num_key_heads, n, s.key_dim, dtype=problem.dtype),
        "g": zeros(s.num_value_heads, n),
        "beta": zeros(s.num_value_heads, n),
    }
