# SPDX-License-Identifier: Apache-2.0
"""Kinds of drafters that can be trained: from options to a run.

An option that a kind does not have is refused: it would have no effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.train.block_loop import BlockRecipe
from specla.train.block_run import (
    BlockRun,
    BlockSizes,
    ReaderSizes,
    block_config_for,
    captured_layers,
    start_config,
    start_reader_config,
)
from specla.train.capture import Capture, Text
from specla.train.loop import Recipe
from specla.train.run import Run, Sizes, config_for
from specla.train.run import start_config as start_eagle_config
from specla.train.session import Session
from specla.train.team import ALONE, Team

Options = Mapping[str, Any]


class Kind(ABC):
    """One kind of drafter for one target, before the texts are there.

    feature_layers: what the texts are read for.
    """

    feature_layers: tuple[int, ...]

    @abstractmethod
    def run(
        self,
        folder: Path,
        capture: Capture,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        compute: torch.dtype,
        team: Team = ALONE,
    ) -> Session[Any]:
        """The run in a folder. The schedule is each process's own part of the team's."""


def kind_of(
    name: str, model: TargetModel, tokenizer_hash: str | None, schedule: Options, own: Options
) -> Kind:
    """A kind by name.

    Args:
        schedule: fields of `steps.Schedule`.
        own: options of this kind; those of another are refused.

    Raises:
        ConfigError: no such kind, an option that it does not have, a size out of range.
    """
    if name not in KINDS:
        raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, got {name!r}")
    make, known = KINDS[name]
    for option in own:
        if option not in known:
            raise ConfigError(
                f"{option} is not an option of --kind {name}, which has {', '.join(known)}"
            )
    return make(model, tokenizer_hash, schedule, own)


class _Eagle(Kind):
    def __init__(
        self, model: TargetModel, tokenizer_hash: str | None, schedule: Options, own: Options
    ) -> None:
        self._model, self._start = model, own.get("start")
        sizes = _of(Sizes, own)
        if self._start is None:
            self._config = config_for(model, Sizes(**sizes), tokenizer_hash)
        else:
            _refuse_sizes(self._start, sizes)
            self._config = start_eagle_config(self._start, model, tokenizer_hash)
        self._recipe = Recipe(**schedule, **_of(Recipe, own))
        self.feature_layers = self._config.target_layer_ids

    def run(
        self,
        folder: Path,
        capture: Capture,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        compute: torch.dtype,
        team: Team = ALONE,
    ) -> Session[Any]:
        return Run(
            folder, self._model, capture, self._config, texts, held_out,
            self._recipe.times(team.count), team=team, compute=compute, start=self._start,
        )  # fmt: skip


class _Block(Kind):
    def __init__(
        self, model: TargetModel, tokenizer_hash: str | None, schedule: Options, own: Options
    ) -> None:
        self._model, self._start = model, own.get("start")
        self._recipe = BlockRecipe(**schedule, **_of(BlockRecipe, own))
        self._reader_loss = bool(own.get("reader_loss", False))
        sizes = _of(BlockSizes, own)
        if self._start is None:
            self._config = block_config_for(model, BlockSizes(**sizes), tokenizer_hash)
        else:
            _refuse_sizes(self._start, sizes)
            self._config = start_config(self._start, model, tokenizer_hash)
        self.feature_layers = self._config.target_layer_ids

    def run(
        self,
        folder: Path,
        capture: Capture,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        compute: torch.dtype,
        team: Team = ALONE,
    ) -> Session[Any]:
        return BlockRun(
            folder, self._model, capture, self._config, texts, held_out,
            self._recipe.times(team.count), team=team, compute=compute, start=self._start,
            **self._reading(),
        )  # fmt: skip

    def _reading(self) -> dict[str, Any]:
        return {"reader_loss": self._reader_loss}


class _Reader(_Block):
    def __init__(
        self, model: TargetModel, tokenizer_hash: str | None, schedule: Options, own: Options
    ) -> None:
        if own.get("start") is None:
            raise ConfigError(
                "a state reader is trained on a block drafter (start), but none is given; train "
                "one with --kind block"
            )
        kept = {"start", "anchors"}
        super().__init__(
            model, tokenizer_hash, {"lr": 1e-4, **schedule},
            {name: value for name, value in own.items() if name in kept},
        )  # fmt: skip
        self._joint = bool(own.get("joint", False))
        assert self._start is not None
        sizes = ReaderSizes(**_of(ReaderSizes, own))
        ids = self._config.target_layer_ids
        self._reader = start_reader_config(self._start, model, sizes, ids)
        self.feature_layers = captured_layers(self._config, self._reader)

    def _reading(self) -> dict[str, Any]:
        return {"reader": self._reader, "joint": self._joint}


def _refuse_sizes(start: Path, sizes: Options) -> None:
    if sizes:
        raise ConfigError(
            f"a drafter goes on with the sizes it has in {start} (start), got "
            f"{', '.join(sizes)}; leave them out"
        )


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _of(kind: type, own: Options) -> dict[str, Any]:
    """Those options that are fields of a record."""
    return {name: own[name] for name in _names(kind) if name in own}


KINDS: Mapping[str, tuple[type[_Eagle] | type[_Block], tuple[str, ...]]] = {
    "eagle": (_Eagle, (*_names(Sizes), "unroll", "start")),
    "block": (_Block, (*_names(BlockSizes), "anchors", "start", "reader_loss")),
    "reader": (_Reader, (*_names(ReaderSizes), "anchors", "start", "joint")),
}
