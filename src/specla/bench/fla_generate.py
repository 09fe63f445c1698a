# SPDX-License-Identifier: Apache-2.0
"""fla's own `generate` on GDN-1.3B's shape: what a user of the checkpoint runs today."""

from __future__ import annotations

import time
from statistics import median

from specla.bench.random_model import HEAD_DIM, HEADS, INTERMEDIATE, LAYERS, VOCAB, WIDTH


def ms_per_token(num_tokens: int = 48, repeats: int = 3) -> float:
    """Milliseconds per token of transformers' generate over fla's model, batch 1, bfloat16,
    greedy, the prompt's forward left out.

    Raises:
        ImportError: fla is not installed.
    """
    import torch
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    config = GatedDeltaNetConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        expand_v=1,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
        use_cache=True,
    )
    with torch.device("cuda"):
        model = GatedDeltaNetForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(0, VOCAB, (1, 16), device="cuda")

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(num_tokens)
    long = median(seconds(num_tokens) for _ in range(repeats))
    short = median(seconds(1) for _ in range(repeats))
    return 1e3 * (long - short) / (num_tokens - 1)
