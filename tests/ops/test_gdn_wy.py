# SPDX-License-Identifier: Apache-2.0
"""The tree-masked kernel against the float64 oracle, and bitwise where it only moves things.

Tier: budget, of norms. Two bfloat16 pieces keep 17 bits of each factor, and the product of the low
ones is left out; sums are float32: 2e-5. What no row may read is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from random_inputs import (
    TREES,
    ancestors,
    correlated_keys,
    oracle,
    random_inputs,
    random_parents,
    random_state,
    with_keys,
)
from torch import Tensor

from specla.ops.contract import DeviceRound, Factors, LayerState, RecurrentShape
from specla.ops.gdn.reference import Inputs, per_value_head
from specla.ops.gdn.triton import Workspace
from specla.ops.gdn.triton_wy import Tile, compile_masks, tile_for, walk_wy
from specla.ops.gdn.triton_wy_form import ClosedForm
from specla.ops.gdn.triton_wy_stream import StreamTile

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LIMIT = 2e-5
NAN = float("nan")


def shape(H: int = 1, G: int = 2, K: int = 32, V: int = 16) -> RecurrentShape:
    return RecurrentShape(
        num_layers=1, num_key_heads=H, num_value_heads=G, key_dim=K, value_dim=V, conv_width=4
    )


@dataclass(kw_only=True)
class Row:
    """One row of a round; without parents it is idle. path: entries of the last verify's bank."""

    parents: Sequence[int] = (-1,)
    ring_len: int = 0
    path: Sequence[int] = ()
    bank: int = 0
    x: Inputs | None = None
    fastest: float = -1.5
    truth: dict[str, Tensor] = field(default_factory=dict)

    @property
    def log_len(self) -> int:
        return self.ring_len + len(self.path)


