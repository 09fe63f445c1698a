# SPDX-License-Identifier: Apache-2.0
"""Acceptance figures on rounds small enough to count by hand, and prompts from files."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from completions import completion

from specla.bench.accept import Tally, Watched, collect, figures, result
from specla.bench.accept_page import csv_rows, record, render, text_record
from specla.bench.measure import Prompt
from specla.bench.report import COLUMNS, head
from specla.bench.suites import read_suites
from specla.drafters.base import Observation
from specla.errors import ConfigError
from specla.request import Completion
from specla.topology.tree import DraftTree

# 10 and 11 below node 0; 12 below 10. The second child is the likelier one.
TREE = DraftTree(
    (9, 10, 11, 12), (-1, 0, 0, 1), (0.0, math.log(0.3), math.log(0.6), math.log(0.9))
)


def seen(tree: DraftTree, path: Sequence[int], emitted: Sequence[int]) -> Observation:
    return Observation(slot=1, tree=tree, path=tuple(path), emitted=tuple(emitted))


ROUNDS = (
    seen(TREE, (0, 1, 3), (10, 12, 7)),  # both accepted
    seen(TREE, (0, 2), (11, 8)),  # the likeliest; nothing below it
    seen(TREE, (0, 1), (10, 6)),  # wrong at depth 2
    seen(TREE, (0,), (5,)),  # wrong at once
    seen(DraftTree.root(5), (0,), (4,)),  # silent
    seen(TREE, (0, 1), (10,)),  # cut by an end: nothing was drawn below node 1
)


def tally(rounds: Sequence[Observation] = ROUNDS) -> Tally:
    counts = Tally()
    for one in rounds:
        counts.add(one)
    return counts


def test_counts_by_hand() -> None:
    t = tally()
    assert (t.rounds, t.silent, t.tokens, t.drafted, t.accepted) == (6, 1, 10, 15, 5)
    assert (t.offered, t.taken, t.reached) == ([5, 2], [4, 1], [4, 1])
    assert t.first == 1
    assert (t.scored, t.recalled) == (7, {1: 2, 2: 5, 4: 5, 8: 5})


def test_figures() -> None:
    f = figures([tally()])
    assert f.tau == pytest.approx(10 / 6)
    assert f.acceptance == pytest.approx(5 / 15)
    assert f.acceptance_by_depth == (0.8, 0.5)
    assert f.survival_by_depth == (4 / 6, 1 / 6)
    assert f.first_token == pytest.approx(1 / 6)
    assert f.silent == pytest.approx(1 / 6)
    assert f.recall == {1: 2 / 7, 2: 5 / 7, 4: 5 / 7, 8: 5 / 7}


def test_merging_is_adding() -> None:
    whole, parts = tally(), Tally()
    parts.merge(tally(ROUNDS[:2]))
    parts.merge(tally(ROUNDS[2:]))
    assert parts == whole


def test_without_scores_there_is_no_recall() -> None:
    chain = DraftTree.chain(9, (10, 11))
    f = figures([tally([seen(chain, (0, 1), (10, 3))])])
    assert f.recall is None
    assert f.first_token == 1


def test_nothing_at_all() -> None:
    f = figures([])
    assert (f.tau, f.acceptance, f.rounds) == (0.0, None, 0)


def answered(name: str, ids: Sequence[int], finish: str = "length") -> Completion:
    one = completion(ids=tuple(ids), options={"drafter": "ngram", "mode": "exact"})
    return replace(one, request_id=name, finish_reason=finish)


def test_filtered_figures_leave_looping_answers_out() -> None:
    prompts = [Prompt(kind="k", text=str(i)) for i in range(3)]
    done = [answered("a", range(80)), answered("b", [1, 2] * 40), answered("c", (), "error")]
    good, loopy = ROUNDS[3:4], ROUNDS[:1]

    def generate(
        asked: Sequence[Prompt], watch: Callable[[Watched], None]
    ) -> Sequence[Completion]:
        watch([("a", good[0]), ("b", loopy[0])])
        watch([("b", loopy[0])])
        return done

    r = result("k", "ngram", 0.0, collect(prompts, generate))
    assert (r.prompts, r.failed, r.looping) == (3, 1, 1)
    assert r.raw.tau == pytest.approx(7 / 3)
    assert r.filtered is not None
    assert r.filtered.tau == 1.0
    json.dumps(record(r))
    first = head(
        device="cpu", versions={"torch": "2"}, command="specla bench accept", measured="abc"
    )
    rows = csv_rows([r], first)
    assert {row["commit"] for row in rows} == {"abc"}
    assert all(set(row) == set(COLUMNS) for row in rows)
    metrics = {str(row["metric"]): row["value"] for row in rows}
    assert metrics["accept/k/t0/ngram/tau"] == "2.333"
    assert metrics["accept/k/t0/ngram/tau_filtered"] == "1.000"
    assert metrics["accept/k/t0/ngram/survival_d2"] == "0.6667"
    assert render([r], "title").row_count == 1


def test_a_kept_text_says_whether_it_loops() -> None:
    (one,) = collect([Prompt(kind="k", text="p")], lambda p, w: [answered("a", [1, 2] * 40)])
    assert text_record(one, 1.0)["loops"] is True


# ---- suites


def write(path: Path, *records: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, records)) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_prompts_of_every_form(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k" / "test.jsonl", {"question": "one", "answer": "1"})
    write(tmp_path / "gsm8k" / "train.jsonl", {"question": "not this"})
    write(tmp_path / "humaneval" / "HumanEval.jsonl.gz", {"prompt": "def f():", "test": "x"})
    write(tmp_path / "more" / "qa" / "question.jsonl", {"turns": ["first", "second"]})
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes?"}]
    write(tmp_path / "chat" / "held-out.jsonl", {"messages": said})
    (tmp_path / "gsm8k" / "LICENSE").write_text("MIT")
    suites = read_suites([tmp_path])
    assert {name: [p.text for p in s] for name, s in suites.items()} == {
        "chat": ["hello"], "gsm8k": ["one"], "humaneval": ["def f():"], "qa": ["first"],
    }  # fmt: skip
    file = tmp_path / "gsm8k" / "train.jsonl"
    assert [p.text for p in read_suites([file])["gsm8k"]] == ["not this"]


def test_a_sample_is_drawn_by_seed_and_keeps_its_order(tmp_path: Path) -> None:
    path = write(tmp_path / "s" / "q.jsonl", *({"question": f"{i:02}"} for i in range(50)))
    drawn = [[p.text for p in read_suites([path], most=5, seed=s)["s"]] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == sorted(drawn[0])
    assert len(read_suites([path], most=99)["s"]) == 50


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "q.jsonl:1 must be a JSON object"),
        ('{"question": "a"}\n[]', "q.jsonl:2 must have a text"),
        ('{"turns": []}', "q.jsonl:1 must have a text"),
        ("\n", "is empty"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_suites([tmp_path / "q.jsonl"])


def test_paths_without_suites_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder with some"):
        read_suites([tmp_path / "nothing"])
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "same" / name, {"question": "x"})
    with pytest.raises(ConfigError, match="distinct folders, got 'same' twice"):
        read_suites([tmp_path])
    with pytest.raises(ConfigError, match="--prompts must be >= 1"):
        read_suites([tmp_path], most=0)
