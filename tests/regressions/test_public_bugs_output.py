# SPDX-License-Identifier: Apache-2.0
"""Bugs other engines had with ends, counts, sampling and text: one small reproduction each.

Every test is run twice: as it is, and with the bug put in, which must be noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from engine_harness import (
    PIECES,
    SUCCESSOR,
    VOCAB,
    Letters,
    Run,
    check_counts,
    drive,
    make_engine,
    outcome,
    plain,
    request,
    truth_of,
)
from torch import Tensor

from specla.drafters.base import DraftRow
from specla.drafters.none import NoDrafter
from specla.engine.running import Running
from specla.engine.text import TextStream
from specla.models.base import TargetModel
from specla.request import Completion, SamplingParams
from specla.sampling import accept as accepting
from specla.sampling import draw as drawing
from specla.sampling.accept import RowLaw, Verdict, Walk, walk
from specla.sampling.filters import History
from specla.state import State
from specla.testing import AdversarialDrafter, OracleDrafter
from specla.topology.tree import DraftTree

PROMPT = (5, 9, 14, 15, 16, 17, 10, 22, 6)
STOP = 12


class Following:
    """The target, except that every token has one successor, by a wide margin."""

    def __init__(self, target: TargetModel, successor: dict[int, int]) -> None:
        self._target, self._successor = target, successor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, plan: Any, state: State, features: Any = None) -> Tensor:
        logits = self._target.verify(plan, state, features).clone()
        for row, token in zip(logits, plan.tokens.tolist(), strict=True):
            row[self._successor[token]] += 1000
        return logits


def following(target: TargetModel, tokens: Sequence[int]) -> tuple[Any, OracleDrafter]:
    """A model that says `tokens` (all different) after a prompt (23,); a drafter that knows."""
    after = dict(pairwise((23, *tokens)))
    model = Following(target, {token: after.get(token, 23) for token in range(VOCAB)})
    return model, OracleDrafter(lambda row: (*tokens, *((23, *tokens) * 9)), depth=15)


def say(target: TargetModel, tokens: Sequence[int], **params: Any) -> Completion:
    """What comes of `tokens` accepted in one round."""
    model, drafter = following(target, tokens)
    one = request("a", (23,), **{"max_tokens": 12, **params})
    return drive(make_engine(model, drafter, nodes=16), [one]).completions["a"]


def test_case_16_a_stop_beats_a_length_at_the_same_token(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#31599, PR#33758: the length was looked at before the stop, so a block that reached
    the cap ended with reason length and kept what came after the stop."""
    tokens = (10, 11, STOP, 20, 21, 22)

    def ends() -> list[tuple[tuple[int, ...], str]]:
        return [
            (c.token_ids, c.finish_reason)
            for cap in (2, 3, 5)
            for c in [say(target, tokens, max_tokens=cap, stop_token_ids=[STOP])]
        ]

    right = [((10, 11), "length"), (tokens[:3], "stop"), (tokens[:3], "stop")]
    assert ends() == right
    advance = Walk.advance

    def length_first(one: Walk, token: int) -> None:
        advance(one, token)
        if len(one.emitted) >= one.row.remaining:
            one.finish = "length"

    monkeypatch.setattr(Walk, "advance", length_first)
    assert ends() != right


