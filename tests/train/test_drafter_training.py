# SPDX-License-Identifier: Apache-2.0
"""Answers, batches, the loss, and a run that is stopped and gone on with, on a target with
habits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config
from engine_harness import drive, make_engine, request
from safetensors.torch import load_file

from specla.drafters.eagle import EagleDrafter
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.state import State
from specla.topology.tree import DraftTree
from specla.train.batches import Batch, Packer, draft_vocabulary, fill, order
from specla.train.capture import Answers, Capture, Text, agreed, answer
from specla.train.eagle import EagleNet
from specla.train.kinds import kind_of
from specla.train.loop import DECAY, Recipe, Trainer, _chains, figures, loss_of
from specla.train.run import Prompt, Run, Sizes, config_for, texts_of
from specla.train.session import held_apart
from specla.train.unroll import valid_steps

PROMPTS = [tuple(5 + (i * k + k * k) % 19 for k in range(3 + i % 9)) for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def engine(target: TargetModel) -> Engine:
    return make_engine(target, slots=5, nodes=1)


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> list[Text]:
    engine = make_engine(target, slots=8, nodes=1)
    found = dict(answer(engine, dict(enumerate(PROMPTS)), GREEDY))
    return [found[i] for i in range(len(PROMPTS))]


def test_answers_are_the_engines(engine: Engine, texts: list[Text]) -> None:
    for i in (0, 5, 23):
        one = drive(engine, [request("a", PROMPTS[i], max_tokens=20)]).completions["a"]
        assert texts[i].tokens == (*PROMPTS[i], *one.token_ids)
        assert texts[i].num_prompt == len(PROMPTS[i])


def test_answers_go_on_where_they_stopped(
    target: TargetModel, engine: Engine, texts: list[Text], tmp_path: Path
) -> None:
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, GREEDY, target.info.fingerprint)
    for i in (7, 2):
        answers.add(i, texts[i])
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write('{"number": 3, "num_pro')
    assert Answers(path, GREEDY, target.info.fingerprint).missing(9) == [0, 1, 3, 4, 5, 6, 8]
    assert path.read_bytes() == whole
    written = path.stat().st_mtime_ns
    assert Answers(path, GREEDY, target.info.fingerprint).missing(3) == [0, 1]
    assert path.stat().st_mtime_ns == written
    prompts = [Prompt(tokens=p, known=None) for p in PROMPTS[:9]]
    capture = Capture(target, (0,))
    assert texts_of(engine, capture, prompts, GREEDY, path) == texts[:9]
    assert texts_of(engine, capture, prompts, GREEDY, path) == texts[:9]
    assert len(path.read_text().splitlines()) == 9
    with pytest.raises(ConfigError, match=r"answer to prompt 0 \(from 0 on\) is to another"):
        texts_of(engine, capture, prompts[1:], GREEDY, path)
    # More answers than prompts: those of the first ones, and nothing is asked or lost.
    assert texts_of(engine, capture, prompts[:4], GREEDY, path) == texts[:4]
    assert len(path.read_text().splitlines()) == 9
    for name, other in (("max_tokens", {"max_tokens": 9}), ("temperature", {"temperature": 1})):
        with pytest.raises(ConfigError, match=f"the {name} they were begun with"):
            texts_of(engine, capture, prompts, replace(GREEDY, **other), path)


def test_answers_are_of_one_target(
    target: TargetModel, engine: Engine, texts: list[Text], tmp_path: Path
) -> None:
    """Another's are refused, and so are those that do not say whose they are; no byte is lost."""
    path, mine = tmp_path / "answers.jsonl", target.info.fingerprint
    prompts = [Prompt(tokens=p, known=None) for p in PROMPTS[:2]]

    def ask() -> list[Text]:
        return texts_of(engine, Capture(target, (0,)), prompts, GREEDY, path)

    assert ask() == texts[:2]
    own = path.read_text()
    for others, says in (
        (own.replace(mine, "of another"), "the target_fingerprint they .* has of another, now"),
        (
            own.replace(f'"target_fingerprint": "{mine}", ', ""),
            f"whose they are.*{mine!r} to each",
        ),
    ):
        assert others != own
        path.write_text(others)
        with pytest.raises(ConfigError, match=says):
            ask()
        assert path.read_text() == others


