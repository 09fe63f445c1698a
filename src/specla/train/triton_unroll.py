# SPDX-License-Identifier: Apache-2.0
"""The way from a state with true features down to a step's pair, on a GPU: `unroll.descend` in one
kernel each way, a program per pair and head.

Shapes: B rows, T pairs, H heads; K, V key and value dims; s the step, from 1 on. All tensors are
float32 and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def descend(reads: Sequence[Tensor], given: Sequence[Tensor], above: Sequence[Tensor]) -> tuple[
    Tensor, Tensor
]:  # fmt: skip
    """(o, u) [B, T, H, V].

    Args:
        reads: read_k, read_q [B, T, H, V].
        given: q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H].
        above: k, u, g of the steps 1 .. s - 1, one after the other.
    """
    o, u = torch.empty_like(reads[0]), torch.empty_like(reads[0])
    grid, sizes = _sizes(reads[0], given, above)
    _descend_kernel[grid](*reads, *given, *_twelve(above), o, u, **sizes)
    return o, u


def descend_gradients(
    reads: Sequence[Tensor], given: Sequence[Tensor], above: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Those of reads, given and above, in this order; grads: those of o and u."""
    inputs = [*reads, *given, *above]
    found = [torch.empty_like(x) for x in inputs]
    grid, sizes = _sizes(reads[0], given, above)
    _descend_back_kernel[grid](
        *reads, *given, *_twelve(above), *grads, *found[:7], *_twelve(found[7:]), **sizes
    )
    return found


def _sizes(
    read: Tensor, given: Sequence[Tensor], above: Sequence[Tensor]
) -> tuple[tuple[int], dict[str, int]]:
    rows, length, heads, v = read.shape
    assert all(x.dtype == torch.float32 for x in (read, *given, *above))
    assert all(x.is_contiguous() for x in (read, *given, *above))
    k, s = given[0].shape[3], len(above) // 3 + 1
    assert s >= 1
    sizes = {"T": length, "H": heads, "K": k, "V": v, "S": s}
    blocks = {"BK": triton.next_power_of_2(k), "BV": triton.next_power_of_2(v), "num_warps": 1}
    return (rows * length * heads,), sizes | blocks


def _twelve(above: Sequence[Tensor]) -> list[Tensor | None]:
    """k, u, g of four steps; those that are not there are None."""
    return [*above, *[None] * (12 - len(above))]


@triton.jit
def _of(i: tl.constexpr, p1, p2, p3, p4):
    """The i-th of four."""
    if i == 1:  # noqa: SIM116
        return p1
    elif i == 2:
        return p2
    elif i == 3:
        return p3
    else:
        return p4


