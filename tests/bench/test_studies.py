# SPDX-License-Identifier: Apache-2.0
"""What studies are made of: guesses that are right so often, settings, counts, batches."""

from __future__ import annotations

import random
import time
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from completions import completion

from specla.bench.accept import Answer, Tally
from specla.bench.headline import Ratio
from specla.bench.measure import Prompt
from specla.bench.random_model import gdn_1_3b
from specla.bench.studies import REGISTRY, find
from specla.bench.studies.batch import taken
from specla.bench.studies.controlled import closed_form
from specla.bench.studies.counts import figures, over_rounds, tau_over
from specla.bench.studies.guesses import Guesses
from specla.bench.studies.reader import labels
from specla.bench.studies.study import UNITS, Lab, Subject, named
from specla.bench.studies.tree import around
from specla.drafters.base import DeviceDrafter, Drafter, DraftRow
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.request import Completion, SamplingParams
from specla.state import State
from specla.testing import OracleDrafter, replay

VOCAB = 50
PROMPT = [1, 2, 3]
TEXT = [random.Random(7).randrange(VOCAB) for _ in range(3000)]


def guesses(length: int, p: float, text: list[int] = TEXT) -> Guesses:
    drafter = Guesses(length, vocab_size=VOCAB, device="cpu")
    drafter.expect(PROMPT, text, p)
    return drafter


@pytest.mark.parametrize("length", [1, 4, 16])
def test_with_p_1_it_is_the_oracle(length: int) -> None:
    text = TEXT[:200]
    oracle = OracleDrafter({tuple(PROMPT): text}, depth=length)
    mine = replay(guesses(length, 1, text), PROMPT, text, max_drafts=length)
    assert mine == replay(oracle, PROMPT, text, max_drafts=length)


