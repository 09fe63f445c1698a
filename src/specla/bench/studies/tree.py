# SPDX-License-Identifier: Apache-2.0
"""The tree: what width, depth, number of nodes and pruning are worth with a trained drafter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specla.bench.measure import Prompt
from specla.bench.studies import plots
from specla.bench.studies.study import Lab, Measurement, Setting, Value, measured, require_whole
from specla.errors import SpeclaError

COUNTS = {"top_k": (1, 64), "max_depth": (1, 1023), "nodes": (2, 1024)}


class Tree:
    """See `study.Study`."""

    name = "tree"
    about = """\
One factor at a time is changed around a centre: children per node (`top_k`; 1 is a chain),
deepest draft (`max_depth`), nodes that a round verifies, node 0 included (`nodes`), and how far
below the best first draft's log-probability a node may be (`threshold`, the drafters' option tau;
large: no pruning). No budget: all that the drafter proposes is verified. Plain decoding takes
turns with every setting. The centre says for how many prompts there is time; all settings answer
the same ones."""
    factors: Mapping[str, tuple[Value, ...]] = {
        "top_k": (1, 2, 4, 8),
        "max_depth": (2, 4, 6, 8),
        "nodes": (4, 8, 16, 32, 64),
        "threshold": (1, 2, 4, 6, 8, 12),
    }
    centre: Mapping[str, Value] = {"top_k": 4, "max_depth": 6, "nodes": 16, "threshold": 6}
    drafters = (1, 1)
    prompts = 8
    recorded = ("ratio", "tau")
    max_nodes = None

    def measure(self, lab: Lab) -> Iterator[Measurement]:
        """The centre first: if that cannot be had, nothing can."""
        for factor, bounds in COUNTS.items():
            require_whole(factor, [lab.centre[factor], *lab.values[factor]], *bounds)
        places = around(lab.centre, lab.values)
        prompts, until = lab.prompts, lab.share(len(places))
        for done, at in enumerate(places):
            before = len(lab.kept)
            try:
                yield from _measure(lab, at, prompts, until)
            except SpeclaError as error:
                if not done:
                    raise
                yield Measurement(at=at, figures={}, missing=str(error))
            if not done:
                # Plain decoding's answers are kept too.
                prompts, until = prompts[: (len(lab.kept) - before) // 2], math.inf

    def draw(self, found: Sequence[Measurement]) -> Any:
        """Tokens per round above, speed below; a column per factor, a line per suite."""
        centre = {name: found[0].at[name] for name in self.factors}
        figure, panels = plots.axes(len(self.factors), 2)
        for i, factor in enumerate(self.factors):
            rest = {name: value for name, value in centre.items() if name != factor}
            line = [m for m in found if rest.items() <= m.at.items()]
            line.sort(key=lambda m: float(m.at[factor]))
            for name, axis in (("tau", panels[i]), ("ratio", panels[len(self.factors) + i])):
                for suite in plots.values(line, "suite"):
                    mine = [m for m in line if m.at["suite"] == suite]
                    plots.line(axis, mine, factor, name, label=suite)
                if factor in COUNTS:
                    plots.powers(axis, plots.values(line, factor))
                what = {"tau": "tokens per round", "ratio": "speed over plain decoding"}[name]
                plots.label(axis, factor, what, legend=axis is panels[0])
            plots.even(panels[len(self.factors) + i])
        for row in (panels[: len(self.factors)], panels[len(self.factors) :]):
            plots.alike(row)
        return figure


def around(
    centre: Mapping[str, Value], values: Mapping[str, Sequence[Value]]
) -> list[dict[str, Value]]:
    """The centre, then every setting that differs from it in one factor."""
    others = [{**centre, name: value} for name, given in values.items() for value in given]
    return [dict(centre), *(one for one in others if one != centre)]


def _measure(
    lab: Lab, at: Mapping[str, Value], prompts: Sequence[Prompt], until: float
) -> Iterator[Measurement]:
    options = {"top_k": at["top_k"], "max_depth": at["max_depth"], "tau": at["threshold"]}
    setting = Setting(drafter=lab.drafters[0], options=options, max_nodes=int(at["nodes"]))
    subject = lab.load(setting)
    name = subject.engine.drafter.info.name
    scores = lab.take_turns({name: subject}, prompts, until)
    for suite in lab.suites():
        score = scores.get((suite, name))
        yield measured({**at, "suite": suite}, score, note=subject.note)
