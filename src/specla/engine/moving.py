# SPDX-License-Identifier: Apache-2.0
"""Moving: rows on a GPU go from one bucket to another, and others join them, while the host waits
for nothing.

What a round knows of a row is a few integers at the row's place: they are gathered from one
bucket's memory and laid out in the other's, where rows that are left out leave no gap. Loading the
device anew instead means to wait for the round under way, to read it back, and to send all that
again, while the device has nothing to do: of 16 rows 4.3 ms with a drafter that reads features, of
64 rows 14.7 (1.3 billion parameters on an H200, where plain rounds take 1.4 and 2.6; ADR 0022).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specla.engine.device_rows import BucketRound, fill_rows
from specla.engine.running import Running
from specla.ops.transfer import ints, sent
from specla.state.log import Log

# Words about a row that joins, its path last; node 0 is its only one.
FIELDS = ("slot", "num_nodes", "bank", "ring_len", "path_len", "path")


def move(one: BucketRound, other: BucketRound, places: Sequence[int]) -> None:
    """The rows at `places` of one bucket are the first of the other from here on; the rest of
    those are idle. Their next round's node 0 and its cursors go along, trees do not."""
    at, count = ints(places, one.rnd.slot.device), len(places)
    # All of it first: buckets of as many rows share their memory.
    cursors = {name: getattr(one.rnd, name).index_select(0, at) for name in FIELDS}
    roots = one.rnd.tokens[:, 0].index_select(0, at)
    arrays = [x.index_select(0, at) for x in one.rows]
    clear(other)
    for name, values in cursors.items():
        getattr(other.rnd, name)[:count].copy_(values)
    other.rnd.tokens[:count, 0].copy_(roots)
    for into, values in zip(other.rows, arrays, strict=True):
        into[:count].copy_(values)


def clear(one: BucketRound) -> None:
    """All of its rows are idle, and the next round's trees node 0 alone."""
    one.rnd.slot.zero_()
    one.rnd.num_nodes.zero_()
    one.rnd.parents[:, 0].fill_(-1)


def join(one: BucketRound, rows: Sequence[Running], logs: Sequence[Log], *, first: int) -> None:
    """These rows are at the places from `first` on; logs: of all slots."""
    words = torch.zeros(len(rows), len(FIELDS) + one.rnd.path.shape[1], dtype=torch.int32)
    for line, row in zip(words, rows, strict=True):
        log = logs[row.slot]
        known = row.tokens[-1], row.slot, 1, log.bank, log.ring_len, len(log.path), *log.path
        line[: len(known)] = torch.tensor(known, dtype=torch.int32)
    there, places = sent(words, one.rnd.slot.device), slice(first, first + len(rows))
    one.rnd.tokens[places, 0] = there[:, 0]
    for i, name in enumerate(FIELDS[:-1], 1):
        getattr(one.rnd, name)[places] = there[:, i]
    one.rnd.path[places] = there[:, len(FIELDS) :]
    fill_rows(one.rows, rows, first=first, history=True)
