# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over packed rows, chunk by chunk, with gradients.

Per head, with state S [K, V], decay e^g, write strength beta:

    S <- e^g S,    u = beta (v - k S),    S <- S + k^T u,    o = q S

Inside a chunk, G is the running sum of g and D_ij = e^{G_i - G_j} for j <= i in the same
document, masked
before the exponential. One unit lower triangular inverse P = (I + tril(beta k k^T * D, -1))^-1
gives what the chunk's tokens write as u - w S, so that two small products per chunk are all that
is sequential. (As a linear map of the state, S_out = M S_in + N, it is one, but M alone costs
K / C times as much: too much where K is 256.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SOLVED = 64
"""Most rows of a triangular system that is solved directly (docs/log.md, 2026-11-29)."""


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
    """(I + A)^-1 for strictly lower triangular A [N, C, C]: forward substitution in blocks of at
    most SOLVED rows, merged by products."""
    size = a.shape[-1]
    if size > SOLVED and size % 2 == 0:
        return _merged(a, size // 2)
    eye = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)
    return inverse.contiguous()


def _merged(a: Tensor, half: int) -> Tensor:
    """The inverse from those of the two diagonal blocks."""
    blocks = torch.cat([a[:, :half, :half], a[:, half:, half:]])
    top, bottom = unit_lower_inverse(blocks).chunk(2)
    result = torch.zeros_like(a)
    result[:, :half, :half], result[:, half:, half:] = top, bottom
    result[:, half:, :half] = -(bottom @ (a[:, half:, :half] @ top))
    return result


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
def state_scan(w: Tensor, u: Tensor, k_end: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk, and what its tokens write: S_0 = 0,

        writes_c = u_c - w_c S_c,    S_{c+1} = keep_c S_c + k_end_c^T writes_c

    ``w``, ``k_end`` [R, n, C, K], ``u`` [R, n, C, V], ``keep`` [R, n] -> states [R, n, K, V],
    writes [R, n, C, V] in the dtype of ``u``; R = rows times heads. S itself has the dtype of
    ``keep``.
    """
    rows, count, _, width = w.shape
    states = u.new_empty(rows, count, width, u.shape[-1])
    writes = torch.empty_like(u, memory_format=torch.contiguous_format)
    state = torch.zeros_like(states[:, 0], dtype=keep.dtype)
    for c in range(count):
        states[:, c] = state
        torch.baddbmm(u[:, c], w[:, c], states[:, c], alpha=-1, out=writes[:, c])
        state = torch.addcmul(k_end[:, c].mT @ writes[:, c], state, keep[:, c, None, None])
    return states, writes


@torch.library.custom_op("specla_train::state_scan_adjoint", mutates_args=())
def state_scan_adjoint(
    w: Tensor, k_end: Tensor, keep: Tensor, grad_states: Tensor, grad_writes: Tensor
) -> tuple[Tensor, Tensor]:
    """The scan's transpose: gradients of the state *after* every chunk [R, n, K, V] and of its
    writes [R, n, C, V], all paths counted; arguments as in `state_scan`."""
    after = torch.empty_like(grad_states, memory_format=torch.contiguous_format)
    written = torch.empty_like(grad_writes, memory_format=torch.contiguous_format)
    adjoint = torch.zeros_like(after[:, 0], dtype=keep.dtype)
    for c in range(w.shape[1] - 1, -1, -1):
        after[:, c] = adjoint
        torch.baddbmm(grad_writes[:, c], k_end[:, c], after[:, c], out=written[:, c])
        step = torch.baddbmm(grad_states[:, c], w[:, c].mT, written[:, c], alpha=-1)
        adjoint = torch.addcmul(step, adjoint, keep[:, c, None, None])
    return after, written


@state_scan.register_fake
def _(w: Tensor, u: Tensor, k_end: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    states = u.new_empty(w.shape[0], w.shape[1], w.shape[3], u.shape[3])
    return states, torch.empty_like(u, memory_format=torch.contiguous_format)


@state_scan_adjoint.register_fake
def _(
    w: Tensor, k_end: Tensor, keep: Tensor, grad_states: Tensor, grad_writes: Tensor
) -> tuple[Tensor, Tensor]:
    after = torch.empty_like(grad_states, memory_format=torch.contiguous_format)
    return after, torch.empty_like(grad_writes, memory_format=torch.contiguous_format)


def keep_states(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """The adjoint needs the maps; their gradients need states and writes."""
    w, _, k_end, keep = inputs
    ctx.save_for_backward(w, k_end, keep, *output)


def scan_gradient(ctx: Any, grad_states: Tensor, grad_writes: Tensor) -> tuple[Tensor, ...]:
    """Gradients of w, u, k_end and keep."""
    w, k_end, keep, states, writes = ctx.saved_tensors
    after, written = state_scan_adjoint(w, k_end, keep, grad_states, grad_writes)
    kept = (after.to(keep.dtype) * states).sum((-1, -2))
    return -(written @ states.mT), written, writes @ after.mT, kept


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
        return self.read_all(q)[0]

    def read_all(self, *queries: Tensor) -> list[Tensor]:
        """`read` of several in one."""
        low, count = self.keys.dtype, len(queries)
        q, *others = (split_chunks(q, self.decay.shape[-1]) for q in queries)
        from_start, decay = self.from_start, self.decay
        if others:
            q = torch.cat([q, *others], dim=-2)
            from_start, decay = from_start.repeat(1, 1, 1, count), decay.repeat(1, 1, 1, count, 1)
        o = (q * from_start[..., None]).to(low) @ self.states
        o = o + (q.to(low) @ self.keys.mT * decay).to(low) @ self.writes
        return [self._rows(x) for x in o.chunk(count, dim=-2)]

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
    `chunk_masks`. Matrix products run in the dtype of ``k``; decays, the inverse and the carried
    state stay in that of ``g``.
    """
    length, chunk, low = k.shape[1], masks[0].shape[-1], k.dtype
    k, v, g, beta = (split_chunks(x, chunk) for x in (k, v, g, beta))
    pair, first, last, whole = (mask[:, None] for mask in masks)
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~pair, -torch.inf).exp()
    from_start = total.exp() * first
    to_end = (total[..., -1:] - total).exp() * last
    keep = total[..., -1].exp() * whole

    a = ((k * beta[..., None]).to(low) @ k.mT * decay).tril(-1)
    inverse = unit_lower_inverse(a.flatten(0, 2)).unflatten(0, a.shape[:3]).to(low)
    u = inverse @ (v * beta[..., None]).to(low)
    w = inverse @ (k * (beta * from_start)[..., None]).to(low)
    k_end = (k * to_end[..., None]).to(low)
    found = state_scan(*(x.flatten(0, 1) for x in (w, u, k_end, keep)))
    states, writes = (x.unflatten(0, k.shape[:2]) for x in found)
    return Scan(k, writes, states, decay, from_start, length)


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
