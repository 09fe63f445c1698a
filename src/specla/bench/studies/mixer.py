# SPDX-License-Identifier: Apache-2.0
"""The mixer of an EAGLE drafter: the gated delta rule against attention, at equal size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from specla.bench.measure import Prompt
from specla.bench.studies import counts, plots
from specla.bench.studies.reader import survival
from specla.bench.studies.study import (
    ALL,
    Figure,
    Lab,
    Measurement,
    Setting,
    Subject,
    Value,
    measured,
    require_whole,
)
from specla.drafters.base import DeviceDrafter
from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_config import expected_tensors
from specla.errors import ConfigError

KIND = "eagle:"
MOST_LENGTH = 1 << 15
ROOM = 256
"""Tokens besides a prompt's and an answer's: a chat format's, and those of a round's nodes."""


class Mixer:
    """See `study.Study`."""

    name = "mixer"
    about = """\
Two EAGLE drafters of equal size for one target, one with a gated delta rule, whose memory is
constant, one with causal attention, whose memory grows with the text, or on a GPU is there for the
longest from the start. Both draft whole trees (`min_survival=0`). Prompts are preceded by other
prompts until they have `length` tokens, so that long texts are texts that the drafters were not
trained on. slot_bytes: what a drafter keeps per sequence once the prompt is read. draft_us: per
round, where the host drafts, re-encoding what was accepted included; inside a round's graph it is
part of the round (`round_over_ar`, which has both). Intervals are 95 %, bootstrapped over
prompts."""
    factors: Mapping[str, tuple[Value, ...]] = {"length": (256, 2048, 8192)}
    centre: Mapping[str, Value] = {}
    drafters = (2, 2)
    prompts = 4
    recorded = ("tau", "round_over_ar", "ratio", "draft_us", "slot_bytes")
    max_nodes = 16

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """Both take turns at every length; then their rounds are counted."""
        lengths = require_whole("length", lab.values["length"], 2, MOST_LENGTH)
        subjects = _by_mixer(lab, max(lengths) + lab.params.max_tokens + ROOM)
        for done, length in enumerate(lengths):
            prompts = [
                Prompt(kind=ALL, text=lengthened(lab, i, length)) for i in range(len(lab.prompts))
            ]
            until = lab.share(len(lengths) - done)
            yield from _measure(lab, subjects, prompts, until, length)

    def draw(self, found: Sequence[Measurement]) -> Any:
        """tau, time and memory by length, and survival by depth."""
        figure, axes = plots.axes(4)
        lengths = plots.values(found, "length")
        shown = {"tau": "tokens per round", "round_over_ar": "a round, in plain ones",
                 "slot_bytes": "bytes per sequence"}  # fmt: skip
        for axis, (name, title) in zip(axes, shown.items(), strict=False):
            for mixer in plots.values(found, "mixer"):
                line = [m for m in found if m.at["mixer"] == mixer]
                plots.line(axis, line, "length", name, label=mixer, capsize=2)
            plots.powers(axis, lengths)
            plots.label(axis, "tokens of the prompt", title)
            axis.set_ylim(0)
        for m in found:
            style = "-" if m.at["mixer"] == "gdn" else ":"
            name = f"{m.at['mixer']}, {m.at['length']}"
            plots.points(axes[3], survival(m), label=name, linestyle=style)
        axes[3].set_ylim(0, 1)
        plots.whole(axes[3])
        plots.label(axes[3], "drafts accepted", "of all rounds")
        return figure


def _by_mixer(lab: Lab, longest: int) -> dict[str, Subject]:
    """The drafters, loaded, for texts of so many tokens.

    Raises:
        ConfigError: not an EAGLE drafter of each kind.
    """
    found: dict[str, Subject] = {}
    for name in lab.drafters:
        if not name.startswith(KIND):
            raise ConfigError(f"--drafter must be eagle:FOLDER for this study, got {name!r}")
        # The host would cut what looks unlikely, a round's graph never does: one of these two may
        # be drafted there and the other here.
        options = {"min_survival": 0, "longest": longest}
        setting = Setting(drafter=name, options=options, max_nodes=lab.max_nodes)
        subject = lab.load(setting)
        found[_drafter(subject).config.mixer] = subject
    if len(found) < len(lab.drafters):
        raise ConfigError(
            f"--drafter must be given for both mixers, gdn and attention, got only {list(found)}"
        )
    return found


def _drafter(subject: Subject) -> EagleDrafter:
    drafter = subject.engine.drafter
    assert isinstance(drafter, EagleDrafter), "checked by its name"
    return drafter


def lengthened(lab: Lab, number: int, length: int) -> str:
    """A prompt, preceded by the others over and over, that has about `length` tokens."""
    texts = [prompt.text for prompt in lab.prompts]
    text, before = texts[number], number
    while len(lab.plain.encode(text)) < length:
        before = (before - 1) % len(texts)
        text = f"{texts[before]}\n\n{text}"
    assert lab.tokenizer is not None, "drafters are trained for a checkpoint"
    ids = lab.tokenizer.encode(text, add_special_tokens=False)
    # What the chat format adds stays.
    room = length - (len(lab.plain.encode(text)) - len(ids))
    return lab.tokenizer.decode(ids[-max(1, room) :])


def _measure(
    lab: Lab,
    subjects: Mapping[str, Subject],
    prompts: Sequence[Prompt],
    until: float,
    length: int,
) -> Iterator[Measurement]:
    scores = lab.take_turns(subjects, prompts, until)
    for mixer, subject in subjects.items():
        drafter, before = _drafter(subject), _drafting(subject)
        on_device = isinstance(drafter, DeviceDrafter)
        answers = counts.watched(subject, prompts, lab.params)
        figures: dict[str, Figure] = {
            **counts.figures(answers, drafter.info.max_depth),
            "draft_us": None if on_device else _per_round(before, _drafting(subject)),
            "slot_bytes": _slot_bytes(subject, prompts[0], lab),
            "parameters": sum(map(prod, expected_tensors(drafter.config).values())),
        }
        at: dict[str, str | Value] = {"length": length, "mixer": mixer}
        yield measured(at, scores.get((ALL, mixer)), figures, note=subject.note)


def _drafting(subject: Subject) -> tuple[float, int]:
    """Seconds of drafting by the host, and rounds, so far."""
    stats = subject.engine.stats
    return stats.seconds["draft"], stats.acceptance.rounds


def _per_round(before: tuple[float, int], after: tuple[float, int]) -> float:
    """Microseconds."""
    return 1e6 * (after[0] - before[0]) / max(after[1] - before[1], 1)


def _slot_bytes(subject: Subject, prompt: Prompt, lab: Lab) -> int:
    """Once the prompt has been read. The answer must not end before that is looked at."""
    params = replace(lab.params, ignore_eos=True, max_tokens=MOST_LENGTH)
    with subject.under_way(prompt.text, params) as slot:
        return _drafter(subject).model.mixer.slot_bytes(slot)
