# SPDX-License-Identifier: Apache-2.0
"""The state reader: what it computes, and that it sees what is committed, base and log."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from block_naive import Naive
from block_toy import (
    block_config,
    block_drafter,
    random_tensors,
    reader_config,
    write_block,
)
from engine_harness import VOCAB, drive, load_target, make_engine, plain, request
from safetensors.torch import load_file
from torch import Tensor

from specla.drafters import DraftRow
from specla.drafters.block_files import load_reader
from specla.drafters.reader import (
    PROJECTIONS,
    Reader,
    ReaderConfig,
    parse_reader_config,
    reader_tensors,
)
from specla.engine.engine import Engine
from specla.errors import ConfigError, InvalidCheckpoint
from specla.models.base import TargetModel
from specla.ops.contract import Factors
from specla.ops.gdn import reference
from specla.state import State
from specla.testing import RandomTreeDrafter

HEADS, KEYS, VALUES, WIDTH = 4, 6, 10, 20
CONFIG = ReaderConfig(
    state_layers=(0, 2),
    rank=3,
    num_heads=HEADS,
    key_dim=KEYS,
    value_dim=VALUES,
    hidden_size=WIDTH,
    bottleneck=8,
    norm_eps=1e-6,
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A target in float64."""
    return load_target(tmp_path_factory.mktemp("wide"), dtype=torch.float64)


def weights(config: ReaderConfig = CONFIG) -> dict[str, Tensor]:
    return {k: v.double() for k, v in random_tensors(reader_tensors(config), 3).items()}


def empty_log(key_heads: int = HEADS) -> Factors:
    k, u, g = (0, key_heads, KEYS), (0, HEADS, VALUES), (0, HEADS)
    return Factors(*(torch.zeros(shape, dtype=torch.float64) for shape in (k, u, g)))


def random_log(count: int, key_heads: int, generator: torch.Generator) -> Factors:
    k = torch.randn(count, key_heads, KEYS, generator=generator, dtype=torch.float64)
    u = torch.randn(count, HEADS, VALUES, generator=generator, dtype=torch.float64)
    g = -torch.rand(count, HEADS, generator=generator, dtype=torch.float64)
    return Factors(k / k.norm(dim=-1, keepdim=True), u, g)


def naive_delta(w: dict[str, Tensor], h: Tensor, states: list[Tensor]) -> Tensor:
    """One position: h [D], states [G, V, K] per state layer -> what is added to h."""
    x = h / torch.sqrt((h**2).mean() + 1e-6) * w["norm.weight"]
    z = (w["query.weight"] @ x).view(len(states), HEADS, -1)
    found = []
    for i, state in enumerate(states):
        for head, S in enumerate(state):
            rms = torch.sqrt((S**2).mean() + 1e-12)
            q = w["keys"][i, head].T @ z[i, head]
            T = w["values"][i, head].T @ (S / rms)
            found += [*(T @ q / math.sqrt(KEYS)), rms.log()]
    hidden = w["mlp.down.weight"] @ torch.stack(found)
    return w["mlp.up.weight"] @ (hidden / (1 + torch.exp(-hidden)))


