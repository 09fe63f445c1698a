# SPDX-License-Identifier: Apache-2.0
"""The reader: what a block drafter gains by reading the target's states.

Source: ReaDy (arXiv 2610.20503), figure 5 and table 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specla.bench.measure import Prompt
from specla.bench.studies import counts, plots
from specla.bench.studies.study import (
    Figure,
    Lab,
    Measurement,
    Scores,
    Setting,
    Subject,
    Value,
    measured,
    require_whole,
)
from specla.drafters.block_files import has_reader
from specla.errors import ConfigError

KIND = "block:"
NO_PRUNING = 1e9


class Reader:
    """See `study.Study`."""

    name = "reader"
    about = """\
Block drafters on the same prompts: one that has a state reader with the reader on and off, and
beside it others, such as the same drafter trained on for as long without a state (`--drafter` can
be repeated; `over_first` compares tokens per round with the first). `top_k` 1 drafts the likeliest
chain of the whole block, unpruned, as ReaDy does; more is the tree that is used by default.
survival_dN: of all rounds, those that accepted N drafts or more (cumulative, not conditional;
rounds that an end cuts short are among them, for all alike). first_token: rounds whose first
token was the likeliest draft. Intervals are 95 %, bootstrapped over prompts, and paired for
`over_first`. After ReaDy: figure 5 (on GSM8K the seventh draft survived 46 % of rounds without
and 58 % with the reader) and table 2 (tau +5.97 % over training on without a state)."""
    factors: Mapping[str, tuple[Value, ...]] = {"top_k": (1, 4)}
    centre: Mapping[str, Value] = {}
    drafters = (1, 8)
    prompts = 12
    recorded = ("tau", "over_first", "first_token", "survival")
    max_nodes = 16

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """All variants take turns; then their rounds are counted."""
        widths, chosen = require_whole("top_k", lab.values["top_k"], 1, 64), variants(lab.drafters)
        for done, width in enumerate(widths):
            subjects = {
                name: lab.load(_setting(lab, drafter, width, reader))
                for name, (drafter, reader) in chosen.items()
            }
            # The other half is for counting, which takes every prompt.
            until = lab.share(2 * (len(widths) - done))
            scores = lab.take_turns(subjects, lab.prompts, until)
            for suite in lab.suites():
                prompts = [prompt for prompt in lab.prompts if prompt.kind == suite]
                yield from _counted(lab, subjects, prompts, scores, {"top_k": width})

    def draw(self, found: Sequence[Measurement]) -> Any:
        """Survival by depth; a panel per suite and width, a line per variant."""
        panels = list(dict.fromkeys((m.at["suite"], m.at["top_k"]) for m in found))
        columns = min(3, len(panels))
        figure, axes = plots.axes(columns, -(-len(panels) // columns))
        for (suite, width), axis in zip(panels, axes, strict=False):
            for m in found:
                if (m.at["suite"], m.at["top_k"]) == (suite, width):
                    plots.points(axis, survival(m), label=m.at["drafter"], capsize=2)
            axis.set_ylim(0, 1)
            plots.whole(axis)
            plots.label(axis, "drafts accepted", "of all rounds", f"{suite}, top_k {width}")
        for axis in axes[len(panels) :]:
            axis.remove()
        return figure


def variants(drafters: Sequence[str]) -> dict[str, tuple[str, bool | None]]:
    """By name: a drafter, and whether its reader is on; None where it has none.

    Raises:
        ConfigError: one is no block drafter with its folder, no one has a reader, or one stands
            there twice.
    """
    for drafter in drafters:
        if not drafter.startswith(KIND):
            raise ConfigError(f"--drafter must be block:FOLDER for this study, got {drafter!r}")
    folders = [Path(drafter.removeprefix(KIND)) for drafter in drafters]
    found: dict[str, tuple[str, bool | None]] = {}
    for name, folder, drafter in zip(labels(folders), folders, drafters, strict=True):
        if has_reader(folder):
            found |= {f"{name}, reader {x}": (drafter, x == "on") for x in ("off", "on")}
        else:
            found[name] = drafter, None
    if all(reader is None for _, reader in found.values()):
        raise ConfigError(f"a --drafter must have a reader, got {', '.join(drafters)}")
    return found


def labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of their paths, as many as it takes to tell them apart.

    Raises:
        ConfigError: two are the same.
    """
    for count in range(1, max(len(folder.parts) for folder in folders) + 1):
        found = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(found)) == len(found):
            return found
    raise ConfigError(f"--drafter folders must differ, got {', '.join(map(str, folders))}")


def _setting(lab: Lab, drafter: str, width: int, reader: bool | None) -> Setting:
    options: dict[str, object] = {"top_k": width}
    if width == 1:
        options["tau"] = NO_PRUNING
    if reader is not None:
        options["reader"] = reader
    return Setting(drafter=drafter, options=options, max_nodes=lab.max_nodes)


def _counted(
    lab: Lab,
    subjects: Mapping[str, Subject],
    prompts: Sequence[Prompt],
    scores: Scores,
    at: Mapping[str, Value],
) -> Iterator[Measurement]:
    """One measurement per variant; speeds are those of the turns."""
    answers = {name: counts.watched(one, prompts, lab.params) for name, one in subjects.items()}
    first = next(iter(answers.values()))
    for name, mine in answers.items():
        depth = subjects[name].engine.drafter.info.max_depth
        figures: dict[str, Figure] = {
            **counts.figures(mine, depth),
            "over_first": counts.tau_over(mine, first),
        }
        where = {"suite": prompts[0].kind, **at, "drafter": name}
        score = scores.get((prompts[0].kind, name))
        yield measured(where, score, figures, note=subjects[name].note)


def survival(one: Measurement) -> list[tuple[Value | str, Figure]]:
    """Depth and figure."""
    named = [name for name in one.figures if name.startswith("survival")]
    return [(int(name.partition("_d")[2]), one.figures[name]) for name in named]
