# SPDX-License-Identifier: Apache-2.0
"""Layer outputs on request: which layer, which rows, and that asking changes nothing."""

from __future__ import annotations

import pytest
import torch

import specla.models
from specla.models.base import TargetModel
from specla.models.features import Features
from specla.models.toy import write_toy_checkpoint
from specla.state import State
from specla.topology.tree import DraftTree

LAYERS = 3
TOKENS = [7, 9, 30, 11, 12]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = write_toy_checkpoint(tmp_path_factory.mktemp("toy"), num_layers=LAYERS, hidden=32)
    model = specla.models.load(str(folder), device="cpu", dtype=torch.float32)
    model.check_rows(8)
    return model


def verified(model: TargetModel, tree: DraftTree, features: Features | None) -> torch.Tensor:
    state = State(model.info.recurrent, num_slots=1, max_nodes=8)
    slot = state.acquire()
    return model.verify(state.begin([slot], [tree]), state, features)


def test_an_id_is_the_output_of_that_layer(target: TargetModel) -> None:
    """The last layer's output gives the logits; the first's depends on its own weights alone."""
    features = Features((LAYERS - 1, 0))
    logits = verified(target, DraftTree.chain(TOKENS[0], TOKENS[1:]), features)
    rows = features.rows()
    assert rows.shape == (5, 64)
    torch.testing.assert_close(target.logits(rows[:, :32]), logits, rtol=1e-4, atol=1e-5)
    one = target.blocks[0]  # type: ignore[attr-defined]
    y = one.feed_forward(rows[:, 32:])
    assert y.shape == (5, 32)
    second = Features((1,))
    verified(target, DraftTree.chain(TOKENS[0], TOKENS[1:]), second)
    assert not torch.allclose(second.rows(), rows[:, 32:])


def test_asking_changes_no_bits(target: TargetModel) -> None:
    tree = DraftTree((3, 4, 5, 6), (-1, 0, 0, 2))
    assert torch.equal(verified(target, tree, Features((0, 2))), verified(target, tree, None))


def test_a_node_has_the_features_of_its_path(target: TargetModel) -> None:
    """Bit for bit, whatever else is in the tree; `rows` picks them."""
    in_tree, alone = Features((0, 1, 2)), Features((0, 1, 2))
    verified(target, DraftTree((3, 4, 5, 6), (-1, 0, 0, 2)), in_tree)
    verified(target, DraftTree.chain(3, [5, 6]), alone)
    assert torch.equal(in_tree.rows([0, 2, 3]), alone.rows())


def test_prefill_gives_a_row_per_token(target: TargetModel) -> None:
    state = State(target.info.recurrent, num_slots=1, max_nodes=8)
    prompt, chain = Features((1, 2)), Features((1, 2))
    target.prefill(TOKENS, state.acquire(), state, prompt)
    verified(target, DraftTree.chain(TOKENS[0], TOKENS[1:]), chain)
    torch.testing.assert_close(prompt.rows(), chain.rows(), rtol=1e-4, atol=1e-5)
