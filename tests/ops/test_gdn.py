# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against the float64 oracle. Tier: algebra, unless a test says exact.

K != V, G a multiple of H, beta up to 2 (negative eigenvalues) throughout.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import (
    SHAPE,
    TREES,
    ancestors,
    oracle,
    random_inputs,
    random_parents,
    random_state,
)
from torch import Tensor

from specla.ops import gdn
from specla.ops.contract import Factors, RecurrentShape
from specla.ops.gdn import reference
from specla.ops.gdn.reference import CHUNK, Inputs, per_value_head
from specla.state import State
from specla.topology.tree import DraftTree

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
SHAPES = (
    SHAPE,
    RecurrentShape(
        num_layers=1, num_key_heads=1, num_value_heads=3, key_dim=5, value_dim=9, conv_width=4
    ),
    RecurrentShape(
        num_layers=1, num_key_heads=3, num_value_heads=3, key_dim=4, value_dim=2, conv_width=4
    ),
)


def agree(got: Tensor, truth: Tensor) -> None:
    """rtol 1e-10 of the largest number: single ones may cancel to nothing."""
    assert got.shape == truth.shape
    assert (got - truth).abs().max() <= 1e-10 * truth.abs().max()


def chain(count: int) -> tuple[int, ...]:
    return tuple(range(-1, count - 1))


def token(x: Inputs, i: int, heads: int) -> tuple[Tensor, ...]:
    """Arguments of `step` for one token."""
    return per_value_head(x.k[i], heads), x.v[i], x.g[i], x.beta[i]


def step_by_step(S: Tensor, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(o, u, S after) of a run, token by token."""
    outputs, us = [], []
    for i in range(len(x.v)):
        k, v, g, beta = token(x, i, len(S))
        o, u = reference.token(S, per_value_head(x.q[i], len(S)), k, v, g, beta)
        S = reference.replay(S, k, u, g)
        us.append(u)
        outputs.append(o)
    return torch.stack(outputs), torch.stack(us), S


def verify_round(
    trees: list[tuple[int, ...]], shape: RecurrentShape = SHAPE, dtype: torch.dtype = torch.float64
) -> tuple[State, list[Tensor], list[Inputs], list[Tensor]]:
    """One round over random states. Returns (state, S before, inputs, o) by row."""
    state = State(shape, num_slots=len(trees), max_nodes=24, dtype=dtype)
    slots = [state.acquire() for _ in trees]
    before = [random_state(10 + s, shape, dtype) for s in slots]
    for slot, S in zip(slots, before, strict=True):
        state.layers[0].S[slot] = S
    plan = state.begin(slots, [DraftTree(tuple(range(len(t))), t) for t in trees])
    xs = [
        random_inputs(20 + s, len(t), shape, dtype=dtype)
        for s, t in zip(slots, trees, strict=True)
    ]
    x = Inputs(*(torch.cat(parts) for parts in zip(*xs, strict=True)))
    o = reference.verify(state.layers[0], plan, x)
    return state, before, xs, list(o.split([len(t) for t in trees]))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"H{s.num_key_heads}G{s.num_value_heads}")
@pytest.mark.parametrize("count", [1, 2, 40])
def test_step_and_read(count: int, shape: RecurrentShape) -> None:
    S, x = random_state(0, shape), random_inputs(1, count, shape)
    truth = oracle(S, x, chain(count))
    o, u, after = step_by_step(S, x)
    agree(o, truth.o)
    agree(u, truth.u)
    agree(after, truth.states[-1])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"H{s.num_key_heads}G{s.num_value_heads}")
def test_verify_on_trees_chains_and_stars(shape: RecurrentShape) -> None:
    trees = [*TREES.values(), *(random_parents(i, 24, reach=i + 1) for i in range(4))]
    state, before, xs, outputs = verify_round(trees, shape)
    for row, (parents, S, x, o) in enumerate(zip(trees, before, xs, outputs, strict=True)):
        truth = oracle(S, x, parents)
        agree(o, truth.o)
        # The bank that this verify wrote, node by node.
        entries = slice(state.logs[row + 1].bank_entry(1, 0), None)
        factors = [f[row + 1, entries][: len(parents)] for f in state.layers[0].factors]
        agree(factors[1], truth.u)
        assert torch.equal(factors[0], x.k)
        assert torch.equal(factors[2], x.g)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 24), reach=st.integers(1, 24))
def test_verify_on_any_tree(seed: int, size: int, reach: int) -> None:
    parents = random_parents(seed, size, reach)
    _, (S,), (x,), (o,) = verify_round([parents])
    agree(o, oracle(S, x, parents).o)


def test_verify_of_a_chain_is_the_run_of_single_tokens() -> None:
    """Exact, in float32: one node per round, or all in one."""
    _, (S,), (x,), (o,) = verify_round([chain(12)], dtype=torch.float32)
    assert torch.equal(o, step_by_step(S, x)[0])


@pytest.mark.parametrize("name", TREES)
def test_masked_form(name: str) -> None:
    masked_equals_oracle(TREES[name], seed=0)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 70), reach=st.integers(1, 70))
def test_masked_form_on_any_tree(seed: int, size: int, reach: int) -> None:
    masked_equals_oracle(random_parents(seed, size, reach), seed)


def masked_equals_oracle(parents: tuple[int, ...], seed: int) -> None:
    # beta <= 1 here: with beta up to 2 and 70 tokens the truth itself may grow without bound.
    S, x = random_state(seed), random_inputs(seed + 1, len(parents), max_beta=1.0)
    truth = oracle(S, x, parents)
    o, u, total = masked(S, x, ancestors(parents))
    agree(o, truth.o)
    agree(u, truth.u)
    agree(total, ancestors(parents).double() @ x.g)


def masked(S: Tensor, x: Inputs, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`masked_form` with the node axis first, as the oracle has it."""
    q, k = (per_value_head(t, len(S)).transpose(0, 1) for t in (x.q, x.k))
    o, u, total = reference.masked_form(S, q, k, x, mask)
    return o.transpose(0, 1), u.transpose(0, 1), total.t()


def test_masked_form_with_negative_eigenvalues() -> None:
    parents = random_parents(5, 40, reach=3)
    S, x = random_state(1), random_inputs(2, 40, max_beta=2.0)
    o, u, _ = masked(S, x, ancestors(parents))
    agree(o, oracle(S, x, parents).o)
    agree(u, oracle(S, x, parents).u)


def test_masked_form_ignores_other_branches() -> None:
    """Exact: at one width, what is not above a node does not touch its bits."""
    S, x, parents = random_state(1), random_inputs(2, 7), (-1, 0, 1, 0, 3, 4, 4)
    other = random_inputs(3, 7)
    changed = Inputs(*(torch.cat([t[:6], o[6:]]) for t, o in zip(x, other, strict=True)))
    for got, want in zip(
        masked(S, changed, ancestors(parents)), masked(S, x, ancestors(parents)), strict=True
    ):
        assert torch.equal(got[:6], want[:6])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"H{s.num_key_heads}G{s.num_value_heads}")
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_step_by_step(length: int, shape: RecurrentShape) -> None:
    S, x = random_state(0, shape), random_inputs(1, length, shape)
    o, after = reference.prefill(S, x)
    want, _, state = step_by_step(S, x)
    agree(o, want)
    agree(after, state)


