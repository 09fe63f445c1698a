# SPDX-License-Identifier: Apache-2.0
"""The headline's turns, scores, intervals, figures and page, on made-up completions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from completions import completion

from specla.bench import headline as h
from specla.bench import headline_page as page
from specla.bench.measure import Method, Prompt, Sample
from specla.errors import SpeclaError
from specla.request import BudgetReport, Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=8)
SUITES = {s: [Prompt(kind=s, text=f"{s} {i}") for i in range(n)]
          for s, n in ((h.GSM8K, 3), (h.HUMANEVAL, 1), (h.MIXED, 2))}  # fmt: skip


def answer(tokens: int, rounds: int, seconds: float, drafter: str = "eagle") -> Completion:
    made = completion(ids=tuple(range(tokens)), options={"drafter": drafter, "mode": "exact"},
                      decode_s=seconds)  # fmt: skip
    return replace(made, speculation=replace(made.speculation, rounds=rounds))


def sample(method: str, suite: str, done: Completion | None, number: int = 0) -> Sample:
    prompt = Prompt(kind=suite, text=f"{suite} {number}")
    seconds = 0.0 if done is None else done.timing.decode_s
    return Sample(method=method, prompt=prompt, completion=done, decode_s=seconds,
                  error=None if done else "broken")  # fmt: skip


def everything() -> list[Sample]:
    """AR at 100 tokens/s; the tree twice as fast in rounds of 1.5 AR steps."""
    speeds = {h.AR: (24, 0.24), h.CHAIN: (12, 0.15), h.TREE: (8, 0.12), h.PRUNED: (8, 0.12),
              h.BUDGET: (8, 0.16), h.BLOCK_MORE: (12, 0.2), h.READER: (10, 0.2)}  # fmt: skip
    return [
        sample(method, suite, answer(24, rounds, seconds), i)
        for suite in h.SUITES
        for i in range(4)
        for method, (rounds, seconds) in speeds.items()
    ]


def whole_batch() -> h.Batch:
    """A fifth faster than AR, half as fast again without prompts."""
    return h.Batch(
        suite="gsm8k", size=64, method=h.BUDGET, tokens=9, seconds=1.0, plain_seconds=1.2,
        decode_s=0.6, plain_decode_s=0.9, rounds=30, tau=3.2, drafts=4.1, drafted=0.97, same=64,
        looping=3,
    )  # fmt: skip


def test_suites_take_turns() -> None:
    order = [prompt.text for prompt in h.in_turn(SUITES)]
    assert order == ["gsm8k 0", "humaneval 0", "mixed 0", "gsm8k 1", "mixed 1", "gsm8k 2"]


def test_every_method_answers_a_prompt_before_the_next_and_none_after_the_deadline() -> None:
    calls: list[tuple[str, str]] = []

    def method(name: str) -> Method:
        def run(text: str, params: SamplingParams) -> Completion:
            calls.append((name, text))
            if (name, text) == ("b", "humaneval 0"):
                raise SpeclaError("no")
            return answer(4, 2, 0.1)

        return Method(name=name, run=run)

    methods, order = [method("a"), method("b")], h.in_turn(SUITES)
    samples = h.take_turns(methods, order, PARAMS, time.monotonic() + 60)
    assert calls[:2] == [("a", "gsm8k 0"), ("b", "gsm8k 0")]  # the warm-up
    assert calls[2:] == [(name, p.text) for p in order for name in "ab"]
    assert [s.error for s in samples].count("no") == 1
    late = h.take_turns(methods, order, PARAMS, time.monotonic() - 1)
    assert [(s.method, s.prompt.text) for s in late] == [("a", "gsm8k 0"), ("b", "gsm8k 0")]


@pytest.mark.parametrize(("deadline", "prompts"), [(11.9, 1), (12.0, 2), (18.0, 3)])
def test_a_prompt_that_would_not_fit_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, deadline: float, prompts: int
) -> None:
    clock = [0.0]

    def run(text: str, params: SamplingParams) -> Completion:
        clock[0] += 4.0
        return answer(4, 2, 0.1)

    monkeypatch.setattr(h.time, "monotonic", lambda: clock[0])
    samples = h.take_turns([Method(name="a", run=run)], h.in_turn(SUITES), PARAMS, deadline)
    assert len(samples) == prompts
    assert clock[0] <= deadline


def test_what_a_device_cannot_do_is_one_methods_failure() -> None:
    """Memory, in torch's words or in Triton's: minutes of the others' answers stay."""
    errors = pytest.importorskip("triton.runtime.errors")
    said = [torch.OutOfMemoryError("none left"), errors.OutOfResources(300, 227, "shared memory")]

    def run(text: str, params: SamplingParams) -> Completion:
        raise said[0]

    for error in list(said):
        samples = h.take_turns([Method(name="a", run=run)], h.in_turn(SUITES)[:1], PARAMS, 0.0)
        assert [one.error for one in samples] == [str(error)]
        del said[0]


