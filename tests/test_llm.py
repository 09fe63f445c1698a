# SPDX-License-Identifier: Apache-2.0
"""LLM: what users call. A toy checkpoint with a tokenizer and a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_toy import toy_config, write_drafter

from specla import LLM, ConfigError, ModelNotFound, RequestRejected, SamplingParams, drafters
from specla.errors import SpeclaError
from specla.models.toy import write_toy_checkpoint
from specla.request import Completion

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=8)
PROMPTS = ["A farmer has 12 apples", "def add(first, second):", "x", "\u6f22\u5b57 and caf\u00e9"]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("toy")
    return str(write_toy_checkpoint(path, hidden=32, intermediate=48, head_dim=8))


def load(folder: str, **options: Any) -> LLM:
    return LLM(folder, threads=1, **{"max_slots": 3, "max_nodes": 4, **options})


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return load(folder)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test all slots are free again."""
    yield
    if "llm" in request.fixturenames:
        left = request.getfixturevalue("llm")
        assert not left.engine.has_work
        assert left.engine.state.pool.num_free == 3
        assert not left._inboxes


def bare(c: Completion) -> tuple[object, ...]:
    """A completion without its name and its times."""
    return (c.prompt, c.prompt_token_ids, c.text, c.token_ids, c.finish_reason, c.seed, c.logprobs)


def test_one_prompt_many_prompts_and_token_ids(llm: LLM) -> None:
    many = llm.generate(PROMPTS, GREEDY)
    assert [c.prompt for c in many] == PROMPTS
    assert len({c.token_ids for c in many}) == len(PROMPTS)
    for prompt, c in zip(PROMPTS, many, strict=True):
        assert [bare(one) for one in llm.generate(prompt, GREEDY)] == [bare(c)]
        (by_ids,) = llm.generate([llm.tokenizer.encode(prompt)], GREEDY)
        assert bare(by_ids)[1:] == bare(c)[1:]
        assert by_ids.prompt is None
        assert c.text == llm.tokenizer.decode(list(c.token_ids))


def test_mixed_text_and_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[1])
    a, b = llm.generate([PROMPTS[0], tuple(ids)], GREEDY)
    assert [bare(a)] == [bare(c) for c in llm.generate(PROMPTS[0], GREEDY)]
    assert b.prompt_token_ids == tuple(ids)


def test_ids_may_be_tensors(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    (want,) = llm.generate([ids], GREEDY)
    (got,) = llm.generate([torch.tensor(ids)], GREEDY)  # type: ignore[list-item]
    assert bare(got) == bare(want)
    assert all(type(i) is int for i in got.prompt_token_ids)


def test_params_for_each_prompt(llm: LLM) -> None:
    each = [GREEDY, SAMPLED, SamplingParams(max_tokens=1, temperature=0, seed=1)]
    together = llm.generate(PROMPTS[:3], each)
    for prompt, params, c in zip(PROMPTS, each, together, strict=False):
        assert [bare(one) for one in llm.generate(prompt, params)] == [bare(c)]
    with pytest.raises(ConfigError, match="got 2"):
        llm.generate(PROMPTS, each[:2])


def test_defaults(llm: LLM) -> None:
    a, b = llm.generate([PROMPTS[0]] * 2)
    assert len(a.token_ids) <= 16
    assert a.seed != b.seed
    replay = SamplingParams(seed=a.seed)
    assert llm.generate(PROMPTS[0], replay)[0].token_ids == a.token_ids
    assert llm.generate([]) == []


def test_several_completions_per_prompt(llm: LLM) -> None:
    """In order, prompt by prompt; completion i is the one of seed + i."""
    three = SamplingParams(temperature=1.0, seed=2**64 - 2, n=3, max_tokens=6)
    before = llm.engine.stats.prefill_tokens
    llm.generate(PROMPTS[0], three)
    # One prefill for all three. With more prompts than slots it depends on who ends first.
    assert llm.engine.stats.prefill_tokens - before == len(llm.tokenizer.encode(PROMPTS[0])) - 1
    got = llm.generate(PROMPTS[:2], three)
    assert [c.prompt for c in got] == [p for p in PROMPTS[:2] for _ in range(3)]
    seeds = [2**64 - 2, 2**64 - 1, 0]
    assert [c.seed for c in got] == seeds * 2
    for c in got:
        params = SamplingParams(temperature=1.0, seed=c.seed, max_tokens=6)
        assert [bare(one) for one in llm.generate(c.prompt or "", params)] == [bare(c)]


def test_chat(llm: LLM) -> None:
    other = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Go"}]
    (one,) = llm.chat(HELLO, GREEDY)
    many = llm.chat([HELLO, other], GREEDY)
    assert bare(many[0]) == bare(one)
    assert one.prompt_token_ids == tuple(llm.tokenizer.apply_chat_template(HELLO))
    assert many[1].prompt_token_ids == tuple(llm.tokenizer.apply_chat_template(other))
    assert one.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    with pytest.raises(RequestRejected, match="messages"):
        llm.chat([], GREEDY)
    with pytest.raises(RequestRejected, match="messages"):
        llm.chat([{"role": "user"}], GREEDY)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(seed=3, stop=["e", "\ufffd"])])