@pytest.mark.parametrize("cut", [1, 2, 3, 63, 64, 65, 128, 129])
def test_prefill_in_segments_is_the_full_one(cut: int) -> None:
    S, x = random_state(0), random_inputs(1, 130)
    o, after = reference.prefill(S, x)
    first, middle = reference.prefill(S, Inputs(*(t[:cut] for t in x)))
    second, last = reference.prefill(middle, Inputs(*(t[cut:] for t in x)))
    agree(torch.cat([first, second]), o)
    agree(last, after)
    if cut % CHUNK == 0:  # exact: the chunks are the same ones
        assert torch.equal(last, after)


@pytest.mark.parametrize("name", TREES)
def test_fold_of_a_path_is_its_state(name: str) -> None:
    parents = TREES[name]
    S, x = random_state(0), random_inputs(1, len(parents))
    truth = oracle(S, x, parents)
    for node in range(len(parents)):
        path = DraftTree(tuple(range(len(parents))), parents).path_to(node)
        at = list(path)
        agree(reference.fold(S, Factors(x.k[at], truth.u[at], x.g[at])), truth.states[node])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_replay_has_the_bits_of_step(dtype: torch.dtype) -> None:
    """Exact. This is what makes a delayed commit lossless."""
    S, x = random_state(0, dtype=dtype), random_inputs(1, 50, dtype=dtype)
    live = S
    for i in range(50):
        k, v, g, beta = token(x, i, len(S))
        after, u = reference.step(live, k, v, g, beta)
        assert torch.equal(reference.replay(live, k, u, g), after)
        live = after
    us = step_by_step(S, x)[1]
    assert torch.equal(reference.fold(S, Factors(x.k, us, x.g)), live)


def test_functions_leave_their_state_argument_alone() -> None:
    """Exact. `fold` and `step` work on copies: a caller's S may be a view into State."""
    S, x = random_state(0), random_inputs(1, 70)
    kept = S.clone()
    _, us, _ = step_by_step(S, x)
    reference.fold(S, Factors(x.k, us, x.g))
    reference.replay(S, *(t[0] for t in (per_value_head(x.k, 4), us, x.g)))
    reference.prefill(S, x)
    assert torch.equal(S, kept)


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_inputs(beta_scale: float) -> None:
    """Gates and norms by their formulas."""
    count, generator = 5, torch.Generator().manual_seed(0)
    qkv = torch.randn(count, SHAPE.conv_channels, generator=generator, dtype=torch.float64)
    a, b = torch.randn(2, count, 4, generator=generator, dtype=torch.float64) * 4
    A, dt_bias = -torch.rand(4).double(), torch.randn(4, generator=generator).double()
    x = gdn.inputs(qkv, a, b, A=A, dt_bias=dt_bias, shape=SHAPE, beta_scale=beta_scale)
    agree(x.g, A * torch.log1p(torch.exp(a + dt_bias)))
    agree(x.beta, beta_scale / (1 + torch.exp(-b)))
    q, k, v = qkv.split([16, 16, 24], -1)
    q, k, v = q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 6))
    agree(x.q, q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * 8**-0.5)
    agree(x.k, k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt())
    assert torch.equal(x.v, v)


def test_one_key_head_per_value_head_or_several() -> None:
    """G = 2 H is G = H with every key head twice."""
    S, x = random_state(0), random_inputs(1, 9)
    twice = x._replace(q=per_value_head(x.q, 4), k=per_value_head(x.k, 4))
    shape = replace(SHAPE, num_key_heads=4)
    assert shape.num_value_heads == S.shape[0]
    assert torch.equal(reference.prefill(S, x)[0], reference.prefill(S, twice)[0])
