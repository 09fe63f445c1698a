# SPDX-License-Identifier: Apache-2.0
"""The EAGLE drafter: its state, its trees, and what it is refused for. Untrained weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config, toy_drafter, write_drafter
from engine_harness import VOCAB
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.drafters import DraftRow, Observation, build
from specla.drafters.base import FeatureDrafter
from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_config import parse_eagle_config
from specla.drafters.eagle_gdn import GdnMixer
from specla.drafters.eagle_model import EagleModel, Tips
from specla.errors import ConfigError, InvalidCheckpoint
from specla.models.base import TargetModel
from specla.models.files import read_json_object, write_json
from specla.topology.tree import DraftTree

SLOTS, NODES = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafter")


def bound(folder: Path, target: TargetModel, **options: object) -> EagleDrafter:
    drafter = toy_drafter(folder, target.info, **options)
    drafter.bind(target, num_slots=SLOTS, max_nodes=NODES, exact=True)
    return drafter


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def outputs(rng: random.Random, target: TargetModel, count: int) -> Tensor:
    """Stand-ins for a target's features."""
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    width = 2 * target.info.hidden_size
    return torch.randn(count, width, generator=generator)


def row(tokens: Sequence[int], slot: int, max_drafts: int = NODES - 1) -> DraftRow:
    return DraftRow(
        slot=slot, tokens=tokens, num_prompt_tokens=len(tokens), max_drafts=max_drafts, seed=0
    )


def seen(slot: int, emitted: Sequence[int]) -> Observation:
    tree = DraftTree.chain(0, emitted[:-1])
    return Observation(
        slot=slot, tree=tree, path=tuple(range(len(emitted))), emitted=tuple(emitted)
    )


def committed(model: EagleModel, slot: int) -> tuple[Tensor, ...]:
    tips = model.roots([slot])
    return tuple(x.clone() for x in (tips.y, *tips.memory))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_it_is_a_feature_drafter(folder: Path, target: TargetModel) -> None:
    drafter = bound(folder, target)
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.feature_layers == (0, 1)
    made = build(f"eagle:{folder}", options={"top_k": 2})
    assert made.info.name == "eagle"


@pytest.mark.parametrize("seed", range(3))
def test_any_acceptance_lengths_leave_the_state_of_encoding_one_by_one(
    folder: Path, target: TargetModel, seed: int
) -> None:
    """Bitwise, S and conv window and last output: several rows, different lengths at a time,
    longer than a bank, with drafts in between."""
    rng = random.Random(seed)
    many, single = bound(folder, target), bound(folder, target)
    texts = {slot: text(rng, 23) for slot in (1, 2, 3)}
    given = {slot: outputs(rng, target, 23) for slot in texts}
    done = dict.fromkeys(texts, 0)
    for slot in texts:
        for drafter in (many, single):
            drafter.prefill(slot, texts[slot][:5], given[slot][:5])
        done[slot] = 5
    while any(n < 23 for n in done.values()):
        rows = [slot for slot in texts if done[slot] < 23 and rng.random() < 0.7]
        if not rows:
            continue
        steps = {slot: min(rng.choice([1, 2, 3, 4, 9]), 23 - done[slot]) for slot in rows}
        spans = {slot: slice(done[slot], done[slot] + steps[slot]) for slot in rows}
        many.feed(
            [seen(slot, texts[slot][spans[slot]]) for slot in rows],
            torch.cat([given[slot][spans[slot]] for slot in rows]),
        )
        done.update({slot: spans[slot].stop for slot in rows})
        if rng.random() < 0.7:
            many.draft([row(texts[slot][: done[slot]], slot) for slot in rows])
    many.draft([row(texts[slot], slot, 0) for slot in texts])
    for slot in texts:
        for i in range(5, 23):
            single.feed([seen(slot, texts[slot][i : i + 1])], given[slot][i : i + 1])
            single.draft([row(texts[slot][: i + 1], slot, 0)])
        assert same(committed(many.model, slot), committed(single.model, slot))
        assert gdn(many).state.logs[slot].committed_len == 23


