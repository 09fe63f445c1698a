# SPDX-License-Identifier: Apache-2.0
"""The block drafter: its one pass, its trees, its memory, and what it is refused for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from block_naive import Naive
from block_toy import DFLASH, block_config, block_drafter, random_tensors, write_block
from engine_harness import VOCAB, load_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla.drafters import DraftRow, Observation
from specla.drafters.base import FeatureDrafter
from specla.drafters.block import BlockDrafter
from specla.drafters.block_config import BlockConfig, expected_tensors
from specla.errors import ConfigError, InvalidCheckpoint
from specla.models.base import TargetModel
from specla.topology.tree import DraftTree

SLOTS, NODES = 4, 9
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": dict(DFLASH),
    "windows": {**DFLASH, "windows": (3, None), "is_causal": None},
    "causal": {"is_causal": True, "num_kv_heads": 4, "confidence_with_markov": False},
    "narrow": {"windows": (4, 1), "block_size": 3},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """The same target in float64."""
    return load_target(tmp_path_factory.mktemp("wide"), dtype=torch.float64)


@pytest.fixture(scope="module")
def folders(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters without a reader."""
    folder = tmp_path_factory.mktemp("drafters")
    return {
        name: write_block(folder / name, block_config(target.info, **changes))
        for name, changes in KINDS.items()
    }


def bound(folder: Path, target: TargetModel, **options: Any) -> BlockDrafter:
    drafter = block_drafter(folder, target.info, **options)
    drafter.bind(target, num_slots=SLOTS, max_nodes=NODES, exact=target.dtype != torch.float64)
    return drafter


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def outputs(rng: random.Random, target: TargetModel, count: int) -> Tensor:
    """Stand-ins for a target's features."""
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    width = 2 * target.info.hidden_size
    return torch.randn(count, width, generator=generator).to(target.dtype)


def row(tokens: Sequence[int], slot: int, max_drafts: int = NODES - 1) -> DraftRow:
    return DraftRow(
        slot=slot, tokens=tokens, num_prompt_tokens=len(tokens), max_drafts=max_drafts, seed=0
    )


def seen(slot: int, emitted: Sequence[int]) -> Observation:
    tree = DraftTree.chain(0, emitted[:-1])
    return Observation(
        slot=slot, tree=tree, path=tuple(range(len(emitted))), emitted=tuple(emitted)
    )


def naive(folder: Path, config: BlockConfig, target: TargetModel) -> Naive:
    return Naive(
        config, load_file(folder / "model.safetensors"), target.embeddings, target.head_weight
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("context", "window"), [(0, None), (1, None), (9, None), (9, 3)])
def test_a_block_is_one_pass_of_the_naive_reference(
    folders: dict[str, Path], wide: TargetModel, name: str, context: int, window: int | None
) -> None:
    """To 1e-10, in float64: outputs, chain, log-probabilities, confidences."""
    folder, rng = folders[name], random.Random(context)
    drafter = bound(folder, wide, top_k=1, window=window)
    features = outputs(rng, wide, context)
    if context:
        drafter.prefill(1, text(rng, context), features)
    reference = naive(folder, drafter.config, wide)
    want = reference.outputs(5, features, window=window)
    with torch.inference_mode():
        h = drafter._outputs([1], torch.tensor([5]))
    drafting = want if drafter.config.shift_label else want[1:]
    torch.testing.assert_close(h[0], drafting, rtol=1e-10, atol=1e-10)
    tokens, logprobs = reference.chain(5, want)
    tree = drafter.draft([row([5], 1)])[0]
    assert tree.tokens[1:] == tuple(tokens)
    assert tree.logprobs is not None
    assert tree.logprobs[1:] == pytest.approx(logprobs, rel=1e-10)
    if drafter.config.confidence_head:
        with torch.inference_mode():
            found = drafter.model.confidence(h, torch.tensor([[5, *tokens[:-1]]]))[0].tolist()
        before = [5, *tokens[:-1]]
        assert found == pytest.approx(
            [reference.confidence(x, t) for x, t in zip(drafting, before, strict=True)], rel=1e-9
        )


