# SPDX-License-Identifier: Apache-2.0
"""Packing and the resumable trainer, on a toy model and toy pools."""

import numpy as np
import pytest
import torch

from specla.train import pretrain
from specla.train.checkpoint import load_checkpoint
from specla.train.gdn import GDNShape
from specla.train.packing import LIGHT_BIT, START_BIT, Pool, Sampler, unpack

TOY = GDNShape(32, 1, 2, 8, 2.0, 48, 64)


def toy_pool(name: str, seed: int, documents: int = 40) -> Pool:
    """Documents of 3 to 30 tokens; token = 5 + document number modulo 50, so origins are
    visible."""
    rng, parts = np.random.default_rng(seed), []
    for i in range(documents):
        part = np.full(rng.integers(3, 30), 5 + i % 50, np.uint32)
        part[1] |= LIGHT_BIT
        part[0] |= START_BIT
        parts.append(part)
    return Pool(name, np.concatenate(parts))


@pytest.fixture
def pools(tmp_path):
    folder = tmp_path / "pools"
    folder.mkdir()
    for i, name in enumerate(("python", "symbolic")):
        np.save(folder / f"{name}.npy", toy_pool(name, i).tokens)
    return folder


def test_rows_hold_whole_documents_cut_only_at_the_end():
    sampler = Sampler([toy_pool("a", 0), toy_pool("b", 1)], [0.5, 0.5], rows=6, length=64, seed=3)
    for _ in range(4):
        packed = sampler.tokens[torch.from_numpy(sampler.positions())]
        starts = packed < 0
        assert starts[:, 0].all()
        tokens, segments, weights = unpack(packed)
        assert (weights[:, :-1][starts[:, 1:]] == 0).all()
        assert (weights[:, -1] == 0).all()
        inside = segments[:, 1:] == segments[:, :-1]
        assert (tokens[:, 1:] == tokens[:, :-1])[inside].all()
        assert set(weights.unique().tolist()) == {0.0, 0.25, 1.0}


def test_an_epoch_visits_every_document_once():
    pool = toy_pool("a", 0)
    sampler = Sampler([pool], [1.0], rows=1, length=32, seed=0)
    starts, _ = sampler.take(0, pool.documents)
    assert sorted(starts) == pool.starts[:-1].tolist()


def trainer_of(pools, steps: int) -> pretrain.Trainer:
    recipe = pretrain.Recipe(rows=4, length=64, steps=steps, warmup=2, compile=False)
    return pretrain.Trainer(recipe, pools, pretrain.build_model(recipe, TOY, "cpu"))


def test_resumed_run_repeats_the_uninterrupted_one(pools, tmp_path):
    whole = trainer_of(pools, 8)
    losses = [whole.train_step().item() for _ in range(8)]
    first = trainer_of(pools, 8)
    head = [first.train_step().item() for _ in range(3)]
    first.save(tmp_path / "run")
    second = trainer_of(pools, 8)
    assert second.restore(tmp_path / "run")
    assert second.step == 3
    tail = [second.train_step().item() for _ in range(5)]
    assert head + tail == losses
    assert losses[-1] < losses[0]


def test_checkpoint_round_trip(pools, tmp_path):
    trainer = trainer_of(pools, 2)
    trainer.train_step()
    trainer.save(tmp_path)
    loaded = load_checkpoint(tmp_path / "checkpoint")
    for (name, a), b in zip(trainer.model.named_parameters(), loaded.parameters(), strict=True):
        exact = name.endswith(("A_log", "dt_bias"))
        assert torch.equal(b, a if exact else a.bfloat16().float()), name
