# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens and accepting trees on the device, so that a round needs no host.

    choose   logits -> for every node and block of the vocabulary, the best token in the block
    accept   those  -> the token at every node, the walk, its ends, the row's new cursors

The law is that of `sampling.draw` for rows without filters, penalties, bias, min_tokens and
logprobs; rows with any of these go through the host:

    temperature 0:  argmax(logits), the lowest id among equals
    temperature t:  argmax((logit - max) / t + noise(seed, position, id)), float64

The noise is `sampling.noise`: the same words and uniforms bit for bit. Its two logarithms, and a
maximum that is taken per block and made up for when blocks are compared, may differ from the CPU
in the last bit of a float64, so a row must be drawn by one of the two paths, not by both in turn.
No score depends on other rows or on the tree: blocks are fixed by the vocabulary's size (rule I4).

Letters: B rows, N nodes per row, M = B N flat nodes, V vocabulary, P blocks of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import DeviceRound, RowArrays
from specla.sampling.triton_draw import draw

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_INVALID = 0, 1, 2, 3
"""A verdict's finish codes. FINISH_INVALID: NaN, +inf or nothing but -inf at a visited node."""

VERDICT_HEADER = 5
"""Words of a verdict before its tokens: see `accept`."""

_STOP, _LENGTH, _INVALID = map(tl.constexpr, (FINISH_STOP, FINISH_LENGTH, FINISH_INVALID))
_HEADER = tl.constexpr(VERDICT_HEADER)
_INF = tl.constexpr(float("inf"))
_NO_TOKEN = tl.constexpr(2**31 - 1)

# Elements of a tile that a program holds at once: logits being drawn from, in float32 and in
# float64, and blocks being compared, where more would spill registers.
_DRAW_TILE, _EXACT_TILE, _COMPARE_TILE = 1024, 256, 256


class Choices(NamedTuple):
    """The best of each block of the vocabulary, per flat node; all [>= M, P], from `choose`.

    top float32: the block's largest logit, +inf if it holds a NaN. score float64: of the best
    token, relative to `top`; for drawn rows only. token int32: the best token.
    """

    top: Tensor
    score: Tensor
    token: Tensor


def block_size(vocab_size: int) -> int:
    """Tokens of a block: enough blocks to occupy the device for one node, few to compare."""
    return min(8192, max(_DRAW_TILE, triton.next_power_of_2(triton.cdiv(vocab_size, 16))))


def new_choices(num_flat: int, vocab_size: int, device: torch.device | str) -> Choices:
    """Room for rounds of up to `num_flat` flat nodes (M)."""
    size = (num_flat, triton.cdiv(vocab_size, block_size(vocab_size)))
    return Choices(
        top=torch.zeros(size, dtype=torch.float32, device=device),
        score=torch.zeros(size, dtype=torch.float64, device=device),
        token=torch.zeros(size, dtype=torch.int32, device=device),
    )


def choose(
    logits: Tensor, rows: RowArrays, rnd: DeviceRound, out: Choices, *, pdl: bool = False
) -> None:
    """Fill `out` for every node in use. One program per node and block; nodes not in use are
    skipped, their entries keep what they held.

    logits: float32 [M, V], contiguous; read at nodes in use only.
    """
    num_nodes, vocab_size = rnd.tokens.shape[1], logits.shape[1]
    block = block_size(vocab_size)
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert logits.shape[0] == rnd.tokens.numel() <= out.top.shape[0]
    assert out.top.shape[1] == triton.cdiv(vocab_size, block)
    _choose_kernel[(logits.shape[0], out.top.shape[1])](
        logits,
        rnd.num_nodes,
        rnd.parents,
        rows.seed,
        rows.len_tokens,
        rows.temperature,
        *out,
        num_nodes,
        vocab_size,
        BLOCK=block,
        TILE=_DRAW_TILE,
        EXACT_TILE=_EXACT_TILE,
        PDL=pdl,
        num_warps=8 if block > 4096 else 4,
        launch_pdl=pdl,
    )


