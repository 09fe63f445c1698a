# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of many prompts at once with the plain recurrent step, and a loop detector."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specla.train.chat import DOCUMENT_END_ID, END_ID
from specla.train.gdn import GDNLanguageModel


class Decoded(NamedTuple):
    """One continuation: its text without the end token, its tokens, whether it ended by itself."""

    text: str
    tokens: list[int]
    ended: bool


@torch.no_grad()
def greedy_tokens(
    model: GDNLanguageModel, prompts: list[list[int]], longest: int
) -> list[list[int]]:
    """Continuations of at most ``longest`` tokens, an end token included; rows are independent."""
    device = model.model.embeddings.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    text = prompt_matrix(prompts, longest).to(device)
    rows, cache = torch.arange(len(prompts), device=device), model.start(len(prompts))
    for t in range(text.shape[1] - 1):
        if t % 16 == 0:
            live = unfinished(text[rows], lengths[rows], t, longest)
            rows, cache = rows[live], [(w[live], s[live]) for w, s in cache]
        if not len(rows):
            break
        logits, cache = model.step(text[rows, t], cache)
        free = t + 1 >= lengths[rows]
        text[rows, t + 1] = torch.where(free, logits.argmax(-1), text[rows, t + 1])
    ends = lengths.tolist()
    return [cut(text[i, n : n + longest].tolist()) for i, n in enumerate(ends)]


def prompt_matrix(prompts: list[list[int]], longest: int) -> Tensor:
    """Prompts as rows [B, longest prompt + ``longest``], padded behind."""
    text = torch.full((len(prompts), max(map(len, prompts)) + longest), DOCUMENT_END_ID)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = torch.tensor(prompt)
    return text


def unfinished(text: Tensor, lengths: Tensor, t: int, longest: int) -> Tensor:
    """[B] bool: rows that at position ``t`` have no end token behind their prompt, nor run out."""
    at = torch.arange(t + 1, device=text.device)
    behind = at >= lengths[:, None]
    ended = ((text[:, : t + 1] == END_ID) | (text[:, : t + 1] == DOCUMENT_END_ID)) & behind
    return ~ended.any(1) & (t + 1 < lengths + longest)


def cut(tokens: list[int]) -> list[int]:
    """Everything up to and with the first end token."""
    for i, token in enumerate(tokens):
        if token in (END_ID, DOCUMENT_END_ID):
            return tokens[: i + 1]
    return tokens


def decode_all(
    model: GDNLanguageModel,
    tokenizer: Tokenizer,
    prompts: list[str],
    longest: int = 400,
    rows: int = 512,
) -> list[Decoded]:
    """Greedy continuations of text prompts, decoded in batches of similar length."""
    ids = [tokenizer.encode(p).ids for p in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    decoded: dict[int, Decoded] = {}
    for first in range(0, len(order), rows):
        part = order[first : first + rows]
        outputs = greedy_tokens(model, [ids[i] for i in part], longest)
        for i, tokens in zip(part, outputs, strict=True):
            ended = tokens[-1] in (END_ID, DOCUMENT_END_ID)
            text = tokenizer.decode(tokens[: len(tokens) - ended], skip_special_tokens=False)
            decoded[i] = Decoded(text, tokens, ended)
    return [decoded[i] for i in range(len(ids))]


def loops(tokens: list[int], size: int = 8, times: int = 4) -> bool:
    """Whether some run of ``size`` tokens occurs ``times`` times or more."""
    grams = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    return max(grams.values(), default=0) >= times


def rambles(decoded: Decoded) -> bool:
    """Whether a continuation loops or does not end."""
    return not decoded.ended or loops(decoded.tokens)
