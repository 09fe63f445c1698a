# SPDX-License-Identifier: Apache-2.0
"""The processes of one training run, a GPU each, as `accelerate launch` starts them.

Every process takes its own rows of a step's batch and what it finds is added up, so that a step is
that of one process with all the rows. The main process looks at held-out texts and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from specla.config import launched_processes
from specla.errors import ConfigError

T = TypeVar("T")
PATIENCE = timedelta(days=1)
"""Some wait while others answer prompts; where one dies, the launcher ends the others."""


class Team:
    """One process, alone: process `number` of `count`.

    In a team of several, all must call a method but `share`, and in the same order.
    """

    number, count = 0, 1

    @property
    def main(self) -> bool:
        """Whether this is the process that looks and writes."""
        return self.number == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's: every count-th."""
        return items[self.number :: self.count]

    def total(self, x: Tensor) -> Tensor:
        """The sum of every process's x, which have one shape."""
        return x

    def of_main(self, find: Callable[[], T]) -> T:
        """What the main process finds; the others wait for it."""
        return find()

    def wait(self) -> None:
        """Until every process is here."""

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over the processes: the same bits in each."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if self.count > 1:
            vector_to_parameters(self.total(parameters_to_vector(grads)), grads)


ALONE = Team()


class _Launched(Team):
    """A process among others. device: of the command line."""

    def __init__(self, device: str) -> None:
        from accelerate import PartialState

        on_cpu = device == "cpu" or not torch.cuda.is_available()
        # Takes the GPU of this process's number on its machine as the current one.
        self._state = PartialState(cpu=on_cpu, timeout=PATIENCE)
        self.number, self.count = self._state.process_index, self._state.num_processes

    def total(self, x: Tensor) -> Tensor:
        from accelerate.utils import reduce

        found: Tensor = reduce(x.to(self._state.device), reduction="sum")
        return found.to(x.device)

    def of_main(self, find: Callable[[], T]) -> T:
        from accelerate.utils import broadcast_object_list

        found: T = broadcast_object_list([find() if self.main else None])[0]
        return found

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def leave(self) -> None:
        """Nothing can be added up any more."""
        self._state.destroy_process_group()


def launched() -> int:
    """How many processes there are; 1 without a launcher.

    Raises:
        ConfigError: the launcher does not say a number.
    """
    given = launched_processes()
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) > 0):
        raise ConfigError(
            f"WORLD_SIZE must be the number of processes that were started, got {given!r:.80}; "
            "start them with accelerate launch, or unset it and LOCAL_RANK"
        )
    return int(given)


@contextmanager
def joined(device: str) -> Iterator[Team]:
    """The team that this process was started in. device: as for an engine.

    Raises:
        ConfigError: several processes, but no accelerate, or one GPU for all of them.
    """
    count = launched()
    if count == 1:
        yield ALONE
        return
    if ":" in device:
        raise ConfigError(
            f"each of {count} processes must have a GPU of its own, got --device {device}; leave "
            "it out"
        )
    if find_spec("accelerate") is None:
        raise ConfigError(
            f"training in {count} processes needs accelerate, which is not installed; "
            "pip install 'specla[train]', or start one process"
        )
    team = _Launched(device)
    yield team
    # Not after an error: what the others are in the middle of would never end.
    team.leave()
