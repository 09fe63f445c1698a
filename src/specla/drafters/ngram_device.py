# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup on the device: `drafters.ngram`, token for token, without the host.

The host keeps an index that grows with the text; here each round scans the row's history from its
end, and stops at the first longest match that can be. A key orders the places where the text
could go on: the length of the match first, then how late it is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specla.ops.contract import DeviceRound

# History tokens looked at by one step of the scan.
_TILE = 4096
# Match length << bits | position: lengths up to 64, histories up to 2^24 tokens.
POSITION_BITS = 24
_BITS, _MASK = tl.constexpr(POSITION_BITS), tl.constexpr((1 << POSITION_BITS) - 1)


def draft_chain(
    history: Tensor,
    len_tokens: Tensor,
    remaining: Tensor,
    rnd: DeviceRound,
    *,
    prompt_lookup_max: int = 4,
    prompt_lookup_min: int = 2,
    num_draft_tokens: int = 8,
    pdl: bool = False,
) -> None:
    """Fill tokens, parents and num_nodes of every live row with a chain, or node 0 alone.

    A row whose `num_nodes` is 0 is idle and stays so. One program per row.

    Args:
        history: int32 [B, max_len], prompt and output so far.
        len_tokens: int32 [B], how many of them there are, >= 1 for a live row.
        remaining: int32 [B], tokens that may still be emitted; 1 has no use for a draft.
        rnd: at most N_max - 1 drafts fit: a bucket may have room for more than a tree may have.
        prompt_lookup_max, prompt_lookup_min, num_draft_tokens: as `NgramDrafter` takes them.
    """
    num_rows, num_nodes = rnd.tokens.shape
    num_draft_tokens = min(num_draft_tokens, rnd.path.shape[1] - 1)
    assert 1 <= prompt_lookup_min <= prompt_lookup_max <= 64
    assert history.shape[1] <= 1 << POSITION_BITS
    _draft_kernel[(num_rows,)](
        history,
        len_tokens,
        remaining,
        rnd.num_nodes,
        rnd.tokens,
        rnd.parents,
        history.shape[1],
        num_nodes,
        prompt_lookup_min,
        num_draft_tokens,
        LONGEST=prompt_lookup_max,
        TILE=_TILE,
        NODES=triton.next_power_of_2(num_nodes),
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )


@triton.jit
def _match(tokens_ptr, length, after, LONGEST: tl.constexpr):
    """How many tokens, up to LONGEST, before each place `after` equal the text's last ones."""
    size = after * 0
    for j in tl.range(0, LONGEST, loop_unroll_factor=4):
        last = tl.load(tokens_ptr + length - 1 - j, mask=j < length, other=-1)
        there = (after > j) & (after < length)
        token = tl.load(tokens_ptr + after - 1 - j, mask=there, other=-2)
        size += ((token == last) & (size == j)).to(tl.int32)
    return size


@triton.jit(do_not_specialize=["max_len", "num_columns", "shortest", "num_drafts"])
def _draft_kernel(
    history_ptr,
    len_tokens_ptr,
    remaining_ptr,
    num_nodes_ptr,
    tokens_ptr,
    parents_ptr,
    max_len,
    num_columns,
    shortest,
    num_drafts,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(num_nodes_ptr + b) == 0:
        return
    history_ptr += b.to(tl.int64) * max_len
    length = tl.load(len_tokens_ptr + b)
    num_drafts = tl.minimum(num_drafts, num_columns - 1)
    num_drafts = tl.where(tl.load(remaining_ptr + b) > 1, num_drafts, 0)

    # Places where a copy could start, from late to early: tokens[after - size : after] matches.
    best = tl.zeros([], tl.int32)
    end = tl.where(num_drafts > 0, length, 0)
    while (end > 0) & (best >> _BITS < LONGEST):
        end -= TILE
        after = end + tl.arange(0, TILE)
        size = _match(history_ptr, length, after, LONGEST)
        key = tl.where(size >= shortest, (size << _BITS) | after, 0)
        best = tl.maximum(best, tl.max(key, axis=0))

    # Past the end the copy continues from itself: a period of length - start tokens.
    start = best & _MASK
    num_nodes = tl.where(best > 0, num_drafts, 0) + 1
    node = tl.arange(0, NODES)
    source = tl.where(node == 0, length - 1, start + (node - 1) % tl.maximum(length - start, 1))
    in_use = node < num_nodes
    token = tl.load(history_ptr + source, mask=in_use, other=0)
    tl.store(tokens_ptr + b * num_columns + node, token, mask=in_use)
    tl.store(parents_ptr + b * num_columns + node, node - 1, mask=in_use)
    tl.store(num_nodes_ptr + b, num_nodes)
