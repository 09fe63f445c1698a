# SPDX-License-Identifier: Apache-2.0
"""The causal attention of an EAGLE drafter, as in EAGLE-3: Llama's, with rotary positions.

Keys and values of a slot's tokens are kept and grow with the text (unlike the recurrent mixer's
state); a drafted path carries its own. Row by row: reductions run over as many keys as a text has.
`KeptAttention` has them where a device's kernels look for them (`eagle_attention_device`).

Source: EAGLE-3 (arXiv 2503.01840); rotary embedding (arXiv 2104.09864), halves rotated as in
transformers' Llama.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specla.drafters.eagle_mixer import Cursor, Memory
from specla.ops.linear import Linear

MAX_TOKENS = 1 << 20


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [..., T, H, hd] at positions [..., T], in float32 at least; returns x's dtype."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angles = (positions.to(torch.float64)[..., None] * theta**-exponents).unsqueeze(-2)
    cos, sin = torch.cos(angles).to(wide), torch.sin(angles).to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class AttentionMixer:
    """See `eagle_mixer.Mixer`. Memory: slots [n], positions [n] int64, keys, values [n, d, H, hd]
    of the d tokens below the slot's.

    Args:
        weights: q, k, v, o [out, in].
        heads, kv_heads, theta: as in Llama's config.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        *,
        heads: int,
        kv_heads: int,
        theta: float,
        num_slots: int,
    ) -> None:
        self.linears = {f"{name}_proj": Linear(weight) for name, weight in weights.items()}
        self._heads, self._kv_heads, self._theta = heads, kv_heads, theta
        self.max_tokens = MAX_TOKENS
        self._like = weights["k"]
        self._cache: list[tuple[Tensor, Tensor]] = [self._empty() for _ in range(num_slots + 1)]

    def reset(self, slot: int) -> None:
        """Forget a slot's keys and values."""
        self._cache[slot] = self._empty()

    def copy(self, slot: int, to: int) -> None:
        """Share what is never written again."""
        self._cache[to] = self._cache[slot]

    def slot_bytes(self, slot: int) -> int:
        """Its keys and values."""
        return sum(part.nbytes for part in self._cache[slot])

    def prefill(self, slot: int, x: Tensor) -> Tensor:
        """A run of tokens: each attends to those before it and to itself."""
        start, count = len(self._tokens(slot)[0]), len(x)
        q, k, v = self._project(x, torch.arange(start, start + count, device=x.device))
        keys, values = self._append(slot, k, v)
        seen = torch.ones(count, len(keys), dtype=torch.bool, device=x.device).tril(start)
        return self._attend(q, keys, values, seen)

    def encode(self, slots: Sequence[int], lengths: Sequence[int], x: Tensor) -> Tensor:
        """Row by row."""
        parts = zip(slots, x.split(list(lengths)), strict=True)
        return torch.cat([self.prefill(slot, part) for slot, part in parts])

    def roots(self, slots: Sequence[int]) -> Memory:
        """Paths without a token of their own."""
        device = self._like.device
        ends = [len(self._tokens(slot)[0]) for slot in slots]
        keys, values = (part.new_zeros(len(slots), *part.shape) for part in self._empty())
        return torch.tensor(slots, device=device), torch.tensor(ends, device=device), keys, values

    def step(self, memory: Memory, source: Sequence[int], x: Tensor) -> tuple[Tensor, Memory]:
        """Each attends to its slot's tokens, those above it in its path, and itself."""
        slots, positions, above_k, above_v = (part[list(source)] for part in memory)
        q, k, v = self._project(x, positions)
        path_k = torch.cat([above_k, k.unsqueeze(1)], dim=1)
        path_v = torch.cat([above_v, v.unsqueeze(1)], dim=1)
        rows = []
        for i, slot in enumerate(slots.tolist()):
            keys, values = self._tokens(slot)
            both = torch.cat([keys, path_k[i]]), torch.cat([values, path_v[i]])
            rows.append(self._attend(q[i : i + 1], *both, None))
        return torch.cat(rows), (slots, positions + 1, path_k, path_v)

    def _tokens(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, H, hd] of a slot's tokens."""
        return self._cache[slot]

    def _append(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens behind the others; all of them."""
        keys, values = self._cache[slot]
        self._cache[slot] = torch.cat([keys, k]), torch.cat([values, v])
        return self._cache[slot]

    def _empty(self) -> tuple[Tensor, Tensor]:
        width = self._like.shape[0] // self._kv_heads
        shape = (0, self._kv_heads, width)
        return self._like.new_zeros(shape), self._like.new_zeros(shape)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, hd], k, v [T, H_kv, hd]; q and k rotated."""
        q = self.linears["q_proj"](x).unflatten(-1, (self._heads, -1))
        k, v = (
            self.linears[name](x).unflatten(-1, (self._kv_heads, -1))
            for name in ("k_proj", "v_proj")
        )
        return rotate(q, positions, self._theta), rotate(k, positions, self._theta), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """q [T, H, hd] over k, v [L, H_kv, hd] -> [T, D]."""
        repeats = self._heads // self._kv_heads
        keys, values = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
        o = scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen)
        return self.linears["o_proj"](o.transpose(0, 1).flatten(1).contiguous())


