# SPDX-License-Identifier: Apache-2.0
"""What stands between a layer's projections and its recurrence on a GPU: one kernel.

Reads of earlier rounds' results come before the wait (see `ops.gdn.triton`); only a tree's own
rows of the projection come after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specla.ops.contract import DeviceRound, LayerState, RecurrentShape


class Workspace(NamedTuple):
    """What `prepare` hands to `walk`, for M = B * N nodes; shared by all layers.

    q [M, H, K] float32, normalised and scaled; v [M, G, V] activation dtype; beta [M, G]
    float32; o [M, G, V] float32, the outputs. arrivals [M, G V / 2] int32: zero between calls.
    """

    q: Tensor
    v: Tensor
    beta: Tensor
    o: Tensor
    arrivals: Tensor

    @classmethod
    def allocate(
        cls,
        shape: RecurrentShape,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Workspace:
        """Room for num_rows nodes."""

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        values = (num_rows, shape.num_value_heads, shape.value_dim)
        return cls(
            q=empty(num_rows, shape.num_key_heads, shape.key_dim),
            v=empty(*values, dtype=dtype),
            beta=empty(num_rows, shape.num_value_heads),
            o=empty(*values),
            arrivals=torch.zeros(
                num_rows, values[1] * values[2] // 2, dtype=torch.int32, device=device
            ),
        )


def prepare(
    layer: LayerState,
    rnd: DeviceRound,
    y: Tensor,
    conv_taps: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    workspace: Workspace,
    *,
    shape: RecurrentShape,
    log_capacity: int,
    beta_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Convolution along tree paths, SiLU, norms, gates; one program per node and head.

    y [M, C_in]: raw projections, columns q | k | v | ... | a | b (the last 2 G are a and b);
    conv_taps [W, C]: the convolution, oldest tap first; A, dt_bias [G] float32. Writes k, g, the
    raw conv inputs and the new tail to the bank that this round writes; q, v, beta to `workspace`.
    """
    num_rows, num_nodes = rnd.parents.shape
    s = shape
    heads = 2 * s.num_key_heads + s.num_value_heads
    _prepare_kernel[(num_rows * num_nodes, heads)](
        y,
        conv_taps,
        A,
        dt_bias,
        layer.tail,
        layer.inputs,
        layer.factors.k,
        layer.factors.g,
        workspace.q,
        workspace.v,
        workspace.beta,
        rnd.slot,
        rnd.num_nodes,
        rnd.parents,
        rnd.bank,
        rnd.path_len,
        rnd.path,
        num_nodes,
        rnd.path.shape[1],
        layer.factors.k.shape[1],
        log_capacity,
        y.stride(0),
        y.shape[1] - 2 * s.num_value_heads,
        s.key_dim**-0.5,
        beta_scale,
        H=s.num_key_heads,
        G=s.num_value_heads,
        K=s.key_dim,
        V=s.value_dim,
        W=s.conv_width,
        BLOCK=max(s.key_dim, s.value_dim),
        PDL=pdl,
        num_warps=1,
        **overlap(pdl),
    )


def overlap(pdl: bool) -> dict[str, bool]:
    """The launch option of programmatic dependent launch."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0 without losing small x (Kahan)."""
    y = 1 + x
    return tl.where(y == 1, x, tl.log(y) * (x / (y - 1)))


