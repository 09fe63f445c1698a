# SPDX-License-Identifier: Apache-2.0
"""The contract every drafter implements: draft, observe, reset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from torch import Tensor

    from specla.models.base import TargetModel
    from specla.models.features import Features
    from specla.ops.contract import DeviceRound, RowArrays
    from specla.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One running sequence, as a drafter sees it.

    slot: the sequence's place in the state; also the drafter's key for per-sequence memory.
    tokens: prompt and output so far; the last one is node 0. Read, never kept or changed.
    num_prompt_tokens: how many of `tokens` are the prompt.
    max_drafts: most nodes below node 0 this round (0 is possible: draft nothing).
    seed: the request's noise seed (a drafter may use it for coupled sampling).
    """

    slot: int
    tokens: Sequence[int]
    num_prompt_tokens: int
    max_drafts: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What became of one row's tree: the committed path (node indices from node 0 down, the path
    may have been cut by an end) and the tokens emitted this round, the last the next node 0."""

    slot: int
    tree: DraftTree
    path: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """Capabilities, declared once and checked at load.

    name: what reports print. max_depth: deepest draft it can propose. may_return_nothing: an
    ordinary round of one node can happen. variant: what else a call's cost depends on, options
    and checkpoint (`options.described`); empty: nothing. fallback: why it drafts otherwise than
    it would elsewhere, for results; None: it does not. level_bytes: of weights that a level of
    drafts reads on the device; 0: next to nothing, or it does not draft there. remembers: it keeps
    something of rows that have ended. longest: most committed tokens of a row that it drafts for,
    its option of that name; None: any number.
    """

    name: str
    max_depth: int
    may_return_nothing: bool
    variant: str = ""
    fallback: str | None = None
    level_bytes: int = 0
    remembers: bool = False
    longest: int | None = None

    @property
    def priced_as(self) -> str:
        """What cost tables keep its calls under: two that share a price share this."""
        return f"{self.name} {self.variant}".strip()


class Drafter(Protocol):
    """Who guesses. A wrong guess costs time, never correctness."""

    info: DrafterInfo

    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, node 0 = the row's last token, at most 1 + max_drafts nodes."""
        ...

    def observe(self, seen: Sequence[Observation]) -> None:
        """Learn what was committed. Called once per round, after commit, for every live row."""
        ...

    def reset(self, slot: int) -> None:
        """Forget everything about a slot (rule I6). Called before a slot is reused."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's layer outputs, and shares its slots.

    Features [n, layers * D] are of `feature_layers` (ids as in `models.features`), side by side,
    a row per committed token; each comes with the token *after* that one.
    """

    feature_layers: tuple[int, ...]

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Make ready for an engine on `model`. exact: where the device has products whose bits do
        not depend on the row count, a row's trees do not depend on other rows either (outputs
        never do).

        Raises:
            ConfigError: made for another target; the message names what differs.
        """
        ...

    def check_tokenizer(self, digest: str) -> None:
        """Raises ConfigError if it was trained with a tokenizer of another digest."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk of the prompt, after the target's: tokens[i] follows features[i]'s token."""
        ...

    def feed(self, seen: Sequence[Observation], features: Tensor) -> None:
        """Called after `observe` with the features of each row's path, as many rows as the row
        has emitted tokens, end to end: emitted[i] follows the i-th node of the path."""
        ...

    def fork(self, slot: int, to: int) -> None:
        """Slot `to` starts as a copy of `slot`, which has been prefilled."""
        ...


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """A drafter that reads the target's recurrent states, through `State.committed`."""

    def attach(self, state: State) -> None:
        """The states of the engine it drafts for, with its slots. Reads only."""
        ...


class Shape(NamedTuple):
    """Of the rounds that one CUDA graph serves: nodes per row, a power of two, and the depth that
    it drafts to. Depth 0 does not draft."""

    nodes: int
    depth: int


@runtime_checkable
class DeviceDrafter(Protocol):
    """A drafter that can also draft on the device, inside a CUDA graph: same proposals."""

    def depths(self, num_nodes: int) -> tuple[int, ...]:
        """Depths to choose from for trees of up to so many nodes, increasing, one at least; the
        last is as deep as it goes."""
        ...

    def launch(
        self, rows: RowArrays, rnd: DeviceRound, features: Features | None = None, *, depth: int
    ) -> None:
        """Write tokens, parents and num_nodes of every live row (num_nodes > 0); node 0's token
        is there already, and rnd.path has room for as many nodes as a tree may have. Kernel
        launches only: no allocation, no host synchronisation. `observe` is not called.

        features: with room, for a drafter that reads them: of the rows' last round, whose
        accepted nodes are still rnd.path, unless the rows have only just come, or were moved. A
        row that is alone may have had more nodes in it, or been deeper. depth: of the deepest
        draft, one of `depths`."""
        ...


def shapes(drafter: DeviceDrafter, max_nodes: int) -> tuple[Shape, ...]:
    """All there are of rounds that it drafts for. max_nodes: of a tree, a power of two."""
    sizes = [1 << i for i in range(max_nodes.bit_length())]
    return tuple(Shape(n, depth) for n in sizes for depth in drafter.depths(n))


@runtime_checkable
class TwofoldDrafter(Protocol):
    """A drafter that may have another form, which drafts on the device."""

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> Drafter:
        """That form, with nothing remembered; or this one, whose `info.fallback` then says why.

        Raises:
            ConfigError, KernelUnavailable: the other form was asked for and cannot be.
        """
        ...


@runtime_checkable
class ResidentDrafter(FeatureDrafter, DeviceDrafter, Protocol):
    """One that also keeps on the device what it knows of the rows, round after round; `feed` is
    not called for the rounds that it drafts for there."""

    def enter(self, slots: Sequence[int]) -> None:
        """These rows' rounds are on the device from now on, in these places."""
        ...

    def leave(self, slots: Sequence[int | None], rnd: DeviceRound, features: Features) -> None:
        """They no longer are; what the device knew of them is the host's again. None: a row that
        has ended, of which nothing may be taken over. rnd, features: of the last round."""
        ...


@runtime_checkable
class PatientDrafter(ResidentDrafter, Protocol):
    """One that can stay with its rows on the device while it rests, and while they are moved:
    launched to depth 0 it only takes in what was accepted last."""

    def catch_up(self, tokens: Sequence[Sequence[int]], features: Tensor) -> None:
        """Rounds of one node that were not launched here, without waiting for the device: the
        tokens that each row has emitted in them, by place, none for one that has ended, and their
        features as of `feed`. After them the target's round before the next launch is one that is
        to be taken in."""
        ...

    def move(self, places: Sequence[int], joining: Sequence[int]) -> None:
        """Only the rows at these places are left, side by side, and behind them those of these
        slots, which come from their prompts. Everything that the others have emitted was taken
        in, or is to be caught up with; without waiting for the device."""
        ...
