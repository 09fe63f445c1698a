# SPDX-License-Identifier: Apache-2.0
"""Run fla's own model on checkpoints, on the CPU, and save what it computes.

    python fla_reference.py JOBS.json

Runs in an environment of its own (`make venv-fla`): fla needs triton, which must not be
importable where the rest of the tests run. Kernels run in Triton's interpreter; every autotuner
list is cut to its first entry, because choosing among several needs a GPU.

JOBS.json: a list of {checkpoint, chunks, out}. Chunks are lists of tokens, fed one after the
other through fla's cache; each has at most 64, since fla's kernel for more does not run in the
interpreter. `out` receives `logits` [T, vocab] of all chunks and, per layer i, `S.i` [G, V, K]
and `past.i` [C, W], the newest inputs of the q, k and v convolutions; float32.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from safetensors.torch import save_file
from triton.runtime import autotuner


def keep_one_config() -> None:
    make = autotuner.Autotuner.__init__

    def patched(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        make(self, fn, names, configs[:1] if configs else configs, *args, **kwargs)

    autotuner.Autotuner.__init__ = patched


def run(checkpoint: str, chunks: list[list[int]], out: str) -> None:
    from fla.models import GatedDeltaNetForCausalLM

    model = GatedDeltaNetForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    logits, cache = [], None
    with torch.no_grad():
        for chunk in chunks:
            result = model(torch.tensor([chunk]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            logits.append(result.logits[0])
    found = {"logits": torch.cat(logits)}
    for i in range(model.config.num_hidden_layers):
        found[f"S.{i}"] = cache[i]["recurrent_state"][0]
        found[f"past.{i}"] = torch.cat([part[0] for part in cache[i]["conv_state"]])
    save_file({name: tensor.float().contiguous() for name, tensor in found.items()}, out)


if __name__ == "__main__":
    keep_one_config()
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for job in jobs:
        run(**job)
