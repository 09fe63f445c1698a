# SPDX-License-Identifier: Apache-2.0
"""Drafters that draft inside a round's graph, by name, for a target of a few layers. Those with
weights are untrained, and their checkpoints are written first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from block_toy import DFLASH, block_config, reader_config, write_block
from eagle_toy import toy_config, write_drafter

from specla.drafters.base import Drafter
from specla.drafters.block import BlockDrafter
from specla.drafters.eagle import EagleDrafter
from specla.drafters.ngram import NgramDrafter
from specla.drafters.none import NoDrafter
from specla.models.base import ModelInfo

Sizes = Mapping[str, Any]
# Beside GDN-1.3B's layers: half as wide, and with small heads.
EAGLE: Sizes = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_heads": 4, "num_v_heads": 4},
    **{"head_dim": 256, "head_v_dim": 256, "draft_vocab_size": 8192},
}
BLOCK: Sizes = {"head_dim": 64, "intermediate_size": 512}
ATTENTION: Sizes = {"mixer": "attention", "num_heads": 4, "num_v_heads": 2}
NAMES = ("none", "ngram", "eagle", "eagle-attention", "block", "dflash", "block+reader")


def made(
    name: str, target: ModelInfo, folder: Path, *, eagle: Sizes = EAGLE, block: Sizes = BLOCK
) -> Drafter:
    """One of NAMES. folder: where all of them are, for this target."""
    path, layers = folder / name, target.recurrent.num_layers
    if name in ("none", "ngram"):
        return NoDrafter() if name == "none" else NgramDrafter()
    if name.startswith("eagle"):
        if not path.exists():
            mixer = ATTENTION if "attention" in name else {}
            write_drafter(path, toy_config(target, **{**eagle, **mixer}))
        return EagleDrafter(path=str(path), tau=50.0, on_device=True)
    if not path.exists():
        some, others = (0, layers // 2), (layers // 2 - 1, layers - 1)
        kind = {**block, "target_layer_ids": some, **(DFLASH if name == "dflash" else {})}
        reader = reader_config(target, state_layers=others, rank=8) if "reader" in name else None
        write_block(path, block_config(target, **kind), reader)
    return BlockDrafter(path=str(path), tau=50.0, on_device=True)
