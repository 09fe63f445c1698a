# SPDX-License-Identifier: Apache-2.0
"""Rows on a GPU, and what they come to beside each row's own plain decoding, alone: tokens, and
the bytes of the folded state (rule I4). Nothing in here needs a GPU by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from behind import Turns
from torch import Tensor

from specla import models
from specla.bench.random_model import gdn_1_3b
from specla.config import CHEAPEST
from specla.drafters.base import DeviceDrafter, Drafter, DraftRow, Shape
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.models.resolve import resolve
from specla.models.tokenizer import Tokenizer, load_tokenizer
from specla.request import Request, SamplingParams
from specla.state import State

TOKENS = 512
NAMES = "Ben", "Lisa", "Anna", "Paul", "Mia"
Prompt = tuple[int, ...]
OnStep = Callable[[Engine], None]


class Outcome(NamedTuple):
    """Of one row. committed: how many tokens its state is about; states: S [G, V, K] with the log
    folded in, and the tail [W-1, C], by layer. rounds, accepted: as results report them."""

    tokens: tuple[int, ...]
    rounds: int
    accepted: int
    committed: int
    states: list[tuple[Tensor, Tensor]]


class Remembering(State):
    """Keeps what a slot's committed state came to when it is given back. engine: its own; lengths:
    tokens of its rows before the step that it is at, by slot."""

    engine: Engine
    lengths: Mapping[int, int]
    kept: dict[int, tuple[int, list[tuple[Tensor, Tensor]]]]

    def release(self, slot: int) -> None:
        self._follow(slot)
        self.kept[slot] = self.logs[slot].committed_len, self.committed_state(slot)
        super().release(slot)

    def _follow(self, slot: int) -> None:
        """Take over the cursors of a row that ended on the device, a round ago: in that it was
        idle, so they lie in its place as its last round left them."""
        rounds = self.engine._graphs
        places = [row.slot for row in rounds._flight.rows] if rounds else []
        if rounds is None or slot not in places:
            return
        place, rnd = places.index(slot), rounds._buckets[rounds._key].rnd
        length = int(rnd.path_len[place])
        self.logs[slot].follow(
            self.lengths[slot] - 1,
            bank=int(rnd.bank[place]),
            ring_len=int(rnd.ring_len[place]),
            path=rnd.path[place, :length].tolist(),
        )


class HostNone(NoDrafter):
    """No drafts, and no rounds without the host either: cursors stay the host's."""

    launch = None  # type: ignore[assignment]


