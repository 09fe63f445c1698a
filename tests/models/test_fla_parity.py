# SPDX-License-Identifier: Apache-2.0
"""Tier: budget. The target model against flash-linear-attention itself, both in float32.

Two implementations of one model round differently, so this is parity, not exactness. The largest
differences measured over these cases are 1.5e-5 in the logits (standard deviation 2.1) and 3.2e-6
in the states; the bounds are about six times that. A wrong tap, head order, gate, scale or norm
epsilon changes the logits by more than 0.2. The epsilon of the key norm is too small to show
here: test_oracle_gdn.py and test_parity.py pin it in float64.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specla.models.fla_gdn import FlaGDN
from specla.models.toy import write_toy_checkpoint
from specla.state import State
from specla.topology.tree import DraftTree

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-fla/bin/python"
REFERENCE = Path(__file__).with_name("fla_reference.py")
BOUNDS = {"logits": 1e-4, "S": 2e-5, "past": 2e-5}
VOCAB = 97
# A prompt, a single step, a block: fla's three ways of continuing from its cache.
CHUNKS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [35, 8, 97 - 18, 79, 3]]
CASES: dict[str, dict[str, Any]] = {
    "K16 V32": {},
    "K32 V16": {"head_dim": 32, "expand_v": 0.5},
    "grouped values": {"num_v_heads": 6},
    "negative eigenvalues": {"neg_eigval": True},
    "no gate": {"use_gate": False},
    "tied": {"tie": True},
    "old file in shards": {"dead_d": True, "shards": 3},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Checkpoint and fla's results for every case, from one run of fla."""
    if not PYTHON.exists():
        pytest.skip("needs flash-linear-attention in .venv-fla: run `make venv-fla`")
    root, found = tmp_path_factory.mktemp("fla"), {}
    for i, (name, options) in enumerate(CASES.items()):
        checkpoint = write_toy_checkpoint(root / str(i), vocab=VOCAB, seed=i, **options)
        found[name] = checkpoint, root / f"{i}.safetensors"
    jobs = [
        {"checkpoint": str(checkpoint), "chunks": CHUNKS, "out": str(out)}
        for checkpoint, out in found.values()
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [PYTHON, REFERENCE, root / "jobs.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return found


def ours(checkpoint: Path) -> dict[str, Tensor]:
    """The same tokens: the first chunk by prefill and as nodes, the others as chains."""
    cpu = torch.device("cpu")
    model = FlaGDN.from_checkpoint(checkpoint, device=cpu, dtype=torch.float32)
    state = State(model.info.recurrent, num_slots=2, max_nodes=8, log_capacity=4)
    slot, again = state.acquire(), state.acquire()
    first, *later = CHUNKS
    logits = [block(model, state, again, first)]
    model.prefill(first, slot, state)
    logits += [block(model, state, slot, chunk) for chunk in later]
    found = {"logits": torch.cat(logits)}
    for i, (S, tail) in enumerate(state.committed_state(slot)):
        found[f"S.{i}"], found[f"past.{i}"] = S, tail
    return found


def block(model: FlaGDN, state: State, slot: int, tokens: list[int]) -> Tensor:
    chain = DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
    logits = model.verify(state.begin([slot], [chain]), state)
    state.commit([slot], [list(range(len(tokens)))])
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_and_state_equal_flas(reference: dict[str, tuple[Path, Path]], case: str) -> None:
    checkpoint, out = reference[case]
    mine, theirs = ours(checkpoint), load_file(out)
    for name, tensor in mine.items():
        want = theirs[name][:, 1:].T if name.startswith("past") else theirs[name]
        bound = BOUNDS[name.partition(".")[0]]
        torch.testing.assert_close(tensor, want, rtol=0, atol=bound, msg=lambda m, n=name: n + m)
    assert theirs["logits"].std() > 1
