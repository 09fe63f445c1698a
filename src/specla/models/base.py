# SPDX-License-Identifier: Apache-2.0
"""The contract every checkpoint family implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device, dtype

from specla.models.features import Features
from specla.ops.contract import DevicePlan, RecurrentShape, RoundPlan
from specla.ops.gdn import Inputs
from specla.state import State

KernelChoice = Callable[[int, int], str]
"""The kernel that verifies rounds of (rows, nodes), as padded: one of `TargetModel.kernels`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine and drafters may know about a target. No tensors.

    fingerprint: hex digest of config and samples of the weights, names the target in drafter
        configs.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_parameters: int
    weight_bytes: int
    recurrent: RecurrentShape
    eos_token_ids: tuple[int, ...]
    fingerprint: str


class TargetModel(Protocol):
    """A checkpoint, loaded. Calls never allocate per-sequence memory: State owns it."""

    info: ModelInfo
    device: device
    dtype: dtype

    @property
    def embeddings(self) -> Tensor:
        """[vocab, D], what a drafter may share."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """[vocab, D], what a drafter may share."""
        ...

    @property
    def final_norm(self) -> Tensor:
        """[D], the norm before the head."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Logits [M, vocab] float32 of outputs x [M, D] of the last layer: the final norm and the
        head, for training drafters. No promise about bits."""
        ...

    def recurrence_inputs(self, layer: int, x: Tensor, same: Tensor) -> Inputs:
        """What the recurrence of `layer` reads of texts, end to end, for training drafters.

        x [M, D]: the outputs of the layer before, or embeddings. same [M, W] bool: whether the
        token W - 1 - j places before is of the same text. No promise about bits.
        """
        ...

    def prefill(
        self, tokens: Sequence[int], slot: int, state: State, features: Features | None = None
    ) -> None:
        """Advance `slot` over `tokens` (one chunk of the prompt, in order): S, tail, durable_len.

        The slot's log must be empty. Bits depend on the chunk's own tokens and length only.
        features: where given, is filled with its layers' outputs, a row per token.
        """
        ...

    def side_by_side(self) -> AbstractContextManager[None]:
        """What is prefilled inside, one chunk of a slot, need not wait for what was prefilled
        before it inside, and on a GPU may run at the same time; its bits are the same. Whatever
        else is launched waits for all that was launched before it, as ever. Features are to be
        read before the next prefill."""
        ...

    def kernels(self, mode: str) -> tuple[str, ...]:
        """Names of the kernels that may verify a round in `mode`; any of them can verify every
        round. In exact mode they give the same bits."""
        ...

    def default_kernel(self, rows: int, nodes: int, mode: str) -> str:
        """Which of them is taken where nobody has measured, for `rows` trees of `nodes` nodes."""
        ...

    def reserve(self, max_rows: int) -> None:
        """Make room for rounds of up to `max_rows` flat nodes, before the first one."""
        ...

    def verify(
        self,
        plan: RoundPlan | DevicePlan,
        state: State,
        features: Features | None = None,
    ) -> Tensor:
        """Logits [M, vocab] float32 of every node of every tree in `plan`. On a GPU a view that
        the next verify writes again, undefined at padding. features: where given, is filled with
        its layers' outputs, a row per node."""
        ...

    def check_rows(self, max_rows: int) -> None:
        """Find, for each operation, a form whose bits do not depend on row count or position.

        Raises:
            ExactnessUnavailable: no such form exists here; the message names the operation.
        """
        ...
