# SPDX-License-Identifier: Apache-2.0
"""Who runs next: a first-come queue in front of a fixed number of slots.

Rows join and leave between rounds. Requests that share a prompt (`n` completions of one) are
prefilled once: the first to be ready is forked into every free slot its siblings can take.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from specla.engine.running import Running
from specla.errors import RequestRejected
from specla.request import Request
from specla.state import State


class Scheduler:
    """Waiting requests and running sequences, by id and in order of arrival; owns the slots'
    assignment."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.waiting: dict[str, Running] = {}
        self.running: dict[str, Running] = {}

    def add(self, sequence: Running) -> None:
        """Queue a sequence.

        Raises:
            RequestRejected: its id is already in use.
        """
        name = sequence.request.request_id
        if self.find(name) is not None:
            raise RequestRejected(
                f"request_id must be unique among live requests, got {name!r} twice",
                param="request_id",
            )
        self.waiting[name] = sequence

    def find(self, request_id: str) -> Running | None:
        """The live sequence of that id, waiting or running."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def admit(self) -> None:
        """Give free slots to waiting sequences, oldest first. One whose prompt is being prefilled
        has its slot kept, and starts in it as a fork of that prefill."""
        begun = {s.prompt for s in self.prefilling()}
        for sequence in list(islice(self.waiting.values(), self._state.pool.num_free)):
            if sequence.prompt not in begun:
                self._start(sequence, self._state.acquire())
                begun |= set() if sequence.ready else {sequence.prompt}

    def share_prefill(self, ready: Running) -> list[int]:
        """Fork a sequence that has just been prefilled to waiting ones with the same prompt.
        Returns the slots that they have got."""
        same = [s for s in self.waiting.values() if s.prompt == ready.prompt]
        forks = same[: self._state.pool.num_free]
        for sequence in forks:
            self._start(sequence, self._state.fork(ready.slot))
            sequence.num_prefilled = ready.num_prefilled
        return [sequence.slot for sequence in forks]

    def prefilling(self) -> Iterator[Running]:
        """Running sequences whose prompt is not in the state yet."""
        return (s for s in list(self.running.values()) if not s.ready)

    def ready(self) -> list[Running]:
        """Running sequences that take part in the next round, in order of arrival."""
        return [s for s in self.running.values() if s.ready]

    def remove(self, sequence: Running) -> None:
        """Forget a sequence; erase and free its slot if it has one."""
        name = sequence.request.request_id
        if name in self.running:
            del self.running[name]
            self._state.release(sequence.slot)
        else:
            del self.waiting[name]

    def _start(self, sequence: Running, slot: int) -> None:
        name = sequence.request.request_id
        sequence.slot = slot
        self.running[name] = self.waiting.pop(name)


def request_fits(request: Request, vocab_size: int) -> None:
    """Refuse what would break the engine later.

    Raises:
        RequestRejected: an empty prompt, or what is not a token id of the vocabulary.
    """
    if not request.prompt_token_ids:
        raise RequestRejected(
            "prompt must have at least one token, got none; give some text or token ids",
            param="prompt",
        )
    for token in request.prompt_token_ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestRejected(
                f"prompt token ids must be integers in [0, {vocab_size}), got {token!r}",
                param="prompt",
            )
