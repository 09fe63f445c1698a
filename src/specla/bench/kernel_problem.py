# SPDX-License-Identifier: Apache-2.0
"""A workload's tensors, and the truth its outputs are held against.

Layers own distinct states and logs; projections are shared, as a layer's input would just have
been written and still be in the cache. Values: S and u of order 1, unit keys, log decays between
-0.3 and -0.02, so that nothing explodes when a benchmark folds the same log again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from specla.bench.kernel_cases import Case
from specla.ops import conv
from specla.ops.contract import DeviceRound, Factors, LayerState, RecurrentShape, RoundPlan
from specla.ops.gdn import Inputs, inputs, reference
from specla.ops.oracle import gdn_paths
from specla.state.log import Log
from specla.state.plan import compile_round
from specla.state.rounds import walk_shape
from specla.topology.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What one layer's kernels read besides activations: conv_weight [C, W], A = -exp(A_log) and
    dt_bias [G] float32. taps [W, C]: conv as our own kernel reads it."""

    conv: Tensor
    taps: Tensor
    A: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What one verify of layer 0 must give, from the reference in float32.

    qkv [M, C]: after conv and SiLU, activation dtype; a, b [M, G] raw gate logits; x: what the
    recurrence reads; live [B, G, V, K]: S with the log folded in; o, u [M, G, V].
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    x: Inputs
    live: Tensor
    o: Tensor
    u: Tensor


