# SPDX-License-Identifier: Apache-2.0
"""Rules I1, I2, I3, I4 and I6 over random histories. Tier: exact.

2,000 histories in the fast lane, the same ones every time. More, and other ones:

    SPECLA_HISTORIES=20000 pytest tests/state/test_machine.py
"""

from __future__ import annotations

import os

import pytest
import torch
from histories import Histories, same, target
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from mutants import MUTANTS
from plain_run import PROMPTS
from tiny_decoder import VOCAB

HISTORIES = int(os.environ.get("SPECLA_HISTORIES", "2000"))
SHARDS = 4
# A mutant must be found within this many histories; measured: at most a third of it.
MUTANT_HISTORIES = 150

SETTINGS = settings(
    stateful_step_count=6,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_histories(shard: int, record_property) -> None:  # type: ignore[no-untyped-def]
    """A failure prints the history as a program. Shards are seeded by their number and by the
    total, so that a longer run sees other histories."""
    Histories.finished = Histories.rounds = 0
    share = -(-HISTORIES // SHARDS)
    # run_state_machine_as_test takes the seed from the class.
    machine = seed(HISTORIES * SHARDS + shard)(type("Shard", (Histories,), {}))
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=share))
    record_property("histories", Histories.finished)
    record_property("rounds", Histories.rounds)
    assert Histories.finished >= share


@pytest.mark.parametrize("name", MUTANTS)
def test_histories_find_bugs(  # type: ignore[no-untyped-def]
    name: str, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    owner, attribute, make = MUTANTS[name]
    plain, original = target()[1], getattr(owner, attribute)
    broken = make(original)

    def either(*args):  # type: ignore[no-untyped-def]
        return (original if plain.running else broken)(*args)

    monkeypatch.setattr(owner, attribute, either)
    machine = seed(1)(type("Mutated", (Histories,), {}))
    only = settings(SETTINGS, max_examples=MUTANT_HISTORIES, phases=[Phase.generate])
    Histories.finished = 0
    with pytest.raises(AssertionError, match=r"I[1246]\b|^free slot"):
        run_state_machine_as_test(machine, settings=only)
    record_property("histories_to_find", Histories.finished)


def test_the_trie_is_plain_decoding() -> None:
    """What histories are held against is itself held against runs that reuse nothing."""
    plain = target()[1]
    for prompt in range(len(PROMPTS)):
        tokens = (PROMPTS[prompt][-1], *(7 * i % VOCAB for i in range(5)))
        kept, fresh = plain.at(prompt, tokens), plain.fresh(prompt, tokens)
        assert kept.logits is not None
        assert fresh.logits is not None
        assert torch.equal(kept.logits, fresh.logits)
        assert same(kept.committed, fresh.committed)