def test_a_score_compares_the_same_prompts_only() -> None:
    samples = [
        sample(h.AR, "gsm8k", answer(10, 10, 0.1), 0),
        sample(h.AR, "gsm8k", answer(30, 30, 0.3), 1),
        sample(h.TREE, "gsm8k", answer(10, 4, 0.05), 0),
        sample(h.TREE, "gsm8k", None, 1),
    ]
    plain, tree = h.scores(samples)
    assert (plain.speed, plain.ratio.value, plain.round_over_ar) == pytest.approx((100, 1, 1))
    assert (tree.prompts, tree.failed, tree.same, tree.tokens) == (2, 1, 1, 10)
    assert (tree.speed, tree.ratio.value, tree.tau) == pytest.approx((200, 2, 2.5))
    # 0.05 s / 4 rounds over 0.1 s / 10 tokens
    assert tree.round_over_ar == pytest.approx(1.25)


def test_a_method_that_answers_nothing_has_no_score_but_a_reason() -> None:
    samples = everything()
    broken = [
        replace(one, completion=None, error="out of memory\nat 3")
        if (one.method, one.prompt.kind) in ((h.PRUNED, "gsm8k"), (h.BUDGET, "mixed"))
        else one
        for one in samples
    ]
    assert h.unanswered(samples) == {}
    why = h.unanswered(broken)
    reason = "none of 4 prompts was answered by it and by AR: out of memory"
    assert why == {f"{h.PRUNED}, gsm8k": reason, f"{h.BUDGET}, mixed": reason}
    scores = h.scores(broken)
    assert (h.PRUNED, "gsm8k") not in {(s.method, s.suite) for s in scores}
    assert len(scores) == len(h.scores(samples)) - 2
    batch = whole_batch()
    named = {m.name: m for m in page.metrics(scores, [batch], broken, why)}
    for name in ("e2e_gsm8k_b1", "round_over_ar", "e2e_worst_case"):
        assert named[name].value is None
        assert "out of memory" in named[name].notes
    assert named["e2e_mixed_b1"].value == pytest.approx(2)
    assert not any(name.startswith(f"headline/gsm8k/{h.PRUNED}/") for name in named)


def test_where_ar_answers_nothing_nothing_is_compared() -> None:
    samples = [
        replace(one, completion=None, error="no") if one.method == h.AR else one
        for one in everything()
        if one.prompt.kind == "gsm8k"
    ]
    assert h.scores(samples) == []
    assert len(h.unanswered(samples)) == 7
    assert h.tau_ratio(samples, "gsm8k", h.TREE, h.CHAIN) is not None


def test_prompts_that_ar_was_not_asked_are_no_failures() -> None:
    """Where time was short, fla's loop may have come further than the others."""
    samples = [
        sample(h.AR, "gsm8k", answer(10, 10, 0.1), 0),
        *(sample("FLA-SD", "gsm8k", answer(10, 5, 0.2), i) for i in range(3)),
        sample("FLA-SD", "mixed", answer(10, 5, 0.2), 0),
    ]
    _, fla = h.scores(samples)
    assert (fla.prompts, fla.failed, fla.tokens) == (1, 0, 10)
    assert h.unanswered(samples) == {
        "FLA-SD, mixed": "none of 1 prompts was answered by it and by AR: AR was not asked the "
        "same ones"
    }