@pytest.mark.parametrize("bad", ["{", "7", "[]", '{"number": 3}', '{"number": 1.5}', "\ufffd"])
def test_a_damaged_answer_is_named(
    target: TargetModel, texts: list[Text], tmp_path: Path, bad: str
) -> None:
    path = tmp_path / "answers.jsonl"
    answers = Answers(path, GREEDY, target.info.fingerprint)
    answers.add(0, texts[0])
    with path.open("a") as file:
        file.write(bad + "\n")
    answers.add(2, texts[2])
    with pytest.raises(ConfigError, match=r"answers.jsonl, line 2, must be an answer.*delete"):
        Answers(path, GREEDY, target.info.fingerprint)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])
    assert Answers(path, GREEDY, target.info.fingerprint).missing(3) == [1]


def test_a_capture_within_a_wider_one(target: TargetModel, texts: list[Text]) -> None:
    """The same features; the wider one runs the target, and keeps the text for both."""
    wide = Capture(target, (0, 1), keep_bytes=1 << 20)
    part, tokens = Capture(target, (1,), within=wide), texts[4].tokens
    for got, want in zip(part(tokens), Capture(target, (1,))(tokens), strict=True):
        assert torch.equal(got, want)
    assert list(wide._kept) == [tokens]
    assert not part._kept


def test_a_known_answer_is_taken_as_far_as_the_target_agrees(
    target: TargetModel, engine: Engine, texts: list[Text], tmp_path: Path
) -> None:
    text, capture = texts[4], Capture(target, (0,), keep_bytes=1 << 20)
    prompt, said = text.tokens[: text.num_prompt], text.tokens[text.num_prompt :]
    assert agreed(capture, target, prompt, said) == text
    wrong = (*said[:6], (said[6] + 1) % 24, *said[7:])
    assert agreed(capture, target, prompt, wrong).tokens == (*prompt, *said[:7])
    known = [Prompt(tokens=prompt, known=wrong)]
    path = tmp_path / "a.jsonl"
    assert texts_of(engine, capture, known, GREEDY, path)[0].tokens == (*prompt, *said[:7])
    with pytest.raises(ConfigError, match="temperature 0"):
        texts_of(engine, capture, known, SamplingParams(temperature=1), tmp_path / "b.jsonl")


def packer_for(target: TargetModel, d2t: torch.Tensor, length: int = 40) -> Packer:
    return Packer(target, Capture(target, (0, 1), keep_bytes=1 << 22), d2t, length)


def test_a_batch_teaches_what_the_drafter_will_be_asked(
    target: TargetModel, texts: list[Text]
) -> None:
    """Every lesson is the target's own law after the same tokens, of the rows they stand in."""
    d2t = torch.arange(3, 24, 2)
    rows = [texts[:1], texts[1:2], [replace(texts[2], tokens=texts[2].tokens[:-5])]]
    batch = packer_for(target, d2t)(rows)
    assert batch.pairs.embeds.shape == (3, 40, target.info.hidden_size)
    flat = iter(range(len(batch.at)))
    for b, (text,) in enumerate(rows):
        state = State(target.info.recurrent, num_slots=1, max_nodes=64)
        chain = DraftTree.chain(text.tokens[0], text.tokens[1:])
        logits = target.verify(state.begin([state.acquire()], [chain]), state)
        for place in range(text.num_prompt, len(text.tokens)):
            i = next(flat)
            t = int(batch.at[i]) - 40 * b
            assert t + 2 == place
            assert batch.tokens[i] == text.tokens[place]
            assert torch.equal(batch.pairs.embeds[b, t], target.embeddings[text.tokens[place - 1]])
            law = torch.softmax(logits[place - 1, d2t], dim=-1)
            torch.testing.assert_close(batch.laws[i], law, rtol=1e-3, atol=1e-5)
            assert batch.known[i] == (int(logits[place - 1].argmax()) in d2t.tolist())
            assert batch.documents[i] == b
        count = len(text.tokens) - 1
        assert (batch.pairs.segments[b, :count] == 0).all()
        assert (batch.pairs.segments[b, count:] == -1).all()
    assert next(flat, None) is None
    for b in range(3):
        assert batch.weights[batch.documents == b].sum() == pytest.approx(1)