@pytest.mark.parametrize("p", [0, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("length", [1, 6])
def test_tokens_per_round_follow_the_closed_form(p: float, length: int) -> None:
    found = replay(guesses(length, p), PROMPT, TEXT, max_drafts=length)
    assert closed_form(p, length) == pytest.approx((1 - p ** (length + 1)) / (1 - p))
    # 800 rounds or more, whose tokens spread by 2 or less: four standard errors.
    assert found.tokens_per_round == pytest.approx(closed_form(p, length), abs=0.28 if p else 0)


def test_what_is_right_with_a_smaller_p_is_right_with_a_larger_one() -> None:
    def right(p: float) -> set[int]:
        row = DraftRow(slot=1, tokens=PROMPT, num_prompt_tokens=3, max_drafts=99, seed=0)
        (tree,) = guesses(99, p).draft([row])
        return {i for i, token in enumerate(tree.tokens[1:]) if token == TEXT[i]}

    assert set() == right(0) < right(0.4) < right(0.6) < right(1) == set(range(99))


@pytest.mark.parametrize(("nodes", "remaining"), [(8, 50), (4, 50), (8, 1)])
def test_the_device_drafts_what_the_host_does(nodes: int, remaining: int) -> None:
    drafter = guesses(5, 0.6)
    assert isinstance(drafter, DeviceDrafter)
    tokens = [*PROMPT, *TEXT[:20]]
    state: dict[str, Any] = {
        "tokens": torch.full((2, nodes), -7, dtype=torch.int32),
        "parents": torch.full((2, nodes), -7, dtype=torch.int32),
        "num_nodes": torch.tensor([1, 0], dtype=torch.int32),
    }
    rows: dict[str, Any] = {
        "len_tokens": torch.tensor([len(tokens), 0], dtype=torch.int32),
        "remaining": torch.tensor([remaining, 0], dtype=torch.int32),
    }
    (depth,) = drafter.depths(nodes)
    drafter.launch(SimpleNamespace(**rows), SimpleNamespace(**state), depth=depth)  # type: ignore[arg-type]
    most = 0 if remaining == 1 else nodes - 1
    row = DraftRow(slot=1, tokens=tokens, num_prompt_tokens=3, max_drafts=most, seed=0)
    (tree,) = drafter.draft([row])
    count = tree.num_nodes
    assert state["num_nodes"].tolist() == [count, 0]
    assert state["tokens"][0, 1:count].tolist() == list(tree.tokens[1:])
    assert state["parents"][0, :count].tolist() == list(tree.parents)


def test_settings_around_a_centre_differ_from_it_in_one_factor() -> None:
    found = around({"a": 1, "b": 2}, {"a": (1, 3), "b": (2, 4, 5)})
    assert found == [{"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 1, "b": 4}, {"a": 1, "b": 5}]


def test_all_trees_answer_what_the_centre_has_time_for() -> None:
    """Settings after it may be faster: other prompts would look like another acceptance."""

    def subject(seconds: float) -> SimpleNamespace:
        def one(text: str, params: SamplingParams) -> Completion:
            time.sleep(seconds)
            return completion(ids=(1, 2, 3), options={}, decode_s=0.1)

        engine = SimpleNamespace(drafter=SimpleNamespace(info=SimpleNamespace(name="eagle")))
        return SimpleNamespace(engine=engine, one=one, note=None)

    study = find("tree")
    values = {name: [value] for name, value in study.centre.items()}
    pause = [0.2]
    lab = Lab(
        plain=subject(0), load=lambda _: subject(pause.pop() if pause else 0), own=None,
        tokenizer=None, prompts=[Prompt(kind="x", text=str(i)) for i in range(9)],
        params=SamplingParams(max_tokens=3), drafters=["eagle"],
        values={**values, "top_k": [1, 2]}, centre=study.centre, max_nodes=16,
        deadline=time.monotonic() + 1.5,
    )  # type: ignore[arg-type]  # fmt: skip
    found = list(study.measure(lab))
    assert len(found) == 3
    counts = {one.figures["prompts"] for one in found}
    assert len(counts) == 1
    assert counts < {1, 2, 3, 4}


def test_folders_are_told_apart_by_as_little_as_it_takes() -> None:
    assert labels([Path("a/b"), Path("a/c")]) == ["b", "c"]
    assert labels([Path("w/a/checkpoint"), Path("w/b/checkpoint")]) == [
        "a/checkpoint", "b/checkpoint",
    ]  # fmt: skip
    assert labels([Path("a"), Path("x/a")]) == ["a", "x/a"]
    with pytest.raises(ConfigError, match="must differ"):
        labels([Path("a/b"), Path("a/b")])


def test_rounds_count_alike_whoever_s_they_are() -> None:
    tallies = [Tally(rounds=2, tokens=8), Tally(rounds=6, tokens=8)]
    found = over_rounds(tallies, lambda t: t.tokens)
    assert found.value == 2
    assert (found.low, found.high) == pytest.approx((8 / 6, 4))


def answer(*paths: int) -> Answer:
    """Of rounds that accepted so many drafts of three; the first draft is always right."""
    tally = Tally(first=sum(n > 0 for n in paths), rounds=len(paths))
    tally.tokens = sum(paths) + len(paths)
    tally.reached = [sum(n > d for n in paths) for d in range(max(paths))]
    return Answer(prompt=Prompt(kind="x", text="?"), completion=completion(), tally=tally)


def test_survival_is_of_all_rounds_and_a_gain_is_over_the_same_prompts() -> None:
    mine, base = [answer(3, 1, 0), answer(2)], [answer(0, 1, 0), answer(1)]
    found = figures(mine, 3)
    values = {name: x.value if isinstance(x, Ratio) else x for name, x in found.items()}
    assert values == {
        "counted": 2, "tau": 10 / 4, "first_token": 3 / 4, "survival_d1": 3 / 4,
        "survival_d2": 2 / 4, "survival_d3": 1 / 4,
    }  # fmt: skip
    assert tau_over(mine, base).value == pytest.approx((10 / 4) / (6 / 4))
    assert tau_over(mine, mine) == Ratio(value=1, low=1, high=1, p10=1, p90=1)


@pytest.mark.parametrize(
    ("prompts", "size", "count"), [(30, 1, 8), (30, 3, 9), (30, 16, 16), (4, 3, 3), (4, 1, 4)]
)
def test_whole_batches_of_eight_prompts_or_more(prompts: int, size: int, count: int) -> None:
    given = [Prompt(kind="x", text=str(i)) for i in range(prompts)]
    assert taken(given, size) == [str(i) for i in range(count)]


def test_studies_say_what_they_are() -> None:
    for name in REGISTRY:
        study = find(name)
        assert study.name == name
        assert study.centre.keys() <= study.factors.keys()
        assert {named(figure) for figure in study.recorded} <= UNITS.keys()
        assert study.about.strip().endswith((".", ")."))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 4, 7])
def test_in_a_graph_the_oracle_is_right_and_the_text_the_same(length: int) -> None:
    model = gdn_1_3b(layers=2)
    model.check_rows(length + 1)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = list(range(100, 140))

    def subject(drafter: Drafter, nodes: int) -> Subject:
        state = State(
            model.info.recurrent, num_slots=1, max_nodes=nodes, log_capacity=16,
            dtype=model.dtype, device="cuda",
        )  # fmt: skip
        engine = Engine(model, state, drafter, mode="exact", prefill_chunk=64)
        return Subject(engine, lambda text: prompt)

    want = subject(NoDrafter(), 1).one("", params)
    drafter = Guesses(length, vocab_size=model.info.vocab_size, device="cuda")
    mine = subject(drafter, length + 1)
    for p in (1, 0, 0.5):
        drafter.expect(prompt, want.token_ids, p)
        done = mine.one("", params)
        assert done.token_ids == want.token_ids
        if p != 0.5:
            assert done.speculation.rounds == (ceil(60 / (length + 1)) if p else 60)