def test_the_prompt_in_chunks_is_the_prompt_token_by_token(
    folder: Path, target: TargetModel
) -> None:
    rng = random.Random(4)
    drafter, tokens, given = bound(folder, target), text(rng, 19), outputs(rng, target, 19)
    drafter.prefill(1, tokens[:12], given[:12])
    drafter.prefill(1, tokens[12:], given[12:])
    for i in range(19):
        drafter.feed([seen(2, tokens[i : i + 1])], given[i : i + 1])
        drafter.draft([row(tokens[: i + 1], 2, 0)])
    for x, y in zip(committed(drafter.model, 1), committed(drafter.model, 2), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def started(folder: Path, target: TargetModel, rng: random.Random, **options: object):  # type: ignore[no-untyped-def]
    """A drafter with three slots at different places, and their tokens."""
    drafter = bound(folder, target, **options)
    tokens = {slot: text(rng, 4 + 3 * slot) for slot in (1, 2, 3)}
    for slot, ids in tokens.items():
        drafter.prefill(slot, ids[1:-1], outputs(rng, target, len(ids) - 2))
        drafter.feed([seen(slot, ids[-1:])], outputs(rng, target, 1))
    return drafter, tokens


def test_a_node_is_what_replaying_its_path_gives(folder: Path, target: TargetModel) -> None:
    """Every node's log-probability, from the committed state along its own path alone."""
    rng = random.Random(5)
    drafter, tokens = started(folder, target, rng, top_k=3, max_depth=4, tau=50.0)
    for (slot, ids), tree in zip(
        tokens.items(), drafter.draft([row(t, s) for s, t in tokens.items()]), strict=True
    ):
        assert tree.num_drafts == NODES - 1
        assert tree.logprobs is not None
        for node in range(1, tree.num_nodes):
            path = tree.path_to(node)
            tips = drafter.model.roots([slot])
            for above in path[1:-1]:
                tips = drafter.model.step(tips, [0], [tree.tokens[above]])
            law = torch.log_softmax(drafter.model.logits(tips.y), dim=-1)[0]
            assert law[tree.tokens[node]].item() == tree.logprobs[node]
        assert ids[-1] == tree.tokens[0]


def test_a_chain_is_the_tree_of_one_branch(folder: Path, target: TargetModel) -> None:
    rng = random.Random(6)
    chain, tokens = started(folder, target, rng, top_k=1, max_depth=4, tau=50.0)
    rng = random.Random(6)
    tree, _ = started(folder, target, rng, top_k=4, max_depth=4, tau=50.0, spine=True)
    rows = [row(t, s) for s, t in tokens.items()]
    for one, other in zip(chain.draft(rows), tree.draft(rows), strict=True):
        assert one.is_chain
        node = 0
        for token in one.tokens[1:]:
            node = other.child_with(node, token)  # type: ignore[assignment]
            assert node is not None
        assert other.logprobs is not None
        assert one.logprobs is not None
        assert [other.logprobs[n] for n in other.path_to(node)] == list(one.logprobs)


def test_encoding_equals_stepping(folder: Path, target: TargetModel) -> None:
    """A drafted node whose feature happened to be the true one is what encoding would give."""
    rng = random.Random(7)
    drafter, tokens = started(folder, target, rng)
    drafter.draft([row(tokens[1], 1, 0)])
    truth = outputs(rng, target, 1)
    tips = drafter.model.roots([1])
    tips = Tips(drafter.model.features(truth), tips.memory)
    stepped = drafter.model.step(tips, [0], [3])
    drafter.feed([seen(1, [3])], truth)
    drafter.draft([row([*tokens[1], 3], 1, 0)])
    assert same(committed(drafter.model, 1), (stepped.y, *stepped.memory))


def test_drafting_leaves_no_trace(folder: Path, target: TargetModel) -> None:
    """All of the state, to the bit: rejected branches have nowhere to hide."""
    drafter, tokens = started(folder, target, random.Random(8), tau=50.0)
    rows = [row(t, s) for s, t in tokens.items()]
    first = drafter.draft(rows)
    state = gdn(drafter).state
    before = [x.clone() for x in _tensors(drafter.model)]
    logs = [repr(log) for log in state.logs]
    assert drafter.draft(rows) == first
    assert same(_tensors(drafter.model), before)
    assert [repr(log) for log in state.logs] == logs


def _tensors(model: EagleModel) -> list[Tensor]:
    assert isinstance(model.mixer, GdnMixer)
    held = [x for y in model.mixer.state.layers for x in (y.S, *y.factors, y.tail, y.inputs)]
    return [*held, model.last]


def gdn(drafter: EagleDrafter) -> GdnMixer:
    assert isinstance(drafter.model.mixer, GdnMixer)
    return drafter.model.mixer


def test_rows_do_not_see_each_other(folder: Path, target: TargetModel) -> None:
    drafter, tokens = started(folder, target, random.Random(9), tau=50.0)
    rows = [row(t, s) for s, t in tokens.items()]
    together = drafter.draft(rows)
    assert drafter.draft(rows[::-1]) == together[::-1]
    other, _ = started(folder, target, random.Random(9), tau=50.0)
    assert [tree for one in rows for tree in other.draft([one])] == together
    assert len({tree.tokens[1:] for tree in together}) == 3


def test_a_slot_is_erased_before_it_is_used_again(folder: Path, target: TargetModel) -> None:
    drafter, tokens = started(folder, target, random.Random(10), tau=50.0)
    drafter.draft([row(tokens[2], 2)])
    for slot in (1, 2, 3):
        drafter.reset(slot)
        drafter.reset(slot)
    assert not any(x.any() for x in _tensors(drafter.model))
    assert drafter.draft([row([5], 2)])[0].num_nodes == 1
    fresh, tokens = started(folder, target, random.Random(11), tau=50.0)
    rng = random.Random(11)
    for slot, ids in {s: text(rng, 4 + 3 * s) for s in (1, 2, 3)}.items():
        drafter.prefill(slot, ids[1:-1], outputs(rng, target, len(ids) - 2))
        drafter.feed([seen(slot, ids[-1:])], outputs(rng, target, 1))
    rows = [row(t, s) for s, t in tokens.items()]
    assert drafter.draft(rows) == fresh.draft(rows)


def test_a_fork_goes_on_alone(folder: Path, target: TargetModel) -> None:
    rng = random.Random(12)
    drafter, ids = bound(folder, target, tau=50.0), text(rng, 9)
    drafter.prefill(1, ids[1:], outputs(rng, target, 8))
    drafter.fork(1, 2)
    one, two = drafter.draft([row(ids, 1), row(ids, 2)])
    assert one == two
    before = committed(drafter.model, 1)
    drafter.feed([seen(2, [4, 4])], outputs(rng, target, 2))
    assert drafter.draft([row([*ids, 4, 4], 2)])[0] != one
    assert same(committed(drafter.model, 1), before)


def test_a_draft_vocabulary_is_mapped_to_the_targets(tmp_path: Path, target: TargetModel) -> None:
    config = toy_config(target.info, draft_vocab_size=7, fc_norm=False)
    write_drafter(tmp_path, config)
    drafter, tokens = started(tmp_path, target, random.Random(13), top_k=9, tau=50.0)
    ids = drafter.model.target_ids(torch.arange(7)).tolist()
    assert ids == sorted(set(ids))
    assert ids != list(range(7))
    tree = drafter.draft([row(tokens[1], 1)])[0]
    assert set(tree.tokens[1:]) <= set(ids)


def test_without_a_head_it_is_the_targets(tmp_path: Path, target: TargetModel) -> None:
    config = toy_config(target.info, hidden_size=target.info.hidden_size, draft_vocab_size=None)
    write_drafter(tmp_path, config)
    drafter, tokens = started(tmp_path, target, random.Random(14))
    assert drafter.model.weights.head is target.head_weight
    assert drafter.draft([row(tokens[1], 1)])[0].num_nodes > 1


CHANGES = {
    "vocab_size": (99, "vocabulary"),
    "target_hidden_size": (48, "width"),
    "target_layer_ids": ((0, 2), "feature layers"),
    "target_fingerprint": ("0" * 64, "target_fingerprint"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_target_is_refused_by_name(
    tmp_path: Path, target: TargetModel, field: str
) -> None:
    value, name = CHANGES[field]
    write_drafter(tmp_path, replace(toy_config(target.info), **{field: value}))
    with pytest.raises(ConfigError, match=name):
        bound(tmp_path, target)


def test_another_tokenizer_is_refused(tmp_path: Path, target: TargetModel) -> None:
    write_drafter(tmp_path, toy_config(target.info, tokenizer_hash="ab"))
    drafter = toy_drafter(tmp_path, target.info)
    drafter.check_tokenizer("ab")
    with pytest.raises(ConfigError, match="tokenizer_hash"):
        drafter.check_tokenizer("cd")


def test_layers_counted_by_input_are_converted(tmp_path: Path, target: TargetModel) -> None:
    write_drafter(tmp_path, toy_config(target.info))
    values = read_json_object(tmp_path / "config.json")
    del values["target_layer_ids"]
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    write_json(tmp_path / "config.json", values)
    assert toy_drafter(tmp_path, target.info).feature_layers == (0, 1)
    values["eagle_config"] = [1, 2]
    write_json(tmp_path / "config.json", values)
    with pytest.raises(InvalidCheckpoint, match="eagle_config"):
        toy_drafter(tmp_path, target.info)
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2]}
    write_json(tmp_path / "config.json", values)
    with pytest.raises(InvalidCheckpoint, match="input of layer 0"):
        toy_drafter(tmp_path, target.info)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLM"], "architectures"),
        ("target_layer_ids", [1, 1], "target_layer_ids"),
        ("draft_vocab_size", 10**6, "draft_vocab_size"),
        ("draft_vocab_size", None, "draft_vocab_size"),
        ("num_v_heads", 0, "num_v_heads"),
        ("num_hidden_layers", 2, "num_hidden_layers"),
        ("hidden_act", "gelu", "hidden_act"),
        ("rope_scaling", {"rope_type": "llama3"}, "rope_scaling"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_type"),
        ("rope_parameters", [1], "rope_parameters"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    tmp_path: Path, target: TargetModel, field: str, value: object, message: str
) -> None:
    write_drafter(tmp_path, toy_config(target.info))
    values = read_json_object(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**values, field: value})
    with pytest.raises(InvalidCheckpoint, match=message):
        toy_drafter(tmp_path, target.info)


def test_the_base_of_rotary_positions_is_read_where_it_stands(target: TargetModel) -> None:
    values = toy_config(target.info).as_dict()
    del values["rope_theta"]
    assert parse_eagle_config(values, "file").rope_theta == 10000.0
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert parse_eagle_config(values, "file").rope_theta == 5e5


def test_a_broken_d2t_is_refused(tmp_path: Path, target: TargetModel) -> None:
    write_drafter(tmp_path, toy_config(target.info, draft_vocab_size=7))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for broken, message in (
        (tensors["d2t"] * 0 + 90, "d2t"),
        (None, "must hold int64 tensor d2t"),
    ):
        kept = {k: v for k, v in tensors.items() if k != "d2t"}
        save_file(kept if broken is None else {**kept, "d2t": broken}, file, {"format": "pt"})
        with pytest.raises(InvalidCheckpoint, match=message):
            bound(tmp_path, target)


def test_options_out_of_range_are_named(folder: Path, target: TargetModel) -> None:
    bound(folder, target)
    for option, value in (
        ("top_k", 0), ("max_depth", 0), ("tau", -1), ("tau", float("nan")), ("spine", "no"),
        ("min_survival", -0.1), ("min_survival", 1.5),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=option):
            EagleDrafter(path=str(folder), **{option: value})
    with pytest.raises(ConfigError, match="does not exist"):
        EagleDrafter(path="/nowhere")