def test_a_stream_is_the_same_text_in_pieces(llm: LLM, params: SamplingParams) -> None:
    for prompt in PROMPTS:
        (want,) = llm.generate(prompt, params)
        deltas = list(llm.stream(prompt, params))
        assert "".join(delta.text for delta in deltas) == want.text
        assert tuple(i for delta in deltas for i in delta.token_ids) == want.token_ids
        assert [d.completion is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].completion is not None
        assert bare(deltas[-1].completion) == bare(want)


def test_a_streamed_chat(llm: LLM) -> None:
    (want,) = llm.chat(HELLO, SAMPLED)
    assert "".join(d.text for d in llm.stream_chat(HELLO, SAMPLED)) == want.text


def test_leaving_a_stream_frees_its_slot(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.engine.state.pool.num_free == 2
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.state.pool.num_free == 3
    for _ in llm.stream(PROMPTS[0], GREEDY):
        break
    llm.stream(PROMPTS[0], GREEDY)  # never started
    assert not llm.engine.has_work


def test_open_streams_do_not_take_each_others_text(llm: LLM) -> None:
    """Any of them steps the engine for all; what it gets for others is kept for them."""
    want = [bare(c) for c in llm.generate(PROMPTS[:2], SAMPLED)]
    first, second = llm.stream(PROMPTS[0], SAMPLED), llm.stream(PROMPTS[1], SAMPLED)
    heads = [next(first), next(second)]
    between = llm.generate(PROMPTS[2], SAMPLED)
    rests = [list(second), list(first)][::-1]
    for head, rest, expected in zip(heads, rests, want, strict=True):
        assert head.text + "".join(delta.text for delta in rest) == expected[2]
        assert rest[-1].completion is not None
        assert bare(rest[-1].completion) == expected
    assert [bare(c) for c in between] == [bare(c) for c in llm.generate(PROMPTS[2], SAMPLED)]


def test_a_stream_dropped_by_another_ones_failure(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "verify", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(SpeclaError, match="send the request again"):
        list(stream)
    assert [bare(c) for c in llm.generate(PROMPTS[0], GREEDY)]


def test_threads_share_one(llm: LLM) -> None:
    """Each has the tokens that it has alone; they are decoded together."""
    params, began = [replace(SAMPLED, seed=i, max_tokens=24) for i in range(4)], steps(llm)
    alone = [bare(llm.generate(*one)[0]) for one in zip(PROMPTS, params, strict=True)]
    one_by_one, began = steps(llm) - began, steps(llm)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        for _ in range(3):
            found = threads.map(llm.generate, PROMPTS, params)
            assert [bare(one) for (one,) in found] == alone
    assert steps(llm) - began < 3 * one_by_one


def steps(llm: LLM) -> int:
    return llm.engine.stats.steps


def test_an_interrupt_leaves_a_working_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [bare(c) for c in llm.generate(PROMPTS, SAMPLED)]
    steps = iter([llm.model.verify] * 3)

    def interrupted(*args: Any) -> Any:
        for verify in steps:
            return verify(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SAMPLED)
    assert not llm.engine.has_work
    assert [bare(c) for c in llm.generate(PROMPTS, SAMPLED)] == want


@pytest.mark.parametrize(
    "prompts", [[[]], [5], [None], [[5.5]], [["a"]], [[-1]], [[10**9]], ["ok", []], ["\ud800"]]
)
def test_bad_prompts(llm: LLM, prompts: Any) -> None:
    """Nothing is generated, for the good prompts neither."""
    rounds = llm.engine.stats.acceptance.rounds
    with pytest.raises(RequestRejected) as refused:
        llm.generate(prompts, GREEDY)
    assert refused.value.param == "prompt"
    assert llm.engine.stats.acceptance.rounds == rounds


def test_what_is_no_list(llm: LLM) -> None:
    for prompts in (None, 5, b"abc", {"prompt": "x"}):
        with pytest.raises(RequestRejected, match="prompts must be a list"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    for messages in ("hi", HELLO[0], None):
        with pytest.raises(RequestRejected, match="messages must be a list"):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestRejected, match="must be a mapping with role and content"):
        llm.chat([["hi"]], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="must be SamplingParams"):
        llm.generate("x", {"temperature": 0})  # type: ignore[arg-type]


def test_bad_params(llm: LLM) -> None:
    for bad in (SamplingParams(logit_bias={10**6: 1.0}), SamplingParams(stop_token_ids=[10**6])):
        with pytest.raises(RequestRejected, match="vocabulary"):
            llm.generate("x", bad)
    with pytest.raises(RequestRejected, match="n must be 1"):
        list(llm.stream("x", SamplingParams(n=2)))


@pytest.mark.parametrize("name", drafters.UNTRAINED)
def test_every_drafter_says_the_same(llm: LLM, folder: str, name: str) -> None:
    other = load(folder, drafter=name, log_capacity=3)
    for params in (GREEDY, SAMPLED):
        want = [bare(c) for c in llm.generate(PROMPTS, params)]
        got = other.generate(PROMPTS, params)
        assert [bare(c) for c in got] == want
        assert {c.speculation.drafter for c in got} == {name}
        assert {c.speculation.mode for c in got} == {"exact"}


def test_a_trained_drafter_beside_the_target_is_what_auto_means(
    llm: LLM, folder: str, tmp_path: Path
) -> None:
    copy = tmp_path / "target"
    shutil.copytree(folder, copy)
    config = toy_config(llm.model.info, tokenizer_hash=llm.tokenizer.digest)
    write_drafter(copy / "eagle", config)
    want = [bare(c) for c in llm.generate(PROMPTS, SAMPLED)]
    for name in ("auto", "eagle", f"eagle:{copy / 'eagle'}"):
        other = load(str(copy), drafter=name, log_capacity=3)
        got = other.generate(PROMPTS, SAMPLED)
        assert [bare(c) for c in got] == want
        assert {c.speculation.drafter for c in got} == {"eagle"}
        assert any(c.speculation.drafted for c in got)
    write_drafter(copy / "eagle", toy_config(llm.model.info, tokenizer_hash="0"))
    with pytest.raises(ConfigError, match="tokenizer_hash"):
        load(str(copy))
    with pytest.raises(ConfigError, match="needs a trained checkpoint"):
        load(folder, drafter="eagle")


def test_auto_is_reported_by_its_name(llm: LLM) -> None:
    assert llm.config.drafter == llm.engine.drafter.info.name == "suffix"
    assert llm.generate("x", GREEDY)[0].speculation.drafter == "suffix"
    assert "drafter" in llm.config.reasons


def test_plain_mode(folder: str) -> None:
    plain = load(folder, mode="plain")
    (c,) = plain.generate("x", GREEDY)
    assert (c.speculation.mode, c.speculation.drafter) == ("plain", "none")
    assert c.speculation.rounds == len(c.token_ids)
    with pytest.raises(ConfigError, match="plain"):
        load(folder, mode="plain", drafter="ngram")


def test_without_a_drafter_no_memory_for_candidates(folder: str) -> None:
    state = load(folder, drafter="none", max_nodes=16).engine.state
    assert state.max_nodes == 1
    assert state.bytes().candidates == 2 * state.bytes().candidate


def test_settings_arrive(folder: str) -> None:
    engine = load(folder, max_slots=2, max_nodes=5, log_capacity=6, dtype="float64").engine
    assert (engine.state.pool.num_slots, engine.state.max_nodes) == (2, 5)
    assert engine.state.log_capacity == 6
    assert engine.model.dtype == torch.float64
    options = {"num_draft_tokens": 2}
    assert (
        load(folder, drafter="ngram", drafter_options=options).engine.drafter.info.max_depth == 2
    )


def test_settings_that_cannot_be(folder: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM(folder, tensor_parallel_size=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'suffix'"):
        load(folder, drafter="sufix")
    with pytest.raises(ConfigError, match="drafter none has no options"):
        load(folder, drafter="none", drafter_options={"depth": 3})
    with pytest.raises(ConfigError, match="max_slots"):
        load(folder, max_slots=0)
    with pytest.raises(ModelNotFound):
        load(str(tmp_path / "nowhere"))


def test_progress_counts_up_to_the_whole(folder: str) -> None:
    seen: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: seen.append((done, total)))
    (total,) = {total for _, total in seen}
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_another_model_does_not_change_our_threads(folder: str) -> None:
    """Row invariance was checked for one thread count; bits are promised for that one only."""
    ours = load(folder)
    LLM(folder, threads=2, max_slots=1)
    assert torch.get_num_threads() == 2
    ours.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert torch.get_num_threads() == 1


def test_a_drafter_is_another_one_only_if_it_remembers(llm: LLM) -> None:
    suffix = llm.engine.drafter
    assert suffix.info.remembers
    llm.renew()
    assert llm.engine.drafter is not suffix
    llm.engine.use(drafters.build("suffix", options={"global_tokens": 0}))
    forgets = llm.engine.drafter
    llm.renew()
    assert llm.engine.drafter is forgets
    llm.engine.use(llm.new_drafter())