def started(folder: Path, target: TargetModel, rng: random.Random, **options: Any):  # type: ignore[no-untyped-def]
    """A drafter with three slots at different places, and their tokens."""
    drafter = bound(folder, target, **options)
    tokens = {slot: text(rng, 4 + 3 * slot) for slot in (1, 2, 3)}
    for slot, ids in tokens.items():
        drafter.prefill(slot, ids[1:-1], outputs(rng, target, len(ids) - 2))
        drafter.feed([seen(slot, ids[-1:])], outputs(rng, target, 1))
    return drafter, tokens


def rows_of(tokens: dict[int, list[int]]) -> list[DraftRow]:
    return [row(ids, slot) for slot, ids in tokens.items()]


def test_it_is_a_feature_drafter(folders: dict[str, Path], target: TargetModel) -> None:
    drafter = bound(folders["dspark"], target)
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.feature_layers == (0, 1)
    assert drafter.info.name == "block"
    assert drafter.info.max_depth == 5
    assert bound(folders["dflash"], target).info.max_depth == 4
    with pytest.raises(ConfigError, match="reader"):
        bound(folders["dspark"], target, reader=True)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("window", [None, 5])
def test_any_acceptance_lengths_leave_the_memory_of_one_by_one(
    folders: dict[str, Path], target: TargetModel, name: str, window: int | None
) -> None:
    """Bitwise: several rows together, chunks and single tokens, past the first buffer."""
    rng, total = random.Random(1), 150
    many, single = (bound(folders[name], target, window=window) for _ in range(2))
    given = {slot: outputs(rng, target, total) for slot in (1, 2, 3)}
    done = dict.fromkeys(given, 0)
    while any(n < total for n in done.values()):
        rows = [s for s in given if done[s] < total and rng.random() < 0.7]
        steps = {s: min(rng.choice([1, 2, 5, 40]), total - done[s]) for s in rows}
        if rows:
            spans = {s: slice(done[s], done[s] + steps[s]) for s in rows}
            many.feed(
                [seen(s, [0] * steps[s]) for s in rows],
                torch.cat([given[s][spans[s]] for s in rows]),
            )
        done.update({s: done[s] + steps[s] for s in rows})
        many.draft([row([4], s) for s in given])
    for slot, features in given.items():
        for i in range(total):
            single.prefill(slot, [0], features[i : i + 1])
    for slot in given:
        assert many._context.length(slot) == total
        for a, b in zip(many._context._slots[slot], single._context._slots[slot], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.view(), b.view(), strict=True))  # type: ignore[arg-type]
            limit = b._limit
            assert len(b.view().k) == (total if limit is None else min(limit, total))  # type: ignore[union-attr]
    rows = [row([4], slot) for slot in given]
    assert many.draft(rows) == single.draft(rows)


def test_a_bounded_memory_stays_bounded(folders: dict[str, Path], target: TargetModel) -> None:
    drafter, rng = bound(folders["dspark"], target, window=5), random.Random(2)
    for _ in range(60):
        drafter.prefill(1, [0] * 20, outputs(rng, target, 20))
    kept = drafter._context._slots[1][0]
    assert drafter._context.length(1) == 1200
    assert len(kept._buffers[0]) <= 64


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_holds_the_best_nodes_with_their_own_laws(
    folders: dict[str, Path], wide: TargetModel, name: str
) -> None:
    """Against all nodes of the whole tree, each with the law of its position after its parent."""
    rng, folder = random.Random(3), folders[name]
    features, drafts = outputs(rng, wide, 6), 14
    drafter = bound(folder, wide, top_k=VOCAB, max_depth=2, tau=5.0, spine=False)
    drafter.prefill(1, text(rng, 6), features)
    tree = drafter.draft([row([5], 1, drafts)])[0]
    reference = naive(folder, drafter.config, wide)
    h = reference.outputs(5, features)[0 if drafter.config.shift_label else 1 :]
    scores = {(5, a): float(q) for a, q in enumerate(reference.law(h[0], 5))}
    least = max(scores.values()) - 5.0
    for a in range(VOCAB):
        law = reference.law(h[1], a)
        scores.update({(5, a, b): scores[5, a] + float(q) for b, q in enumerate(law)})
    best = sorted((p for p in scores if scores[p] >= least), key=lambda p: -scores[p])[:drafts]
    found = {tuple(tree.tokens[n] for n in tree.path_to(i)) for i in range(1, tree.num_nodes)}
    assert found == set(best)
    assert len(best) > 4


