# SPDX-License-Identifier: Apache-2.0
"""Flight: the rows that a GPU has, while the host is one round behind it. No device in here.

Rows have places 0 .. B-1. A row that ends by itself stays in its place, idle; one that the host
ends (a stop string, an abort, an error) has a finish reason, and what the device still makes of
it is nobody's: its slot may be another row's by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from specla.engine.running import Running
from specla.sampling.accept import Finish, Verdict
from specla.sampling.triton import FINISH_INVALID, FINISH_LENGTH, FINISH_STOP, VERDICT_HEADER
from specla.state.log import Log

FINISHES: dict[int, Finish] = {
    FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_INVALID: "error",
}  # fmt: skip
# A row's bank, ring_len and path_len on the device, then its path.
Cursors = tuple[int, int, int, Sequence[int]]


class Flight:
    """rows: as the device has them, by place. unread: a round is under way that nobody has
    read."""

    def __init__(self) -> None:
        self.rows: list[Running] = []
        self.unread = False
        self._ended: set[Running] = set()

    def places(self, rows: Sequence[Running]) -> tuple[list[int], list[Running]] | None:
        """Where the device has those of these rows that it has, and the others, which join. None
        if it has none of them, or one that has neither ended there by itself nor goes on."""
        live = {row: place for place, row in enumerate(self.rows) if row not in self._ended}
        if not live or not live.keys() <= set(rows):
            return None
        return list(live.values()), [row for row in rows if row not in live]

    def load(self, rows: Sequence[Running]) -> None:
        """The device is given these rows."""
        assert not self.unread, "land() first"
        self.rows, self._ended = list(rows), set()

    def move(self, places: Sequence[int], joining: Sequence[Running]) -> None:
        """Only the rows at these places are left there from the next round on, and those that
        join."""
        self.rows = [*(self.rows[place] for place in places), *joining]

    def read(
        self, words: Sequence[Sequence[int]], rows: Sequence[Running]
    ) -> list[tuple[Running, Verdict]]:
        """What a round over `rows` came to, from the device's words [B, ...]."""
        verdicts = []
        for row, line in zip(rows, words, strict=False):
            emitted, finish = line[:2]
            if row.finish_reason is None and (emitted or finish):
                verdicts.append((row, to_verdict(line)))
            if finish:
                self._ended.add(row)
        return verdicts

    def land(self, logs: Sequence[Log], cursors: Sequence[Cursors]) -> None:
        """The device's cursors become the logs', by slot, and it has no rows any more. The rows'
        tokens are those from before the last round."""
        for row, (bank, ring_len, path_len, path) in zip(self.rows, cursors, strict=False):
            if row.finish_reason is None:
                logs[row.slot].follow(
                    len(row.tokens) - 1, bank=bank, ring_len=ring_len, path=path[:path_len]
                )
        self.rows, self.unread, self._ended = [], False, set()


def to_verdict(line: Sequence[int], path: Sequence[int] = ()) -> Verdict:
    """From the device's words (see `sampling.triton.accept`). Without a path, whose nodes only
    the device knows, it is that long."""
    emitted, finish, accepted, drafted, depth = line[:VERDICT_HEADER]
    tokens = tuple(line[VERDICT_HEADER : VERDICT_HEADER + emitted])
    return Verdict(
        path=tuple(path[: accepted + 1]) if path else tuple(range(accepted + 1)),
        emitted=tokens,
        finish=FINISHES.get(finish),
        stop_token=tokens[-1] if finish == FINISH_STOP else None,
        logprobs=None,
        num_drafted=drafted,
        offered_depth=depth,
    )