@triton.jit
def softplus(x):
    """Linear above 20, as in fla."""
    return tl.where(x > 20, x, _log1p(tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _above(inputs_ptr, tail_ptr, path_ptr, entry, wanted, channel, used, C, W: tl.constexpr):
    """Raw inputs above the root: the committed path's `entry`, or for entry < 0 the tail's."""
    source = tl.where(used & (channel >= 0), tl.where(entry >= 0, 1, 2), 0)
    source = source * tl.where(wanted, 1, 0)
    place = tl.load(path_ptr + entry, mask=wanted & (entry >= 0), other=0)
    x = tl.load(inputs_ptr + place * C + channel, mask=source == 1, other=0)
    return x + tl.load(tail_ptr + (W - 1 + entry) * C + channel, mask=source == 2, other=0)


@triton.jit
def _climb(parents_ptr, node, steps: tl.constexpr):
    """(the node `steps` above, or -1; how far above the root that is, at least 1)."""
    beyond = 0
    for _ in tl.static_range(steps):
        beyond = tl.where(node < 0, beyond + 1, beyond)
        node = tl.load(parents_ptr + node, mask=node >= 0, other=-1)
    return node, beyond + 1


@triton.jit(
    do_not_specialize=[
        "num_columns", "num_path", "num_entries", "log_capacity", "y_stride", "gates_at",
    ]
)  # fmt: skip
def _prepare_kernel(  # noqa: C901
    y_ptr, taps_ptr, A_ptr, dt_bias_ptr, tail_ptr, inputs_ptr, k_ptr, g_ptr,
    q_out, v_out, beta_out,
    slot_ptr, num_nodes_ptr, parents_ptr, bank_ptr, path_len_ptr, path_ptr,
    num_columns, num_path, num_entries, log_capacity, y_stride, gates_at, scale, beta_scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * H * K + G * V
    m, part = tl.program_id(0), tl.program_id(1)
    b, node = m // num_columns, m % num_columns
    num_nodes = tl.load(num_nodes_ptr + b)
    slot = tl.load(slot_ptr + b).to(tl.int64)
    bank = tl.load(bank_ptr + b)
    path_len = tl.load(path_len_ptr + b)
    if PDL:
        gdc_launch_dependents()
    if node >= num_nodes:
        if PDL:
            gdc_wait()
        return
    parents_ptr += b * num_columns
    path_ptr += b * num_path
    inputs_ptr += (slot * 2 + bank) * num_path * C
    tail_ptr += (slot * 2 + bank) * (W - 1) * C
    write = 1 - 2 * bank  # from the read bank to the other
    entry = slot * num_entries + log_capacity + (1 - bank) * num_path + node

    # Programs 0 .. H-1 are q's heads, the next H are k's, then v's.
    is_value = part >= 2 * H
    head = tl.where(is_value, part - 2 * H, part % H)
    width = tl.where(is_value, V, K)
    column = tl.arange(0, BLOCK)
    used = column < width
    channel = tl.where(is_value, 2 * H * K + head * V, part * K) + column
    acc = tl.zeros([BLOCK], tl.float32)
    # Oldest tap first, and what is above the root is older than what is below.
    for back in tl.static_range(W - 1, 0, -1):
        at, beyond = _climb(parents_ptr, node, back)
        x = _above(inputs_ptr, tail_ptr, path_ptr, path_len - beyond, at < 0, channel, used, C, W)
        w = tl.load(taps_ptr + (W - 1 - back) * C + channel, mask=used, other=0)
        acc = tl.fma(x.to(tl.float32), w.to(tl.float32), acc)
        if node == 0:
            tl.store(tail_ptr + (write * (W - 1) + W - 1 - back) * C + channel, x, mask=used)
    if PDL:
        gdc_wait()
    for back in tl.static_range(W - 1, -1, -1):
        at, _ = _climb(parents_ptr, node, back)
        row = y_ptr + (b * num_columns + at) * y_stride
        x = tl.load(row + channel, mask=tl.where(used, at, -1) >= 0, other=0)
        w = tl.load(taps_ptr + (W - 1 - back) * C + channel, mask=used, other=0)
        acc = tl.fma(x.to(tl.float32), w.to(tl.float32), acc)
        if back == 0:
            tl.store(inputs_ptr + (write * num_path + node) * C + channel, x, mask=used)
    y = _silu(acc).to(y_ptr.dtype.element_ty).to(tl.float32)
    if is_value:
        tl.store(v_out + (m * G + head) * V + column, y.to(v_out.dtype.element_ty), mask=used)
        gates = y_ptr + m * y_stride + gates_at + head
        a = tl.load(gates).to(tl.float32) + tl.load(dt_bias_ptr + head)
        tl.store(g_ptr + entry * G + head, tl.load(A_ptr + head) * softplus(a))
        beta = beta_scale / (1 + tl.exp(-tl.load(gates + G).to(tl.float32)))
        tl.store(beta_out + m * G + head, beta)
    else:
        y = y / tl.sqrt(tl.sum(y * y, axis=0) + 1e-6)
        if part < H:
            tl.store(q_out + (m * H + head) * K + column, y * scale, mask=used)
        else:
            tl.store(k_ptr + (entry * H + head) * K + column, y, mask=used)