class Case:
    """The tensors of one layer and one round, what the kernel must make of them, and the run."""

    def __init__(
        self,
        rows: Sequence[Row],
        shape: RecurrentShape,
        *,
        nodes: int,
        R: int = 4,
        threshold: int | None = None,
        max_nodes: int | None = None,
        seed: int = 0,
    ) -> None:
        self.rows, self.shape, self.N, self.R, self.seed = rows, shape, nodes, R, seed
        self.threshold = R if threshold is None else threshold
        self.Nmax, self.max_log = max_nodes or nodes, max(row.log_len for row in rows)
        # Slots in another order than rows.
        self.slots = [len(rows) - b for b in range(len(rows))]
        self.layer = self._garbage()
        self.work = self._workspace()
        for b, row in enumerate(rows):
            self._fill(b, row)
        self.want = Factors(*(f.clone() for f in self.layer.factors))
        self.before = self.layer.S.clone()
        for b, row in enumerate(rows):
            if row.parents:
                self._expect(b, row)

    def entry(self, row: Row, j: int) -> int:
        """Of the log."""
        if j < row.ring_len:
            return j
        return self.R + row.bank * self.Nmax + row.path[j - row.ring_len]

    def candidates(self, row: Row) -> slice:
        start = self.R + (1 - row.bank) * self.Nmax
        return slice(start, start + len(row.parents))

    def _garbage(self) -> LayerState:
        s, slots, entries = self.shape, len(self.rows) + 1, self.R + 2 * self.Nmax
        G, V, K = s.num_value_heads, s.value_dim, s.key_dim
        return LayerState(
            S=torch.stack([random_state(self.seed + i, s, torch.float32) for i in range(slots)]),
            factors=Factors(
                torch.full((slots, entries, s.num_key_heads, K), NAN),
                torch.full((slots, entries, G, V), NAN),
                torch.full((slots, entries, G), NAN),
            ),
            tail=torch.empty(0),
            inputs=torch.empty(0),
        )

    def _workspace(self) -> Workspace:
        space = Workspace.allocate(self.shape, len(self.rows) * self.N, torch.float32, "cpu")
        for tensor in (space.q, space.v, space.beta, space.o):
            tensor.fill_(NAN)
        return space

    def _fill(self, b: int, row: Row) -> None:
        slot, n = self.slots[b], len(row.parents)
        log = random_inputs(
            100 * self.seed + b, max(row.log_len, 1), self.shape, dtype=torch.float32
        )
        for j in range(row.log_len):
            at = (slot, self.entry(row, j))
            for store, value in zip(self.layer.factors, (log.k, log.v, log.g), strict=True):
                store[at] = value[j]
        if not n:
            return
        if row.x is None:
            row.x = random_inputs(
                7 + 100 * self.seed + b, n, self.shape,
                dtype=torch.float32, max_beta=1.0, fastest=row.fastest,
            )  # fmt: skip
        k, _, g = self.layer.factors
        k[slot, self.candidates(row)], g[slot, self.candidates(row)] = row.x.k, row.x.g
        flat = slice(b * self.N, b * self.N + n)
        self.work.q[flat], self.work.v[flat] = row.x.q, row.x.v
        self.work.beta[flat] = row.x.beta

    def _expect(self, b: int, row: Row) -> None:
        """Truth in float64; moves in `want`."""
        slot, G = self.slots[b], self.shape.num_value_heads
        S = self.before[slot].double()
        for j in range(row.log_len):
            k, u, g = (f[slot, self.entry(row, j)].double() for f in self.layer.factors)
            S = S * g.exp()[:, None, None] + u[:, :, None] * per_value_head(k, G)[:, None, :]
            if row.log_len <= self.threshold:
                for f in self.want:
                    f[slot, j] = f[slot, self.entry(row, j)]
        assert row.x is not None
        truth = oracle(S, row.x, row.parents)
        row.truth = {"S": S, "o": truth.o, "u": truth.u}

    def round(self) -> DeviceRound:
        def ints(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        def wide(values: Sequence[int], width: int) -> list[int]:
            # What is past the end must not be looked at.
            return [*values, *[-(2**30)] * (width - len(values))]

        rows = self.rows
        return DeviceRound(
            slot=ints(self.slots),
            num_nodes=ints([len(r.parents) for r in rows]),
            tokens=ints([[0] * self.N for _ in rows]),
            parents=ints([wide(r.parents, self.N) for r in rows]),
            bank=ints([r.bank for r in rows]),
            ring_len=ints([r.ring_len for r in rows]),
            path_len=ints([len(r.path) for r in rows]),
            path=ints([wide(r.path, self.Nmax) for r in rows]),
            walk=ints([[[0]] for _ in rows]),
        )

    def run(
        self, tile: Tile | StreamTile | None = None, *, pdl: bool = False, replays: int = 0
    ) -> Case:
        """Once; then `replays` times from one graph, each time from the start."""

        def move(x: Tensor) -> Tensor:
            return x.to(DEVICE, copy=True)

        factors = Factors(*map(move, self.layer.factors))
        layer = self.layer._replace(S=move(self.layer.S), factors=factors)
        work, rnd = Workspace(*map(move, self.work)), DeviceRound(*map(move, self.round()))
        form = ClosedForm.allocate(self.shape, len(self.rows), self.Nmax, self.max_log, DEVICE)

        def once() -> None:
            log = {"log_capacity": self.R, "max_log": self.max_log}
            compile_masks(rnd, form, **log)
            log["threshold"] = self.threshold
            walk_wy(layer, rnd, work, form, shape=self.shape, tile=tile, pdl=pdl, **log)

        once()
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                taken = torch.cuda.memory_stats()["allocation.all.allocated"]
                once()
                assert torch.cuda.memory_stats()["allocation.all.allocated"] == taken
        for _ in range(replays):
            starts = (self.layer.S, *self.layer.factors, *self.work)
            for tensor, start in zip((layer.S, *factors, *work), starts, strict=True):
                tensor.copy_(start)
            graph.replay()
        self.o = work.o.cpu().unflatten(0, (len(self.rows), self.N))
        self.S, self.factors = layer.S.cpu(), Factors(*(f.cpu() for f in factors))
        return self

    def check(self, limit: float = LIMIT) -> None:
        for b, row in enumerate(self.rows):
            slot, n = self.slots[b], len(row.parents)
            assert self.o[b, n:].isnan().all()
            if n:
                self._check_row(b, row, limit)
            else:
                assert same(self.S[slot], self.before[slot])
        # Whatever was not this round's to write has its bits; k and g are never computed.
        for name in Factors._fields:
            assert same(getattr(self.factors, name), getattr(self.want, name)), name
        assert same(self.S[0], self.before[0])

    def _check_row(self, b: int, row: Row, limit: float) -> None:
        slot = self.slots[b]
        written = self.factors.u[slot, self.candidates(row)]
        assert error(self.o[b, : len(row.parents)], row.truth["o"]) < limit
        assert error(written, row.truth["u"]) < limit
        if row.log_len > self.threshold:
            assert error(self.S[slot], row.truth["S"]) < limit
        else:
            assert same(self.S[slot], self.before[slot])
        self.want.u[slot, self.candidates(row)] = written


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def error(got: Tensor, truth: Tensor) -> float:
    """Relative, of the norm; NaN if anything is."""
    return ((got.double() - truth).norm() / truth.norm()).item()


def rows(*given: Row) -> list[Row]:
    """Copies: a case fills its rows in."""
    return [replace(row, truth={}) for row in given]


def chain(count: int) -> tuple[int, ...]:
    return tuple(range(-1, count - 1))


@pytest.mark.parametrize("size", [1, 2, 16, 33, 64])
def test_ancestors(size: int) -> None:
    trees = [random_parents(i, size, reach) for i, reach in enumerate((1, 3, size))]
    case = Case([Row(parents=t) for t in trees] + [Row(parents=())], shape(), nodes=size)
    form = ClosedForm.allocate(case.shape, 4, size, case.max_log, DEVICE)
    out = form.ancestors.fill_(77)
    rnd = DeviceRound(*(t.to(DEVICE) for t in case.round()))
    compile_masks(rnd, form, log_capacity=case.R, max_log=case.max_log)
    for tree, bits in zip(trees, out.cpu().unflatten(0, (4, size)), strict=False):
        mask = (bits[:, None] >> torch.arange(size)) & 1
        assert torch.equal(mask.bool(), ancestors(tree))
    assert (out[3 * size :] == 77).all()


MIXED = (
    Row(parents=TREES["binary"]),
    Row(parents=TREES["out of order"], ring_len=2, path=(0, 3), bank=1),
    Row(parents=()),
    Row(parents=(-1,), ring_len=4, path=(0,)),
    Row(parents=TREES["star"], path=(0, 1, 5), bank=1),
    Row(parents=(), ring_len=4, path=(0, 2)),
)


@pytest.mark.parametrize("s", [shape(), shape(2, 2, 16, 32)], ids=["G2H", "H2"])
def test_rows_of_all_kinds(s: RecurrentShape) -> None:
    Case(rows(*MIXED), s, nodes=16).run().check()


@pytest.mark.parametrize("size", [1, 15, 33, 64])
def test_random_trees(size: int) -> None:
    trees = [random_parents(size, size, 3), random_parents(size + 1, size)]
    Case([Row(parents=t, path=(0,)) for t in trees], shape(), nodes=size, R=0).run().check()


@pytest.mark.parametrize("threshold", [0, 4, 20])
def test_logs_of_every_length(threshold: int) -> None:
    """From empty to R + N entries, folded in one pass over S or in several, or moved."""
    logs = [(0, 0), (0, 1), (4, 0), (4, 1), (9, 8), (20, 0), (20, 16)]
    cases = [
        Row(parents=TREES["comb"], ring_len=ring, path=sorted({*range(path)}), bank=i % 2)
        for i, (ring, path) in enumerate(logs)
    ]
    Case(cases, shape(1, 1), nodes=16, R=20, threshold=threshold).run().check()


def test_a_bank_wider_than_the_round() -> None:
    """The last tree may have been larger than this round's bucket."""
    cases = [Row(parents=(-1, 0), ring_len=1, path=(0, 7, 30)), Row(parents=(-1,), path=(0, 31))]
    Case(cases, shape(), nodes=2, max_nodes=32).run().check()


def hard_keys(correlation: float, count: int, s: RecurrentShape) -> Inputs:
    x = random_inputs(5, count, s, dtype=torch.float32)
    return with_keys(x, correlated_keys(6, count, correlation, s), beta=0.95, g=-1e-3)


@pytest.mark.parametrize("correlation", [0.9, 1.0], ids=["alike", "repeated"])
@pytest.mark.parametrize("size", [16, 64])
def test_keys_that_are_alike(size: int, correlation: float) -> None:
    """Powers of A fail here from 32 nodes on."""
    s = shape(1, 1)
    trees = [chain(size), random_parents(size, size, 2)]
    cases = [
        Row(parents=t, path=(0, 1), bank=i, x=hard_keys(correlation, size, s))
        for i, t in enumerate(trees)
    ]
    Case(cases, s, nodes=size, R=0).run().check()


def test_strong_decay() -> None:
    """e^-G would overflow from 36 nodes of -2.5 on."""
    s, cases = shape(1, 1), []
    for parents, g in ((chain(64), -2.5), (random_parents(3, 50, 2), -2.5), (chain(20), -20.0)):
        x = random_inputs(9, len(parents), s, dtype=torch.float32, max_beta=1.0)
        cases.append(Row(parents=parents, path=(0,), x=x._replace(g=torch.full_like(x.g, g))))
    Case(cases, s, nodes=64, R=0).run().check()


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 2, 1, 32), Tile(32, 64, 4, 1)])
def test_tiles(tile: Tile) -> None:
    Case(rows(*MIXED[:2]), shape(1, 1, 64, 32), nodes=16).run(tile=tile).check()