@triton.jit
def _ancestor(
    i: tl.constexpr, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """k, u and decay of step i, S - i pairs before this program's; none before the row's start."""
    row = tl.program_id(0) - (S - i) * H
    there = (tl.program_id(0) // H) % T >= S - i
    at = tl.where(there, row, 0).to(tl.int64)
    k = _vector(_of(i, k1, k2, k3, k4), at, tl.where(there, K, 0), K, BK)
    u = _vector(_of(i, u1, u2, u3, u4), at, tl.where(there, V, 0), V, BV)
    g = tl.load(_of(i, g1, g2, g3, g4) + at)
    return k, u, tl.where(there, tl.exp(g), 1.0)


@triton.jit
def _vector(ptr, at, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The first `count` numbers of a vector; the rest are 0."""
    lanes = tl.arange(0, BLOCK)
    return tl.load(ptr + at * SIZE + lanes, mask=lanes < count, other=0.0)


@triton.jit
def _put(ptr, at, x, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(ptr + at * SIZE + lanes, x, mask=lanes < count)


@triton.jit
def _down(
    read_k, read_q, q, k, end: tl.constexpr,
    k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What the state after the steps before `end` gives k and q."""
    for i in tl.static_range(1, end):
        k_i, u_i, decay = _ancestor(
            i, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4, T, H, K, V, S, BK, BV
        )
        read_k = decay * read_k + tl.sum(k_i * k, 0) * u_i
        read_q = decay * read_q + tl.sum(k_i * q, 0) * u_i
    return read_k, read_q


@triton.jit
def _descend_kernel(
    read_k_ptr, read_q_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4, o_ptr, u_ptr,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    q, k = _vector(q_ptr, at, K, K, BK), _vector(k_ptr, at, K, K, BK)
    read_k, read_q = _vector(read_k_ptr, at, V, V, BV), _vector(read_q_ptr, at, V, V, BV)
    read_k, read_q = _down(
        read_k, read_q, q, k, S, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4,
        T, H, K, V, S, BK, BV,
    )  # fmt: skip
    decay, beta = tl.exp(tl.load(g_ptr + at)), tl.load(beta_ptr + at)
    u = beta * (_vector(v_ptr, at, V, V, BV) - decay * read_k)
    _put(u_ptr, at, u, V, V, BV)
    _put(o_ptr, at, decay * read_q + u * tl.sum(k * q, 0), V, V, BV)


@triton.jit
def _descend_back_kernel(
    read_k_ptr, read_q_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4, grad_o_ptr, grad_u_ptr,
    of_read_k_ptr, of_read_q_ptr, of_q_ptr, of_k_ptr, of_v_ptr, of_g_ptr, of_beta_ptr,
    of_k1, of_u1, of_g1, of_k2, of_u2, of_g2, of_k3, of_u3, of_g3, of_k4, of_u4, of_g4,
    T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, S: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    q, k = _vector(q_ptr, at, K, K, BK), _vector(k_ptr, at, K, K, BK)
    top_k, top_q = _vector(read_k_ptr, at, V, V, BV), _vector(read_q_ptr, at, V, V, BV)
    read_k, read_q = _down(
        top_k, top_q, q, k, S, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4,
        T, H, K, V, S, BK, BV,
    )  # fmt: skip
    decay, beta = tl.exp(tl.load(g_ptr + at)), tl.load(beta_ptr + at)
    error, c = _vector(v_ptr, at, V, V, BV) - decay * read_k, tl.sum(k * q, 0)
    grad_o = _vector(grad_o_ptr, at, V, V, BV)
    grad_u = _vector(grad_u_ptr, at, V, V, BV) + c * grad_o
    of_c = tl.sum(grad_o * beta * error, 0)
    of_decay = tl.sum(grad_o * read_q - beta * grad_u * read_k, 0)
    of_q, of_k = of_c * k, of_c * q
    of_read_k, of_read_q = -beta * decay * grad_u, decay * grad_o
    tl.store(of_g_ptr + at, decay * of_decay)
    tl.store(of_beta_ptr + at, tl.sum(grad_u * error, 0))
    _put(of_v_ptr, at, beta * grad_u, V, V, BV)
    t = (tl.program_id(0) // H) % T
    for back in tl.static_range(1, S):
        # From the step just above down to the first: i = S - back.
        k_i, u_i, decay_i = _ancestor(
            S - back, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4, T, H, K, V, S, BK, BV
        )
        read_k, read_q = _down(
            top_k, top_q, q, k, S - back, k1, u1, g1, k2, u2, g2, k3, u3, g3, k4, u4, g4,
            T, H, K, V, S, BK, BV,
        )  # fmt: skip
        by_k, by_q = tl.sum(of_read_k * u_i, 0), tl.sum(of_read_q * u_i, 0)
        of_u = tl.sum(k_i * k, 0) * of_read_k + tl.sum(k_i * q, 0) * of_read_q
        of_g = decay_i * tl.sum(of_read_k * read_k + of_read_q * read_q, 0)
        k_to = _of(S - back, of_k1, of_k2, of_k3, of_k4)
        u_to = _of(S - back, of_u1, of_u2, of_u3, of_u4)
        g_to = _of(S - back, of_g1, of_g2, of_g3, of_g4)
        there, to = t >= back, at - back * H
        _put(k_to, to, by_k * k + by_q * q, tl.where(there, K, 0), K, BK)
        _put(u_to, to, of_u, tl.where(there, V, 0), V, BV)
        tl.store(g_to + to, of_g, mask=there)
        # A row's last pairs are nobody's ancestors.
        last = t >= T - back
        _put(k_to, at, tl.zeros((BK,), tl.float32), tl.where(last, K, 0), K, BK)
        _put(u_to, at, tl.zeros((BV,), tl.float32), tl.where(last, V, 0), V, BV)
        tl.store(g_to + at, 0.0, mask=last)
        of_k += by_k * k_i
        of_q += by_q * k_i
        of_read_k *= decay_i
        of_read_q *= decay_i
    _put(of_k_ptr, at, of_k, K, K, BK)
    _put(of_q_ptr, at, of_q, K, K, BK)
    _put(of_read_k_ptr, at, of_read_k, V, V, BV)
    _put(of_read_q_ptr, at, of_read_q, V, V, BV)
