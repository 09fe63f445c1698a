# SPDX-License-Identifier: Apache-2.0
"""Options shared by the commands, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from specla.errors import ConfigError

MODEL, ENGINE, SAMPLING, OUTPUT = "Model", "Engine", "Sampling", "Output"


@dataclass(slots=True)
class Settings:
    """What `main` must know after a command failed. Set by the --debug option."""

    debug: bool = False


def _debug(context: typer.Context, wanted: bool) -> None:
    if isinstance(context.obj, Settings):
        context.obj.debug = wanted


Model = Annotated[str, typer.Argument(help="'demo', a directory, or a hub id such as org/name.")]
Drafter = Annotated[
    str, typer.Option(help="Who guesses: none, ngram, suffix, ...", rich_help_panel=ENGINE)
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the drafter's own, such as top_k=2 or spine=false; repeatable.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.", rich_help_panel=ENGINE)]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float64.", rich_help_panel=ENGINE)
]
MaxNodes = Annotated[
    int, typer.Option(help="Most tree nodes a round verifies.", rich_help_panel=ENGINE)
]
MaxSlots = Annotated[
    int, typer.Option(help="Most sequences decoded together.", rich_help_panel=ENGINE)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id.", rich_help_panel=ENGINE)
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads; default: 1 for small models, else all cores.", rich_help_panel=ENGINE
    ),
]
Kernel = Annotated[
    str,
    typer.Option(
        help="What verifies on a GPU: auto (what costs less), walk, or closed (mode fast).",
        rich_help_panel=ENGINE,
    ),
]
Costs = Annotated[
    str,
    typer.Option(
        help="Measured costs: a file of 'specla profile', none, or auto: this model's on this "
        "device, if they were measured.",
        rich_help_panel=ENGINE,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        help="auto: draft and verify what pays, or nothing; a number: so many drafts per row; "
        "off: all that the drafter proposes.",
        rich_help_panel=ENGINE,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(help="Most tokens to generate; >= 1.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float, typer.Option(help="0 is greedy; finite and >= 0.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(help="Noise key; default: drawn and reported.", rich_help_panel=SAMPLING),
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0: all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep this much probability.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Drop below this fraction of the top token.", rich_help_panel=SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the text before this string; repeatable.", rich_help_panel=SAMPLING),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past end tokens.", rich_help_panel=SAMPLING)
]
NoProgress = Annotated[
    bool,
    typer.Option("--no-progress", help="No progress bars on stderr.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel=OUTPUT)
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_debug,
        is_eager=True,
        help="Show a traceback when something fails.",
        rich_help_panel=OUTPUT,
    ),
]
# Of the benchmarks.
RESULTS = Path("results/results.csv")
Results = Annotated[Path, typer.Option(help="The append-only CSV of --record.")]
Commit = Annotated[
    str | None, typer.Option(help="Hash to record where there is no checkout to ask.")
]
HeldOut = Annotated[
    Path | None, typer.Option(help="The headline's suites, from its folder of data.")
]
Source = Annotated[
    Path | None,
    typer.Option("--from", help="rows.jsonl of an earlier run, to show and record; runs nothing."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to load and run a model: what `cli.loading.load` needs, from any command."""

    model: str
    drafter: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    mode: str = "exact"
    max_nodes: int = 16
    max_slots: int = 8
    revision: str | None = None
    threads: int | None = None
    kernel: str = "auto"
    costs: str = "auto"
    budget: str = "auto"
    drafter_options: Mapping[str, object] | None = None


def drafter_options(given: Sequence[str] | None) -> dict[str, object]:
    """What --drafter-option says, by name. Whether the drafter has them is the drafter's to say.

    Raises:
        ConfigError: not NAME=VALUE, or a name that is given twice.
    """
    found: dict[str, object] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--drafter-option must be NAME=VALUE, got {text!r}")
        if name in found:
            raise ConfigError(f"--drafter-option {name} must be given once; leave one out")
        found[name] = _value(value)
    return found


def require_none(**given: object) -> None:
    """Options of a run, beside --from, which runs nothing.

    Raises:
        ConfigError: one was given.
    """
    for name, value in given.items():
        if value is not None and value != []:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} has no effect with --from, which runs nothing; leave it out"
            )


def labelled(drafter: str, options: Mapping[str, object]) -> str:
    """A drafter's name, and options that were set, for reports: "eagle top_k=2"."""
    from specla.drafters.options import described

    return f"{drafter} {described(**options)}".strip()


def _value(text: str) -> object:
    """As JSON has it: a number, true, false or null; what is none of these is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
