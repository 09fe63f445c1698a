# SPDX-License-Identifier: Apache-2.0
"""Resting: what a drafter that reads features has missed while nobody asked it.

Rounds without drafts need neither the drafter nor the host, but a drafter must know every token
before it drafts again. Each of these rounds commits one token per row, so one row of features per
round and place is all there is; the round itself puts it aside, at its token's place in a ring
(`ops.rows.keep`), so that it is one launch as in plain decoding, and the drafter is fed many
rounds at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specla.drafters.base import FeatureDrafter, Observation, PatientDrafter
from specla.engine.device_rows import BucketRound
from specla.engine.running import Running
from specla.ops.rows import keep
from specla.ops.transfer import ints
from specla.sampling.accept import Verdict
from specla.topology.tree import DraftTree

MOST_ROUNDS, MOST_BYTES = 128, 1 << 25
"""Kept before the drafter is fed: these rounds, or fewer where they take more memory than that."""


class Resting:
    """Of one engine. like: a round's features [layers, M, D], of whose first `num_rows` rows each
    is a sequence's. kept [most, layers, num_rows, D]: the ring, by tokens before the node."""

    def __init__(self, like: Tensor, num_rows: int) -> None:
        layers, _, width = like.shape
        each = num_rows * layers * width * like.element_size()
        self.most = max(4, min(MOST_ROUNDS, MOST_BYTES // each))
        self.kept = like.new_zeros(self.most, layers, num_rows, width)
        self.count = 0
        """Rounds that the drafter has missed."""
        # Of those, by place: how many were before the row joined. Rows of no entry: none.
        self._before: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another round."""
        return self.count == self.most

    def keep(self, one: BucketRound) -> None:
        """A launch within a round of one node."""
        assert one.features is not None
        keep(one.features.room, one.rows.len_tokens, one.rnd.num_nodes, self.kept)

    def feed(
        self,
        drafter: FeatureDrafter,
        rows: Sequence[Running],
        ended: Sequence[tuple[Running, Verdict]],
        count: int,
    ) -> None:
        """The first `count` rounds, which are forgotten, to a drafter of the host. rows: by place.
        ended: what the last of them came to, where the rows do not have it yet."""
        assert not any(self._before), "rows only join those of a drafter that stays with them"
        last = {row.slot: verdict for row, verdict in ended if row.finish_reason is None}
        seen, texts = list[Observation](), list[tuple[int, Sequence[int], int]]()
        for place, row in enumerate(rows):
            verdict = last.get(row.slot)
            gone = verdict is not None and verdict.finish is not None
            if count and row.finish_reason is None and not gone:
                tokens = [*row.tokens, *(verdict.emitted if verdict else ())]
                texts.append((place, tokens, count))
                seen.append(_chain(row.slot, tokens[-count - 1 :]))
        if seen:
            drafter.feed(seen, self._features(texts))
        self.count -= count

    def catch_up(self, drafter: PatientDrafter, rows: Sequence[Running], count: int) -> None:
        """The same to one that stayed on the device. The last of the rounds is the last that the
        rows know of; a row that has ended has no use for them."""
        before = [*self._before, *[0] * (len(rows) - len(self._before))]
        texts = [
            (place, row.tokens, max(0, count - before[place]))
            for place, row in enumerate(rows)
            if row.finish_reason is None
        ]
        tokens: list[Sequence[int]] = [()] * len(rows)
        for place, text, missed in texts:
            tokens[place] = text[len(text) - missed :]
        drafter.catch_up(tokens, self._features(texts))
        self.count -= count
        self._before = [max(0, rounds - count) for rounds in before]

    def move(self, places: Sequence[int], joining: int) -> None:
        """Only the rows at these places are left, side by side, and so many join them."""
        before = [*self._before, *[0] * (max(places) + 1 - len(self._before))]
        self._before = [*(before[place] for place in places), *[self.count] * joining]
        self.kept[:, :, : len(places)] = self.kept[:, :, ints(places, self.kept.device)]

    def begin(self) -> None:
        """Nothing was missed yet."""
        self.count, self._before = 0, []

    def _features(self, texts: Sequence[tuple[int, Sequence[int], int]]) -> Tensor:
        """[n, layers * D] of the last rounds of texts, so many of each, by place, end to end."""
        _, layers, places, width = self.kept.shape
        at = [
            ((n - 1) % self.most * layers + layer) * places + place
            for place, tokens, count in texts
            for n in range(len(tokens) - count, len(tokens))
            for layer in range(layers)
        ]
        found = self.kept.view(-1, width).index_select(0, ints(at, self.kept.device))
        return found.view(len(at) // layers, layers * width)


def _chain(slot: int, tokens: Sequence[int]) -> Observation:
    """A round of one node after another is a chain that was accepted."""
    tree, path = DraftTree.chain(tokens[0], tokens[1:-1]), tuple(range(len(tokens) - 1))
    return Observation(slot=slot, tree=tree, path=path, emitted=tuple(tokens[1:]))
