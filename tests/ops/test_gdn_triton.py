# SPDX-License-Identifier: Apache-2.0
"""`prepare` and `walk` against the torch reference over rounds with trees, pending logs and
folds, in Triton's interpreter. What nobody wrote is NaN. On a GPU every pair of tilings gives
the same bits, and so do a node alone and the kernel of `ops.gdn.triton_stream` (marked gpu)."""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

import pytest
import torch
from random_inputs import random_parents
from torch import Tensor

from specla.ops import conv
from specla.ops.contract import DeviceRound, Factors, LayerState, RecurrentShape
from specla.ops.gdn import inputs, reference
from specla.state import State
from specla.topology.tree import DraftTree

pytest.importorskip("triton")
from specla.ops.gdn import triton as kernels
from specla.ops.gdn.triton_stream import StreamTile
from specla.ops.walk import compile_walks

NAN = float("nan")
SHAPES = {
    "two value heads per key head": RecurrentShape(
        num_layers=1, num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=8, conv_width=4
    ),
    "K = 256": RecurrentShape(
        num_layers=1, num_key_heads=1, num_value_heads=1, key_dim=256, value_dim=8, conv_width=4
    ),
}
GPU_SHAPES = {
    name: RecurrentShape(
        num_layers=1, num_key_heads=h, num_value_heads=g, key_dim=k, value_dim=v, conv_width=4
    )
    for name, (h, g, k, v) in {
        "8 x 256 x 256": (8, 8, 256, 256),
        "16/32 x 128": (16, 32, 128, 128),
        "4 x 64 x 128": (4, 4, 64, 128),
        "2/4 x 128 x 64": (2, 4, 128, 64),
    }.items()
}
NODES = 4


class Layer:
    """Random weights of one layer's mixer."""

    def __init__(self, shape: RecurrentShape, generator: torch.Generator) -> None:
        heads = shape.num_value_heads
        self.conv = torch.randn(shape.conv_channels, 4, generator=generator) * 0.5
        self.A = -2 * torch.rand(heads, generator=generator)
        self.dt_bias = torch.randn(heads, generator=generator)


def random_state(shape: RecurrentShape, capacity: int) -> State:
    state = State(shape, num_slots=2, max_nodes=NODES, log_capacity=capacity)
    generator = torch.Generator().manual_seed(1)
    layer = state.layers[0]
    layer.S.copy_(torch.randn(layer.S.shape, generator=generator))
    layer.tail.copy_(torch.randn(layer.tail.shape, generator=generator))
    return state


def by_reference(state: State, plan, y: Tensor, w: Layer, shape: RecurrentShape) -> Tensor:  # type: ignore[no-untyped-def]
    heads, channels = shape.num_value_heads, shape.conv_channels
    active = conv.verify(state.layers[0], plan, y[:, :channels], w.conv)
    a, b = y[:, channels : channels + heads], y[:, channels + heads :]
    x = inputs(active, a, b, A=w.A, dt_bias=w.dt_bias, shape=shape)
    return reference.verify(state.layers[0], plan, x)


def by_kernels(
    state: State,
    rnd: DeviceRound,
    y: Tensor,
    w: Layer,
    shape: RecurrentShape,
    tile: kernels.Tile | StreamTile | None,
    branching: bool = True,
) -> Tensor:
    rows = rnd.tokens.numel()
    workspace = kernels.Workspace.allocate(shape, rows, y.dtype, y.device)
    for tensor in workspace[:4]:
        tensor.fill_(NAN)
    capacity = state.log_capacity
    kernels.prepare(
        state.layers[0],
        rnd,
        y,
        w.conv.t().contiguous(),
        w.A,
        w.dt_bias,
        workspace,
        shape=shape,
        log_capacity=capacity,
    )
    kernels.walk(
        state.layers[0],
        rnd,
        workspace,
        shape=shape,
        log_capacity=capacity,
        threshold=state.fold_threshold,
        tile=tile,
        branching=branching,
    )
    assert not workspace.arrivals.any()
    return workspace.o


def random_path(rng: random.Random, parents: tuple[int, ...]) -> tuple[int, ...]:
    path = [0]
    while children := [i for i, p in enumerate(parents) if p == path[-1]]:
        path.append(rng.choice(children))
    return tuple(path)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("capacity", "parts"), [(0, 1), (3, 2)])