def accept(
    choices: Choices,
    rows: RowArrays,
    rnd: DeviceRound,
    verdicts: Tensor,
    *,
    fold_threshold: int,
    pdl: bool = False,
) -> None:
    """Judge and commit one round, one program per row, as `sampling.accept` and `state.Log` do.

    Every live row's cursors move: the old path joins the ring or, if a fold was due, leaves it;
    the accepted path takes its place; `bank` flips; emitted tokens join the history and leave
    `remaining`; node 0 is the last of them. `num_nodes` becomes 1, the tree without drafts, or 0
    if the row has ended. Where logits leave nothing to draw, path is node 0 and nothing is
    emitted. A history entry past max_len is dropped.

    Args:
        choices: from `choose`, for this round.
        verdicts: int32 [B, >= VERDICT_HEADER + N], written: number of tokens emitted, finish
            code, drafts accepted, drafts that had a chance, depth of the deepest of them (see
            `sampling.accept.Verdict`), then the tokens. Idle rows get five zeros; entries past
            the last token are undefined.
        fold_threshold: a fold is due when the log is longer.
    """
    num_rows, num_nodes = rnd.tokens.shape
    num_parts, max_ends = choices.top.shape[1], rows.ends.shape[1]
    assert verdicts.shape[0] >= num_rows
    assert verdicts.shape[1] >= VERDICT_HEADER + num_nodes
    nodes = max(2, triton.next_power_of_2(num_nodes))
    num_warps = 1 if nodes <= 16 else 4
    tile = _COMPARE_TILE if num_warps == 1 else 2 * _COMPARE_TILE
    _accept_kernel[(num_rows,)](
        *choices,
        rows.len_tokens,
        rows.remaining,
        rows.temperature,
        rows.ends,
        rows.history,
        rnd.num_nodes,
        rnd.tokens,
        rnd.parents,
        rnd.bank,
        rnd.ring_len,
        rnd.path_len,
        rnd.path,
        verdicts,
        num_parts,
        max_ends,
        rows.history.shape[1],
        num_nodes,
        rnd.path.shape[1],
        verdicts.shape[1],
        fold_threshold,
        NODES=nodes,
        LEVELS=nodes.bit_length() - 1,
        PARTS=min(tile // nodes, triton.next_power_of_2(num_parts)),
        ENDS=triton.next_power_of_2(max_ends),
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )


@triton.jit(do_not_specialize=["num_columns"])
def _choose_kernel(
    logits_ptr,
    num_nodes_ptr,
    parents_ptr,
    seed_ptr,
    len_tokens_ptr,
    temperature_ptr,
    top_ptr,
    score_ptr,
    token_ptr,
    num_columns,
    vocab_size,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EXACT_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.program_id(0)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = m // num_columns
    node = m - b * num_columns
    if node >= tl.load(num_nodes_ptr + b):
        return
    logits_ptr += m.to(tl.int64) * vocab_size
    at = m * tl.num_programs(1) + part
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-_INF)
    # A maximum passes over NaN; +inf shows.
    x = tl.where(x == x, x, _INF)
    top = tl.max(x, axis=0)
    tl.store(top_ptr + at, top)
    temperature = tl.load(temperature_ptr + b)
    if (temperature > 0) & (top > -_INF) & (top < _INF):
        position = tl.load(len_tokens_ptr + b) + _depth(parents_ptr + b * num_columns, node)
        seed = tl.load(seed_ptr + b)
        score, token = draw(
            logits_ptr, part * BLOCK, vocab_size, top, temperature, seed, position,
            BLOCK, TILE, EXACT_TILE,
        )  # fmt: skip
        tl.store(score_ptr + at, score)
        tl.store(token_ptr + at, token)
    else:
        tl.store(score_ptr + at, 0.0)
        tl.store(token_ptr + at, tl.min(tl.where(x == top, ids, _NO_TOKEN), axis=0))


@triton.jit
def _depth(parents_ptr, node):
    """Steps from `node` up to node 0."""
    depth = 0
    while node > 0:
        node = tl.load(parents_ptr + node)
        depth += 1
    return depth


@triton.jit
def _compare(
    top_ptr,
    score_ptr,
    token_ptr,
    temperature,
    in_use,
    num_parts,
    NODES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The blocks' best tokens compared: the token chosen at every node [NODES], and whether its
    maximum is finite. Pointers are at the row's node 0."""
    node = tl.arange(0, NODES)[:, None]
    top = tl.full([NODES], -_INF, tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)[None, :]
        there = in_use[:, None] & (part < num_parts)
        x = tl.load(top_ptr + node * num_parts + part, mask=there, other=-_INF)
        top = tl.maximum(top, tl.max(x, axis=1))
    is_finite = (top > -_INF) & (top < _INF)
    # Any number will do where it is not finite, as long as no difference is NaN.
    base = tl.where(is_finite, top, 0.0).to(tl.float64)

    best = tl.full([NODES], -_INF, tl.float64)
    best_token = tl.full([NODES], _NO_TOKEN, tl.int32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)[None, :]
        there = in_use[:, None] & (part < num_parts)
        at = node * num_parts + part
        x = tl.load(top_ptr + at, mask=there, other=-_INF).to(tl.float64)
        if temperature > 0:
            score = tl.load(score_ptr + at, mask=there, other=0.0)
            x = score + (x - base[:, None]) / temperature
        token = tl.load(token_ptr + at, mask=there, other=_NO_TOKEN)
        high = tl.max(x, axis=1)
        token = tl.min(tl.where(x == high[:, None], token, _NO_TOKEN), axis=1)
        best_token = tl.where(high > best, token, best_token)
        best = tl.maximum(high, best)
    return best_token, is_finite


@triton.jit
def _is_in(x, ends):
    """Which of x [NODES] are among `ends` [ENDS]; -1 is padding."""
    hits = (x[:, None] == ends[None, :]) & (ends[None, :] >= 0)
    return tl.max(hits.to(tl.int32), axis=1) > 0


@triton.jit
def _is_repeated(parent, token, node):
    """Nodes with an equal sibling before them. Siblings should be distinct; if a drafter repeats
    itself, the walk must still be a path."""
    same = (parent[:, None] == parent[None, :]) & (token[:, None] == token[None, :])
    return tl.max((same & (node[None, :] < node[:, None])).to(tl.int32), axis=1) > 0


@triton.jit
def _climb(parent, is_right, LEVELS: tl.constexpr):
    """Every node's depth, and whether it and all nodes above it are right (int32 0 or 1), in
    log2 steps: what is known up to an ancestor is joined with what the ancestor knows."""
    depth = (parent >= 0).to(tl.int32)
    ancestor = tl.maximum(parent, 0)
    for _ in tl.static_range(LEVELS):
        is_right = is_right & tl.gather(is_right, ancestor, axis=0)
        depth += tl.gather(depth, ancestor, axis=0)
        ancestor = tl.gather(ancestor, ancestor, axis=0)
    return depth, is_right


@triton.jit(
    do_not_specialize=[
        "num_parts",
        "max_ends",
        "max_len",
        "num_columns",
        "path_stride",
        "verdict_stride",
        "threshold",
    ]
)
def _accept_kernel(
    top_ptr,
    score_ptr,
    choice_ptr,
    len_tokens_ptr,
    remaining_ptr,
    temperature_ptr,
    ends_ptr,
    history_ptr,
    num_nodes_ptr,
    tokens_ptr,
    parents_ptr,
    bank_ptr,
    ring_len_ptr,
    path_len_ptr,
    path_ptr,
    verdict_ptr,
    num_parts,
    max_ends,
    max_len,
    num_columns,
    path_stride,
    verdict_stride,
    threshold,
    NODES: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    num_nodes = tl.load(num_nodes_ptr + b)
    verdict_ptr += b * verdict_stride
    if num_nodes == 0:
        word = tl.arange(0, 8)
        tl.store(verdict_ptr + word, word * 0, mask=word < _HEADER)
        return
    tokens_ptr += b * num_columns
    node = tl.arange(0, NODES)
    in_use = node < num_nodes
    is_draft = in_use & (node > 0)
    token = tl.load(tokens_ptr + node, mask=in_use, other=-1)
    parent = tl.load(parents_ptr + b * num_columns + node, mask=is_draft, other=-1)
    column = tl.arange(0, ENDS)
    ends = tl.load(ends_ptr + b * max_ends + column, mask=column < max_ends, other=-1)
    len_tokens = tl.load(len_tokens_ptr + b)
    remaining = tl.load(remaining_ptr + b)
    log_len = tl.load(ring_len_ptr + b) + tl.load(path_len_ptr + b)
    bank = tl.load(bank_ptr + b)
    blocks = b * num_columns * num_parts
    choice, is_finite = _compare(
        top_ptr + blocks,
        score_ptr + blocks,
        choice_ptr + blocks,
        tl.load(temperature_ptr + b),
        in_use,
        num_parts,
        NODES,
        PARTS,
    )

    # A draft is right if its parent is one where the walk goes on and chooses the draft's token.
    # Nothing is drawn at an accepted draft that is an end, or below as many as may be emitted.
    is_end = _is_in(token, ends)
    goes_on = is_finite & ((node == 0) | (is_end == 0))
    above = tl.maximum(parent, 0)
    is_right = (tl.gather(choice, above, axis=0) == token) & is_draft
    is_right = is_right & (tl.gather(goes_on.to(tl.int32), above, axis=0) > 0)
    is_right = is_right & (_is_repeated(parent, token, node) == 0)
    depth, on_path = _climb(parent, (is_right | (node == 0)).to(tl.int32), LEVELS)
    on_path = on_path * (depth <= remaining).to(tl.int32)

    path_len = tl.sum(on_path, axis=0)
    num_drafts = path_len - 1
    is_last = (on_path > 0) & (depth == num_drafts)
    last_token = tl.sum(tl.where(is_last, token, 0), axis=0)
    last_is_end = tl.sum((is_last & is_end).to(tl.int32), axis=0)
    bonus = tl.sum(tl.where(is_last, choice, 0), axis=0)
    bonus_is_end = tl.max(((ends == bonus) & (ends >= 0)).to(tl.int32), axis=0)
    draws = (num_drafts == 0) | ((last_is_end == 0) & (num_drafts < remaining))
    invalid = draws & (tl.sum((is_last & is_finite).to(tl.int32), axis=0) == 0)
    has_bonus = draws & (invalid == 0)

    emitted = num_drafts + has_bonus.to(tl.int32)
    is_cut = emitted < path_len
    is_stop = tl.where(has_bonus, bonus_is_end, last_is_end) > 0
    finish = tl.where(is_stop, _STOP, tl.where(emitted >= remaining, _LENGTH, 0))
    had_chance = is_draft & ((is_cut == 0) | (depth <= emitted))
    finish = tl.where(invalid, _INVALID, finish)
    on_path = on_path > 0

    # From here on nothing is read: some of it is overwritten.
    tl.debug_barrier()
    tl.store(verdict_ptr, emitted)
    tl.store(verdict_ptr + 1, finish)
    tl.store(verdict_ptr + 2, num_drafts)
    tl.store(verdict_ptr + 3, tl.sum(had_chance.to(tl.int32), axis=0))
    tl.store(verdict_ptr + 4, tl.max(tl.where(had_chance, depth, 0), axis=0))
    verdict_ptr += _HEADER
    history_ptr += b.to(tl.int64) * max_len + len_tokens
    accepted = on_path & (node > 0)
    room = max_len - len_tokens
    tl.store(verdict_ptr + depth - 1, token, mask=accepted)
    tl.store(history_ptr + depth - 1, token, mask=accepted & (depth <= room))
    tl.store(verdict_ptr + num_drafts, bonus, mask=emitted > num_drafts)
    tl.store(history_ptr + num_drafts, bonus, mask=(emitted > num_drafts) & (emitted <= room))

    tl.store(path_ptr + b * path_stride + depth, node, mask=on_path)
    tl.store(ring_len_ptr + b, tl.where(log_len > threshold, 0, log_len))
    tl.store(path_len_ptr + b, path_len)
    tl.store(bank_ptr + b, 1 - bank)
    tl.store(len_tokens_ptr + b, len_tokens + emitted)
    tl.store(remaining_ptr + b, remaining - emitted)
    tl.store(tokens_ptr, tl.where(has_bonus, bonus, last_token), mask=emitted > 0)
    tl.store(num_nodes_ptr + b, tl.where(finish == 0, 1, 0))