def test_texts_share_rows_and_are_cut_at_their_end(target: TargetModel, texts: list[Text]) -> None:
    lengths = [len(text.tokens) - 1 for text in texts]
    rows = fill(lengths, 3, 64)
    assert [i for row in rows for i in row] == list(range(sum(map(len, rows))))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert fill([100, 3], 2, 64) == [[0], [1]]
    packer = packer_for(target, torch.arange(24), 64)
    together = packer([[texts[i] for i in row] for row in rows])
    alone = [packer([[texts[i]]]) for row in rows for i in row]
    torch.testing.assert_close(together.laws, torch.cat([one.laws for one in alone]))
    assert together.tokens.tolist() == [t for one in alone for t in one.tokens.tolist()]
    assert together.documents.unique().tolist() == list(range(len(alone)))
    cut = packer_for(target, torch.arange(24), 10)([[texts[0]]])
    assert cut.pairs.segments.shape == (1, 10)
    assert int(cut.at.max()) == 8


def test_the_order_of_texts_goes_on_from_anywhere() -> None:
    run = list(itertools.islice(order(7, 3, 0), 20))
    assert sorted(run[:7]) == sorted(run[7:14]) == list(range(7))
    assert run[:7] != run[7:14]
    for start in (1, 7, 12):
        assert list(itertools.islice(order(7, 3, start), 5)) == run[start : start + 5]


def test_the_draft_vocabulary_is_what_answers_use(texts: list[Text]) -> None:
    two = [
        Text(tokens=(1, 1, 1, 9, 9, 4), num_prompt=3),
        Text(tokens=(2, 9, 7, 4), num_prompt=1),
    ]
    assert draft_vocabulary(two, 3, 24).tolist() == [4, 7, 9]
    assert draft_vocabulary(two, 4, 24).tolist() == [0, 4, 7, 9]


def net_for(target: TargetModel, size: int = 24) -> EagleNet:
    config = toy_config(
        target.info, num_heads=2, num_v_heads=2, draft_vocab_size=size, hidden_size=32
    )
    torch.manual_seed(0)
    net = EagleNet(config, torch.arange(size))
    net.start_from(target.head_weight, target.final_norm)
    return net


@torch.no_grad()
def test_the_loss_written_out(target: TargetModel, texts: list[Text]) -> None:
    d2t = torch.arange(20)
    batch, net = packer_for(target, d2t)([texts[:1], texts[3:4]]), net_for(target, 20)
    outputs, total = net.unroll(batch.pairs, 3), 0.0
    for b in range(2):
        members = [i for i in range(len(batch.at)) if batch.documents[i] == b]
        for s, i in itertools.product(range(3), members):
            t = int(batch.at[i]) - 40 * b
            if t >= s and batch.known[i]:
                guess = torch.log_softmax(net.logits(outputs[s][b, t]), dim=-1)
                total -= DECAY**s * float((batch.laws[i] * guess).sum()) / len(members) / 2
    assert not batch.known.all()
    assert float(loss_of(net, batch, 3)) == pytest.approx(total, rel=1e-5)


def test_chains_are_counted_at_every_place() -> None:
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    hits = torch.tensor(
        [[1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1]], dtype=torch.bool
    )
    # From place 0: steps 0 and 1 are right at places 0 and 1, step 2 at place 2: three drafts.
    # From place 3: the document ends after one. From place 4: places 4, 5, 6 at steps 0, 1, 2.
    assert _chains(hits, documents).tolist() == [3, 2, 0, 1, 3, 2, 0]


def trainer_for(target: TargetModel, texts: Sequence[Text], recipe: Recipe) -> Trainer:
    return Trainer(net_for(target), packer_for(target, torch.arange(24)), texts, recipe)