def test_rounds_agree_with_the_reference(name: str, capacity: int, parts: int) -> None:
    shape, rng = SHAPES[name], random.Random(0)
    generator = torch.Generator().manual_seed(0)
    w = Layer(shape, generator)
    one, two = random_state(shape, capacity), random_state(shape, capacity)
    slots = [one.acquire(), one.acquire()]
    assert slots == [two.acquire(), two.acquire()]
    for number in range(2 if capacity == 0 else 3):
        shapes = [random_parents(10 * number + b, rng.randint(1, NODES)) for b in range(2)]
        trees = [DraftTree(tuple(range(len(p))), p) for p in shapes]
        y = torch.randn(
            2, NODES, shape.conv_channels + 2 * shape.num_value_heads, generator=generator
        )
        for b, tree in enumerate(trees):
            y[b, tree.num_nodes :] = NAN
        used = torch.cat([y[b, : tree.num_nodes] for b, tree in enumerate(trees)])
        want = by_reference(one, one.begin(slots, trees), used, w, shape)
        rnd = two.rounds.plan(slots, [two.logs[s] for s in slots], trees, num_nodes=NODES).round
        rnd = rnd._replace(walk=rnd.walk.new_zeros(2, parts, rnd.walk.shape[2]))
        compile_walks(rnd)
        got = by_kernels(two, rnd, y.flatten(0, 1), w, shape, kernels.Tile(4, 1))
        got = got.view(2, NODES, *got.shape[1:])
        got = torch.cat([got[b, : tree.num_nodes] for b, tree in enumerate(trees)])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        _assert_same(two, one)
        paths = [random_path(rng, tree.parents) for tree in trees]
        for state in (one, two):
            state.commit(slots, paths)


