# SPDX-License-Identifier: Apache-2.0
"""The chunked gated delta rule by flash-linear-attention's kernels, in our state layout.

fla chooses among several configurations of each kernel by timing them, once per process, and a
configuration decides bits: a prompt's state would depend on the process and, where fla's key
contains it, on who ran first (rule I4). Here its compiled functions are launched without their
autotuners, each with the one configuration that `configurations` names; the rest of fla (its
choice of backends, settings from the environment, autotuning by other users of the process) is
neither used nor changed. What is launched is private to fla, so the versions are bounded
(`config.FLA_CORE`) and the functions' parameters compared before the first launch.

One sequence per call and chunks of 64 from the call's start, so a prompt that is cut at multiples
of 64 has the same chunks however it is cut.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3.3.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from math import log
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.autotuner import Autotuner, Heuristics

from specla.errors import KernelUnavailable
from specla.ops.contract import RecurrentShape
from specla.ops.gdn.reference import CHUNK, Inputs

# Ours: fla's module and function.
KERNELS = {
    "decay": ("fla.ops.utils.cumsum", "chunk_local_cumsum_scalar_kernel"),
    "solve": ("fla.ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_kkt_solve_kernel"),
    "factors": ("fla.ops.gated_delta_rule.wy_fast", "recompute_w_u_fwd_kernel"),
    "state": ("fla.ops.common.chunk_delta_h", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
    "outputs": ("fla.ops.common.chunk_o", "chunk_fwd_kernel_o"),
}
PARAMETERS = {
    "decay": "s o scale cu_seqlens chunk_indices T B H BT REVERSE HAS_SCALE IS_VARLEN USE_GRAPH",
    "solve": "k g beta A cu_seqlens chunk_indices T H HV K BT BC BK USE_G IS_VARLEN",
    "factors": "k v beta w u A g cu_seqlens chunk_indices T H HV K V BT BK BV USE_G IS_VARLEN",
    "state": (
        "k v w v_new g gk h h0 ht cu_seqlens chunk_offsets T H HV K V BT BV USE_G USE_GK "
        "USE_INITIAL_STATE STORE_FINAL_STATE SAVE_NEW_VALUE STATE_V_FIRST IS_VARLEN"
    ),
    "outputs": (
        "q k v h g g_gamma o cu_seqlens chunk_indices scale T H HV K V BT BK BV USE_G "
        "USE_G_GAMMA STATE_V_FIRST IS_VARLEN"
    ),
}
# Bytes of shared memory with which the state kernel can load one chunk ahead at K = 256.
ROOMY = 160 * 1024
Configuration = Mapping[str, int]


def configurations(key_dim: int, shared_memory: int) -> dict[str, Configuration]:
    """The one configuration of each kernel, by head size. shared_memory: bytes a program of this
    device may use; where little, the state kernel loads nothing ahead."""
    ahead = 2 if shared_memory >= ROOMY or key_dim <= 128 else 1
    return {
        "decay": {"num_warps": 1, "num_stages": 1},
        "solve": {"BK": 64, "num_warps": 2, "num_stages": 3},
        "factors": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
        "state": {"BV": 32, "num_warps": 4, "num_stages": ahead},
        "outputs": {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3},
    }


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may use on this CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def load() -> dict[str, Any]:
    """fla's compiled functions by our names, taken out of their autotuners.

    Raises:
        KernelUnavailable: fla's functions have other parameters than those launched here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts of fla that are not used here
        found = {name: _launchable(*where) for name, where in KERNELS.items()}
    for name, function in found.items():
        if list(function.arg_names) != PARAMETERS[name].split():
            raise KernelUnavailable(
                f"fla-core must be one of 0.6, but {KERNELS[name][1]} of the one installed takes "
                f"{', '.join(function.arg_names)}; pip install 'fla-core>=0.6,<0.7'"
            )
    return found


def _launchable(module: str, name: str) -> Any:
    function = getattr(import_module(module), name)
    while isinstance(function, Autotuner | Heuristics):
        function = function.fn
    return function


