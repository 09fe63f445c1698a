# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over packed rows, chunk by chunk, with gradients.

Per head, with state S [K, V], decay e^g, write strength beta:

    S <- e^g S,    u = beta (v - k S),    S <- S + k^T u,    o = q S

Inside a chunk, G is the running sum of g and D_ij = e^{G_i - G_j} for j <= i in the same
document, masked
before the exponential. One unit lower triangular inverse P = (I + tril(beta k k^T * D, -1))^-1
turns the
chunk into a linear map of the state, S_out = M S_in + N, so only one small matrix product per
chunk is
sequential.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_masks(segments: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Boundary masks of packed rows. ``segments`` [B, T], T a multiple of ``chunk`` after padding.

    Returns pair [B, n, C, C] (j <= i, same document), first [B, n, C] (token continues the
    document
    before the chunk), last [B, n, C] (token is in the document that ends the chunk), whole [B, n]
    (that
    document also came before the chunk).
    """
    padding = -segments.shape[1] % chunk
    parts = F.pad(segments, (0, padding), value=-2).unflatten(1, (-1, chunk))
    before = F.pad(parts[:, :-1, -1], (1, 0), value=-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=segments.device).tril()
    pair = (parts[..., :, None] == parts[..., None, :]) & causal
    first = parts == before[..., None]
    last = parts == parts[..., -1:]
    return pair, first, last, first[..., -1]


@torch.library.custom_op("specla_train::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 for strictly lower triangular A [N, C, C], by batched forward substitution."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    return inverse.contiguous()


@unit_lower_inverse.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def keep_inverse(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """The gradient needs only the inverse."""
    ctx.save_for_backward(output)


def inverse_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """-P^T grad P^T, strictly lower part."""
    (inverse,) = ctx.saved_tensors
    transposed = inverse.mT
    result: Tensor = -(transposed @ grad @ transposed).tril(-1)
    return result


unit_lower_inverse.register_autograd(inverse_gradient, setup_context=keep_inverse)


@torch.library.custom_op("specla_train::state_scan", mutates_args=())
def state_scan(m: Tensor, n: Tensor) -> Tensor:
    """States at the start of every chunk: S_0 = 0, S_{c+1} = M_c S_c + N_c.

    ``m`` [R, n, K, K], ``n`` [R, n, K, V] -> [R, n, K, V], R = rows times heads.
    """
    states = torch.empty_like(n)
    states[:, 0] = 0
    for c in range(n.shape[1] - 1):
        torch.baddbmm(n[:, c], m[:, c], states[:, c], out=states[:, c + 1])
    return states


@torch.library.custom_op("specla_train::state_scan_adjoint", mutates_args=())
def state_scan_adjoint(m: Tensor, grad: Tensor) -> Tensor:
    """The scan's transpose: a_c = grad_{c+1} + M_{c+1}^T a_{c+1}, nothing after the last chunk."""
    adjoint = torch.empty_like(grad, memory_format=torch.contiguous_format)
    adjoint[:, -1] = 0
    for c in range(grad.shape[1] - 1, 0, -1):
        torch.baddbmm(grad[:, c], m[:, c].mT, adjoint[:, c], out=adjoint[:, c - 1])
    return adjoint


@state_scan.register_fake
def _(m: Tensor, n: Tensor) -> Tensor:
    return torch.empty_like(n)


@state_scan_adjoint.register_fake
def _(m: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def keep_states(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """The adjoint needs the maps; their gradient needs the states."""
    ctx.save_for_backward(inputs[0], output)


def scan_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the maps M and the additions N."""
    m, states = ctx.saved_tensors
    adjoint = state_scan_adjoint(m, grad.contiguous())
    return adjoint @ states.mT, adjoint


state_scan.register_autograd(scan_gradient, setup_context=keep_states)


class Scan(NamedTuple):
    """The rule's states over packed rows, in a form that any query can read, at any token.

    keys, writes [B, H, n, C, K / V]: k and u of every token; states [B, H, n, K, V] before each
    chunk; decay [B, H, n, C, C] from an earlier token of the same document; from_start
    [B, H, n, C] from the chunk's start, 0 where the document begins inside it. length: T.
    """

    keys: Tensor
    writes: Tensor
    states: Tensor
    decay: Tensor
    from_start: Tensor
    length: int

    def read(self, q: Tensor) -> Tensor:
        """q [B, T, H, K]: what the state *after* each token gives, [B, T, H, V]."""
        q = split_chunks(q, self.decay.shape[-1])
        o = (q * self.from_start[..., None]) @ self.states
        return self._rows(o + (q @ self.keys.mT * self.decay) @ self.writes)

    @property
    def u(self) -> Tensor:
        """What every token has written, [B, T, H, V]."""
        return self._rows(self.writes)

    def _rows(self, x: Tensor) -> Tensor:
        rows: Tensor = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        return rows[:, : self.length]


def scan(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, masks: tuple[Tensor, ...]) -> Scan:
    """The rule on packed rows from an empty state.

    ``k`` [B, T, H, K] normalised, ``v`` [B, T, H, V], ``g``, ``beta`` [B, T, H], ``masks`` from
    `chunk_masks`.
    """
    length, chunk = k.shape[1], masks[0].shape[-1]
    k, v, g, beta = (split_chunks(x, chunk) for x in (k, v, g, beta))
    pair, first, last, whole = (mask[:, None] for mask in masks)
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~pair, -torch.inf).exp()
    from_start = total.exp() * first
    to_end = (total[..., -1:] - total).exp() * last

    a = ((k * beta[..., None]) @ k.mT * decay).tril(-1)
    inverse = unit_lower_inverse(a.flatten(0, 2)).unflatten(0, a.shape[:3])
    u = inverse @ (v * beta[..., None])
    w = inverse @ (k * (beta * from_start)[..., None])
    k_end = (k * to_end[..., None]).mT
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    m = eye * (total[..., -1].exp() * whole)[..., None, None] - k_end @ w
    states = state_scan(m.flatten(0, 1), (k_end @ u).flatten(0, 1)).unflatten(0, m.shape[:2])
    return Scan(k, u - w @ states, states, decay, from_start, length)


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, masks: tuple[Tensor, ...]
) -> Tensor:
    """`scan`, read by each token's own query ``q`` [B, T, H, K] (scaled) -> [B, T, H, V]."""
    return scan(k, v, g, beta, masks).read(q)


def split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, n, C, ...], zero-padded to whole chunks."""
    padding = -x.shape[1] % chunk
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
    chunks: Tensor = x.unflatten(1, (-1, chunk))
    return chunks.movedim(3, 1)
