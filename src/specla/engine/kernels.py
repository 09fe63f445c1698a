# SPDX-License-Identifier: Apache-2.0
"""Kernels: which state kernel verifies the rounds of an engine, bucket by bucket, and where that
is known from. In exact mode every candidate gives the same bits, in mode fast it is speed alone
that is chosen by."""

from __future__ import annotations

from specla.config import CHEAPEST
from specla.engine.cost import CostTable
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.state.rounds import bucket


class Kernels:
    """The choice of one engine.

    Args:
        model: names the candidates, and which one runs where nothing was measured.
        kernel: one candidate for every round, or "cheapest": by `costs`, else the model's
            default.
        costs: of this model, device and mode; None: nothing was measured.

    Raises:
        ConfigError: the model cannot verify with that kernel in that mode, or the table knows
            kernels that it does not have.
    """

    def __init__(
        self, model: TargetModel, mode: str, *, kernel: str = CHEAPEST, costs: CostTable | None
    ) -> None:
        names = model.kernels(mode)
        if kernel not in (CHEAPEST, *names):
            raise ConfigError(
                f"kernel must be {CHEAPEST} or one that this model verifies with in mode {mode} "
                f"({', '.join(names)}), got {kernel!r}"
            )
        if costs is not None and (other := set(costs.kernels(mode)) - {*names}):
            raise ConfigError(
                f"a cost table must be about kernels of mode {mode} ({', '.join(names)}), got "
                f"{', '.join(sorted(other))}; run specla profile again"
            )
        self._model, self._mode, self._kernel, self.costs = model, mode, kernel, costs
        self._known: dict[tuple[int, int], str] = {}

    @property
    def source(self) -> str:
        """Where costs come from, as results say it: "measured" or "default"."""
        return "default" if self.costs is None else "measured"

    def of(self, rows: int, nodes: int) -> str:
        """What verifies rounds of up to `rows` rows of `nodes` nodes.

        Raises:
            ConfigError: `costs` does not cover them; it then fails for the largest, too.
        """
        size = bucket(rows), bucket(nodes)
        if size not in self._known:
            self._known[size] = self._choose(*size)
        return self._known[size]

    def _choose(self, rows: int, nodes: int) -> str:
        if self._kernel != CHEAPEST:
            if self.costs is not None:
                self.costs.find("verify", rows, nodes, kernel=self._kernel, mode=self._mode)
            return self._kernel
        if self.costs is None:
            return self._model.default_kernel(rows, nodes, self._mode)
        return self.costs.best_kernel(rows, nodes, self._mode)