def _assert_same(got: State, want: State) -> None:
    a, b = got.layers[0], want.layers[0]
    for x, y in zip((a.S, *a.factors), (b.S, *b.factors), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert torch.equal(a.tail, b.tail)
    assert torch.equal(a.inputs, b.inputs)


@pytest.mark.parametrize(
    ("short", "says"),
    [
        ("y", "y must have 8 rows, one per node; it has 7"),
        ("q", "must have 8 rows, one per node; it has 7"),
        ("o", "must have 8 rows, one per node; it has 7"),
        ("arrivals", "arrivals must have 2 rows, one per tree; has 1"),
    ],
)
def test_too_little_room_is_noticed_before_the_launch(short: str, says: str) -> None:
    shape = SHAPES["K = 256"]
    w, state = Layer(shape, torch.Generator().manual_seed(0)), random_state(shape, 3)
    rnd = state.rounds.round(2, NODES)
    compile_walks(rnd)
    y = torch.zeros(2 * NODES - (short == "y"), shape.conv_channels + 2)
    workspace = kernels.Workspace.allocate(shape, 2 * NODES, y.dtype, y.device)
    if short != "y":
        rows = 1 if short == "arrivals" else 2 * NODES - 1
        workspace = workspace._replace(**{short: getattr(workspace, short)[:rows]})
    layer, sizes = state.layers[0], {"shape": shape, "log_capacity": 3}
    with pytest.raises(AssertionError, match=says):
        kernels.prepare(layer, rnd, y, w.conv.t(), w.A, w.dt_bias, workspace, **sizes)  # type: ignore[arg-type]
    if short != "y":
        with pytest.raises(AssertionError, match=says):
            kernels.walk(layer, rnd, workspace, threshold=3, **sizes)  # type: ignore[arg-type]


def test_idle_rows_touch_nothing() -> None:
    shape = SHAPES["K = 256"]
    w = Layer(shape, torch.Generator().manual_seed(0))
    state = random_state(shape, 3)
    before = [x.clone() for x in (state.layers[0].S, *state.layers[0].factors)]
    rnd = state.rounds.round(1, 1)
    compile_walks(rnd)
    y = torch.full((1, shape.conv_channels + 2), NAN)
    by_kernels(state, rnd, y, w, shape, kernels.Tile(4, 1))
    after = (state.layers[0].S, *state.layers[0].factors)
    assert all(map(torch.equal, before, after))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_tilings_give_the_same_bits(name: str) -> None:
    shape = GPU_SHAPES[name]
    trees = [random_parents(i, 16, 1 + i) for i in range(4)]
    first = None
    for parts in (1, 2, 8):
        for tile in map(kernels.Tile, (4, 8, 16, 8, 16, 32), (1, 1, 1, 2, 4, 4)):
            results = _on_gpu(shape, trees, tile, parts)
            first = first or results
            assert all(map(torch.equal, first, results)), (parts, tile)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_the_stream_kernel_gives_the_same_bits(name: str) -> None:
    """Every number of rows a lane can have; what `walk` chooses; parts; ragged trees; chains
    without a checkpoint."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the stream kernel is for compute capability 9.0")
    shape = GPU_SHAPES[name]
    side_by_side = 32 // kernels.lanes_for(shape.key_dim)
    tiles = [StreamTile(4 * side_by_side * rows, 4) for rows in (1, 2, 4)]
    tiles += [StreamTile(16 * side_by_side, 4, registers=168), None]
    tiles += [StreamTile(4 * side_by_side * rows, 4, late=True) for rows in (2, 4)]
    trees = [random_parents(i, count, 1 + i) for i, count in enumerate((16, 16, 11, 1))]
    chains: list[tuple[int, ...]] = [tuple(range(-1, count - 1)) for count in (16, 13, 1, 16)]
    for rounds, branching in ((trees, True), (chains, False)):
        want = _on_gpu(shape, rounds, kernels.Tile(8, 1), 1)
        for parts in (1, 2, 8):
            for tile in tiles:
                got = _on_gpu(shape, rounds, tile, parts, branching)
                assert all(map(torch.equal, want, got)), (parts, tile, branching)


def _on_gpu(
    shape: RecurrentShape,
    trees: list[tuple[int, ...]],
    tile: kernels.Tile | StreamTile | None,
    parts: int,
    branching: bool = True,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = State(shape, num_slots=4, max_nodes=16, log_capacity=8, device="cuda")
    layer = state.layers[0]
    for tensor in (layer.S, *layer.factors[:2], layer.tail, layer.inputs):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    layer.factors.g.copy_(-torch.rand(layer.factors.g.shape, generator=generator))
    slots = [state.acquire() for _ in trees]
    for slot, ring in zip(slots, (0, 3, 7, 8), strict=True):
        state.logs[slot].ring_len, state.logs[slot].path = ring, (0, 2)
    w = Layer(shape, generator)
    for name in ("conv", "A", "dt_bias"):
        setattr(w, name, getattr(w, name).cuda())
    rnd = state.begin(slots, [DraftTree(tuple(range(len(p))), p) for p in trees]).round  # type: ignore[union-attr]
    rnd = rnd._replace(walk=rnd.walk.new_zeros(4, parts, rnd.walk.shape[2]))
    compile_walks(rnd)
    columns = shape.conv_channels + 2 * shape.num_value_heads
    y = torch.randn(64, columns, generator=generator).cuda()
    o = by_kernels(state, rnd, y, w, shape, tile, branching)
    o = torch.cat([part[: len(p)] for part, p in zip(o.view(4, 16, -1), trees, strict=True)])
    return [o, layer.S, *layer.factors]


class Rows(NamedTuple):
    """What `prepare` reads, for B trees of N nodes: parents [B, N] int32, y [B N, C_in] and the
    raw inputs above each root, above [B, 3, C]."""

    parents: Tensor
    y: Tensor
    above: Tensor


def random_rows(shape: RecurrentShape, num_rows: int, num_nodes: int) -> Rows:
    generator = torch.Generator().manual_seed(num_nodes)
    channels = shape.conv_channels
    parents = [random_parents(b, num_nodes, 1 + 3 * b) for b in range(num_rows)]
    columns = channels + (shape.value_dim + 2) * shape.num_value_heads
    y = torch.randn(num_rows * num_nodes, columns, generator=generator)
    above = torch.randn(num_rows, 3, channels, generator=generator)
    return Rows(torch.tensor(parents, dtype=torch.int32), y, above)


def one_by_one(rows: Rows) -> Rows:
    """Every node as the only one of a row of its own, under a log of what is above it."""
    y = rows.y.view(*rows.parents.shape, -1)[:, :, : rows.above.shape[2]]
    windows = []
    for b, parents in enumerate(rows.parents.tolist()):
        paths: list[Tensor] = []
        for node, parent in enumerate(parents):
            path = paths[parent] if node else rows.above[b]
            paths.append(torch.cat([path, y[b, node : node + 1]])[-4:])
        windows += [path[:3] for path in paths]
    root = torch.full((len(rows.y), 1), -1, dtype=torch.int32, device=y.device)
    return Rows(root, rows.y, torch.stack(windows))


def prepared(
    rows: Rows,
    w: Layer,
    shape: RecurrentShape,
    span: kernels.Span | None = None,
    *,
    gated: bool = True,
) -> list[Tensor]:
    """q, v, beta, k, g, conv inputs and, where it makes them, gates [M, ...] of every node."""
    (num_rows, num_nodes), device = rows.parents.shape, rows.y.device
    entries, channels = max(num_nodes, 3), shape.conv_channels
    ints = partial(torch.full, dtype=torch.int32, device=device)
    empty = partial(torch.full, fill_value=NAN, device=device)
    heads, values = shape.num_key_heads, shape.num_value_heads
    factors = Factors(
        empty((num_rows, 2 * entries, heads, shape.key_dim)),
        empty(()),
        empty((num_rows, 2 * entries, values)),
    )
    tail = empty((num_rows, 2, 3, channels), dtype=rows.y.dtype)
    inputs = empty((num_rows, 2, entries, channels), dtype=rows.y.dtype)
    inputs[:, 0, :3] = rows.above
    zeros, path = ints((num_rows,), 0), torch.arange(entries, dtype=torch.int32, device=device)
    rnd = DeviceRound(
        slot=torch.arange(num_rows, dtype=torch.int32, device=device),
        num_nodes=ints((num_rows,), num_nodes),
        tokens=rows.parents,
        parents=rows.parents,
        bank=zeros,
        ring_len=zeros,
        path_len=ints((num_rows,), 3),
        path=path.repeat(num_rows, 1),
        walk=zeros,
    )
    workspace = kernels.Workspace.allocate(shape, len(rows.y), rows.y.dtype, device)
    layer = LayerState(empty(()), factors, tail, inputs)
    gates = empty(workspace.o.shape) if gated else None
    kernels.prepare(
        layer, rnd, rows.y, w.conv.t().contiguous(), w.A, w.dt_bias, workspace, shape=shape,
        log_capacity=0, span=span, gate=gates,
    )  # fmt: skip
    assert torch.equal(tail[:, 1], rows.above)
    written = slice(entries, entries + num_nodes)
    records = [factors.k[:, written], factors.g[:, written], inputs[:, 1, :num_nodes]]
    records = [x.flatten(0, 1) for x in records]
    made = [workspace.q, workspace.v, workspace.beta, *records]
    return made if gates is None else [*made, gates]


def assert_bits_are_the_nodes_own(
    rows: Rows, w: Layer, shape: RecurrentShape, spans: tuple[kernels.Span, ...]
) -> None:
    """Alone under a log, in its tree, its tree alone or among others, however it is cut, with
    gates or without."""
    alone = prepared(one_by_one(rows), w, shape)
    assert all(x.isfinite().all() for x in alone)
    for span in (None, *spans):
        assert all(map(torch.equal, prepared(rows, w, shape, span), alone)), span
        plain = prepared(rows, w, shape, span, gated=False)
        assert all(map(torch.equal, plain, alone[:-1])), span
    num_nodes = rows.parents.shape[1]
    first = prepared(Rows(rows.parents[:1], rows.y[:num_nodes], rows.above[:1]), w, shape)
    assert all(torch.equal(x, y[:num_nodes]) for x, y in zip(first, alone, strict=True))


def test_a_nodes_inputs_are_its_own() -> None:
    shape = SHAPES["two value heads per key head"]
    w = Layer(shape, torch.Generator().manual_seed(0))
    assert_bits_are_the_nodes_own(random_rows(shape, 2, 3), w, shape, (kernels.Span(1, 2),))


def test_gates_have_been_through_silu() -> None:
    shape = SHAPES["two value heads per key head"]
    rows = random_rows(shape, 2, 3)
    gates = prepared(rows, Layer(shape, torch.Generator().manual_seed(0)), shape)[-1]
    columns = slice(shape.conv_channels, -2 * shape.num_value_heads)
    want = torch.nn.functional.silu(rows.y[:, columns]).view_as(gates)
    torch.testing.assert_close(gates, want, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_a_nodes_inputs_have_the_same_bits_alone(name: str) -> None:
    shape = GPU_SHAPES[name]
    w = Layer(shape, torch.Generator().manual_seed(0))
    w.conv, w.A, w.dt_bias = w.conv.cuda().bfloat16(), w.A.cuda(), w.dt_bias.cuda()
    spans = tuple(kernels.Span(warps, tiles) for warps in (1, 2, 4, 8) for tiles in (1, 2, 16))
    for num_nodes in (1, 4, 16, 64):
        rows = random_rows(shape, 3, num_nodes)
        y, above = rows.y.cuda().bfloat16(), rows.above.cuda().bfloat16()
        assert_bits_are_the_nodes_own(Rows(rows.parents.cuda(), y, above), w, shape, spans)
