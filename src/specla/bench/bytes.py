# SPDX-License-Identifier: Apache-2.0
"""Bytes each method must move per layer, counted from its algorithm: every input once, every
output once, states as often as the method touches them. Not measured; caches can only help.

Letters as in ops/contract.py; all of state, factors and prepared inputs is float32, activations
are 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from specla.bench.kernel_cases import Case
from specla.topology.schedule import Schedule

FLOAT, HALF = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes read and written by one layer's launches."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(read=self.read + other.read, written=self.written + other.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of the parts, for all rows of a case.

    state: S of every row. factor: one log entry (k, u, g) of every row. node_in: prepared q, k,
    v, g, beta of one node of every row; node_out: its o; node_u: its u. activation: q, k, v and
    gates of one node of every row in the activation dtype.
    """

    state: int
    factor: int
    node_in: int
    node_out: int
    node_u: int
    activation: int
    conv: int


def sizes(case: Case) -> Sizes:
    """The parts of one layer."""
    s, rows = case.shape, case.num_rows
    keys, values = s.num_key_heads * s.key_dim, s.num_value_heads * s.value_dim
    heads = s.num_value_heads
    return Sizes(
        state=rows * values * s.key_dim * FLOAT,
        factor=rows * (keys + values + heads) * FLOAT,
        # The state kernel reads v in the activation dtype; q, k, g and beta in float32.
        node_in=rows * (2 * keys * FLOAT + values * HALF + 2 * heads * FLOAT),
        node_out=rows * values * FLOAT,
        node_u=rows * values * FLOAT,
        activation=rows * (s.conv_channels + 2 * heads) * HALF,
        conv=rows * s.conv_channels * HALF,
    )


def transient_bytes(case: Case) -> dict[str, int]:
    """Memory per sequence and layer that exists only for one verify's candidates; "recurrent" is
    the part without the convolution's inputs."""
    one, n = sizes(case), case.num_nodes
    rows, taps = case.num_rows, case.shape.conv_width - 1
    return {
        "snapshots": (n * one.state + n * taps * one.conv) // rows,
        "factors": (n * one.factor + n * one.conv) // rows,
        "recurrent snapshots": n * one.state // rows,
        "recurrent factors": n * one.factor // rows,
        "state": one.state // rows,
    }


def walk(case: Case) -> Traffic:
    """Our state kernel: S read once; written where the fold is due, else the path's factors are
    moved to the ring."""
    one, n = sizes(case), case.num_nodes
    moved = 0 if case.fold_due else len(case.path) * one.factor
    return Traffic(
        read=one.state + case.log_len * one.factor + n * one.node_in,
        written=(one.state if case.fold_due else 0) + moved + n * (one.node_u + one.node_out),
    )


def prepare(case: Case) -> Traffic:
    """Our convolution, norms and gates: projections in, prepared inputs and conv inputs out."""
    one, n = sizes(case), case.num_nodes
    taps = (case.shape.conv_width - 1) * one.conv
    return Traffic(
        read=n * one.activation + taps,
        written=n * (one.node_in + one.conv) + taps,
    )


def snapshots(case: Case, *, commit: bool) -> Traffic:
    """A state per node: one read (the parent's) and one write each; the commit copies one."""
    one, n = sizes(case), case.num_nodes
    copies = n + int(commit)
    io_read, io_written = n * one.node_in, n * one.node_out
    return Traffic(read=copies * one.state + io_read, written=copies * one.state + io_written)


def waves(case: Case) -> Traffic:
    """Heavy-light chains: the root's reads S and the log, every other one a stored state; one is
    stored per branching node, and S where the fold is due."""
    one, n, schedule = sizes(case), case.num_nodes, Schedule.from_parents(case.parents)
    stored = schedule.num_boundaries + int(case.fold_due)
    return Traffic(
        read=schedule.num_chains * one.state + case.log_len * one.factor + n * one.node_in,
        written=stored * one.state + n * (one.node_u + one.node_out),
    )


def read_only_verify(case: Case) -> Traffic:
    """A verify that reads S and leaves nothing but outputs."""
    one, n = sizes(case), case.num_nodes
    return Traffic(read=one.state + n * one.node_in, written=n * one.node_out)


def paths(case: Case) -> Traffic:
    """Root-to-leaf replay: every leaf reads S and runs its whole path again."""
    one, leaves = sizes(case), case.leaf_paths()
    steps = sum(map(len, leaves))
    return Traffic(
        read=len(leaves) * one.state + steps * one.node_in, written=steps * one.node_out
    )


def commit(case: Case) -> Traffic:
    """A fold in a launch of its own."""
    one = sizes(case)
    return Traffic(read=one.state + case.log_len * one.factor, written=one.state)


def token_replay(case: Case) -> Traffic:
    """The accepted tokens' recurrence once more, S read and written."""
    one = sizes(case)
    return Traffic(read=one.state + len(case.accepted) * one.node_in, written=one.state)


def decode(case: Case) -> Traffic:
    """One token in place."""
    one = sizes(case)
    return Traffic(read=one.state + one.node_in, written=one.state + one.node_out)


def ring_chain(case: Case, pending: int) -> Traffic:
    """ReplaySSM's verify without a flush: S read, `pending` records (d, k in 2 bytes, g) read,
    two 2-byte copies of the inputs and gates written per node."""
    one, n, s = sizes(case), case.num_nodes, case.shape
    record = case.num_rows * (
        (s.num_key_heads * s.key_dim + s.num_value_heads * s.value_dim) * HALF
        + s.num_value_heads * FLOAT
    )
    return Traffic(
        read=one.state + pending * record + n * one.activation,
        written=n * (2 * record + one.node_out // 2),
    )
