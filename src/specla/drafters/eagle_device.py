# SPDX-License-Identifier: Apache-2.0
"""The EAGLE drafter inside a round's CUDA graph: `drafters.eagle` without the host.

Joins and rounds that the host takes part in stay with `EagleDrafter`: `enter` brings its state up
to date before the rows' rounds go to the device, `leave` takes the cursors back. What is launched
in between: `eagle_layer`; for prompts with mixer gdn: `eagle_prefill`.

With attention a row of more than `longest` tokens drafts nothing from then on, there or on the
host: keys and values have room for no more.

Bits are not the host's and depend on the batch: products, sums and their order are other ones.
A drafter's bits may (rule M accepts losslessly whatever is proposed); the same batch gives the
same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from specla.config import prefill_kernels
from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_buffers import Limits, check_limits
from specla.drafters.eagle_layer import EagleLayer
from specla.drafters.eagle_mixer import Cursor, DeviceMixer
from specla.drafters.eagle_model import EagleModel, EagleWeights
from specla.drafters.eagle_prefill import EaglePrompts
from specla.drafters.options import require_int
from specla.drafters.triton_block import MAX_BLOCK, MAX_HEAD
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.models.gdn_fused import check_shape
from specla.ops.contract import DeviceRound, RowArrays
from specla.ops.transfer import ints
from specla.state.rounds import bucket

MAX_TOP_K = 8
"""All pairs of a tree's nodes and a level's children are compared at once."""


class DeviceEagle(EagleDrafter):
    """`EagleDrafter` whose rounds on a GPU need no host; the same options, top_k up to MAX_TOP_K.

    Raises:
        ConfigError: another option out of range, or attention's heads are too wide.
    """

    def __init__(
        self,
        *,
        path: str,
        top_k: int = 4,
        max_depth: int = 6,
        tau: float = 6.0,
        spine: bool = True,
        longest: int = 4096,
    ) -> None:
        require_int("top_k", top_k, 1, MAX_TOP_K)
        super().__init__(
            path=path, top_k=top_k, max_depth=max_depth, tau=tau, spine=spine, min_survival=0,
            longest=longest,
        )  # fmt: skip
        self._attends = self.config.mixer == "attention"
        if self._attends:
            self._refuse("heads of at most", MAX_HEAD, "numbers", self.config.head_dim)
        variant = f"{self.info.variant} on_device"
        self.info = replace(self.info, variant=variant, longest=longest if self._attends else None)
        self._layer: EagleLayer | None = None
        self._prompts: EaglePrompts | None = None
        self._entered: list[int] = []
        """Slots of the rows on the device, by place."""

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> DeviceEagle:
        """It is that form."""
        return self

    def check_room(self, *, num_slots: int, max_nodes: int) -> None:
        """Refuse what `bind` could not make room for.

        Raises:
            KernelUnavailable: head dimensions that the kernels do not have.
            ConfigError: more rows in a launch than the products take, or paths longer than a tile.
        """
        limits = self._limits(num_slots, max_nodes)
        if self._attends:
            self._refuse("at most", MAX_BLOCK, "tokens of an accepted path", limits.path)
        else:
            check_shape(self.config.recurrent)
        check_limits(limits)

    def _refuse(self, what: str, most: int, of: str, given: int) -> None:
        if given > most:
            raise ConfigError(
                f"drafting with attention on the device takes {what} {most} {of}, got {given}; "
                "leave on_device out"
            )

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Also make room on the device; see `check_room`."""
        self.check_room(num_slots=num_slots, max_nodes=max_nodes)
        super().bind(model, num_slots=num_slots, max_nodes=max_nodes, exact=exact)
        self._layer = EagleLayer(self.model, self._limits(num_slots, max_nodes))
        self.info = replace(self.info, level_bytes=self._layer.level_bytes)
        if model.device.type == "cuda":
            # What an engine would otherwise wait for in the middle of a text.
            self._layer.compile()
            if not self._attends:
                self._prompts = self._prompt_kernels(model, self._layer)

    def _prompt_kernels(self, model: TargetModel, layer: EagleLayer) -> EaglePrompts:
        recurrence, _ = prefill_kernels(str(model.dtype).removeprefix("torch."))
        # The torch recurrence has not been captured anywhere.
        prompts = EaglePrompts(self.model, layer.gate_up, recurrence, graphs=recurrence == "fla")
        prompts.compile()
        return prompts

    def _limits(self, num_slots: int, max_nodes: int) -> Limits:
        depth = min(self.info.max_depth, max_nodes - 1)
        return Limits(bucket(num_slots), max_nodes, depth, self._top_k, self._tau, self._spine)

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """All the way, and two thirds of it: a level costs the same however few nodes it adds."""
        most = min(self.info.max_depth, num_nodes - 1)
        return tuple(sorted({-(-2 * most // 3), most}))

    @torch.inference_mode()
    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """See `DeviceDrafter`. features: of the rows' last round."""
        assert self._layer is not None, "bind() first"
        assert features is not None, "it reads features"
        self._layer(rows, rnd, features.room, depth)

    @torch.inference_mode()
    def enter(self, slots: Sequence[int]) -> None:
        """See `ResidentDrafter`."""
        assert self._layer is not None, "bind() first"
        self._encode(slots)
        self._entered = list(slots)
        self._layer.load(self._cursors(slots))

    @torch.inference_mode()
    def catch_up(self, tokens: Sequence[Sequence[int]], features: Tensor) -> None:
        """See `PatientDrafter`."""
        assert self._layer is not None, "bind() first"
        self._layer.resume()
        for rows, part in _in_parts(tokens, features, self._max_tokens):
            self._layer.take_in(self._entered, None, rows, part)

    @torch.inference_mode()
    def move(self, places: Sequence[int], joining: Sequence[int]) -> None:
        """See `PatientDrafter`."""
        assert self._layer is not None, "bind() first"
        assert not self._pending.keys() & set(joining), "what they have emitted is not taken in"
        self._entered = [*(self._entered[place] for place in places), *joining]
        self._layer.move(places, self._cursors(joining))

    def _cursors(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        """As the host has them, and whether there is an output to grow from."""
        return [(*self._mixer.cursor(slot), int(slot in self._started)) for slot in slots]

    @torch.inference_mode()
    def leave(self, slots: Sequence[int | None], rnd: DeviceRound, features: Features) -> None:
        """See `ResidentDrafter`."""
        assert self._layer is not None, "bind() first"
        cursors = self._layer.read(len(slots))
        live, lengths = rnd.num_nodes.tolist(), rnd.path_len.tolist()
        paths, tokens = rnd.path.tolist(), rnd.tokens.tolist()
        width = rnd.tokens.shape[1]
        for b, slot in enumerate(slots):
            if slot is None or not live[b]:
                continue
            *cursor, started, fed = cursors[b]
            self._mixer.follow(slot, Cursor(*cursor))
            self._started |= {slot} if started else set()
            if fed:
                path = paths[b][: lengths[b]]
                emitted = [*(tokens[b][node] for node in path[1:]), tokens[b][0]]
                at = [b * width + node for node in path]
                self._pending[slot] = emitted, [features.rows(at)]

    def _read_prompt(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """By the kernels of the target's prompts, where it is a device's."""
        if self._prompts is None:
            super()._read_prompt(slot, tokens, features)
        else:
            self._prompts(slot, tokens, features)

    def _catch_up(self, waiting: Sequence[int]) -> None:
        """Nothing: `_take_in` takes many at once, on top of a log that prompts do not have."""

    @property
    def _most_waiting(self) -> int:
        """What is more is encoded now, while the device is busy with the next round."""
        return self._max_tokens

    def _drafts_for(self, slot: int) -> bool:
        """Nor is the row too long."""
        fits = not self._attends or self._mixer.cursor(slot).length <= self._longest
        return fits and super()._drafts_for(slot)

    def _made(self, weights: EagleWeights, num_slots: int, max_nodes: int) -> EagleModel:
        room = self._limits(num_slots, max_nodes).room
        return EagleModel(
            self.config, weights, num_slots=num_slots, max_nodes=room, longest=self._longest
        )

    @property
    def _max_tokens(self) -> int:
        assert self._layer is not None, "bind() first"
        return self._layer.max_tokens

    def _take_in(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
    ) -> None:
        """By the round's own kernels: a few launches instead of a hundred operations."""
        assert self._layer is not None, "bind() first"
        cursors = [self._mixer.cursor(slot) for slot in slots]
        self._layer.take_in(slots, cursors, tokens, features)
        for slot, row in zip(slots, tokens, strict=True):
            self._mixer.commit(slot, len(row))

    @property
    def _mixer(self) -> DeviceMixer:
        mixer = self.model.mixer
        assert isinstance(mixer, DeviceMixer)
        return mixer


def _in_parts(
    tokens: Sequence[Sequence[int]], features: Tensor, most: int
) -> Iterator[tuple[list[Sequence[int]], Tensor]]:
    """Up to `most` tokens of every row at a time, and their features, which come end to end."""
    ends = list(accumulate(map(len, tokens)))
    for start in range(0, max(map(len, tokens)), most):
        rows = [row[start : start + most] for row in tokens]
        first = [end - len(row) + start for end, row in zip(ends, tokens, strict=True)]
        at = [i + j for i, row in zip(first, rows, strict=True) for j in range(len(row))]
        yield rows, features if len(at) == len(features) else features[ints(at, features.device)]