def test_the_worst_case_is_over_every_suite_and_batch() -> None:
    samples = everything()
    whole = whole_batch()
    few = replace(whole, size=4, plain_seconds=1.1)
    mixed = replace(whole, suite="mixed", plain_seconds=0.9)
    found = page.metrics(h.scores(samples), [mixed, few, whole], samples, {})
    named = {m.name: m for m in found}
    assert named["e2e_gsm8k_b64"].value == pytest.approx(1.2)
    assert named["e2e_worst_case"].value == pytest.approx(0.9)
    assert named["e2e_worst_case"].notes == (
        "mixed, batch 64; the least of: gsm8k, batch 1 1.500; humaneval, batch 1 1.500; mixed, "
        "batch 1 1.500; mixed, batch 64 0.900; gsm8k, batch 4 1.100; gsm8k, batch 64 1.200; no "
        "other prompts or sizes were measured"
    )
    name = f"headline/gsm8k/{h.BUDGET}, batch of 4/ratio"
    assert named[name].value == pytest.approx(1.1)
    without = {m.name: m for m in page.metrics(h.scores(samples), [mixed], samples, {})}
    assert without["e2e_worst_case"].value is without["e2e_gsm8k_b64"].value is None


def test_a_kind_of_the_mixed_suite_may_be_the_worst() -> None:
    samples = [
        replace(
            one, prompt=replace(one.prompt, part="qa" if one.prompt.text[-1] == "3" else "sum")
        )
        for one in everything()
        if one.prompt.kind == h.MIXED
    ]
    slow = [
        replace(one, decode_s=0.25) if one.method == h.BUDGET and one.prompt.part == "qa" else one
        for one in samples
    ]
    rest = [one for one in everything() if one.prompt.kind != h.MIXED]
    assert h.part_ratios([*rest, *slow], h.BUDGET) == pytest.approx(
        {"mixed, sum": 1.5, "mixed, qa": 0.96}
    )
    found = page.metrics(h.scores([*rest, *slow]), [whole_batch()], [*rest, *slow], {})
    (worst,) = (m for m in found if m.name == "e2e_worst_case")
    assert worst.value == pytest.approx(0.96)
    assert worst.notes.startswith("mixed, qa, batch 1; ")


def test_flas_loop_against_flas_own_plain_decoding() -> None:
    theirs = [
        sample("FLA", "gsm8k", answer(10, 10, 2.0)),
        sample("FLA-SD", "gsm8k", answer(9, 4, 1.5)),
    ]
    samples = [*everything(), *theirs]
    found = {m.name: m for m in page.metrics(h.scores(samples), [], samples, {})}
    one = found["headline/gsm8k/FLA-SD/over_fla"]
    assert one.value == pytest.approx(6 / 5)
    assert one.baseline.startswith("fla's model")


def test_what_the_budget_reckoned_with() -> None:
    assert h.prices(everything()) == "default"
    assert h.prices([one for one in everything() if one.method == h.AR]) == "none"


def test_batches_of_every_suite_and_size() -> None:
    assert h.batch_cases(64) == [
        ("gsm8k", 64), ("humaneval", 64), ("mixed", 64), ("gsm8k", 16), ("gsm8k", 4),
    ]  # fmt: skip
    assert h.batch_cases(3) == [("gsm8k", 3), ("humaneval", 3), ("mixed", 3)]


def test_loops_and_cut_answers_are_counted() -> None:
    looping = replace(answer(96, 96, 1.0), token_ids=(1, 2) * 48, finish_reason="length")
    (score,) = h.scores([sample(h.AR, "gsm8k", looping)])
    assert (score.looping, score.unended, score.ratio_clean) == (1, 1, None)
    assert page.cells(score)[page.HEADERS.index("no loops")] == "-"


