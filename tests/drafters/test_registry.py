# SPDX-License-Identifier: Apache-2.0
"""Drafters by name: what is refused, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from block_toy import block_drafter
from eagle_toy import toy_config, toy_drafter, write_drafter

from specla.drafters import UNTRAINED, beside, build, option_names, resolve_name, with_folder
from specla.drafters.eagle import EagleDrafter
from specla.drafters.none import NoDrafter
from specla.errors import ConfigError
from specla.models.base import ModelInfo
from specla.ops.contract import RecurrentShape
from specla.topology.tree import DraftTree


def test_every_name_builds_itself() -> None:
    for name in UNTRAINED:
        assert build(name).info.name == name


def test_auto_reports_what_it_chose() -> None:
    assert resolve_name("auto") == "suffix"
    assert build("auto").info.name == "suffix"


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"none, ngram, suffix, eagle, block; got 'sufix'; did you mean"
    ):
        build("sufix")
    with pytest.raises(ConfigError, match=r"got 'zzz'$"):
        build("zzz")


def test_a_folder_goes_with_a_trained_drafter_only() -> None:
    assert resolve_name("eagle:/some/where") == "eagle"
    with pytest.raises(ConfigError, match="got 'suffix:/some/where'"):
        resolve_name("suffix:/some/where")
    with pytest.raises(ConfigError, match="eagle:FOLDER"):
        build("eagle")


def test_the_folder_beside_a_target(tmp_path: Path) -> None:
    assert beside(tmp_path) is None
    assert with_folder("suffix", tmp_path) == "suffix"
    with pytest.raises(ConfigError, match="specla train TARGET --kind eagle"):
        with_folder("eagle", tmp_path)
    (tmp_path / "eagle").mkdir()
    (tmp_path / "eagle" / "config.json").write_text("{}")
    assert beside(tmp_path) == with_folder("eagle", tmp_path) == f"eagle:{tmp_path / 'eagle'}"
    assert with_folder("eagle:/else/where", tmp_path) == "eagle:/else/where"
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "config.json").write_text("{}")
    assert beside(tmp_path) == f"eagle:{tmp_path / 'eagle'}"
    assert with_folder("block", tmp_path) == f"block:{tmp_path / 'block'}"


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ngram", "prompt_lookup_max", 5),
        ("ngram", "prompt_lookup_min", 1),
        ("ngram", "num_draft_tokens", 9),
        ("suffix", "max_match", 25),
        ("suffix", "min_match", 2),
        ("suffix", "max_spec_factor", 1.5),
        ("suffix", "max_spec_offset", 1.0),
        ("suffix", "min_token_prob", 0.2),
        ("suffix", "max_votes", 31),
        ("suffix", "global_tokens", 0),
    ],
)
def test_other_options_have_a_price_of_their_own(name: str, option: str, value: object) -> None:
    usual, other = build(name).info, build(name, options={option: value}).info
    assert other.priced_as.startswith(f"{name} ")
    assert f"{option}={value:g}" in other.priced_as
    assert usual.priced_as != other.priced_as
    assert usual.priced_as == build(name).info.priced_as


def test_every_option_of_an_untrained_drafter_is_in_its_price() -> None:
    for name in UNTRAINED:
        assert all(f"{option}=" in build(name).info.variant for option in option_names(name))


def tiny_target() -> ModelInfo:
    shape = RecurrentShape(
        num_layers=2, num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=12, conv_width=4
    )
    return ModelInfo(
        architecture="", fingerprint="0123", vocab_size=48, hidden_size=16, num_parameters=0,
        weight_bytes=0, eos_token_ids=(), recurrent=shape,
    )  # fmt: skip


def test_a_trained_drafter_is_priced_by_checkpoint_and_options(tmp_path: Path) -> None:
    info = tiny_target()
    attention = write_drafter(tmp_path / "f", toy_config(info, mixer="attention", num_v_heads=1))
    eagles = [
        toy_drafter(tmp_path / "a", info),
        toy_drafter(tmp_path / "b", info, top_k=2),
        toy_drafter(tmp_path / "c", info, max_depth=2),
        toy_drafter(tmp_path / "d", info, tau=1.0),
        toy_drafter(tmp_path / "e", info, spine=False),
        EagleDrafter(path=str(attention)),
    ]
    assert len({one.info.priced_as for one in eagles}) == len(eagles)
    assert eagles[0].info.priced_as == toy_drafter(tmp_path / "g", info, tau=6).info.priced_as
    blocks = [
        block_drafter(tmp_path / "h", info),
        block_drafter(tmp_path / "i", info, top_k=2),
        block_drafter(tmp_path / "j", info, max_depth=2),
        block_drafter(tmp_path / "k", info, tau=1.0),
        block_drafter(tmp_path / "l", info, spine=False),
        block_drafter(tmp_path / "m", info, window=3),
    ]
    assert len({one.info.priced_as for one in blocks}) == len(blocks)


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'prompt_lookup_max'"):
        build("ngram", options={"prompt_lookup_maximum": 3})
    with pytest.raises(
        ConfigError, match="drafter none has no options, got 'depth'; leave it out"
    ):
        build("none", options={"depth": 3})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ngram", "prompt_lookup_max", 0),
        ("ngram", "prompt_lookup_max", 2.5),
        ("ngram", "prompt_lookup_min", 5),
        ("ngram", "num_draft_tokens", True),
        ("ngram", "num_draft_tokens", "8"),
        ("suffix", "max_match", 0),
        ("suffix", "min_match", 25),
        ("suffix", "min_token_prob", 1.5),
        ("suffix", "min_token_prob", float("nan")),
        ("suffix", "max_spec_factor", -1),
        ("suffix", "max_spec_offset", float("inf")),
        ("suffix", "max_votes", 0),
        ("suffix", "global_tokens", -1),
    ],
)
def test_option_out_of_range_is_named(name: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"option {option} must be .*, got "):
        build(name, options={option: value})


def test_options_are_the_keywords_of_the_class() -> None:
    assert option_names("none") == ()
    assert option_names("ngram") == ("prompt_lookup_max", "prompt_lookup_min", "num_draft_tokens")
    assert build("ngram", options={"num_draft_tokens": 3}).info.max_depth == 3


def test_import_loads_no_drafter() -> None:
    code = "import sys, specla.drafters as d; d.build('ngram'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "specla.drafters.ngram" in loaded
    assert "specla.drafters.suffix" not in loaded
    assert "torch" not in loaded


def test_none_is_one_node() -> None:
    from specla.drafters import DraftRow

    row = DraftRow(slot=1, tokens=[3, 4], num_prompt_tokens=2, max_drafts=9, seed=0)
    assert NoDrafter().draft([row]) == [DraftTree.root(4)]
