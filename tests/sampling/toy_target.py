# SPDX-License-Identifier: Apache-2.0
"""A toy target whose logits are a function of the whole token history, and drivers for it.

`speculate` runs rounds of draft, verify, accept with any tree maker; a tree maker that offers
nothing is autoregressive decoding. Also: random trees below a history, and row records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from specla.request import SamplingParams
from specla.sampling.accept import RowLaw, Verdict, accept
from specla.topology.tree import DraftTree

VOCAB = 23

Target = Callable[[Sequence[int]], Tensor]
Propose = Callable[[Sequence[int], int], DraftTree]


def toy_target(history: Sequence[int], vocab: int = VOCAB) -> Tensor:
    """float32 [vocab] logits that depend on every token and its place; not to be changed."""
    return _toy_target(tuple(history), vocab)


@lru_cache(maxsize=4096)
def _toy_target(history: tuple[int, ...], vocab: int) -> Tensor:
    key = 7
    for token in history:
        key = (key * 1_000_003 + token + 1) % (2**61 - 1)
    generator = torch.Generator().manual_seed(key % (2**31))
    # Halves, so that exact ties happen.
    return (torch.randn(vocab, generator=generator) * 4).round() / 2


def tree_logits(tree: DraftTree, history: Sequence[int], target: Target = toy_target) -> Tensor:
    """float32 [N, V]: the target at every node, given history (node 0 included) and path."""
    rows = []
    for node in range(tree.num_nodes):
        drafts = [tree.tokens[v] for v in tree.path_to(node)[1:]]
        rows.append(target([*history, *drafts]))
    return torch.stack(rows)


def row_law(
    params: SamplingParams,
    history: Sequence[int],
    num_prompt_tokens: int,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    remaining: int | None = None,
) -> RowLaw:
    ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos)))
    done = len(history) - num_prompt_tokens
    return RowLaw(
        params=params,
        seed=seed,
        history=history,
        num_prompt_tokens=num_prompt_tokens,
        end_token_ids=ends,
        remaining=params.max_tokens - done if remaining is None else remaining,
    )


def nothing(history: Sequence[int], seed: int) -> DraftTree:
    """Autoregressive decoding."""
    return DraftTree.root(history[-1])


def random_tree(history: Sequence[int], seed: int) -> DraftTree:
    """A random tree that often holds what the target would say."""
    rng = random.Random(f"{seed}-{len(history)}")
    paths = []
    for _ in range(rng.randrange(4)):
        path: list[int] = []
        for _ in range(rng.randrange(1, 6)):
            likely = toy_target([*history, *path]).topk(3).indices.tolist()
            path.append(rng.choice([*likely, rng.randrange(VOCAB)]))
        paths.append(path)
    return DraftTree.from_paths(history[-1], paths)


def oracle(answer: Sequence[int], depth: int = 4) -> Propose:
    """An always-right chain, once the answer is known."""

    def propose(history: Sequence[int], seed: int) -> DraftTree:
        return DraftTree.chain(history[-1], answer[len(history) :][:depth])

    return propose


def always_wrong(answer: Sequence[int]) -> Propose:
    """A chain whose first token is never the target's."""

    def propose(history: Sequence[int], seed: int) -> DraftTree:
        right = answer[len(history)]
        return DraftTree.chain(history[-1], [(right + 1) % VOCAB, right, right])

    return propose


def speculate(
    propose: Propose,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    eos: Sequence[int] = (),
    target: Target = toy_target,
) -> list[Verdict]:
    """Rounds of one request until it ends."""
    history, verdicts = list(prompt), []
    while not verdicts or verdicts[-1].finish is None:
        tree = propose(history, seed)
        row = row_law(params, history, len(prompt), seed=seed, eos=eos)
        logits = tree_logits(tree, history, target)
        (verdict,) = accept(logits, [tree], [0], [row])
        history += verdict.emitted
        verdicts.append(verdict)
    return verdicts


def tokens_of(verdicts: Sequence[Verdict]) -> list[int]:
    return [token for verdict in verdicts for token in verdict.emitted]


def logprobs_of(verdicts: Sequence[Verdict]) -> list[object]:
    return [one for verdict in verdicts for one in verdict.logprobs or ()]