def test_it_computes_what_the_paper_says() -> None:
    """Three blocks of five positions, each with states of its own."""
    generator, w = torch.Generator().manual_seed(1), weights()
    reader = Reader(CONFIG, w)
    shape = (3, 2, HEADS, VALUES, KEYS)
    states = torch.randn(shape, generator=generator, dtype=torch.float64)
    h = torch.randn(15, WIDTH, generator=generator, dtype=torch.float64)
    at = {0: 0, 2: 1}
    reading = reader.read(lambda layer, slot: (states[slot, at[layer]], empty_log()), [0, 1, 2])
    found = reader.delta(h, reading)
    for i, x in enumerate(h):
        want = naive_delta(w, x, list(states[i // 5]))
        torch.testing.assert_close(found[i], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", range(20))
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_base_and_log_read_like_the_folded_state(count: int, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(count)
    reader = Reader(CONFIG, weights())
    S = torch.randn(HEADS, VALUES, KEYS, generator=generator, dtype=torch.float64)
    S = S * (0 if count % 5 == 4 else 1)
    log = random_log(count, key_heads, generator)
    folded = reference.fold(S, log)
    for index in (0, 1):
        pairs = zip(
            reader.project(index, S, log),
            reader.project(index, folded, empty_log()),
            strict=True,
        )
        for found, want in pairs:
            torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
        if count:
            stale, _ = reader.project(index, S, empty_log())
            assert (stale - reader.project(index, S, log)[0]).abs().max() > 1e-2


def test_an_empty_state_reads_as_nothing() -> None:
    reader = Reader(CONFIG, weights())
    R, scale = reader.project(0, torch.zeros(HEADS, VALUES, KEYS).double(), empty_log())
    assert not R.any()
    assert torch.allclose(scale, torch.full((HEADS,), math.log(1e-6), dtype=torch.float64))


@pytest.mark.parametrize("log", [0, 3, 16])
def test_it_sees_what_is_committed_after_any_round(wide: TargetModel, log: int) -> None:
    """A real state, with rings, paths and both banks."""
    config = reader_config(wide.info)
    tensors = {k: v.double() for k, v in random_tensors(reader_tensors(config), 3).items()}
    reader, lengths = Reader(config, tensors), set()

    def compare(engine: Engine) -> None:
        state = engine.state
        for one in engine.scheduler.running.values():
            folded = state.committed_state(one.slot)
            found = reader.read(state.committed, [one.slot])
            for i, layer in enumerate(config.state_layers):
                none = Factors(*(x[:0] for x in state.committed(layer, one.slot)[1]))
                R, scale = reader.project(i, folded[layer][0], none)
                torch.testing.assert_close(found.R[0, i], R, rtol=1e-9, atol=1e-10)
                torch.testing.assert_close(found.scale[0, i], scale, rtol=1e-9, atol=1e-10)
            lengths.add(state.logs[one.slot].log_len)

    requests = [request(f"{i}", seed=i, max_tokens=60) for i in range(4)]
    right = plain(wide, requests[:1])["0"].token_ids
    drafter = RandomTreeDrafter(3, VOCAB, truth={(5, 6, 7): right}, p_right=0.9)
    drive(make_engine(wide, drafter, log=log), requests, compare)
    # Every length of a log is tested above; here, that most of them did occur.
    assert len(lengths) >= max(2, log - 4)


def test_in_a_drafter_it_is_added_to_the_last_mlp_input(tmp_path: Path, wide: TargetModel) -> None:
    """One block after the naive reference, with states that lie half in the log."""
    drafter = block_drafter(tmp_path, wide.info, top_k=1)
    assert drafter.info.name == "block+reader"
    drafter.bind(wide, num_slots=2, max_nodes=8, exact=False)
    state = _some_state(wide)
    drafter.attach(state)
    w = {k: v.double() for k, v in load_file(tmp_path / "reader" / "reader.safetensors").items()}
    tensors = load_file(tmp_path / "model.safetensors")
    reference = Naive(drafter.config, tensors, wide.embeddings, wide.head_weight)
    shape = wide.info.recurrent
    states = [S for S, _ in state.committed_state(1)]
    none = Factors(*(x[:0] for x in state.committed(0, 1)[1]))

    def change(i: int, h: Tensor) -> Tensor:
        config = reader_config(wide.info)
        reader = Reader(config, w)
        reading = reader.read(lambda layer, slot: (states[layer], none), [1])
        return h + reader.delta(h.unsqueeze(0), reading)[0]

    assert shape.num_layers == len(states)
    features = torch.zeros(0, 2 * wide.info.hidden_size)
    want = reference.outputs(5, features, change=change)
    with torch.inference_mode():
        found = drafter._outputs([1], torch.tensor([5]))[0]
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
    without = reference.outputs(5, features)
    assert (want - without).abs().max() > 1e-3
    row = DraftRow(slot=1, tokens=[5], num_prompt_tokens=1, max_drafts=5, seed=0)
    assert drafter.draft([row])[0].tokens[1:] == tuple(reference.chain(5, want)[0])


def _some_state(wide: TargetModel) -> State:
    """Slot 1 with nine tokens in the base and five in the log."""
    engine = make_engine(wide, log=16)
    engine.add(request("a", tuple(range(5, 15)), max_tokens=40))
    while engine.state.logs[1].log_len < 5:
        engine.step()
    assert engine.state.logs[1].durable_len == 9
    return engine.state


def test_without_its_reader_it_drafts_differently(tmp_path: Path, wide: TargetModel) -> None:
    row = DraftRow(slot=1, tokens=[5], num_prompt_tokens=1, max_drafts=5, seed=0)
    trees, state = [], _some_state(wide)
    for reads in (True, False):
        drafter = block_drafter(tmp_path, wide.info, reader=reads)
        assert drafter.info.name == ("block+reader" if reads else "block")
        drafter.bind(wide, num_slots=2, max_nodes=8, exact=False)
        drafter.attach(state)
        trees += drafter.draft([row])
    assert trees[0].logprobs != trees[1].logprobs


def test_what_projects_float32_states_stays_float32(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    low = load_target(tmp_path_factory.mktemp("low"), dtype=torch.bfloat16)
    block_drafter(tmp_path, low.info)
    file = load_file(tmp_path / "reader" / "reader.safetensors")
    found = load_reader(tmp_path, reader_config(low.info), low)
    for name, x in found.items():
        kept = file[name] if name in PROJECTIONS else file[name].bfloat16()
        assert x.dtype == kept.dtype
        assert torch.equal(x, kept)


CHANGES = {
    "key_dim": (7, "key width"),
    "value_dim": (7, "value width"),
    "num_heads": (5, "state heads"),
    "hidden_size": (31, "width"),
    "state_layers": ((0, 2), "state layers"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_states_of_another_target_are_refused_by_name(
    tmp_path: Path, wide: TargetModel, field: str
) -> None:
    value, name = CHANGES[field]
    reader = replace(reader_config(wide.info), **{field: value})
    write_block(tmp_path, block_config(wide.info), reader)
    drafter = block_drafter(tmp_path, wide.info)
    with pytest.raises(ConfigError, match=name):
        drafter.bind(wide, num_slots=1, max_nodes=2, exact=False)


def test_its_config_survives_being_written_again() -> None:
    assert parse_reader_config(CONFIG.as_dict(), "file") == CONFIG
    with pytest.raises(InvalidCheckpoint, match="rank"):
        parse_reader_config({**CONFIG.as_dict(), "rank": 0}, "file")