@pytest.mark.parametrize("name", ["dspark", "dflash"])
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_a_tree_with_a_spine_offers_what_the_chain_offers(
    folders: dict[str, Path], target: TargetModel, name: str, drafts: int
) -> None:
    chain, tokens = started(folders[name], target, random.Random(4), top_k=1)
    tree, _ = started(folders[name], target, random.Random(4), top_k=4, spine=True)
    rows = [row(ids, slot, drafts) for slot, ids in tokens.items()]
    for one, other in zip(chain.draft(rows), tree.draft(rows), strict=True):
        assert one.is_chain
        node = 0
        for token in one.tokens[1:]:
            node = other.child_with(node, token)  # type: ignore[assignment]
            assert node is not None


def test_depth_and_budget_are_limits(folders: dict[str, Path], target: TargetModel) -> None:
    for name in ("dspark", "dflash"):
        drafter, tokens = started(folders[name], target, random.Random(5), max_depth=2)
        for drafts in (0, 1, 2, 7):
            trees = drafter.draft([row(ids, s, drafts) for s, ids in tokens.items()])
            assert all(tree.num_drafts == min(drafts, 7) for tree in trees)
            assert all(max(tree.depths()) <= 2 for tree in trees)


def test_rows_do_not_see_each_other(folders: dict[str, Path], target: TargetModel) -> None:
    for name in ("dspark", "dflash", "windows"):
        drafter, tokens = started(folders[name], target, random.Random(6))
        rows = rows_of(tokens)
        together = drafter.draft(rows)
        assert drafter.draft(rows[::-1]) == together[::-1]
        assert [tree for one in rows for tree in drafter.draft([one])] == together
        assert len({tree.tokens[1:] for tree in together}) == 3
        assert drafter.draft([]) == []


def test_a_slot_is_forgotten_before_it_is_used_again(
    folders: dict[str, Path], target: TargetModel
) -> None:
    drafter, tokens = started(folders["dspark"], target, random.Random(7))
    drafter.draft(rows_of(tokens))
    for slot in (1, 2, 3):
        drafter.reset(slot)
        drafter.reset(slot)
    assert not drafter._context._slots
    assert not drafter._context._lengths
    blank = bound(folders["dspark"], target)
    assert drafter.draft([row([5], 2)]) == blank.draft([row([5], 3)])
    rng = random.Random(8)
    fresh, tokens = started(folders["dspark"], target, rng)
    rng = random.Random(8)
    for slot, ids in {s: text(rng, 4 + 3 * s) for s in (1, 2, 3)}.items():
        drafter.prefill(slot, ids[1:-1], outputs(rng, target, len(ids) - 2))
        drafter.feed([seen(slot, ids[-1:])], outputs(rng, target, 1))
    assert drafter.draft(rows_of(tokens)) == fresh.draft(rows_of(tokens))


