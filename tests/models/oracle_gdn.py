# SPDX-License-Identifier: Apache-2.0
"""A second opinion on a whole Gated DeltaNet model: one token, one head at a time, in float64.

Written from the equations alone, for reading rather than speed, on a checkpoint's own tensors
(nothing fused). Shares no code with specla's forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor


class LayerMemory(NamedTuple):
    """past: the W-1 newest inputs of the three convolutions, [W-1, C]; S [G, V, K]."""

    past: Tensor
    S: Tensor


@dataclass(frozen=True)
class Oracle:
    """tensors: float64, by checkpoint name. config: the parsed config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    @classmethod
    def from_folder(cls, folder: Any, config: Mapping[str, Any]) -> Oracle:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
        return cls({name: tensor.double() for name, tensor in tensors.items()}, config)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """H, G, K, V, W."""
        c = self.config
        heads, key = c["num_heads"], c["head_dim"]
        groups = c["num_v_heads"] or heads
        return heads, groups, key, int(key * c["expand_v"]), c["conv_size"]

    def start(self) -> list[LayerMemory]:
        H, G, K, V, W = self.sizes
        past = torch.zeros(W - 1, 2 * H * K + G * V, dtype=torch.float64)
        S = torch.zeros(G, V, K, dtype=torch.float64)
        return [LayerMemory(past, S)] * self.config["num_hidden_layers"]

    def step(self, token: int, memory: Sequence[LayerMemory]) -> tuple[Tensor, list[LayerMemory]]:
        """Logits [vocab] after `token`, and the memory that includes it."""
        x, after = self.tensors["model.embeddings.weight"][token], []
        for i, layer in enumerate(memory):
            w = _Layer(self.tensors, f"model.layers.{i}.")
            mixed, layer = self._mix(self._norm(x, w["attn_norm.weight"]), w, layer)
            x = x + mixed
            h = self._norm(x, w["mlp_norm.weight"])
            gate = w["mlp.gate_proj.weight"] @ h
            x = x + w["mlp.down_proj.weight"] @ (_swish(gate) * (w["mlp.up_proj.weight"] @ h))
            after.append(layer)
        tied = self.config["tie_word_embeddings"]
        head = self.tensors["model.embeddings.weight" if tied else "lm_head.weight"]
        return head @ self._norm(x, self.tensors["model.norm.weight"]), after

    def run(
        self, tokens: Sequence[int], memory: Sequence[LayerMemory] | None = None
    ) -> tuple[Tensor, list[LayerMemory]]:
        """Logits [T, vocab] after each of `tokens`, and the memory at their end."""
        state, rows = list(memory if memory is not None else self.start()), []
        for token in tokens:
            row, state = self.step(token, state)
            rows.append(row)
        return torch.stack(rows), state

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + self.config["norm_eps"]).sqrt() * weight

    def _mix(self, x: Tensor, w: _Layer, memory: LayerMemory) -> tuple[Tensor, LayerMemory]:
        H, G, K, V, _ = self.sizes
        raw = torch.cat([w[f"attn.{n}_proj.weight"] @ x for n in "qkv"])
        window = torch.cat([memory.past, raw[None]])
        taps = torch.cat([w[f"attn.{n}_conv1d.weight"][:, 0] for n in "qkv"])
        mixed = _swish((window * taps.T).sum(0))
        q, k, v = mixed.split([H * K, H * K, G * V])
        rate = w["attn.A_log"].exp()
        time = torch.log1p((w["attn.a_proj.weight"] @ x + w["attn.dt_bias"]).exp())
        strength = 1 / (1 + (-(w["attn.b_proj.weight"] @ x)).exp())
        if self.config["allow_neg_eigval"]:
            strength = 2 * strength
        S, out = memory.S.clone(), []
        for g in range(G):
            h = g // (G // H)  # value heads share key heads in consecutive groups
            key, query = _unit(k[h * K : (h + 1) * K]), _unit(q[h * K : (h + 1) * K]) / K**0.5
            S[g] = S[g] * torch.exp(-rate[g] * time[g])
            error = v[g * V : (g + 1) * V] - S[g] @ key
            S[g] = S[g] + strength[g] * torch.outer(error, key)
            out.append(self._norm(S[g] @ query, w["attn.o_norm.weight"]))
        o = torch.cat(out)
        if self.config["use_gate"]:
            o = o * _swish(w["attn.g_proj.weight"] @ x)
        return w["attn.o_proj.weight"] @ o, LayerMemory(window[1:], S)


class _Layer:
    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.prefix + name]


def _swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum() + 1e-6).sqrt()