class KeptAttention(AttentionMixer):
    """`AttentionMixer` with every slot's keys and values at fixed addresses, in room for `longest`
    tokens. A slot that grows longer only counts, and nothing is drafted for it: its outputs are
    zero.

    kept: [2, slots, longest, H, hd], keys before values.
    """

    def __init__(
        self, weights: dict[str, Tensor], *, heads: int, kv_heads: int, theta: float,
        num_slots: int, longest: int,
    ) -> None:  # fmt: skip
        super().__init__(weights, heads=heads, kv_heads=kv_heads, theta=theta, num_slots=num_slots)
        self.longest = longest
        width = self._like.shape[0] // kv_heads
        self.kept = self._like.new_zeros(2, num_slots + 1, longest, kv_heads, width)
        self._lengths = [0] * (num_slots + 1)

    def reset(self, slot: int) -> None:
        """What is past a slot's length is not seen."""
        self._lengths[slot] = 0

    def copy(self, slot: int, to: int) -> None:
        """Of its own: it goes on being written."""
        self._lengths[to] = self._lengths[slot]
        end = min(self._lengths[slot], self.longest)
        self.kept[:, to, :end] = self.kept[:, slot, :end]

    def slot_bytes(self, slot: int) -> int:
        """All that there is room for."""
        return self.kept[:, slot].nbytes

    def prefill(self, slot: int, x: Tensor) -> Tensor:
        """A run of tokens, if there is room for it."""
        if self._lengths[slot] + len(x) <= self.longest:
            return super().prefill(slot, x)
        self._lengths[slot] += len(x)
        return x.new_zeros(len(x), self.linears["o_proj"].weight.shape[0])

    def cursor(self, slot: int) -> Cursor:
        """See `eagle_mixer.DeviceMixer`."""
        return Cursor(0, 0, self._lengths[slot])

    def follow(self, slot: int, cursor: Cursor) -> None:
        """See `eagle_mixer.DeviceMixer`."""
        self._lengths[slot] = cursor.length

    def commit(self, slot: int, count: int) -> None:
        """See `eagle_mixer.DeviceMixer`."""
        self._lengths[slot] += count

    def _tokens(self, slot: int) -> tuple[Tensor, Tensor]:
        keys, values = self.kept[:, slot, : self._lengths[slot]]
        return keys, values

    def _append(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start = self._lengths[slot]
        self._lengths[slot] += len(k)
        for kept, new in zip(self.kept[:, slot], (k, v), strict=True):
            kept[start : start + len(new)] = new
        return self._tokens(slot)
