# SPDX-License-Identifier: Apache-2.0
"""EAGLE with causal attention: against transformers' Llama attention, and the drafter's rules.
The rules themselves are tested on the recurrent mixer in `test_eagle.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from eagle_toy import toy_config, write_drafter
from engine_harness import drive, make_engine, outcome, plain, request
from engine_requests import LONG, LOOP, WALK
from test_eagle import committed, outputs, row, same, seen, text
from torch import Tensor

from specla.drafters.eagle import EagleDrafter
from specla.drafters.eagle_attention import AttentionMixer, rotate
from specla.errors import InvalidCheckpoint
from specla.models.base import TargetModel
from specla.models.files import read_json_object, write_json

ATTENTION = {
    "mixer": "attention", "num_heads": 4, "num_v_heads": 2, "head_dim": 6, "head_v_dim": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Path:
    return write_drafter(tmp_path_factory.mktemp("d"), toy_config(target.info, **ATTENTION))


def bound(folder: Path, target: TargetModel, **options: object) -> EagleDrafter:
    drafter = EagleDrafter(path=str(folder), tau=50.0, min_survival=0, **options)  # type: ignore[arg-type]
    drafter.bind(target, num_slots=4, max_nodes=6, exact=True)
    return drafter


def reference(mixer: AttentionMixer, x: Tensor) -> Tensor:
    """Causal attention over all of x [T, in] at once, with transformers' own rotary embedding."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    q, k, v = (mixer.linears[f"{n}_proj"].weight for n in "qkv")
    heads = [(x @ w.t()).view(1, len(x), -1, 6).transpose(1, 2) for w in (q, k, v)]
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, torch.arange(len(x))[None])
    heads[:2] = llama.apply_rotary_pos_emb(*heads[:2], cos, sin)
    heads[1:] = [llama.repeat_kv(part, 2) for part in heads[1:]]
    scores = heads[0] @ heads[1].transpose(2, 3) / 6**0.5
    scores = scores.masked_fill(~torch.ones(len(x), len(x), dtype=torch.bool).tril(), -torch.inf)
    o = scores.softmax(-1) @ heads[2]
    return o.transpose(1, 2).flatten(2)[0] @ mixer.linears["o_proj"].weight.t()


def test_it_is_llamas_attention(folder: Path, target: TargetModel) -> None:
    mixer = bound(folder, target).model.mixer
    assert isinstance(mixer, AttentionMixer)
    x = torch.randn(11, 32 + 24, generator=torch.Generator().manual_seed(0))
    want = reference(mixer, x)
    got = torch.cat([mixer.prefill(1, x[:4]), mixer.encode([1], [3], x[4:7])])
    torch.testing.assert_close(got, want[:7], rtol=1e-4, atol=1e-5)
    memory = mixer.roots([1])
    for i in range(7, 11):  # beside each other: a wrong path must not be seen
        y, memory = mixer.step(memory, [0, 0], torch.stack([x[i], -x[i]]))
        torch.testing.assert_close(y[:1], want[i : i + 1], rtol=1e-4, atol=1e-5)
    assert len(mixer._cache[1][0]) == 7


def test_positions_are_relative() -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = []
    for start in (0, 1000):
        q, k = (rotate(part, torch.arange(start, start + 5), 1e4) for part in x)
        scores.append(torch.einsum("ihd,jhd->hij", q, k))
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)


def test_any_acceptance_lengths_are_encoding_one_by_one(folder: Path, target: TargetModel) -> None:
    rng = random.Random(1)
    many, single = bound(folder, target), bound(folder, target)
    tokens, given = text(rng, 17), outputs(rng, target, 17)
    done = 0
    while done < 17:
        step = min(rng.choice([1, 2, 9]), 17 - done)
        span = slice(done, done + step)
        many.feed([seen(1, tokens[span])], given[span])
        many.draft([row(tokens[: span.stop], 1)])
        done = span.stop
    for i in range(17):
        single.feed([seen(1, tokens[i : i + 1])], given[i : i + 1])
        single.draft([row(tokens[: i + 1], 1, 0)])
    for x, y in zip(committed(many.model, 1), committed(single.model, 1), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    caches = [d.model.mixer._cache[1] for d in (many, single)]  # type: ignore[attr-defined]
    for x, y in zip(*caches, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_drafting_forking_and_reset(folder: Path, target: TargetModel) -> None:
    rng = random.Random(2)
    drafter, ids = bound(folder, target), text(rng, 9)
    drafter.prefill(1, ids[1:], outputs(rng, target, 8))
    drafter.fork(1, 2)
    before = [x.clone() for x in drafter.model.mixer._cache[1]]  # type: ignore[attr-defined]
    one, two = drafter.draft([row(ids, 1), row(ids, 2)])
    assert one == two
    assert one.num_drafts == 5
    drafter.feed([seen(2, [4, 4])], outputs(rng, target, 2))
    assert drafter.draft([row([*ids, 4, 4], 2)])[0] != one
    assert same(drafter.model.mixer._cache[1], before)  # type: ignore[attr-defined]
    drafter.reset(1)
    assert drafter.draft([row(ids, 1)])[0].num_nodes == 1
    assert drafter.model.mixer._cache[1][0].numel() == 0  # type: ignore[attr-defined]


def test_it_changes_no_output(tmp_path: Path, target: TargetModel) -> None:
    write_drafter(tmp_path, toy_config(target.info, **ATTENTION))
    drafter = EagleDrafter(path=str(tmp_path), tau=50.0, min_survival=0)
    requests = [
        request(f"{i}/{t}", prompt, temperature=t, seed=i)
        for i, prompt in enumerate((LOOP, WALK, LONG, LOOP[:1]))
        for t in (0.0, 0.9)
    ]
    want = {name: outcome(c) for name, c in plain(target, requests).items()}
    run = drive(make_engine(target, drafter, slots=3, nodes=8, log=3), requests)
    assert run.outcomes() == want
    assert any(c.speculation.accepted for c in run.completions.values())


def test_a_published_config_is_read(tmp_path: Path, target: TargetModel) -> None:
    """Llama's names for the same fields, and EAGLE-3's own way to count layers."""
    write_drafter(tmp_path, toy_config(target.info, **ATTENTION))
    written = read_json_object(tmp_path / "config.json")
    assert written["num_key_value_heads"] == 2
    values = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "target_hidden_size": 32, "vocab_size": 24, "draft_vocab_size": 24, "fc_norm": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    }  # fmt: skip
    write_json(tmp_path / "config.json", values)
    published = bound(tmp_path, target)
    assert published.config.target_layer_ids == (0, 1)
    write_json(tmp_path / "config.json", {**values, "num_key_value_heads": 3})
    with pytest.raises(InvalidCheckpoint, match="heads"):
        bound(tmp_path, target)
