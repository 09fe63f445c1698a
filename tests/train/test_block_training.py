# SPDX-License-Identifier: Apache-2.0
"""Block drafters and readers in training: the forward is that of use, the losses are the papers',
a run can be stopped, and what comes out is accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_toy import DFLASH, block_config, random_tensors, reader_config, write_block
from engine_harness import drive, make_engine, request
from torch import Tensor

from specla.drafters.block import BlockDrafter
from specla.drafters.block_config import BlockConfig, expected_tensors
from specla.drafters.block_files import save_reader
from specla.drafters.calibration import calibration_error, survival
from specla.drafters.reader import ReaderConfig, reader_tensors
from specla.engine.engine import Engine
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.request import SamplingParams
from specla.train.block import BlockNet, Named, ReaderNet
from specla.train.block_batches import BlockBatch, BlockPacker, Lessons, lessons, some
from specla.train.block_loop import (
    READER,
    BlockRecipe,
    BlockSteps,
    Shares,
    block_loss,
    shares_for,
)
from specla.train.capture import Capture, Text, answer
from specla.train.session import Session, all_batches
from specla.train.states import CHUNK, States

PROMPTS = [tuple(5 + (i * k + k * k) % 19 for k in range(3 + i % 9)) for i in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": dict(DFLASH),
    "windows": {**DFLASH, "windows": (3, None), "is_causal": None},
}


@pytest.fixture(scope="module")
def texts(target: TargetModel) -> list[Text]:
    found = dict(answer(make_engine(target, slots=8, nodes=1), dict(enumerate(PROMPTS)), GREEDY))
    return [found[i] for i in range(len(PROMPTS))]


def packer_for(target: TargetModel, length: int = 64) -> BlockPacker:
    return BlockPacker(Capture(target, (0, 1), keep_bytes=1 << 22), length)


def document_of(batch: BlockBatch, place: int) -> tuple[int, list[int]]:
    """Where in its document a place is, and the document's tokens."""
    t = int(batch.positions.flatten()[place])
    return t, batch.tokens.flatten()[place - t : batch.ends[place]].tolist()