class Workspace(NamedTuple):
    """What the kernels hand on, for T tokens; any layer's, one after the other.

    total [T, G] float32, log decay (base 2) since the chunk's start; inverse [T, G, 64], lower
    triangular, must be zero above; w [T, G, K]; u, delta [T, G, V]; states [T / 64, G, V, K], the
    one at each chunk's start; o [T, G, V] float32, the outputs.
    """

    total: Tensor
    inverse: Tensor
    w: Tensor
    u: Tensor
    delta: Tensor
    states: Tensor
    o: Tensor

    @classmethod
    def allocate(
        cls, shape: RecurrentShape, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        """Room for num_tokens tokens. dtype: that of q, k and v."""
        heads, chunks = shape.num_value_heads, triton.cdiv(num_tokens, CHUNK)

        def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        values = (num_tokens, heads, shape.value_dim)
        return cls(
            total=empty(num_tokens, heads, dtype=torch.float32),
            inverse=torch.zeros(num_tokens, heads, CHUNK, dtype=dtype, device=device),
            w=empty(num_tokens, heads, shape.key_dim),
            u=empty(*values),
            delta=empty(*values),
            states=empty(chunks, heads, shape.value_dim, shape.key_dim),
            o=empty(*values, dtype=torch.float32),
        )


class ChunkedRule:
    """fla's kernels with their configurations chosen, for one model's heads.

    Args:
        shared_memory: bytes that a program may use on this device.
        pinned: other configurations than `configurations` has, for measuring.

    Raises:
        KernelUnavailable: see `load`.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        *,
        shared_memory: int,
        pinned: Mapping[str, Configuration] | None = None,
    ) -> None:
        self.kernels, self._shape = load(), shape
        self.pinned = {**configurations(shape.key_dim, shared_memory), **(pinned or {})}

    def __call__(self, S: Tensor, x: Inputs, space: Workspace, *, outputs: bool = True) -> Tensor:
        """T tokens from state S [G, V, K] float32, which becomes the state after them.

        x: leading axis T; q, k, v of one dtype, g and beta float32. space: for T tokens. Returns
        o [T, G, V] float32 (space.o), undefined where no outputs are asked for.
        """
        assert all(tensor.is_contiguous() for tensor in (S, *x))
        assert x.g.shape == space.total.shape
        self._within_chunks(x, space)
        self._across_chunks(S, x.k, space)
        if outputs:
            self._outputs(x, space)
        return space.o

    def _within_chunks(self, x: Inputs, space: Workspace) -> None:
        """Cumulative decay, (I + A)^-1, and what a chunk adds: w against its first state, u."""
        chunks, heads = len(space.states), self._shape.num_value_heads
        scan = {"B": 1, "H": heads, "scale": 1 / log(2), "HAS_SCALE": True}
        self._run(
            "decay", (chunks * heads,), space, s=x.g, o=space.total, REVERSE=False,
            USE_GRAPH=False, **scan,
        )  # fmt: skip
        step = {"k": x.k, "beta": x.beta, "A": space.inverse, "g": space.total, **self._heads()}
        self._run("solve", (chunks, heads), space, BC=16, **step)
        self._run(
            "factors", (chunks, heads), space, v=x.v, w=space.w, u=space.u,
            V=self._shape.value_dim, **step,
        )  # fmt: skip

    def _across_chunks(self, S: Tensor, k: Tensor, space: Workspace) -> None:
        """Chunk after chunk: its first state to `states`, its corrected values to `delta`. A
        program reads its part of S before it writes it, and no other does either."""
        tiles = triton.cdiv(self._shape.value_dim, self.pinned["state"]["BV"])
        self._run(
            "state", (tiles * self._shape.num_value_heads,), space, k=k, v=space.u, w=space.w,
            v_new=space.delta, g=space.total, gk=None, h=space.states, h0=S, ht=S,
            chunk_offsets=None, V=self._shape.value_dim, USE_GK=False, USE_INITIAL_STATE=True,
            STORE_FINAL_STATE=True, SAVE_NEW_VALUE=True, STATE_V_FIRST=True, **self._heads(),
        )  # fmt: skip

    def _outputs(self, x: Inputs, space: Workspace) -> None:
        tiles = triton.cdiv(self._shape.value_dim, self.pinned["outputs"]["BV"])
        self._run(
            "outputs", (tiles * len(space.states), self._shape.num_value_heads), space, q=x.q,
            k=x.k, v=space.delta, h=space.states, g=space.total, g_gamma=None, o=space.o,
            scale=1.0, V=self._shape.value_dim, USE_G_GAMMA=False, STATE_V_FIRST=True,
            **self._heads(),
        )  # fmt: skip

    def _heads(self) -> dict[str, Any]:
        s = self._shape
        return {"H": s.num_key_heads, "HV": s.num_value_heads, "K": s.key_dim, "USE_G": True}

    def _run(self, name: str, grid: tuple[int, ...], space: Workspace, **arguments: Any) -> None:
        common = {"T": len(space.total), "BT": CHUNK, "cu_seqlens": None, "IS_VARLEN": False}
        if "chunk_indices" in PARAMETERS[name].split():
            common["chunk_indices"] = None
        self.kernels[name][grid](**arguments, **common, **self.pinned[name])
