# SPDX-License-Identifier: Apache-2.0
"""What a drafter learns from: the target's own answers, and the target's features over them.

Answers are decoded by the engine, in batch, and kept as token ids in a file that a run which was
stopped goes on with. Features are computed again whenever a text is used: three layers of a
1.3-billion model over ten million tokens would be 120 GB, one more forward pass costs less.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.request import Request, SamplingParams
from specla.state import State

AHEAD = 2
"""Requests in the engine per slot: the next prompt waits when a slot becomes free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what the target said: token ids, the first `num_prompt` of them the prompt."""

    tokens: tuple[int, ...]
    num_prompt: int


def answer(
    engine: Engine, prompts: Mapping[int, tuple[int, ...]], params: SamplingParams
) -> Iterator[tuple[int, Text]]:
    """(number of the prompt, text) in the order in which answers end; prompt i draws with seed i,
    so that its answer does not depend on who else is asked. Answers that failed are left out."""
    waiting, slots = deque(prompts.items()), engine.state.pool.num_slots
    live = 0
    while waiting or live:
        while waiting and live < AHEAD * slots:
            i, prompt = waiting.popleft()
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params, seed=i))
            live += 1
        for delta in engine.step():
            if (done := delta.completion) is not None:
                live -= 1
                if done.finish_reason in ("stop", "length"):
                    tokens = (*done.prompt_token_ids, *done.token_ids)
                    number = int(done.request_id)
                    yield number, Text(tokens=tokens, num_prompt=len(done.prompt_token_ids))


def part_of(path: Path, number: int | str) -> Path:
    """Where the answers of another process lie until they are put into the file."""
    return path.with_name(f"{path.name}.part{number}")


TARGET = "target_fingerprint"


class Answers:
    """The file of answers: one JSON line each, in the order in which they ended.

    Args:
        fingerprint: of the target whose answers they are.

    Raises:
        ConfigError: it holds answers of another target, or that were asked for otherwise than by
            `params`, or a line that is no answer.
    """

    def __init__(self, path: Path, params: SamplingParams, fingerprint: str) -> None:
        self.path, self._params = path, params
        self._asked = {
            TARGET: fingerprint,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }
        self.texts: dict[int, Text] = {}
        if path.exists():
            found = path.read_bytes()
            # A line that was being written when the run stopped has no end. Whole ones are never
            # written again: stopped in the middle of that, a run would lose them all.
            whole = found.rfind(b"\n") + 1
            if whole < len(found):
                os.truncate(path, whole)
            for place, line in enumerate(found[:whole].splitlines(), start=1):
                self._take(line, place)

    def add(self, number: int, text: Text) -> None:
        """Append one answer."""
        self.texts[number] = text
        row = {"number": number, "num_prompt": text.num_prompt, "tokens": text.tokens}
        row |= self._asked
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def take_parts(self) -> dict[int, Text]:
        """Move the answers of other processes' files into this one; all that there are now."""
        for path in sorted(self.path.parent.glob(part_of(self.path, "*").name)):
            part = Answers(path, self._params, str(self._asked[TARGET]))
            for number, text in part.texts.items():
                self.add(number, text)
            path.unlink()
        return self.texts

    def _take(self, line: bytes, place: int) -> None:
        """Read one line, the `place`-th."""
        row = _row(line)
        if row is None:
            raise ConfigError(
                f"{self.path}, line {place}, must be an answer with number, num_prompt and "
                f"tokens, got {line.decode('utf-8', 'replace')!r:.80}; delete the line, and its "
                "prompt is asked again"
            )
        self._check(row)
        self.texts[row["number"]] = Text(tokens=tuple(row["tokens"]), num_prompt=row["num_prompt"])

    def _check(self, row: Mapping[str, Any]) -> None:
        if TARGET not in row:
            # Taken for this one's they would teach another's, and no figure would show it.
            raise ConfigError(
                f"answers must say whose they are, but {self.path} is of an earlier version and "
                f"does not; if this target gave them, add {TARGET!r}: {self._asked[TARGET]!r} to "
                "each line, else use another folder"
            )
        for name, mine in self._asked.items():
            # Files of old do not say how they were asked for.
            if row.get(name, mine) != mine:
                raise ConfigError(
                    f"answers go on with the {name} they were begun with, but {self.path} has "
                    f"{row[name]}, now {mine}; use another folder, or delete the file"
                )

    def missing(self, count: int) -> list[int]:
        """Which of the prompts 0 .. count - 1 have no answer yet."""
        return [i for i in range(count) if i not in self.texts]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line of the file as `Answers.add` writes it; None: it is something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("tokens"), list):
        return None
    numbers = row.get("number"), row.get("num_prompt"), *row["tokens"]
    return row if all(type(x) is int for x in numbers) else None


class Capture:
    """The target's features over whole texts, one text at a time.

    layers: ids of feature layers; the last layer's output always comes with them, so that the
    target's own law can be had. keep_bytes: what it may keep of texts that come again. within: a
    capture of these layers and others, whose texts are kept for both.
    """

    def __init__(
        self,
        model: TargetModel,
        layers: Sequence[int],
        *,
        keep_bytes: int = 0,
        chunk: int = 4096,
        within: Capture | None = None,
    ) -> None:
        self.layers, self._within = tuple(layers), within
        self._model, self._chunk, self._room = model, chunk, keep_bytes
        self._kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        last = model.info.recurrent.num_layers - 1
        self._features, self._last = Features(layers), Features((last,))
        self._both = _Both(self._features, self._last)
        self._state = State(
            model.info.recurrent,
            num_slots=1,
            max_nodes=1,
            dtype=model.dtype,
            device=model.device,
        )
        self._slot = self._state.acquire()

    def __call__(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(features [n, layers * D], last-layer outputs [n, D]) of n tokens, from the start."""
        if self._within is not None:
            return self._part(*self._within(tokens))
        key = tuple(tokens)
        if key not in self._kept:
            found = self._run(tokens)
            size = sum(x.nbytes for x in found)
            if size > self._room:
                return found
            self._room -= size
            self._kept[key] = found
        return self._kept[key]

    def _part(self, features: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """This capture's layers of the wider one's."""
        assert self._within is not None
        parts = features.unflatten(-1, (len(self._within.layers), -1)).unbind(-2)
        wide = dict(zip(self._within.layers, parts, strict=True))
        return torch.cat([wide[layer] for layer in self.layers], dim=-1), last

    def _run(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._state.reset(self._slot)
        parts = []
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            self._model.prefill(chunk, self._slot, self._state, self._both)
            parts.append((self._features.rows(), self._last.rows()))
        features, last = (torch.cat(x).clone() for x in zip(*parts, strict=True))
        return features, last


def agreed(
    capture: Capture, model: TargetModel, prompt: Sequence[int], known: Sequence[int]
) -> Text:
    """The target's greedy answer as far as a known one goes along with it, and the token where
    they part: one pass in place of a round per token."""
    _, last = capture((*prompt, *known))
    said = model.logits(last[len(prompt) - 1 : -1]).argmax(-1).tolist()
    count = 0
    while count < len(known) and said[count] == known[count]:
        count += 1
    return Text(tokens=(*prompt, *said[: count + 1]), num_prompt=len(prompt))


class _Both(Features):
    """Two sets of layers filled by one pass."""

    def __init__(self, one: Features, two: Features) -> None:
        super().__init__((*one.layers, *two.layers))
        self._parts = one, two

    def take(self, layer: int, x: Tensor, *, copy: bool = False) -> None:
        for part in self._parts:
            part.take(layer, x, copy=copy)