class Rows:
    """Of one model. A row is a number: prompt, seed and parameters follow from it.

    make: the model, when it is first asked for. tokens: of every output. chunk: of prompts. log:
    its capacity. lengths: of a row's prompt; they differ, so that rows are at different phases of
    their logs.
    """

    def __init__(
        self,
        make: Callable[[], TargetModel],
        *,
        tokens: int = TOKENS,
        chunk: int = 256,
        log: int = 16,
        lengths: Callable[[int], int] = lambda row: 3 + 7 * row % 90,
    ) -> None:
        self._make, self._tokens, self._chunk = make, tokens, chunk
        self._log, self._lengths = log, lengths
        self._alone: dict[tuple[int, int], Outcome] = {}
        self._prompts: dict[Prompt, int] = {}

    @cached_property
    def model(self) -> TargetModel:
        return self._make()

    @property
    def vocab_size(self) -> int:
        return self.model.info.vocab_size

    def prompt(self, row: int) -> Prompt:
        """No other row's."""
        found = self._prompt(row)
        assert self._prompts.setdefault(found, row) == row, "rows must have prompts of their own"
        return found

    def _prompt(self, row: int) -> Prompt:
        most = self.vocab_size - self.vocab_size // 32
        return tuple((37 * row + 11 * i) % most + 5 for i in range(self._lengths(row)))

    def request(self, name: str, row: int, count: int) -> Request:
        """Every third row samples."""
        params = SamplingParams(
            temperature=0.8 if row % 3 == 2 else 0.0, max_tokens=count, ignore_eos=True
        )
        return Request(request_id=name, prompt_token_ids=self.prompt(row), params=params, seed=row)

    def engine(
        self,
        drafter: Drafter,
        *,
        slots: int,
        max_nodes: int,
        turns: Sequence[int] = (),
        kernel: str = CHEAPEST,
    ) -> tuple[Engine, Remembering]:
        """turns: numbers of nodes that rounds on the device have by turns. kernel: what
        verifies; "closed" makes it mode fast."""
        model = self.model
        state = Remembering(
            model.info.recurrent, num_slots=slots, max_nodes=max_nodes, log_capacity=self._log,
            max_path=drafter.info.max_depth + 1, dtype=model.dtype, device=model.device,
        )  # fmt: skip
        engine = Engine(
            model, state, drafter, mode="fast" if kernel == "closed" else "exact", kernel=kernel,
            prefill_chunk=self._chunk, budget="paying" if turns else "off",
        )  # fmt: skip
        state.engine, state.kept = engine, {}
        if turns:
            assert engine.spending is not None
            assert engine.spending.free is not None
            assert isinstance(engine.drafter, DeviceDrafter)
            wanted = [Shape(nodes, engine.drafter.depths(nodes)[-1]) for nodes in turns]
            engine.spending.free = Turns(wanted, every=7)  # type: ignore[assignment]
        # With every graph there rows are moved where some end, or shapes change.
        engine.capture()
        return engine, state

    def decode(
        self,
        rows: Sequence[int],
        drafter: Drafter,
        *,
        max_nodes: int,
        count: int | None = None,
        at_once: int = 8,
        turns: Sequence[int] = (),
        kernel: str = CHEAPEST,
        on_step: OnStep = lambda engine: None,
    ) -> list[Outcome]:
        """What these rows come to, all in one engine; `at_once` of them join between two rounds.
        on_step: called after every step."""
        engine, state = self.engine(
            drafter, slots=len(rows), max_nodes=max_nodes, turns=turns, kernel=kernel
        )
        outcomes: dict[int, Outcome] = {}
        waiting = list(enumerate(rows))
        slots: dict[str, int] = {}
        while waiting or engine.has_work:
            for i, row in waiting[:at_once]:
                engine.add(self.request(str(i), row, count or self._tokens))
            del waiting[:at_once]
            state.lengths = {x.slot: len(x.tokens) for x in engine.scheduler.running.values()}
            for delta in engine.step():
                if (done := delta.completion) is not None:
                    kept, report = state.kept[slots[delta.request_id]], done.speculation
                    outcomes[int(delta.request_id)] = Outcome(
                        done.token_ids, report.rounds, report.accepted, *kept
                    )
            slots |= {name: row.slot for name, row in engine.scheduler.running.items()}
            on_step(engine)
        return [outcomes[i] for i in range(len(rows))]

    def alone(self, row: int, count: int | None = None) -> Outcome:
        """Plain decoding of one row, in an engine of its own, through the host's trees."""
        count = count or self._tokens
        if (row, count) not in self._alone:
            (found,) = self.decode([row], HostNone(), max_nodes=1, count=count)
            self._alone[row, count] = found
        return self._alone[row, count]

    def truth(self, row: DraftRow) -> Sequence[int]:
        """The whole plain output of the row's prompt."""
        return self.alone(self._prompts[tuple(row.tokens[: row.num_prompt_tokens])]).tokens

    def check(self, rows: Sequence[int], got: Sequence[Outcome]) -> None:
        """Tokens and states are the bytes of each row's own plain decoding."""
        for row, one in zip(rows, got, strict=True):
            plain = self.alone(row)
            assert one.tokens == plain.tokens, f"row {row}: tokens"
            # An accepted draft that ends the row is in the state; plain decoding's last token is
            # not.
            same = self.alone(row, len(plain.tokens) + one.committed - plain.committed)
            assert one.committed == same.committed
            for i, (a, b) in enumerate(zip(one.states, same.states, strict=True)):
                for name, x, y in zip(("S", "tail"), a, b, strict=True):
                    assert torch.equal(x, y), f"row {row}: {name} of layer {i}"


class Questions(Rows):
    """Rows whose prompts the demo model has something to say to, which its drafter can guess."""

    def _prompt(self, row: int) -> Prompt:
        gifts = "".join(f"He gives {2 + i} marbles to {NAMES[i]}. " for i in range(1 + row % 5))
        text = f"Tom has {20 + 7 * row} marbles. {gifts}How many marbles does he have left?"
        return tuple(self._tokenizer.apply_chat_template([{"role": "user", "content": text}]))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(resolve("demo"))


def demo() -> TargetModel:
    """The model that comes with the package."""
    return models.load("demo", device="cuda", dtype=torch.bfloat16)


GDN, DEMO = Rows(gdn_1_3b), Questions(demo)
