# SPDX-License-Identifier: Apache-2.0
"""What ops, state and models agree on: shapes, the factor record, one round's plan.

Letters: B rows, M nodes of all rows laid end to end, N nodes of one tree, H key heads, G value
heads (G % H == 0; value head h reads key head h // (G // H)), K key dim, V value dim, W conv
width, C conv channels (2 H K + G V, ordered q | k | v), R log capacity, E log entries
(R + 2 N), L layers, D model width. State is [slots, G, V, K] float32, K contiguous (V-first).

    u_i = beta_i (v_i - e^{g_i} S_parent k_i)     S_i = e^{g_i} S_parent + u_i k_i^T
    o_i = S_i q_i   (q already scaled by K^-1/2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specla.topology.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Sizes of one model's recurrent layers, the same for every layer."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def conv_channels(self) -> int:
        """C: channels of the fused q | k | v convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class Factors(NamedTuple):
    """What one token adds to a layer: enough to replay its update without the projections.

    k [..., H, K] normalised key, u [..., G, V] corrected value, g [..., G] log decay <= 0;
    all float32. Leading axes say where the record lives.
    """

    k: Tensor
    u: Tensor
    g: Tensor


class LayerState(NamedTuple):
    """Views of one layer of State; every tensor's first axis is the slot.

    S [slots, G, V, K] float32. factors [slots, E, ...]: entries 0..R-1 are the ring, then
    candidate bank 0 (N entries), then bank 1. tail [slots, 2, W-1, C]: the raw conv inputs of
    the last W - 1 committed tokens, oldest first. inputs [slots, 2, N, C]: the candidates' raw
    conv inputs. tail and inputs are in the activation dtype.
    """

    S: Tensor
    factors: Factors
    tail: Tensor
    inputs: Tensor


# Positions on one axis: int64 [n], or a slice where they are consecutive (a view, not a copy).
Places = Tensor | slice


class Level(NamedTuple):
    """All nodes of one depth, over all rows: nodes [n], places on the flat node axis M.

    above [p]: the places of the nodes that they stand below; None at depth 0, where every row's
    state goes on in one node. carried [p]: where these stand in the previous level; None: they
    are all of it. source [n]: which of `above` each node stands below; None: each one a node.
    """

    nodes: Places
    above: Places | None
    carried: Tensor | None
    source: Tensor | None


class Replay(NamedTuple):
    """The j-th log entry of every row whose log is longer than j: rows [n], slots [n],
    entries [n]; `all_rows` is set where no row is left out."""

    rows: Tensor
    slots: Tensor
    entries: Tensor
    all_rows: bool


class Moves(NamedTuple):
    """Log entries that verify copies from the candidate bank to the ring as it passes them."""

    slots: Tensor
    source: Tensor
    target: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Everything a verify needs to know, fixed before layer 0 and shared by all layers.

    Verify replays each row's log on the live state, folds it into S where `fold`, else moves the
    path's entries to the ring; it writes candidates' factors, conv inputs and the new tail to
    bank `1 - read_bank`. Nothing a rejected branch could reach is written, and every entry
    written is one that no row of this round reads.

    Flat nodes are row-major: node i of row b is at offsets[b] + i.

    Attributes (Tensors are int64 unless said):
        slots [B], read_bank [B].
        replay: the log, entry by entry, in order.
        fold_rows [F], fold_slots [F]: the rows whose S is written.
        moves: entries that become part of the ring, or None.
        tokens [M], node_slot [M], node_index [M]: token, slot and index in its tree of each
            flat node.
        write_bank [M], write_entry [M]: where each node's record goes.
        levels: nodes by depth.
        tail_source [B, W-1]: the new tail, as indices into (old tail | inputs of read_bank).
        rows [B, 1]: 0 .. B-1, to go with it.
        taps: W times M places: each node's conv taps, oldest first, in (new tails of all rows,
            row-major | flat nodes).
        offsets [B + 1], trees [B]: host side.
    """

    slots: Tensor
    read_bank: Tensor
    replay: tuple[Replay, ...]
    fold_rows: Tensor
    fold_slots: Tensor
    moves: Moves | None
    tokens: Tensor
    node_slot: Tensor
    node_index: Tensor
    write_bank: Tensor
    write_entry: Tensor
    levels: tuple[Level, ...]
    tail_source: Tensor
    rows: Tensor
    taps: tuple[Places, ...]
    offsets: tuple[int, ...]
    trees: tuple[DraftTree, ...]


class DeviceRound(NamedTuple):
    """One round's integers on the device, at fixed addresses, so that a CUDA graph can replay
    over them. All int32. Node i of row b is row b * N + i of every activation.

    slot [B]: the row's slot; 0 for padding. num_nodes [B]: 0 for a row that does nothing.
    tokens, parents [B, N]: the trees; entries from num_nodes on are never looked at.
    bank [B]: the candidate bank that holds the log's tail; this round writes the other.
    ring_len, path_len [B], path [B, N_max]: the log is ring entries 0 .. ring_len - 1, then
        entries R + bank * N_max + path[0 .. path_len - 1]. A fold is due iff it is longer than
        the threshold that the kernels are given.
    walk [B, P, 1 + capacity]: the trees compiled by `ops.walk.compile_walks` into P parts each;
        word 0 is the count.
    """

    slot: Tensor
    num_nodes: Tensor
    tokens: Tensor
    parents: Tensor
    bank: Tensor
    ring_len: Tensor
    path_len: Tensor
    path: Tensor
    walk: Tensor


class RowArrays(NamedTuple):
    """What the device knows about the rows of a round; all [B, ...], written by the host when a
    row joins and by `accept` from then on. A row is live while its `num_nodes` is not 0.

    seed [B] int64: the request's noise seed, an unsigned number's bits.
    len_tokens [B] int32: prompt and output so far, the last one being node 0.
    remaining [B] int32: tokens that may still be emitted, >= 1 while the row is live.
    temperature [B] float64: 0 is greedy.
    ends [B, E] int32: token ids that end the row, padded with -1.
    history [B, max_len] int32: prompt and output so far, in entries 0 .. len_tokens - 1.
    """

    seed: Tensor
    len_tokens: Tensor
    remaining: Tensor
    temperature: Tensor
    ends: Tensor
    history: Tensor


class DevicePlan(NamedTuple):
    """What `RoundPlan` is to the CPU: one round for the GPU kernels.

    round: the integers; offsets [B]: node i of row b is flat row offsets[b] + i (host side).
    kernel: what verifies it, one of `TargetModel.kernels`; None: the default of exact mode. It
    goes with the round, as engines of several modes may share a model.
    """

    round: DeviceRound
    offsets: tuple[int, ...]
    kernel: str | None = None