def test_a_fork_goes_on_alone(folders: dict[str, Path], target: TargetModel) -> None:
    rng = random.Random(9)
    drafter, ids = bound(folders["dspark"], target), text(rng, 9)
    drafter.prefill(1, ids[1:], outputs(rng, target, 8))
    drafter.prefill(2, ids[1:], outputs(rng, target, 8))
    drafter.fork(1, 2)
    one, two = drafter.draft([row(ids, 1), row(ids, 2)])
    assert one == two
    drafter.feed([seen(2, [4, 4])], outputs(rng, target, 2))
    assert drafter.draft([row([*ids, 4, 4], 2)])[0] != one
    assert drafter.draft([row(ids, 1)])[0] == one


def test_confidence_cuts_the_block(folders: dict[str, Path], target: TargetModel) -> None:
    """Drafts are as deep as the chain survives with at least that probability."""
    whole, tokens = started(folders["dspark"], target, random.Random(10), top_k=1)
    rows, counts = rows_of(tokens), set()
    with torch.inference_mode():
        anchors = torch.tensor([r.tokens[-1] for r in rows])
        h = whole._outputs([r.slot for r in rows], anchors)
        chains = torch.tensor([tree.tokens[:-1] for tree in whole.draft(rows)])
        alive = torch.sigmoid(whole.model.confidence(h, chains)).cumprod(-1)
    for least in (0.02, 0.2, 0.4, 0.6, 1.0):
        cut, _ = started(folders["dspark"], target, random.Random(10), min_survival=least)
        depths = [max(tree.depths()) for tree in cut.draft(rows)]
        assert depths == (alive >= least).sum(-1).tolist()
        assert cut.info.may_return_nothing
        counts |= set(depths)
    assert len(counts) >= 3
    with pytest.raises(ConfigError, match="min_survival"):
        bound(folders["dflash"], target, min_survival=0.5)


def test_a_file_may_hold_embeddings_and_head(tmp_path: Path, target: TargetModel) -> None:
    """Copies are the target's own; others are used."""
    write_block(tmp_path, block_config(target.info))
    file = tmp_path / "model.safetensors"
    given = load_file(file)
    copies = {"embed_tokens.weight": target.embeddings, "lm_head.weight": target.head_weight}
    save_file({**given, **{k: v.clone() for k, v in copies.items()}}, file)
    weights = bound(tmp_path, target).model.weights
    assert weights.embeddings is target.embeddings
    assert weights.head is target.head_weight
    save_file({**given, "lm_head.weight": target.head_weight * 2}, file)
    weights = bound(tmp_path, target).model.weights
    assert torch.equal(weights.head, target.head_weight * 2)
    assert weights.embeddings is target.embeddings


def test_tensors_and_config_must_belong_together(tmp_path: Path, target: TargetModel) -> None:
    write_block(tmp_path, block_config(target.info))
    tensors = random_tensors(expected_tensors(block_config(target.info)), 0)
    tensors["markov_head.gate.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"markov_head\.gate"):
        bound(tmp_path, target)


def test_another_target_or_tokenizer_is_refused(tmp_path: Path, target: TargetModel) -> None:
    write_block(tmp_path / "a", block_config(target.info, target_fingerprint="0" * 64))
    with pytest.raises(ConfigError, match="target_fingerprint"):
        bound(tmp_path / "a", target)
    write_block(tmp_path / "b", block_config(target.info, tokenizer_hash="ab"))
    drafter = block_drafter(tmp_path / "b", target.info)
    drafter.check_tokenizer("ab")
    with pytest.raises(ConfigError, match="tokenizer_hash"):
        drafter.check_tokenizer("cd")


def test_options_out_of_range_are_named(folders: dict[str, Path]) -> None:
    for option, value in (
        ("top_k", 0),
        ("max_depth", 6),
        ("tau", float("nan")),
        ("window", 0),
        ("window", 2.5),
        ("window", "all"),
        ("min_survival", 1.5),
        ("spine", "no"),
        ("reader", 0),
    ):
        with pytest.raises(ConfigError, match=option):
            BlockDrafter(path=str(folders["dspark"]), **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not exist"):
        BlockDrafter(path="/nowhere")