class Problem:
    """Layers, a round and projections for one Case.

    Args:
        num_layers: how many layers with states of their own.
        max_nodes: nodes of a candidate bank; None: what the case needs.
    """

    def __init__(
        self,
        case: Case,
        *,
        num_layers: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        self.y = self._normal(self.num_nodes, _projection_width(case.shape)).to(dtype)
        self.weights = self._weights()
        self.layers = [self._layer() for _ in range(num_layers)]
        self._pristine = copy_layer(self.layers[0])

    @cached_property
    def round(self) -> DeviceRound:
        """The case's round, for kernels."""
        return self.round_of(self.case)

    @property
    def slots(self) -> Tensor:
        """The rows' slots [B] int32."""
        return self.round.slot

    @property
    def shape(self) -> RecurrentShape:
        return self.case.shape

    @property
    def num_nodes(self) -> int:
        """M: nodes of all rows."""
        return self.case.num_rows * self.case.num_nodes

    def fresh_layer(self) -> LayerState:
        """Layer 0 as it was made: timing folds the same log many times over."""
        return copy_layer(self._pristine)

    def round_of(self, case: Case) -> DeviceRound:
        """Another round over the same states: same rows and nodes, another log."""
        return device_round(case, self.device)

    def entries(self, case: Case | None = None) -> Tensor:
        """The log's entries [B, log_len] int32, in order."""
        log = _log(case or self.case)
        row = torch.tensor(log.entries(), dtype=torch.int32, device=self.device)
        return row.expand(self.case.num_rows, -1).contiguous()

    @cached_property
    def truth(self) -> Truth:
        """By the torch reference on the device, on a copy of layer 0."""
        shape, plan, layer = self.shape, self.plan(), self.fresh_layer()
        heads, weights = shape.num_value_heads, self.weights
        qkv = conv.verify(layer, plan, self.y[:, : shape.conv_channels], weights.conv)
        a, b = self.y[:, -2 * heads : -heads], self.y[:, -heads:]
        x = inputs(qkv, a, b, A=weights.A, dt_bias=weights.dt_bias, shape=shape)
        live = live_states(layer, plan)
        o, u = self.verify(x)
        return Truth(qkv=qkv, a=a.contiguous(), b=b.contiguous(), x=x, live=live, o=o, u=u)

    def verify(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """(o, u) [M, G, V] of the torch reference for inputs x, on a copy of layer 0."""
        layer, plan = self.fresh_layer(), self.plan()
        o = reference.verify(layer, plan, x)
        return o, layer.factors.u[plan.node_slot, plan.write_entry]

    def oracle(self, row: int) -> Tensor:
        """One row's o [N, G, V] in float64, path by path."""
        x = self._row(row)
        return gdn_paths(self.truth.live[row], *x, self.case.parents).o

    def after(self, nodes: Sequence[int]) -> Tensor:
        """[G, V, K] float64: row 0's live state after these nodes, one after another."""
        x = self._row(0)
        S = self.truth.live[0].double()
        for i in nodes:
            reference.step_(S, *(t[i].double() for t in (x.k, x.v, x.g, x.beta)))
        return S

    def _row(self, row: int) -> Inputs:
        """One row's inputs, q and k per value head."""
        n, heads = self.case.num_nodes, self.shape.num_value_heads
        x = Inputs(*(t[row * n : (row + 1) * n] for t in self.truth.x))
        q, k = (reference.per_value_head(t, heads) for t in (x.q, x.k))
        return x._replace(q=q, k=k)

    def plan(self) -> RoundPlan:
        """The round as the reference reads it."""
        case = self.case
        tree = DraftTree(tuple(range(case.num_nodes)), case.parents)
        return compile_round(
            range(1, case.num_rows + 1),
            [_log(case)] * case.num_rows,
            [tree] * case.num_rows,
            conv_width=case.shape.conv_width,
            device=self.device,
        )

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def _uniform(self, low: float, high: float, *size: int) -> Tensor:
        x = torch.rand(size, generator=self._generator, device=self.device)
        return low + x * (high - low)

    def _weights(self) -> Weights:
        s = self.shape
        conv = (self._normal(s.conv_channels, s.conv_width) * 0.5).to(self.dtype)
        return Weights(
            conv=conv,
            taps=conv.t().contiguous(),
            A=-self._uniform(0.02, 0.3, s.num_value_heads),
            dt_bias=self._uniform(-1.0, 1.0, s.num_value_heads),
        )

    def _layer(self) -> LayerState:
        case, s = self.case, self.shape
        slots, nodes = case.num_rows + 1, case.max_nodes
        entries = case.log_capacity + 2 * nodes
        k = F.normalize(self._normal(slots, entries, s.num_key_heads, s.key_dim), dim=-1)
        window = (slots, 2, s.conv_width - 1, s.conv_channels)
        return LayerState(
            S=self._normal(slots, s.num_value_heads, s.value_dim, s.key_dim),
            factors=Factors(
                k,
                self._normal(slots, entries, s.num_value_heads, s.value_dim) * 0.5,
                self._uniform(-0.3, -0.02, slots, entries, s.num_value_heads),
            ),
            tail=self._normal(*window).to(self.dtype),
            inputs=self._normal(slots, 2, nodes, s.conv_channels).to(self.dtype),
        )


def device_round(case: Case, device: torch.device) -> DeviceRound:
    """The case's round: slots 1 .. B, every row with the same tree and log, read bank 0; walk
    lists compiled by the device."""
    from specla.ops.walk import compile_walks

    rows = case.num_rows

    def full(value: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    def repeated(values: Sequence[int]) -> Tensor:
        row = torch.tensor(values, dtype=torch.int32, device=device)
        return row.expand(rows, -1).contiguous()

    rnd = DeviceRound(
        slot=torch.arange(1, rows + 1, dtype=torch.int32, device=device),
        num_nodes=full(case.num_nodes),
        tokens=repeated(range(case.num_nodes)),
        parents=repeated(case.parents),
        bank=full(0),
        ring_len=full(case.ring_len),
        path_len=full(len(case.path)),
        path=repeated([*case.path, *[0] * (case.max_nodes - len(case.path))]),
        walk=torch.zeros(walk_shape(rows, case.num_nodes), dtype=torch.int32, device=device),
    )
    compile_walks(rnd)
    return rnd


def copy_layer(layer: LayerState) -> LayerState:
    """A copy that shares nothing."""
    return LayerState(
        layer.S.clone(),
        Factors(*(t.clone() for t in layer.factors)),
        layer.tail.clone(),
        layer.inputs.clone(),
    )


def live_states(layer: LayerState, plan: RoundPlan) -> Tensor:
    """[B, G, V, K]: S with each row's log replayed on it."""
    S = layer.S[plan.slots]
    for entry in plan.replay:
        at = (entry.slots, entry.entries)
        k = reference.per_value_head(layer.factors.k[at], S.shape[1])
        S[entry.rows] = reference.replay(
            S[entry.rows], k, layer.factors.u[at], layer.factors.g[at]
        )
    return S


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value; infinite where anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    worst = (got.double() - expected.double()).abs().max()
    return float(worst / expected.double().abs().max())


def _log(case: Case) -> Log:
    return Log(
        case.log_capacity, case.max_nodes, case.threshold, ring_len=case.ring_len, path=case.path
    )


def _projection_width(s: RecurrentShape) -> int:
    """Columns q | k | v | gate | a | b of one projection."""
    return s.conv_channels + s.num_value_heads * s.value_dim + 2 * s.num_value_heads
