# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in torch: the definition, and what runs on a CPU.

`read` and `replay_` are the only two places that touch a state token by token. Both are built
from elementwise products and a sum over the contiguous key axis: none of these change their
bits with the number of states they run on, where einsum does (rule I4). `prefill` uses the
chunked form and is exact only in the sense that its bits depend on the prompt alone.

Source: Yang et al., Gated Delta Networks (arXiv 2412.06464), section 3; SpecLA (arXiv
2607.16673), section 4, for trees and delayed commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specla.ops.contract import Factors, LayerState, RoundPlan

CHUNK = 64


class Inputs(NamedTuple):
    """Per-token inputs of one layer, compute dtype; leading axis M (nodes) or T (tokens).

    q [M, H, K] normalised and scaled by K^-1/2, k [M, H, K] normalised, v [M, G, V],
    g [M, G] log decay, beta [M, G].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def per_value_head(x: Tensor, num_value_heads: int) -> Tensor:
    """[..., H, K] -> [..., G, K]: value head h reads key head h // (G // H)."""
    repeats = num_value_heads // x.shape[-2]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=-2)


def token(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A token's output and factor below S, which stays as it is: (o, u), both [..., G, V].

        u = beta (v - e^g S k),    o = e^g S q + (k . q) u    which is (e^g S + u k^T) q

    S [..., G, V, K]; q, k [..., G, K]; v [..., G, V]; g, beta [..., G]. Nobody needs the state
    below a leaf, and forming it is most of what a token costs.
    """
    u = _correction(S, k, v, g, beta)
    return torch.exp(g).unsqueeze(-1) * read(S, q) + (k * q).sum(-1, keepdim=True) * u, u


def _correction(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return beta.unsqueeze(-1) * (v - torch.exp(g).unsqueeze(-1) * read(S, k))


def step_(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token, in place. S [..., G, V, K], k [..., G, K], v [..., G, V], g, beta [..., G].

    The delta is against the decayed state. Returns u [..., G, V].
    """
    u = _correction(S, k, v, g, beta)
    replay_(S, k, u, g)
    return u


def step(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """`step_` on a copy. Returns (new S, u)."""
    S = S.clone()
    u = step_(S, k, v, g, beta)
    return S, u


def read(S: Tensor, q: Tensor) -> Tensor:
    """o = S q. S [..., G, V, K], q [..., G, K] -> [..., G, V]."""
    return (S * q.unsqueeze(-2)).sum(-1)


def replay_(S: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """One recorded update in place: e^g S + u k^T.

    S [..., G, V, K], k [..., G, K], u [..., G, V], g [..., G]. Returns S.
    """
    S.mul_(torch.exp(g)[..., None, None])
    return S.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))


def replay(S: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """`replay_` on a copy."""
    return replay_(S.clone(), k, u, g)


def fold(S: Tensor, factors: Factors) -> Tensor:
    """Replay a log, in order, on a copy. S [G, V, K]; factors with leading axis T."""
    S = S.clone()
    keys = per_value_head(factors.k, S.shape[0])
    for k, u, g in zip(keys, factors.u, factors.g, strict=True):
        replay_(S, k, u, g)
    return S


def _live_states(layer: LayerState, plan: RoundPlan) -> Tensor:
    """[B, G, V, K]: S with each row's log replayed; S is written where the fold is due."""
    # index_select copies whole states; indexing by a tensor moves them element by element.
    S = layer.S.index_select(0, plan.slots)
    heads = S.shape[1]
    for entry in plan.replay:
        at = (entry.slots, entry.entries)
        k = per_value_head(layer.factors.k[at], heads)
        u, g = layer.factors.u[at], layer.factors.g[at]
        if entry.all_rows:
            replay_(S, k, u, g)
        else:
            S.index_copy_(0, entry.rows, replay_(S.index_select(0, entry.rows), k, u, g))
    if plan.fold_rows.numel() == len(S):
        layer.S.index_copy_(0, plan.slots, S)
    elif plan.fold_rows.numel():
        layer.S.index_copy_(0, plan.fold_slots, S.index_select(0, plan.fold_rows))
    return S


def _move_to_ring(layer: LayerState, plan: RoundPlan) -> None:
    if plan.moves is not None:
        slots, source, target = plan.moves
        for store in layer.factors:
            store[slots, target] = store[slots, source]


def verify(layer: LayerState, plan: RoundPlan, x: Inputs) -> Tensor:
    """Outputs o [M, G, V] of every node of every tree; x has leading axis M.

    Walks each tree by depth, all rows at once. Appends the candidates' factors to the bank.
    """
    S = _live_states(layer, plan)
    _move_to_ring(layer, plan)
    heads = S.shape[1]
    q, k = per_value_head(x.q, heads), per_value_head(x.k, heads)
    o, u = torch.empty_like(x.v), torch.empty_like(x.v)
    for nodes, above, carried, source in plan.levels:
        if above is not None:
            S = S if carried is None else S.index_select(0, carried)
            replay_(S, k[above], u[above], x.g[above])
        S = S if source is None else S.index_select(0, source)
        o[nodes], u[nodes] = token(S, q[nodes], k[nodes], x.v[nodes], x.g[nodes], x.beta[nodes])
    at = (plan.node_slot, plan.write_entry)
    layer.factors.k[at], layer.factors.u[at], layer.factors.g[at] = x.k, u, x.g
    return o


def runs(S: Tensor, lengths: Sequence[int], x: Inputs) -> tuple[Tensor, Tensor]:
    """A run of tokens of each of B sequences, token by token: S [B, G, V, K], x with leading axis
    M, run by run, lengths[b] >= 1 of each. Returns (o [M, G, V], S after the runs), `verify`'s
    bits."""
    S, heads = S.clone(), S.shape[1]
    q, k = per_value_head(x.q, heads), per_value_head(x.k, heads)
    o, starts = torch.empty_like(x.v), list(accumulate(lengths, initial=0))
    for i in range(max(lengths)):
        rows = [b for b, length in enumerate(lengths) if length > i]
        at = torch.tensor([starts[b] + i for b in rows], device=S.device)
        going = torch.tensor(rows, device=S.device)
        here = S if len(rows) == len(S) else S.index_select(0, going)
        given = [part.index_select(0, at) for part in (q, k, x.v, x.g, x.beta)]
        y, u = token(here, *given)
        o.index_copy_(0, at, y)
        replay_(here, given[1], u, given[3])
        if here is not S:
            S.index_copy_(0, going, here)
    return o, S


def prefill(S: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    """A run of tokens from state S [G, V, K]; x has leading axis T.

    Chunks of 64 from the run's start. Returns (o [T, G, V], S after the run).
    """
    outputs = []
    for start in range(0, x.v.shape[0], CHUNK):
        part = Inputs(*(t[start : start + CHUNK] for t in x))
        o, S = _prefill_chunk(S, part)
        outputs.append(o)
    return torch.cat(outputs), S


def _prefill_chunk(S: Tensor, x: Inputs) -> tuple[Tensor, Tensor]:
    heads = S.shape[0]
    q = per_value_head(x.q, heads).transpose(0, 1)  # [G, T, K]
    k = per_value_head(x.k, heads).transpose(0, 1)
    lower = torch.ones(x.v.shape[0], x.v.shape[0], dtype=torch.bool, device=S.device).tril()
    o, u, total = masked_form(S, q, k, x, lower)
    left = torch.exp(total[:, -1:] - total)  # [G, T], decay still to come after each token
    S = torch.exp(total[:, -1])[:, None, None] * S
    S = S + u.transpose(1, 2) @ (k * left.unsqueeze(-1))
    return o.transpose(0, 1), S


def masked_form(
    S: Tensor, q: Tensor, k: Tensor, x: Inputs, ancestor: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Closed form over any tree (a chain is `tril`): one triangular solve, the rest matmuls.

        (I + A) U = beta (V - e^G K S0^T),    A_ij = [j anc i] beta_i e^{G_i - G_j} k_i.k_j
        O = e^G Q S0^T + P U,                 P_ij = [j anc or = i] e^{G_i - G_j} q_i.k_j

    S [G, V, K]; q, k [G, N, K]; x as in Inputs with leading axis N; ancestor [N, N] bool,
    ancestor[i, j] where j is i or one of its ancestors (nodes in topological order).
    The exponent is masked before exp: e^{G_i - G_j} is never split into two exponentials.
    Returns (o [G, N, V], u [G, N, V], path-cumulative log decay [G, N]).

    Source: reference derivation in docs/math/tree-verification.md.
    """
    beta, v = x.beta.t().unsqueeze(-1), x.v.transpose(0, 1)
    total = (ancestor.to(x.g.dtype) @ x.g).t().contiguous()
    gap = total.unsqueeze(-1) - total.unsqueeze(-2)
    decay = torch.exp(gap.masked_fill(~ancestor, float("-inf")))
    strict = ancestor & ~torch.eye(ancestor.shape[0], dtype=torch.bool, device=S.device)
    A = torch.where(strict, beta * decay * (k @ k.transpose(1, 2)), 0)
    grow = torch.exp(total).unsqueeze(-1)
    rhs = beta * (v - grow * (k @ S.transpose(1, 2)))
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    u = torch.linalg.solve_triangular(A + eye, rhs, upper=False, unitriangular=True)
    o = grow * (q @ S.transpose(1, 2)) + (decay * (q @ k.transpose(1, 2))) @ u
    return o, u, total
