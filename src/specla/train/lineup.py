# SPDX-License-Identifier: Apache-2.0
"""Every kind of drafter for one target, one after another, by the clock.

Prompts are cut from the pools that the target was trained on, so that nothing held out is seen;
the target answers them as it will later (greedily), for a share of the time; then each drafter
has its own. Training counts steps and not seconds, so a run begins with a stretch that measures
its speed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specla.engine.engine import Engine
from specla.errors import SpeclaError, what_may_fail
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.train.capture import Capture, Text
from specla.train.chat import ASSISTANT_ID, DOCUMENT_END_ID
from specla.train.entries import Entry, LineUp
from specla.train.kinds import kind_of
from specla.train.packing import TOKEN_BITS, load_pools
from specla.train.run import Prompt, texts_of
from specla.train.session import CHECKPOINT, Session, Tick, compute_for, held_apart
from specla.train.steps import Figures

Note = Callable[[str], None]

ENDLESS = 1_000_000
"""Steps of a run whose speed is not known yet."""
LOOKS = 8
"""Of a run at its held-out texts: at the start, six times on the way, at the end."""
HELD_OUT = 96
"""Texts that a run is looked at with, at most."""
SLICE = 512
"""Prompts between two looks at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Of a run, between two looks: up to step `until` of a schedule of `of` steps."""

    until: int
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one entry came to; missing: why there is none, or None."""

    name: str
    kind: str
    steps: int = 0
    seconds: float = 0.0
    tau: float | None = None
    checkpoint: str | None = None
    stretches: tuple[Stretch, ...] = ()
    missing: str | None = None


def train_line_up(
    engine: Engine,
    tokenizer_hash: str,
    work: Path,
    deadline: float,
    line_up: LineUp,
    *,
    tick: Tick | None = None,
    note: Note,
    after: Callable[[Sequence[Trained]], None] | None = None,
) -> list[Trained]:
    """Train every entry to ``work/NAME/checkpoint``, anew. An entry that cannot be trained does
    not stop the others; what it says is in its `missing`. Answers that are there are used.

    Args:
        engine: of the target, without a drafter, greedy.
        work: has the target's ``pools``.
        deadline: on the clock of time.monotonic, for everything.
        after: called with all entries so far, after each of them.
    """
    began = time.monotonic()
    until = began + line_up.answering * (deadline - began)
    texts = answers_by_clock(engine, work, until, line_up, tick)
    note(f"{len(texts)} answers, {sum(len(t.tokens) - t.num_prompt for t in texts)} tokens")
    left, found = sum(e.share for e in line_up.entries), list[Trained]()
    layers = _all_layers(line_up, engine.model, tokenizer_hash)
    features = _FeatureCache(engine.model, layers, line_up.keep_bytes)
    for entry in line_up.entries:
        seconds = (deadline - time.monotonic()) * entry.share / left
        left -= entry.share
        note(f"{entry.name}: {seconds:.0f} s")
        try:
            one = _train(
                features, tokenizer_hash, work, entry, _stretches(entry, found), line_up.probe,
                texts, seconds, tick, note,
            )  # fmt: skip
        except what_may_fail() as error:
            one = Trained(name=entry.name, kind=entry.kind, missing=str(error).split("\n")[0])
        if one.missing is not None:
            note(f"{entry.name} is missing: {one.missing}")
        found.append(one)
        if after is not None:
            after(found)
    return found


def prompts_of(pools: Path, line_up: LineUp) -> list[Prompt]:
    """Questions of the training documents, every one once, mixed; the same every time."""
    names = [name for name in line_up.pools if (pools / f"{name}.npy").exists()]
    total, found = sum(line_up.pools[name] for name in names), list[Prompt]()
    for i, pool in enumerate(load_pools(pools, names)):
        wanted = round(line_up.prompts * line_up.pools[pool.name] / total)
        chosen = dict[tuple[int, ...], None]()
        for number in np.random.default_rng((0, i)).permutation(pool.documents):
            if len(chosen) == wanted:
                break
            words = pool.tokens[pool.starts[number] : pool.starts[number + 1]] & TOKEN_BITS
            if (asked := _question(words)) is not None:
                chosen[asked] = None
        found += [Prompt(tokens=tokens, known=None) for tokens in chosen]
    return [found[i] for i in np.random.default_rng(1).permutation(len(found))]


def _question(words: np.ndarray) -> tuple[int, ...] | None:
    """A document up to where the assistant begins; None where it is no conversation."""
    begins = np.flatnonzero(words == ASSISTANT_ID)
    if not len(begins):
        return None
    first = 1 if words[0] == DOCUMENT_END_ID else 0
    return tuple(words[first : begins[0] + 1].tolist())


def answers_by_clock(
    engine: Engine, work: Path, until: float, line_up: LineUp, tick: Tick | None
) -> list[Text]:
    """As many answers as the time allows, a slice of prompts at least; kept in answers.jsonl."""
    asked = prompts_of(work / "pools", line_up)
    params = SamplingParams(temperature=0.0, max_tokens=line_up.max_tokens)
    capture = Capture(engine.model, (0,))
    path, count, texts = work / "answers.jsonl", 0, list[Text]()
    while count < len(asked) and (count == 0 or time.monotonic() < until):
        count = min(count + SLICE, len(asked))
        texts = texts_of(engine, capture, asked[:count], params, path)
        if tick is not None:
            tick("answers", count, len(asked))
    return texts