def test_a_ratio_without_looping_answers() -> None:
    """The loop is decoded ten times as fast, the other answer twice."""
    loop = replace(answer(96, 96, 1.0), token_ids=(1, 2) * 48)
    samples = [
        sample(h.AR, "gsm8k", answer(24, 24, 0.24), 0),
        sample(h.TREE, "gsm8k", answer(24, 12, 0.12), 0),
        sample(h.AR, "gsm8k", loop, 1),
        sample(h.TREE, "gsm8k", replace(loop, timing=answer(96, 10, 0.1).timing), 1),
    ]
    _, tree = h.scores(samples)
    assert tree.ratio_clean is not None
    assert tree.ratio_clean.value == pytest.approx(2)
    assert tree.ratio.value == pytest.approx(1.24 / 0.22)
    found = {m.name: m for m in page.metrics(h.scores(samples), [], samples, {})}
    name = f"headline/gsm8k/{h.TREE}"
    assert found[f"{name}/ratio_clean"].value == pytest.approx(2)
    assert found[f"{name}/ratio"].value == pytest.approx(1.24 / 0.22)
    assert page.cells(tree)[page.HEADERS.index("no loops")] == "2.00"


def test_the_interval_is_over_prompts_and_repeatable() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    mean = lambda at: values[at].mean(-1)  # noqa: E731
    one, two = h.bootstrap(mean, 5), h.bootstrap(mean, 5)
    assert one == two
    assert one.value == 4
    assert one.low < one.p10 < one.value < one.p90 < one.high
    # A twentieth outside, by the law of the mean of five draws.
    assert 1.6 < one.low < 2.2
    assert 6.2 < one.high < 7.8
    assert h.bootstrap(lambda at: 0 * at.sum(-1) + 2.0, 3).low == 2


def test_figures_have_the_issues_names() -> None:
    samples = everything()
    batch = whole_batch()
    steps = {"reader": 20, "reader-joint": 90, "block-first": 20, "block-more": 85}
    trained = {name: {"steps": n, "seconds": n / 10} for name, n in steps.items()}
    found = page.metrics(h.scores(samples), [batch], samples, {}, trained)
    (gain,) = (m for m in found if m.name == "reader_tau_gain")
    assert "reader 20 + 90 steps, 11 s; without 20 + 85 steps, 10 s" in gain.baseline
    values = {m.name: m.value for m in found}
    assert values["e2e_gsm8k_b1"] == values["e2e_mixed_b1"] == pytest.approx(2)
    assert values["e2e_humaneval_b1"] == pytest.approx(2)
    assert values["round_over_ar"] == pytest.approx(1.5)
    assert values["tau_tree_over_chain_gsm8k"] == pytest.approx(1.5)
    assert values["reader_tau_gain"] == pytest.approx(1.2)
    assert values["e2e_gsm8k_b64"] == values["e2e_worst_case"] == pytest.approx(1.2)
    name = f"headline/gsm8k/{h.BUDGET}, batch of 64/decode_ratio"
    assert values[name] == pytest.approx(1.5)
    assert values["headline/gsm8k/tree/ratio_clean"] == pytest.approx(2)
    assert values["headline/mixed/chain/tau"] == pytest.approx(2)
    rows = page.csv_rows(found, {"commit": "x"})
    assert {row["metric"] for row in rows} == set(values)
    assert all(row["baseline"] for row in rows if row["unit"] == "x")


def test_what_is_missing_is_said_with_its_reason() -> None:
    plain = [s for s in everything() if s.method == h.AR]
    missing = {h.PRUNED: "eagle was not trained", h.READER: "no reader", "FLA-SD": "no fla"}
    scores = h.scores(plain)
    found = page.metrics(scores, [], plain, missing)
    named = {m.name: m for m in found}
    for name in ("e2e_gsm8k_b1", "round_over_ar"):
        assert named[name].value is None
        assert "eagle was not trained" in named[name].notes
    assert "no reader" in named["reader_tau_gain"].notes
    assert named["e2e_worst_case"].notes == "not measured in this run"
    text = page.page(scores, [], found, missing, {"device": "made up"})
    assert "In batches" not in text
    assert "| FLA-SD | no fla |" in text
    assert "| `e2e_gsm8k_b1` | missing | tree + pruning: eagle was not trained |" in text
    assert not any(row["metric"] == "e2e_gsm8k_b1" for row in page.csv_rows(found, {}))


