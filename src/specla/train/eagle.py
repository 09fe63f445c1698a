# SPDX-License-Identifier: Apache-2.0
"""The EAGLE drafter as a module that can be trained: parameters named as in its checkpoint.

Its forward is `drafters.eagle_model`'s, over packed rows and several steps ahead (`unroll`).
Matrix products run in ``compute`` dtype; the residual stream, norms and the recurrence stay in
the parameters' dtype.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specla.drafters.eagle_config import EagleConfig
from specla.drafters.eagle_files import MEMBERS, OFFSETS
from specla.drafters.files import replacing
from specla.models.files import write_json
from specla.train.attention import Attention, AttentionUnroll
from specla.train.checkpoint import stored
from specla.train.gdn import MLP, GDNShape, Mixer, RMSNorm, pack_masks
from specla.train.unroll import MixerUnroll, push


class Pairs(NamedTuple):
    """Packed rows of pairs: see `unroll`.

    embeds [B, T, target], the target's embeddings of x_{t+1}; features [B, T, F * target] before
    them; segments [B, T] int, the documents.
    """

    embeds: Tensor
    features: Tensor
    segments: Tensor


class Midlayer(nn.Module):
    """The one layer; its mixer is `linear_attn` or `self_attn`."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        shape, target = shape_of(config), config.target_hidden_size
        self.input_layernorm = RMSNorm(target, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        inputs = target + shape.hidden_size
        if config.mixer == "gdn":
            self.linear_attn = Mixer(shape, inputs)
        else:
            self.self_attn = Attention(
                inputs, shape.hidden_size, config.num_heads, config.num_v_heads, config.head_dim
            )
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)


class EagleNet(nn.Module):
    """A drafter of this configuration, newly initialised.

    Args:
        config: with a head of its own.
        d2t: [draft vocabulary] target ids of the head's rows, ascending.
    """

    def __init__(
        self, config: EagleConfig, d2t: Tensor, compute: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        assert config.draft_vocab_size == len(d2t)
        assert config.mixer == "attention" or config.num_v_heads == config.num_heads
        self.config, self.compute = config, compute
        target = config.target_hidden_size
        count = len(config.target_layer_ids)
        norms = count if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(target, config.norm_eps) for _ in range(norms))
        self.fc = nn.Linear(count * target, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(d2t), bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", d2t, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Small matrices, and outputs of the mixer and the MLP that start at zero, so that the
        first outputs are the features; fla's rule for decays; fc averages the features where
        widths agree."""
        for name, p in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.uniform_(p, -(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                p.uniform_(1e-4, 16).log_()
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand_like(p) * math.log(100) + math.log(1e-3))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.dim() == 2:
                nn.init.normal_(p, std=std)
        count = len(self.config.target_layer_ids)
        if self.config.hidden_size == self.config.target_hidden_size:
            eye = torch.eye(self.config.hidden_size, device=self.fc.weight.device)
            self.fc.weight.copy_(eye.repeat(1, count) / count)

    @torch.no_grad()
    def start_from(self, head: Tensor, norm: Tensor) -> None:
        """Take over the target's head [vocab, D] and final norm [D], where widths agree."""
        if head.shape[1] == self.config.hidden_size:
            self.lm_head.weight.copy_(head[self.d2t.to(head.device)])
            self.norm.weight.copy_(norm)

    def features(self, rows: Tensor) -> Tensor:
        """[..., F * target] -> g [..., D]."""
        if len(self.fc_norm):
            parts = rows.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            pairs = zip(self.fc_norm, parts, strict=True)
            rows = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return F.linear(rows.to(self.compute), self.fc.weight.to(self.compute)).to(rows.dtype)

    def unroll(self, pairs: Pairs, steps: int, chunk: int = 64) -> list[Tensor]:
        """Outputs y [B, T, D] of every step; those whose pair t - s is of another document (see
        `valid_steps`) mean nothing."""
        layer, mixer = self.midlayer, self._mixer(pairs.segments, chunk)
        e, g = layer.input_layernorm(pairs.embeds), self.features(pairs.features)
        outputs: list[Tensor] = []
        for _ in range(steps):
            r = g + mixer(torch.cat([e, layer.hidden_norm(g)], dim=-1))
            outputs.append(r + layer.mlp(layer.post_attention_layernorm(r), self.compute))
            g = push(outputs[-1], 1)
        return outputs

    def _mixer(self, segments: Tensor, chunk: int) -> MixerUnroll | AttentionUnroll:
        layer, config = self.midlayer, self.config
        if config.mixer == "attention":
            return AttentionUnroll(layer.self_attn, segments, config.rope_theta, self.compute)
        packing = pack_masks(segments, config.conv_size, chunk)
        return MixerUnroll(layer.linear_attn, packing, self.compute)

    def logits(self, y: Tensor) -> Tensor:
        """[..., D] -> [..., draft vocabulary], in the compute dtype."""
        return F.linear(self.norm(y).to(self.compute), self.lm_head.weight.to(self.compute))

    def save(self, folder: Path) -> None:
        """config.json and model.safetensors, as `drafters.eagle_files` reads them; bf16, decays
        in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: stored(name, p) for name, p in self.named_parameters()}
        if self.config.has_draft_vocab:
            ids = self.d2t.cpu()
            tensors[OFFSETS] = ids - torch.arange(len(ids))
            tensors[MEMBERS] = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            tensors[MEMBERS][ids] = True
        with replacing(folder / "model.safetensors") as part:
            save_file(tensors, part, {"format": "pt"})
        write_json(folder / "config.json", self.config.as_dict())


def shape_of(config: EagleConfig) -> GDNShape:
    """The layer's sizes as the differentiable model's."""
    return GDNShape(
        hidden_size=config.hidden_size,
        num_hidden_layers=1,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        expand_v=config.head_v_dim / config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.draft_vocab_size or config.vocab_size,
        conv_size=config.conv_size,
        norm_eps=config.norm_eps,
    )
