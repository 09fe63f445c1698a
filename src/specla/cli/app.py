# SPDX-License-Identifier: Apache-2.0
"""The command tree. Commands import torch only when they run, so `--help` is quick."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specla import __version__
from specla.cli.bench import generate as bench_generate
from specla.cli.bench_accept import accept as bench_accept
from specla.cli.bench_exactness import exactness as bench_exactness
from specla.cli.bench_headline import headline as bench_headline
from specla.cli.bench_kernels import kernels as bench_kernels
from specla.cli.bench_round import rounds as bench_round
from specla.cli.bench_study import study as bench_study
from specla.cli.chat import chat
from specla.cli.doctor import doctor
from specla.cli.generate import generate
from specla.cli.profile import profile
from specla.cli.train import train

EXIT_CODES = (
    "Exit codes: 0 ok; 1 runtime failure; 2 usage; 3 model not found, unreachable, missing "
    "offline, unsupported or corrupt; 4 out of memory; 5 self-test or correctness failure; "
    "130 interrupted (Ctrl-C)."
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specla {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit."),
    ] = False,
) -> None:
    """Lossless speculative decoding for linear-attention language models."""


class _Commands(TyperGroup):
    """Typer turns Ctrl-C into exit code 130, without a word: here it stays an error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog=EXIT_CODES,
)
app.callback(epilog=EXIT_CODES)(_root)
app.command(epilog=EXIT_CODES)(generate)
app.command(epilog=EXIT_CODES)(chat)
app.command(epilog=EXIT_CODES)(doctor)
app.command(epilog=EXIT_CODES)(profile)
app.command(epilog=EXIT_CODES)(train)

bench = typer.Typer(no_args_is_help=True, help="Measure speed and acceptance.")
bench.command("generate", epilog=EXIT_CODES)(bench_generate)
bench.command("exactness", epilog=EXIT_CODES)(bench_exactness)
bench.command("accept", epilog=EXIT_CODES)(bench_accept)
bench.command("kernels", epilog=EXIT_CODES)(bench_kernels)
bench.command("round", epilog=EXIT_CODES)(bench_round)
bench.command("headline", epilog=EXIT_CODES)(bench_headline)
bench.command("study", epilog=EXIT_CODES)(bench_study)
app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    """Measure speed and acceptance."""