def fill_in(net: Named, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(tensors[name])


def net_for(target: TargetModel, config: BlockConfig) -> BlockNet:
    net = BlockNet(config, target.embeddings, target.head_weight)
    fill_in(net, random_tensors(expected_tensors(config), 0))
    return net


def reader_for(config: ReaderConfig) -> ReaderNet:
    net = ReaderNet(config)
    fill_in(net, random_tensors(reader_tensors(config), 1))
    return net


def steps_for(
    target: TargetModel, texts: Sequence[Text], config: BlockConfig, **options: Any
) -> BlockSteps:
    recipe = options.pop("recipe", BlockRecipe(rows=2, length=64))
    net, packer = net_for(target, config), packer_for(target, recipe.length)
    shares = options.pop("shares", shares_for(config))
    options.setdefault("captured", (0, 1))
    return BlockSteps(target, net, packer, texts, recipe, shares=shares, **options)


def test_a_batch_is_places_of_texts(target: TargetModel, texts: list[Text]) -> None:
    batch = packer_for(target)([texts[:2], [replace(texts[2], tokens=texts[2].tokens[:7])]])
    assert batch.features.shape == (2, 64, 2 * target.info.hidden_size)
    ends = [len(texts[0].tokens) - 1, len(texts[1].tokens) - 1, 6]
    starts = [0, ends[0], 64]
    want = [
        list(range(start + text.num_prompt - 1, start + end))
        for text, start, end in zip(texts, starts, ends, strict=False)
    ]
    assert batch.anchors.tolist() == [place for one in want for place in one]
    for text, start, end in zip(texts, starts, ends, strict=False):
        assert batch.tokens.flatten()[start : start + end].tolist() == list(text.tokens[:end])
        assert batch.after.flatten()[start : start + end].tolist() == list(
            text.tokens[1 : end + 1]
        )
        assert batch.ends[start : start + end].tolist() == [start + end] * end
    assert batch.positions[0, ends[0]] == 0
    assert batch.segments[1].tolist() == [0] * 6 + [-1] * 58


@torch.no_grad()
def test_lessons_stop_where_the_text_does(target: TargetModel, texts: list[Text]) -> None:
    batch = packer_for(target)([texts[:2], texts[2:3]])
    given = lessons(batch, batch.anchors, 5, target)
    logits = target.logits(batch.last.flatten(0, 1)).softmax(-1)
    for a, place in enumerate(batch.anchors.tolist()):
        t, tokens = document_of(batch, place)
        (text,) = (text for text in texts if list(text.tokens[:-1]) == tokens)
        for k in range(5):
            there = t + k + 1 < len(text.tokens)
            assert given.known[a, k] == there
            if there:
                assert given.labels[a, k] == text.tokens[t + k + 1]
                assert given.before[a, k] == text.tokens[t + k]
                assert torch.equal(given.laws[a, k], logits[place + k])


def test_some_places() -> None:
    places = torch.arange(10, 40)
    assert some(places, 30, None) is places
    assert some(places, 3, None).tolist() == [10, 20, 30]
    drawn = some(places, 9, torch.Generator().manual_seed(1)).tolist()
    assert drawn == sorted(set(drawn))
    assert drawn != some(places, 9, torch.Generator().manual_seed(2)).tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("reads", [False, True])
def test_the_forward_is_that_of_use(
    target: TargetModel, texts: list[Text], tmp_path: Path, name: str, reads: bool
) -> None:
    """Every anchor of a packed batch against a drafter whose slot has been fed up to it."""
    config, read = block_config(target.info, **KINDS[name]), reader_config(target.info)
    write_block(tmp_path, config)
    steps = steps_for(target, texts, config, reader=reader_for(read) if reads else None)
    if reads:
        save_reader(tmp_path, read, random_tensors(reader_tensors(read), 1))
    batch = packer_for(target)([texts[:2], texts[2:3]])
    places = batch.anchors[::3]
    given = lessons(batch, places, config.num_drafts, target)
    logits = steps.guesses(batch, places, given).logits
    drafter = BlockDrafter(path=str(tmp_path))
    for a, place in enumerate(places.tolist()):
        t, tokens = document_of(batch, place)
        engine = make_engine(target, drafter, slots=1, nodes=8)
        slot = engine.state.acquire()
        if t:
            features = batch.features.flatten(0, 1)[place - t : place]
            drafter.prefill(slot, tokens[1 : t + 1], features)
            target.prefill(tokens[:t], slot, engine.state)
        h = drafter._outputs([slot], torch.tensor([tokens[t]]))
        want = drafter.model.logits(h)[0]
        if config.markov_rank:
            want = want + drafter.model.correction(given.before[a])
        torch.testing.assert_close(logits[a], want, rtol=1e-3, atol=2e-4)


def test_attention_with_a_mask_is_not_cudnns(
    target: TargetModel, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, asked = steps_for(target, texts, block_config(target.info)), list[bool]()
    attention = torch.nn.functional.scaled_dot_product_attention

    def attend(*given: Any, **options: Any) -> Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*given, **options)

    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    steps.loss(packer_for(target)([texts[:2], texts[2:3]]))
    assert asked
    assert not any(asked)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_states_are_those_before_the_anchor(target: TargetModel, texts: list[Text]) -> None:
    """Of texts in a row and in the next one, at a text's start and beyond a chunk's end."""
    engine, (one, two, three) = make_engine(target, log=16), texts[:3]
    batch = packer_for(target, 96)([[one, two, three], [three]])
    starts = [0, len(one.tokens) - 1, len(one.tokens) + len(two.tokens) - 2, 96]
    asked = [(0, 0), (0, 9), (1, 0), (1, 4), (1, 20), (2, 19), (2, 22), (3, 1), (3, 9)]
    places = torch.tensor([starts[i] + count for i, count in asked])
    assert places[5] == CHUNK < places[6]
    found = States(target, (1, 0), (0, 1))(batch, places)
    assert [x.shape for x in found] == [(9, *engine.state.layers[0].S.shape[1:])] * 2
    for i, (text, count) in enumerate(asked):
        slot = engine.state.acquire()
        for token in (one, two, three, three)[text].tokens[:count]:
            target.prefill([token], slot, engine.state)
        for layer, states in zip((1, 0), found, strict=True):
            want = engine.state.layers[layer].S[slot]
            torch.testing.assert_close(states[i], want, rtol=1e-4, atol=1e-5)
        engine.state.release(slot)


@torch.no_grad()
def test_a_new_reader_asks_loudly_enough(target: TargetModel) -> None:
    """Of states of any size u has unit variance, and so have the hidden numbers."""
    config = replace(reader_config(target.info), rank=8, key_dim=128, value_dim=64, bottleneck=64)
    torch.manual_seed(0)
    reader = ReaderNet(config).reader()
    states = [1e-3 * torch.randn(9, config.num_heads, 64, 128) for _ in config.state_layers]
    given: list[Tensor] = []
    down = reader._linears["mlp.down"]

    def overheard(f: Tensor) -> Tensor:
        given.extend((f, down(f)))
        return given[-1]

    reader._linears["mlp.down"] = overheard  # type: ignore[assignment]
    delta = reader.delta(torch.randn(27, config.hidden_size), reader.read_folded(states))
    u = given[0].unflatten(-1, (-1, config.rank + 1))[..., :-1]
    assert 0.6 < float(u.std()) < 1.4
    assert 0.6 < float(given[1].std()) < 1.4
    assert not delta.any()


def test_losses_written_out() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 4, 6, generator=generator).double()
    laws = torch.softmax(2 * torch.randn(3, 4, 6, generator=generator).double(), dim=-1)
    confidence = torch.randn(3, 4, generator=generator).double()
    labels = torch.randint(6, (3, 4), generator=generator)
    known = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    given = Lessons(labels=labels, known=known, laws=laws, before=labels)
    for shares in (Shares(0.1, 0.9, 1.0, 4.0), Shares(1.0, 0.0, 0.0, 7.0), READER):
        total = weight = 0.0
        for a in range(3):
            for k in range(int(known[a].sum())):
                w = math.exp(-k / shares.decay)
                p = torch.softmax(logits[a, k], -1)
                gap = float((p - laws[a, k]).abs().sum())
                c, label = float(torch.sigmoid(confidence[a, k])), 1 - gap / 2
                one = -shares.ce * math.log(float(p[labels[a, k]])) + shares.l1 * gap
                entropy = label * math.log(c) + (1 - label) * math.log(1 - c)
                total += w * (one - shares.confidence * entropy)
                weight += w
        found = block_loss(logits, confidence if shares.confidence else None, given, shares)
        assert float(found) == pytest.approx(total / weight, rel=1e-10)


