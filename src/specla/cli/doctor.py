# SPDX-License-Identifier: Apache-2.0
"""`specla doctor`: what runs here, and a self-test of the one promise, in under 30 seconds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specla.cli import options as opt
from specla.cli.console import progress_bars
from specla.cli.environment import describe
from specla.cli.failure import INCORRECT
from specla.cli.loading import load, prompt_format, user_turn
from specla.cli.options import EngineOptions
from specla.cli.records import dumps
from specla.cli.single import print_line
from specla.errors import SpeclaError
from specla.request import Completion, SamplingParams

if TYPE_CHECKING:
    from specla.llm import LLM

PROMPTS = (
    "A farmer has 12 apples and gives 5 away. How many apples are left?",
    "one two three one two three one two",
)
LAWS = tuple(
    SamplingParams(temperature=t, max_tokens=48, seed=1, ignore_eos=True) for t in (0.0, 0.8)
)
# A random model says something new with every token and no draft would ever be accepted. Held to
# three tokens it repeats itself, and both acceptance and rejection are exercised.
FEW_TOKENS = {40: 100.0, 41: 100.0, 42: 100.0}
TINY_LAWS = tuple(replace(law, logit_bias=FEW_TOKENS) for law in LAWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the self-test."""

    name: str
    ok: bool
    detail: str
    seconds: float


def doctor(
    model: opt.Model = "demo",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    revision: opt.Revision = None,
    threads: opt.Threads = None,
    json: opt.Json = False,
    no_progress: opt.NoProgress = False,
    debug: opt.Debug = False,
) -> int:
    """Report the environment and test that speculative decoding equals plain decoding here."""
    found = describe()
    if not json:
        for name, value in found.items():
            print_line(f"{name + ':':14}{value}")
    engine = EngineOptions(
        model=model,
        device=device,
        dtype=dtype,
        max_slots=2,
        revision=revision,
        threads=threads,
    )
    with progress_bars(wanted=not no_progress) as tick:
        plain = load(replace(engine, drafter="none"), tick)
        checks = []
        for check in self_test(engine, plain):
            checks.append(check)
            if not json:
                _print_check(check)
    ok = all(check.ok for check in checks)
    if json:
        print_line(
            dumps({"ok": ok, "environment": found, "checks": [asdict(check) for check in checks]})
        )
    return 0 if ok else INCORRECT


def _print_check(check: Check) -> None:
    verdict = "PASS" if check.ok else "FAIL"
    print_line(f"{verdict}  {check.name}: {check.detail} ({check.seconds:.1f} s)")


def self_test(engine: EngineOptions, plain: LLM) -> Iterator[Check]:
    """All checks: a tiny random model with every drafter that needs no training, then the model
    itself with the one that is chosen for it.

    `plain` is the model with drafter none.
    """
    from specla.drafters import UNTRAINED

    with tempfile.TemporaryDirectory() as folder:
        tiny = replace(engine, model=_write_tiny(Path(folder)), revision=None)
        reference = load(replace(tiny, drafter="none"))
        for name in UNTRAINED:
            if name != "none":
                test = _equal(reference, tiny, name, TINY_LAWS)
                yield _check(f"tiny model, {name} equals AR", test)
    name = engine.model
    yield _check(f"{name}, rows do not change bits", lambda: _rows(plain, engine))
    yield _check(f"{name}, auto drafter equals AR", _equal(plain, engine, "auto"))


def _write_tiny(folder: Path) -> str:
    from specla.models.toy import write_toy_checkpoint

    return str(write_toy_checkpoint(folder / "tiny"))


def _check(name: str, run: Callable[[], tuple[bool, str]]) -> Check:
    start = time.perf_counter()
    try:
        ok, detail = run()
    except SpeclaError as error:
        ok, detail = False, str(error)
    return Check(name=name, ok=ok, detail=detail, seconds=time.perf_counter() - start)


def _rows(llm: LLM, engine: EngineOptions) -> tuple[bool, str]:
    rows = engine.max_slots * engine.max_nodes
    llm.model.check_rows(rows)
    return True, f"every weight shape, 1 to {rows} rows"


def _equal(
    plain: LLM, engine: EngineOptions, drafter: str, laws: Sequence[SamplingParams] = LAWS
) -> Callable[[], tuple[bool, str]]:
    def run() -> tuple[bool, str]:
        llm = load(replace(engine, drafter=drafter))
        same, rounds, tokens = True, 0, 0
        for law in laws:
            mine, truth = _answers(llm, law), _answers(plain, law)
            same = same and [c.token_ids for c in mine] == [c.token_ids for c in truth]
            rounds += sum(c.speculation.rounds for c in mine)
            tokens += sum(len(c.token_ids) for c in mine)
        verdict = "identical" if same else "DIFFERENT"
        return same, f"{verdict}, {tokens} tokens in {rounds} rounds, temperatures 0 and 0.8"

    return run


def _answers(llm: LLM, law: SamplingParams) -> list[Completion]:
    if prompt_format(llm, None) == "chat":
        return llm.chat([user_turn(text) for text in PROMPTS], law)
    return llm.generate(list(PROMPTS), law)