def test_runs_repeat() -> None:
    runs = [Case(rows(MIXED[1]), shape(1, 1), nodes=16).run() for _ in range(2)]
    assert same(runs[0].o, runs[1].o)
    assert same(runs[0].S, runs[1].S)
    assert same(runs[0].factors.u, runs[1].factors.u)


def test_a_tile_for_every_shape() -> None:
    """Tiles divide V and K."""
    for K, V in ((16, 16), (64, 256), (256, 64), (128, 128)):
        for size in (1, 16, 64):
            for num_rows in (1, 8, 64):
                tile = tile_for(shape(8, 8, K, V), num_rows, size)
                assert V % tile.rows == 0
                assert K % tile.columns == 0


def ragged(count: int, R: int, seed: int) -> list[Row]:
    """Trees of all sizes up to 16, logs of all lengths, and rows that are idle."""
    rng, found = random.Random(seed), []
    for i in range(count):
        size = rng.choice((0, 1, 16, rng.randint(1, 16)))
        path = sorted(rng.sample(range(16), rng.choice((0, 1, rng.randint(1, 16), 16))))
        parents = random_parents(i, size, rng.randint(1, 16)) if size else ()
        found.append(Row(parents=parents, ring_len=rng.randint(0, R), path=path, bank=i % 2))
    return found