class _FeatureCache:
    """What all entries read, captured once: a text is run through the target the first time that
    any of them meets it. layers: of those that say theirs before anything is trained."""

    def __init__(self, model: TargetModel, layers: Sequence[int], keep_bytes: int) -> None:
        self.model, self._keep_bytes = model, keep_bytes
        self._wide = Capture(model, layers, keep_bytes=keep_bytes)

    def __call__(self, layers: Sequence[int]) -> Capture:
        """Features of these layers."""
        if not set(layers) <= set(self._wide.layers):
            self._wide = Capture(self.model, layers, keep_bytes=self._keep_bytes)
        return Capture(self.model, layers, within=self._wide)


def _all_layers(line_up: LineUp, model: TargetModel, tokenizer_hash: str) -> list[int]:
    """Feature layers of the entries that start from nothing; readers stay within those. One that
    cannot be made says so in its turn."""
    found = set[int]()
    for one in line_up.entries:
        if one.start is None:
            schedule = {**one.schedule, "steps": ENDLESS}
            with suppress(SpeclaError):
                kind = kind_of(one.kind, model, tokenizer_hash, schedule, one.options)
                found.update(kind.feature_layers)
    return sorted(found)


def _train(
    features: _FeatureCache,
    tokenizer_hash: str,
    work: Path,
    entry: Entry,
    like: Sequence[Stretch],
    probe: float,
    texts: Sequence[Text],
    seconds: float,
    tick: Tick | None,
    note: Note,
) -> Trained:
    began, model, folder = time.monotonic(), features.model, work / entry.name
    # What an interrupted run left was trained on fewer answers, by another clock.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = dict(entry.options)
    if entry.start is not None:
        own["start"] = work / entry.start / CHECKPOINT
        if not (own["start"] / "config.json").is_file():
            raise SpeclaError(f"{entry.start}, which it starts from, is missing")
    rest, held = held_apart(texts)
    compute = compute_for(model)

    kind = kind_of(entry.kind, model, tokenizer_hash, {**entry.schedule, "steps": ENDLESS}, own)
    run = kind.run(folder, features(kind.feature_layers), rest, held[:HELD_OUT], compute)

    def left() -> float:
        return began + seconds - time.monotonic()

    go = partial(run, every=ENDLESS, note=note, saves=False)
    again = partial(_again, run, go, like, left, tick)
    tau, done = again() if like else _by_clock(run, go, probe, left, tick)
    if like and run.step < (wanted := like[-1].until):
        note(f"{entry.name}: {run.step} of {wanted} steps of {entry.like}, for lack of time")
    return Trained(
        name=entry.name,
        kind=entry.kind,
        steps=run.step,
        seconds=time.monotonic() - began,
        tau=tau,
        checkpoint=str(folder / CHECKPOINT),
        stretches=tuple(done),
    )


def _stretches(entry: Entry, found: Sequence[Trained]) -> tuple[Stretch, ...]:
    """Those that an entry repeats; none where it repeats no other's."""
    if entry.like is None:
        return ()
    for one in found:
        if one.name == entry.like and one.stretches:
            return one.stretches
    raise SpeclaError(f"{entry.like}, whose steps it repeats, is missing")


def _by_clock(
    run: Session[Any],
    go: Callable[..., Figures],
    probe: float,
    left: Callable[[], float],
    tick: Tick | None,
) -> tuple[float, list[Stretch]]:
    """The last held-out tau, and the stretches. Steps become faster, as features are kept: a run
    is as long as its last stretch says."""
    stretches, done = Stretches(run, left), list[Stretch]()
    figures = go(minutes=min(probe, left() / 3) / 60)
    done.append(Stretch(until=run.step, of=ENDLESS))
    for looks in range(LOOKS - 2, 0, -1):
        steps = run.step + stretches.affordable(looks)
        run.lengthen(steps)
        figures = go(minutes=stretches.seconds(looks) / 60, tick=tick)
        done.append(Stretch(until=run.step, of=steps))
    return figures.tau, done


def _again(
    run: Session[Any],
    go: Callable[..., Figures],
    like: Sequence[Stretch],
    left: Callable[[], float],
    tick: Tick | None,
) -> tuple[float, list[Stretch]]:
    """The same stretches as another run's, as far as there is time."""
    done = list[Stretch]()
    for stretch in like:
        run.lengthen(stretch.of)
        figures = go(minutes=max(left(), 0.0) / 60, tick=tick, until=stretch.until)
        done.append(Stretch(until=run.step, of=stretch.of))
    return figures.tau, done


class Stretches:
    """A run between two looks at a time. left: seconds that it has."""

    def __init__(self, run: Session[Any], left: Callable[[], float]) -> None:
        self._run, self._left, self._before = run, left, (run.step, run.seconds)

    def seconds(self, looks: int) -> float:
        """Of the next stretch, which ends with the first of so many looks."""
        return max(self._left() / looks - self._run.look_seconds, 0.0)

    def affordable(self, looks: int) -> int:
        """More steps for which there is time, looks aside, at the pace of the stretch that has
        just ended; one at least."""
        steps, seconds = self._run.step - self._before[0], self._run.seconds - self._before[1]
        self._before = self._run.step, self._run.seconds
        left = self._left()
        pace = seconds / steps if steps else left
        return max(int(0.95 * (left - looks * self._run.look_seconds) / pace), 1)


def record(found: Sequence[Trained]) -> list[dict[str, Any]]:
    """As JSON objects."""
    return [asdict(one) for one in found]