def test_each_kind_has_its_papers_loss(target: TargetModel) -> None:
    assert shares_for(block_config(target.info)) == (0.1, 0.9, 1.0, 4.0)
    no_confidence = {"confidence_head": False, "confidence_with_markov": False}
    assert shares_for(block_config(target.info, **no_confidence)) == (0.1, 0.9, 0.0, 4.0)
    assert shares_for(block_config(target.info, **DFLASH)) == (1.0, 0.0, 0.0, 4.0)
    large = block_config(target.info, **DFLASH, **{"block_size": 16})
    assert shares_for(large).decay == 7.0


@pytest.mark.parametrize("reads", [False, True])
def test_going_on_is_not_having_stopped(
    target: TargetModel, texts: list[Text], tmp_path: Path, reads: bool
) -> None:
    """Weights after four steps, bit for bit; anchors are drawn the same."""
    config = block_config(target.info)
    recipe = BlockRecipe(rows=2, length=64, steps=8, lr=1e-3, warmup=2, anchors=11)

    def fresh(recipe: BlockRecipe = recipe) -> BlockSteps:
        reader = reader_for(reader_config(target.info)) if reads else None
        return steps_for(target, texts, config, recipe=recipe, reader=reader, joint=reads)

    straight, first, second = fresh(), fresh(), fresh()
    losses = [straight.train_step() for _ in range(4)]
    assert [first.train_step() for _ in range(2)] == losses[:2]
    first.save(tmp_path)
    assert second.restore(tmp_path)
    assert [second.train_step() for _ in range(2)] == losses[2:]
    for name, p in straight.net.state_dict().items():
        assert torch.equal(p, second.net.state_dict()[name]), name
    with pytest.raises(ConfigError, match="recipe"):
        fresh(replace(recipe, anchors=12)).restore(tmp_path)