def test_going_on_is_not_having_stopped(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """Weights after four steps, bit for bit."""
    recipe = Recipe(rows=2, length=40, unroll=3, steps=8, lr=1e-3, warmup=2)
    straight = trainer_for(target, texts, recipe)
    losses = [straight.train_step() for _ in range(4)]
    first = trainer_for(target, texts, recipe)
    assert [first.train_step() for _ in range(2)] == losses[:2]
    first.save(tmp_path)
    second = trainer_for(target, texts, recipe)
    assert second.restore(tmp_path)
    assert [second.train_step() for _ in range(2)] == losses[2:]
    for name, p in straight.net.state_dict().items():
        assert torch.equal(p, second.net.state_dict()[name]), name
    assert (second.step, second.used, second.tokens) == (4, straight.used, straight.tokens)
    other = trainer_for(target, texts, replace(recipe, lr=1e-2))
    with pytest.raises(ConfigError, match="recipe"):
        other.restore(tmp_path)
    assert not trainer_for(target, texts, recipe).restore(tmp_path / "none")


def test_training_makes_a_drafter_that_is_accepted(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """From about one token per round to more, by the held-out figure and in the engine alike."""
    recipe = Recipe(rows=2, length=64, unroll=4, steps=40, lr=6e-3, warmup=3)
    config = config_for(target, Sizes(hidden_size=24, target_layer_ids=(0, 1)), None)
    capture = Capture(target, (0, 1), keep_bytes=1 << 24)
    notes: list[str] = []
    run = Run(
        tmp_path, target, capture, config, texts[:20], texts[20:], recipe, compute=torch.float32
    )
    found = run(every=20, minutes=9, note=notes.append)
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert len(rows) == 1 + len(notes) == 4
    before = float(rows[1].split(",")[4])
    assert found.tau > before + 0.5
    assert 1 <= found.tau <= 7
    drafter = EagleDrafter(
        path=str(tmp_path / "checkpoint"), top_k=1, max_depth=6, tau=1e9, min_survival=0
    )
    engine = make_engine(target, drafter, slots=4, nodes=7)
    requests = [request(str(i), PROMPTS[i], max_tokens=20) for i in range(20, 24)]
    done = drive(engine, requests).completions
    for i in range(20, 24):
        assert done[str(i)].token_ids == texts[i].tokens[texts[i].num_prompt :]
    accepted = [c.speculation for c in done.values()]
    tau = sum(s.rounds + s.accepted for s in accepted) / sum(s.rounds for s in accepted)
    assert tau > before + 0.5


def test_figures_of_a_drafter_that_knows_nothing(target: TargetModel, texts: list[Text]) -> None:
    batch: Batch = packer_for(target, torch.arange(24))([texts[:1]])
    net = net_for(target)
    found = figures(net, [batch], 3)
    guesses = net.logits(net.unroll(batch.pairs, 1)[0].flatten(0, 1)[batch.at]).topk(4).indices
    right = guesses == batch.tokens[:, None]
    assert found.first[0] == pytest.approx(right[:, 0].float().mean().item())
    assert found.top[0] == pytest.approx(right.any(-1).float().mean().item())
    assert valid_steps(batch.pairs.segments, 3).shape == (3, 1, 40)


def test_some_answers_are_kept_for_the_figures() -> None:
    many = [Text(tokens=(i, 1), num_prompt=1) for i in range(101)]
    rest, held = held_apart(many)
    assert held == [many[0], many[50], many[100]]
    assert sorted((*rest, *held), key=lambda text: text.tokens) == many


def test_sizes_for_a_target(target: TargetModel) -> None:
    config = config_for(target, Sizes(), "ab")
    assert (config.hidden_size, config.num_heads) == (32, 2)
    assert config.target_layer_ids == (0, 1)
    assert config.draft_vocab_size == 24
    assert config.target_fingerprint == target.info.fingerprint
    with pytest.raises(ConfigError, match="feature layers"):
        config_for(target, Sizes(target_layer_ids=(0, 2)), None)


def test_a_drafter_is_trained_further(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """From a checkpoint, on other texts: its sizes, its weights, its draft vocabulary."""
    sizes = Sizes(hidden_size=24, draft_vocab_size=12, target_layer_ids=(0, 1))
    recipe = Recipe(rows=2, length=64, unroll=2, steps=2, warmup=1)
    capture = Capture(target, (0, 1), keep_bytes=1 << 24)
    first = Run(
        tmp_path / "first", target, capture, config_for(target, sizes, "abc"), texts[:20],
        texts[20:], recipe, compute=torch.float32,
    )  # fmt: skip
    first(every=2, minutes=9, note=lambda _: None)
    start = tmp_path / "first" / "checkpoint"
    kind = kind_of("eagle", target, "abc", {"steps": 1}, {"start": start})
    again = kind.run(tmp_path / "again", capture, texts[4:9], texts[20:], torch.float32)
    assert isinstance(again, Run)
    net = again.trainer.net
    assert torch.equal(net.d2t, first.trainer.net.d2t)
    stored = load_file(start / "model.safetensors")
    for name, p in net.named_parameters():
        assert torch.equal(p, stored[name].float()), name
    for hash_, own, says in (
        ("abc", {"hidden_size": 32}, "sizes it has"),
        ("xyz", {}, "tokenizer"),
        ("abc", {"start": tmp_path}, "config.json"),
    ):
        with pytest.raises(ConfigError, match=says):
            kind_of("eagle", target, hash_, {}, {"start": start, **own})
