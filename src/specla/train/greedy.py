# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of many prompts at once with the plain recurrent step, and a loop detector."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from specla.train.chat import DOCUMENT_END_ID, END_ID
from specla.train.gdn import GDNLanguageModel


class Decoded(NamedTuple):
    """One continuation: its text without the end token, its tokens, whether it ended by itself."""

    text: str
    tokens: list[int]
    ended: bool


@torch.no_grad()
def greedy_tokens(model: GDNLanguageModel, prompts: list[list[int]], longest: int) -> list[list[int]]:
    """Continuations of at most ``longest`` tokens, an end token included; rows are independent."""
    device = model.model.embeddings.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lengths.max()) + longest
    text = torch.full((len(prompts), width), DOCUMENT_END_ID, device=device)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = torch.tensor(prompt, device=device)
    cache, over = model.start(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for t in range(width - 1):
        logits, cache = model.step(text[:, t], cache)
        free = (t + 1 >= lengths) & ~over
        text[:, t + 1] = torch.where(free, logits.argmax(-1), text[:, t + 1])
        over |= free & ((text[:, t + 1] == END_ID) | (text[:, t + 1] == DOCUMENT_END_ID))
        over |= t + 2 >= lengths + longest
        if t % 32 == 0 and bool(over.all()):
            break
    return [cut(text[i, n : n + longest].tolist()) for i, n in enumerate(lengths.tolist())]


def cut(tokens: list[int]) -> list[int]:
    """Everything up to and with the first end token."""
    for i, token in enumerate(tokens):
        if token in (END_ID, DOCUMENT_END_ID):
            return tokens[: i + 1]
    return tokens


def decode_all(model: GDNLanguageModel, tokenizer: Tokenizer, prompts: list[str], longest: int = 400,
               rows: int = 512) -> list[Decoded]:  # fmt: skip
    """Greedy continuations of text prompts."""
    decoded = []
    for first in range(0, len(prompts), rows):
        ids = [tokenizer.encode(p).ids for p in prompts[first : first + rows]]
        for tokens in greedy_tokens(model, ids, longest):
            ended = tokens[-1] in (END_ID, DOCUMENT_END_ID)
            text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
            decoded.append(Decoded(text, tokens, ended))
    return decoded


def loops(tokens: list[int], size: int = 8, times: int = 4) -> bool:
    """Whether some run of ``size`` tokens occurs ``times`` times or more."""
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    return max(grams.values(), default=0) >= times


def rambles(decoded: Decoded) -> bool:
    """Whether a continuation loops or does not end."""
    return not decoded.ended or loops(decoded.tokens)