def test_case_17_an_end_token_inside_a_block(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers#47912, koboldcpp#1276: an end token accepted in the middle of a block did not
    end the text. Every place in the block, an engine's own end tokens."""
    tokens = (10, 11, 12, 20, 21, 22, 18, 19)

    def ended(end: int) -> tuple[int, ...]:
        model, drafter = following(target, tokens)
        engine = make_engine(model, drafter, nodes=16)
        engine._ends = (end,)
        one = request("a", (23,), ignore_eos=False, max_tokens=12)
        return drive(engine, [one]).completions["a"].token_ids

    for place, end in enumerate(tokens):
        assert ended(end) == tokens[: place + 1]
    law = Running.law
    monkeypatch.setattr(Running, "law", lambda row: replace(law(row), end_token_ids=()))
    assert ended(12) != tokens[:3]


def test_case_18_a_stop_string_cuts_more_than_text(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm PR#47616: a stop string trimmed the text, while token ids and log-probabilities kept
    the tail."""
    tokens = (18, 19, 10, 11, 13, 20)  # x yz ab "c d" e-acute " the"

    def is_consistent() -> bool:
        c = say(target, tokens, stop="bc d", logprobs=0)
        assert (c.text, c.finish_reason, c.stop_reason) == ("xyza", "stop", "bc d")
        ids = [one.token_id for one in c.logprobs or ()]
        return c.token_ids == tokens[:3] and ids == list(tokens[:3])

    assert is_consistent()
    take = Running._take_text

    def text_only(row: Running, delta: Any) -> None:
        tokens, logprobs = row.tokens, row.logprobs
        row.tokens, row.logprobs = list(tokens), list(logprobs)
        take(row, delta)
        row.tokens, row.logprobs = tokens, logprobs

    monkeypatch.setattr(Running, "_take_text", text_only)
    assert not is_consistent()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_20_logprobs_are_those_of_plain_decoding(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """llama.cpp#27972, vllm#17876: with speculation every log-probability was 0.0."""
    one = request("a", PROMPT, temperature=temperature, logprobs=3)
    want = plain(target, [one])["a"]
    assert any(entry.logprob < -0.1 for entry in want.logprobs or ())

    def got() -> Completion:
        drafter = OracleDrafter(lambda row: want.token_ids)
        return drive(make_engine(target, drafter), [one]).completions["a"]

    assert got().logprobs == want.logprobs
    report = accepting.token_logprobs
    monkeypatch.setattr(accepting, "token_logprobs", lambda logits, *a: report(logits * 0, *a))
    assert got().logprobs != want.logprobs


def test_case_21_any_number_of_alternatives(target: TargetModel) -> None:
    """vllm PR#30059: logprobs with zero alternatives was an index error."""
    rows = [request(str(k), PROMPT, seed=k, logprobs=k, max_tokens=5) for k in range(21)]
    truth = truth_of(rows, plain(target, rows))
    run = drive(make_engine(target, OracleDrafter(truth), slots=7), rows)
    for k in range(21):
        c = run.completions[str(k)]
        assert [len(entry.top) for entry in c.logprobs or ()] == [k] * 5
        assert [entry.token_id for entry in c.logprobs or ()] == list(c.token_ids)
        for entry in c.logprobs or ():
            assert list(entry.top) == sorted(entry.top, key=lambda t: -t[1])
    # More alternatives than tokens: all of them.
    _, few = drawing.token_logprobs(drawing.torch.zeros(2, 3), [0, 1], [20, 2])
    assert len(few.top) == 2


def test_case_22_penalties_count_every_token_of_a_block(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang PR#33643, vllm#18902, TensorRT-LLM PR#17701: penalties were counted once per step
    or not at all, and min_tokens lasted as many times longer as blocks were long."""
    one = request("a", PROMPT, frequency_penalty=2.0, max_tokens=20)
    want = plain(target, [one])["a"].token_ids

    def got() -> tuple[int, ...]:
        drafter = OracleDrafter(lambda row: want)
        return drive(make_engine(target, drafter), [one]).completions["a"].token_ids

    assert got() == want
    for least in (1, 2, 5, 9):
        ended = request("b", PROMPT, min_tokens=least, stop_token_ids=[9], logit_bias={9: 100.0})
        truth = truth_of([ended], plain(target, [ended]))
        done = drive(make_engine(target, OracleDrafter(truth)), [ended]).completions["b"]
        assert len(done.token_ids) == least + 1
        assert done.token_ids.index(9) == least
    monkeypatch.setattr(History, "append", lambda history, token: None)
    assert got() != want


def test_case_23_rejected_drafts_are_not_counted(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vmlx-swift#357: the penalty's memory was shared with a copy, so tokens that were only
    guessed were penalised too."""
    one = request("a", PROMPT, presence_penalty=2.0, max_tokens=20)
    want = plain(target, [one])["a"].token_ids

    class LateByOne(NoDrafter):
        """A wrong token, then the right ones: all are rejected."""

        def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            return [self._late(row.tokens) for row in rows]

        def _late(self, tokens: Sequence[int]) -> DraftTree:
            ahead = want[len(tokens) - len(PROMPT) :][:4]
            wrong = [(ahead[0] + 1) % VOCAB] if len(ahead) > 1 else []
            return DraftTree.chain(tokens[-1], (*wrong, *ahead))

    def got() -> tuple[int, ...]:
        return drive(make_engine(target, LateByOne()), [one]).completions["a"].token_ids

    assert got() == want
    begin = Walk.__init__

    def counts_guesses(one: Walk, tree: DraftTree, row: RowLaw) -> None:
        begin(one, tree, row)
        assert one.history is not None
        one.history.output.update(tree.tokens[1:])

    monkeypatch.setattr(Walk, "__init__", counts_guesses)
    assert got() != want


def test_case_24_a_seed_is_all_that_noise_depends_on(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#6038, TensorRT-LLM PR#17599: the seed was ignored, or the output depended on how many
    steps the engine had taken before."""
    one = request("a", PROMPT, temperature=1.0, seed=42)
    others = [request(f"o{i}", (5 + i,), temperature=1.0, seed=i) for i in range(7)]
    want = outcome(plain(target, [one])["a"])

    def got() -> list[tuple[object, ...]]:
        engine = make_engine(target, slots=8)
        batch = outcome(drive(engine, [*others, one]).completions["a"])
        return [batch, outcome(drive(engine, [one]).completions["a"])]

    assert got() == [want, want]
    noise, steps = drawing.gumbel, iter(range(10**6))
    by_step: Callable[..., Tensor] = lambda seeds, positions, ids: noise(  # noqa: E731
        seeds, [next(steps) for _ in positions], ids
    )
    monkeypatch.setattr(drawing, "gumbel", by_step)
    assert want not in got()


def test_case_25_seeds_of_one_batch_do_not_mix(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm PR#10863: a batch of seeded and unseeded rows drew the wrong tokens. Unseeded rows
    here get a drawn seed, and report it."""
    chooser = random.SystemRandom()
    seeds = [42, chooser.getrandbits(63), 0, chooser.getrandbits(64), 42, 2**64 - 1]
    rows = [
        request(str(i), PROMPT if i % 2 else (11,), seed=seed, temperature=(0.1, 1.0)[i % 3 > 0])
        for i, seed in enumerate(seeds)
    ]
    want = {name: outcome(c) for name, c in plain(target, rows).items()}

    def got() -> dict[str, tuple[object, ...]]:
        return drive(make_engine(target, slots=6), rows).outcomes()

    assert got() == want
    assert [c[-1] for c in want.values()] == seeds
    noise = drawing.gumbel
    monkeypatch.setattr(drawing, "gumbel", lambda seeds, *rest: noise(seeds[::-1], *rest))
    assert got() != want


def test_case_26_a_draft_is_not_accepted_for_being_offered(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers PR#28508: the acceptance test let every draft through, so the drafter's law
    was sampled. Instead of a statistic: seed by seed the same token, and a fair share of them."""
    rows = [request(str(i), (23, 5), seed=i, temperature=1.3, max_tokens=2) for i in range(96)]
    want = drive(make_engine(target, slots=32), rows).outcomes()
    truth = {i: want[str(i)][0] for i in range(96)}

    def got() -> dict[str, tuple[object, ...]]:
        drafter = AdversarialDrafter(lambda row: truth[row.seed], vocab_size=VOCAB)  # type: ignore[arg-type,return-value]
        return drive(make_engine(target, drafter, slots=32), rows).outcomes()

    assert got() == want
    assert len({ids[0] for ids in truth.values()}) > 5  # type: ignore[index]
    advance = Walk.advance

    def trusting(one: Walk, token: int) -> None:
        children = one.tree.children()[one.path[-1]]
        advance(one, one.tree.tokens[children[0]] if children else token)

    monkeypatch.setattr(Walk, "advance", trusting)
    assert got() != want


EMOJI = (14, 15, 16, 17)


def test_case_41_stop_strings_and_characters_of_many_bytes(target: TargetModel) -> None:
    """vllm PR#44620: looking for a stop string cut a character in two and ended the process."""
    ids = [*EMOJI, 22, 13, *EMOJI, 18, 22, 22, *EMOJI, 13]
    text = Letters().decode(ids)
    chooser = random.Random(0)
    for _ in range(50):
        stream, rest, got = TextStream(Letters(), stop=("ZZZ", "\U0001f601", "\u6f22x")), ids, ""
        while rest:
            size = chooser.randint(1, 4)
            got += stream.put(rest[:size]).text
            rest = rest[size:]
        assert got + stream.finish().text == text
    done = say(target, (*EMOJI, 22, 13), stop=("ZZZ", "\u00e9"), max_tokens=12)
    assert (done.text, done.stop_reason) == ("\U0001f600\u6f22", "\u00e9")
    assert done.token_ids == (*EMOJI, 22)


def test_case_42_no_replacement_characters_in_a_stream(target: TargetModel) -> None:
    """vllm-mlx PR#109, ferrox#124: a character whose bytes came in several tokens was streamed
    as U+FFFD."""
    model = Following(target, {**SUCCESSOR, **dict.fromkeys(range(5), 14)})
    for nodes in (1, 2, 3, 8):
        drafter = OracleDrafter(lambda row: EMOJI * 4)
        engine, run, pieces = make_engine(model, drafter, nodes=nodes), Run(), []
        engine.add(request("a", (17,), max_tokens=16))
        while engine.has_work:
            deltas = engine.step()
            pieces += [delta.text for delta in deltas]
            run.take(deltas)
        assert "".join(pieces) == run.completions["a"].text == "\U0001f600" * 4
        assert not any("\ufffd" in piece for piece in pieces)
    # Alone, the bytes do decode to replacement characters: the test can fail.
    assert "\ufffd" in PIECES[14].decode("utf-8", "replace")


def test_case_45_acceptance_is_at_most_one(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang PR#11572, tokenspeed PR#1443: the bonus token was counted as an accepted draft, so
    acceptance went above 1 and counts were off by one per step."""
    rows = [request(str(i), PROMPT, seed=i, temperature=0.7, max_tokens=3 + i) for i in range(6)]
    truth = truth_of(rows, plain(target, rows))

    def check() -> None:
        run = drive(make_engine(target, OracleDrafter(truth), nodes=4), rows)
        for c in run.completions.values():
            check_counts(c)

    check()
    monkeypatch.setattr(Verdict, "num_accepted", property(lambda v: len(v.emitted)))
    with pytest.raises(AssertionError):
        check()


def test_the_walk_alone_agrees_with_case_16() -> None:
    """The same rule without engine and model, for every place and cap."""
    tokens = (10, 11, STOP, 20, 21, 22)
    for cap in range(1, 8):
        row = RowLaw(
            params=SamplingParams(temperature=0),
            seed=0,
            history=[23],
            num_prompt_tokens=1,
            end_token_ids={STOP},
            remaining=cap,
        )
        done = walk(DraftTree.chain(23, tokens), row, lambda node, draw: tokens[node])
        assert tuple(done.emitted) == tokens[: min(cap, 3)]
        assert done.finish == ("length" if cap < 3 else "stop")