def test_muon_leaves_out_what_the_loss_does_not_use(
    target: TargetModel, texts: list[Text]
) -> None:
    """A reader's loss has no share for the confidence of the drafter that is trained with it."""
    steps = steps_for(
        target, texts, block_config(target.info), shares=READER, joint=True,
        recipe=BlockRecipe(rows=1, length=40, warmup=1, anchors=4, muon_lr=0.02),
        reader=reader_for(reader_config(target.info)),
    )  # fmt: skip
    before = {name: x.clone() for name, x in steps._net.state_dict().items()}
    steps.train_step()
    kept = {name for name, x in steps._net.state_dict().items() if torch.equal(x, before[name])}
    assert kept == {f"drafter.confidence_head.proj.{x}" for x in ("weight", "bias")}


def tau_in_use(target: TargetModel, drafter: BlockDrafter, texts: Sequence[Text]) -> float:
    """Tokens per round of the texts' prompts; asserts that they say what the target says."""
    engine: Engine = make_engine(target, drafter, slots=4, nodes=8)
    requests = [
        request(str(i), text.tokens[: text.num_prompt], max_tokens=20)
        for i, text in enumerate(texts)
    ]
    done = drive(engine, requests).completions
    for i, text in enumerate(texts):
        assert done[str(i)].token_ids == text.tokens[text.num_prompt :]
    said = [c.speculation for c in done.values()]
    return sum(s.rounds + s.accepted for s in said) / sum(s.rounds for s in said)


@torch.no_grad()
def survival_error(
    steps: BlockSteps, batches: Sequence[BlockBatch], temperatures: tuple[float, ...] | None
) -> float:
    """Of the first draft being accepted."""
    right, known, logits = (torch.cat(x) for x in zip(*map(steps._look, batches), strict=True))
    survived = right[..., 0].int().cumprod(-1)[known.all(-1)]
    predicted = survival(logits[known.all(-1)], temperatures)
    return float(calibration_error(predicted[:, 0], survived[:, 0]))


def test_training_makes_a_drafter_that_is_accepted(
    target: TargetModel, texts: list[Text], tmp_path: Path
) -> None:
    """First the drafter, by held-out figure and in the engine; then its reader alone: the
    drafter's weights stay, the loss falls."""
    config = block_config(target.info)
    recipe = BlockRecipe(rows=2, length=64, steps=60, lr=5e-3, warmup=3, anchors=48)
    steps = steps_for(target, texts[:20], config, recipe=recipe)
    torch.manual_seed(0)
    steps.net.reset_parameters()
    steps.net.start_from(target.final_norm)
    notes: list[str] = []
    held = all_batches(packer_for(target), texts[20:], recipe)
    before = steps.figures(held).tau
    found = Session(tmp_path, steps, held)(every=30, minutes=9, note=notes.append)
    assert len(notes) == 3
    assert found.tau > before + 0.4
    chain = BlockDrafter(path=str(tmp_path / "checkpoint"), top_k=1, tau=1e9)
    temperatures = chain.config.confidence_temperatures
    assert temperatures is not None
    assert len(temperatures) == config.num_drafts
    assert tau_in_use(target, chain, texts[20:]) > before + 0.4

    kept = {name: p.clone() for name, p in steps.net.tensors().items()}
    reader = ReaderNet(reader_config(target.info))
    second = BlockSteps(
        target,
        steps.net,
        packer_for(target),
        texts[:20],
        recipe,
        shares=READER,
        reader=reader,
        captured=(0, 1),
    )
    assert second.figures(held) == steps.figures(held)
    assert survival_error(steps, held, steps._temperatures) < survival_error(steps, held, None)
    losses = [second.train_step() for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(torch.equal(p, kept[name]) for name, p in steps.net.tensors().items())
    assert any(p.abs().max() > 0 for p in reader.mlp.parameters())  # type: ignore[union-attr]
    second.keep(tmp_path / "read")
    drafter = BlockDrafter(path=str(tmp_path / "read"), top_k=1, tau=1e9)
    assert drafter.info.name == "block+reader"
    assert tau_in_use(target, drafter, texts[20:]) > before + 0.4
