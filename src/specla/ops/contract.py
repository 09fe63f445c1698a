# SPDX-License-Identifier: Apache-2.0
"""What ops, state and models agree on: shapes, the factor record, one round's plan.

Letters: B rows, M nodes of all rows laid end to end, N nodes of one tree, H key heads, G value
heads (G % H == 0; value head h reads key head h // (G // H)), K key dim, V value dim, W conv
width, C conv channels (2 H K + G V, ordered q | k | v), R log capacity, L layers, D model width.
State is [slots, G, V, K] float32, K contiguous (fla's V-first).

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
    all float32. Leading axes say where the record lives (nodes, ring, bank).
    """

    k: Tensor
    u: Tensor
    g: Tensor


class LayerState(NamedTuple):
    """Views of one layer of State; every tensor's first axis is the slot.

    S [slots, G, V, K] float32; ring Factors [slots, R, ...]; bank Factors [slots, 2, N, ...];
    tail [slots, 2, W-1, C] raw conv inputs, oldest first; inputs [slots, 2, N, C] raw conv
    inputs of the candidates; tail and inputs in the activation dtype.
    """

    S: Tensor
    ring: Factors
    bank: Factors
    tail: Tensor
    inputs: Tensor


class Level(NamedTuple):
    """All nodes of one depth, over all rows. `nodes` [n] index the flat node axis M; `source`
    [n] index the previous level's states (at depth 0: the rows)."""

    nodes: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Everything a verify needs to know, fixed before layer 0 and shared by all layers.

    The log of row b is ring[:ring_len[b]] followed by bank[read_bank[b], path[b, :path_len[b]]].
    Verify replays it on the live state, folds it into S where `fold`, else appends the path's
    part to the ring; it writes candidates' factors, conv inputs and the new tail to bank
    1 - read_bank. Nothing a rejected branch could reach is written.

    Flat nodes are row-major: node i of row b is at `offsets[b] + i`.

    Attributes:
        slots, read_bank, ring_len, path_len, num_nodes: int64 [B].
        path: int64 [B, P], entries past path_len are 0 and never read.
        fold: bool [B].
        row, index: int64 [M], the row of each flat node and its index in the row's tree.
        parent: int64 [M], flat index of each node's parent; -1 for roots.
        ancestors: int64 [M, W-1], conv history of each node, nearest first: values >= 0 are
            flat nodes, -1 is the tail's newest entry, -2 the one before, and so on.
        levels: nodes by depth.
        offsets: host ints, [B + 1].
        trees: the rows' trees, host side.
    """

    slots: Tensor
    read_bank: Tensor
    ring_len: Tensor
    path: Tensor
    path_len: Tensor
    fold: Tensor
    num_nodes: Tensor
    row: Tensor
    index: Tensor
    parent: Tensor
    ancestors: Tensor
    levels: tuple[Level, ...]
    offsets: tuple[int, ...]
    trees: tuple[DraftTree, ...]