def test_what_was_measured_is_read_again() -> None:
    """From JSON: scores with and without a ratio of answers that do not loop, and a batch."""
    looping = replace(answer(96, 96, 1.0), token_ids=(1, 2) * 48)
    scores = h.scores([*everything(), sample(h.AR, "other", looping)])
    found = page.metrics(scores, [whole_batch()], everything(), {})
    record = {
        "scores": [asdict(one) for one in scores],
        "batches": [asdict(whole_batch())],
        "metrics": [asdict(one) for one in found],
    }
    assert page.read(json.loads(json.dumps(record))) == (scores, [whole_batch()], found)


def test_the_page_has_batches_with_and_without_prompts() -> None:
    text = page.page([], [whole_batch(), replace(whole_batch(), drafted=None)], [], {}, {})
    row = "| gsm8k | tree, budget | 64 | 1.200 | 1.000 | 1.20 | 0.900 | 0.600 | 1.50 | 30 | 3.20 |"
    assert f"{row} 4.1 | 97% | 64 | 3 |" in text
    assert f"{row} 4.1 | - | 64 | 3 |" in text
    assert page.render_batches([whole_batch()]).row_count == 1


def test_a_batch_is_timed_by_turns_after_a_first_go() -> None:
    calls: list[str] = []
    shapes = [{"none": 1, "tree": 1}, {"tree": 3, "chain": 1}]

    def runs(name: str, seconds: Sequence[float], rounds: int) -> Callable[..., list[Completion]]:
        left = iter(seconds)

        def run(prompts: Sequence[str]) -> list[Completion]:
            calls.append(name)
            time.sleep(next(left))
            made = [answer(8, rounds * (i + 1), 0.01 * len(calls) * (i + 1)) for i in range(2)]
            if name == "plain":
                return made
            reports = [
                BudgetReport(
                    policy="paying", proposed=9, chosen=9, expected=4.0, reasons={}, shapes=shape,
                    last="",
                )
                for shape in shapes
            ]  # fmt: skip
            return [
                replace(one, speculation=replace(one.speculation, drafted=6, budget=report))
                for one, report in zip(made, reports, strict=True)
            ]

        return run

    plain, tree = runs("plain", (0, 0.05, 0.06, 0.3), 8), runs("tree", (0, 0.2, 0.01, 0.012), 2)
    one, kept = h.in_batch("gsm8k", h.BUDGET, ["a", "b"], plain, tree)
    assert calls == ["plain", "tree"] * (1 + h.GOES)
    assert (one.size, one.same, one.tokens, one.looping) == (2, 2, 16, 0)
    # Calls 3, 5, 7 are AR's, 4, 6, 8 the method's; its second row takes twice as long.
    assert (one.plain_decode_s, one.decode_s) == pytest.approx((0.1, 0.12))
    # 2 and 4 rounds, one of them without a draft.
    assert (one.rounds, one.tau, one.drafts) == pytest.approx((4, 16 / 6, 2))
    assert one.drafted == pytest.approx(5 / 6)
    assert [s.prompt.text for s in kept] == ["a", "b"]
    assert page.text_record(kept[0])["loops"] is False
    assert 0.06 <= one.plain_seconds < 0.2, "the median"
    assert 0.012 <= one.seconds < 0.15


def test_an_answer_that_is_not_ars_in_one_go_is_not_the_same() -> None:
    goes = iter([answer(4, 2, 0.1), answer(4, 2, 0.1), answer(5, 2, 0.1), answer(4, 2, 0.1)])
    one, _ = h.in_batch(
        "gsm8k", h.BUDGET, ["a"], lambda _: [answer(4, 4, 0.1)], lambda _: [next(goes)]
    )
    assert (one.same, one.drafted) == (0, None)