def far(a: Tensor, b: Tensor) -> float:
    """Relative to the largest value; NaN in the same places."""
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(), b.nan_to_num()
    return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "count", "R", "threshold"),
    # A program has tiles of one row; of several.
    [((16, 32), 8, 16, 16), ((1, 1), 200, 4, 2)],
)
def test_the_stream_kernel(heads: tuple[int, int], count: int, R: int, threshold: int) -> None:
    """The kernel of `ops.gdn.triton_wy_stream` against the oracle and `_apply_kernel`; its bits
    over repeats, over programs and in a graph. One head's outputs may cancel: a wider limit."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the stream kernel is for compute capability 9.0")
    case = Case(
        ragged(count, R, count), shape(*heads, 128, 128), nodes=16, R=R, threshold=threshold
    )
    assert {row.log_len > threshold for row in case.rows if row.parents} == {False, True}
    case.run(Tile(64, 32, 4, 3), pdl=True).check(2e-4)
    want = case.o, case.S, case.factors.u
    runs = []
    for programs, replays in ((2, 0), (1, 0), (2, 1), (2, 2)):
        case.run(StreamTile(programs), pdl=True, replays=replays).check(2e-4)
        runs.append((case.o, case.S, case.factors.u))
    assert all(far(a, b) < 1e-4 for a, b in zip(want, runs[0], strict=True))
    for run in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], run, strict=True))
