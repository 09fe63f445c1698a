# SPDX-License-Identifier: Apache-2.0
"""A differentiable Gated DeltaNet language model in plain PyTorch, with fla's parameter names.

Shapes: B rows, T tokens a row, H heads, K and V the key and value dims, C tokens a chunk, D the
width.
Rows hold several packed documents. ``segments`` [B, T] numbers them, and nothing crosses a
boundary: not
the convolution's window, not the decayed state, not a gradient.

Matrix products outside the recurrence run in the model's ``compute`` dtype, those of the
recurrence in its ``products`` dtype; the residual stream, the norms, decays and the carried state
stay in float32 (or float64 for float64 weights).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specla.train.delta_rule import chunk_delta_rule, chunk_masks

Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GDNShape:
    """The sizes of the model; field names are those of fla's config."""

    hidden_size: int = 320
    num_hidden_layers: int = 7
    num_heads: int = 4
    head_dim: int = 64
    expand_v: float = 2.0
    intermediate_size: int = 832
    vocab_size: int = 8192
    conv_size: int = 4
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    @property
    def key_dim(self) -> int:
        """Width of the queries and keys of all heads."""
        return self.num_heads * self.head_dim

    @property
    def value_head_dim(self) -> int:
        """V: width of one head's values."""
        return int(self.head_dim * self.expand_v)

    @property
    def value_dim(self) -> int:
        """Width of the values of all heads."""
        return self.num_heads * self.value_head_dim

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)


class Packing(NamedTuple):
    """What the layers need to know about document boundaries: see `pack_masks`."""

    taps: Tensor  # [B, T, W] 1 where the token j - (W-1) steps back is in the same document
    chunk: tuple[Tensor, Tensor, Tensor, Tensor]
    products: torch.dtype | None = None  # of the recurrence; None: that of its operands


def pack_masks(segments: Tensor, conv_size: int, chunk: int) -> Packing:
    """Masks of a batch of packed rows, shared by all layers. ``segments`` [B, T] int."""
    taps = []
    for back in range(conv_size - 1, -1, -1):
        earlier = F.pad(segments, (back, 0), value=-1)[:, : segments.shape[1]]
        taps.append(earlier == segments)
    return Packing(torch.stack(taps, -1), chunk_masks(segments, chunk))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension, by one kernel; a compiler
    is given the operations, as it fuses them with those around."""
    if torch.compiler.is_compiling():
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x if weight is None else x * weight
    fused: Tensor = torch.rms_norm(x, x.shape[-1:], weight, eps)
    return fused


class RMSNorm(nn.Module):
    """See `rms_norm`; in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)


class ShortConvolution(nn.Module):
    """Weights of a depthwise causal convolution; column W-1 is the current token."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))


def convolve(u: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """Depthwise causal convolution, then SiLU. ``u`` [B, T, D], ``weight`` [D, W], ``taps`` [B,
    T, W]."""
    width, length = weight.shape[1], u.shape[1]
    padded = F.pad(u, (0, 0, width - 1, 0)).to(weight.dtype)
    shifted = (padded[:, j : j + length] * taps[..., j : j + 1] for j in range(width))
    total = torch.zeros_like(padded[:, :length])
    for j, u_j in enumerate(shifted):
        total = total + u_j * weight[:, j]
    return F.silu(total)


def l2_normalise(x: Tensor) -> Tensor:
    """Unit length along the last dimension, with fla's epsilon inside the root."""
    size = x.shape[-1]
    return rms_norm(x, None, 1e-6 / size) / math.sqrt(size)


class Mixer(nn.Module):
    """The Gated DeltaNet mixer of one layer. ``inputs``: width it reads, if not the model's."""

    def __init__(self, shape: GDNShape, inputs: int | None = None) -> None:
        super().__init__()
        self.shape, width = shape, shape.hidden_size
        linear = partial(nn.Linear, inputs or width, bias=False)
        self.q_proj, self.k_proj = linear(shape.key_dim), linear(shape.key_dim)
        self.v_proj, self.g_proj = linear(shape.value_dim), linear(shape.value_dim)
        self.a_proj, self.b_proj = linear(shape.num_heads), linear(shape.num_heads)
        self.q_conv1d = ShortConvolution(shape.key_dim, shape.conv_size)
        self.k_conv1d = ShortConvolution(shape.key_dim, shape.conv_size)
        self.v_conv1d = ShortConvolution(shape.value_dim, shape.conv_size)
        self.A_log = nn.Parameter(torch.empty(shape.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.num_heads))
        self.o_norm = RMSNorm(shape.value_head_dim, shape.norm_eps)
        self.o_proj = nn.Linear(shape.value_dim, width, bias=False)

    def project(self, x: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``x`` [B, T, D] -> conv inputs [B, T, 2HK + HV], gate [B, T, HV], a and b [B, T, H]."""
        s = self.shape
        parts = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj)
        weight = torch.cat([p.weight for p in parts]).to(compute)
        mixed = F.linear(x.to(compute), weight)
        sizes = [2 * s.key_dim + s.value_dim, s.value_dim, s.num_heads, s.num_heads]
        qkv, gate, a, b = mixed.split(sizes, -1)
        return qkv, gate, a, b

    def conv_weight(self) -> Tensor:
        """[2HK + HV, W]: the three convolutions side by side."""
        return torch.cat([c.weight[:, 0] for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved [B, T, 2HK + HV] -> unit q / sqrt(K), unit k [B, T, H, K], v [B, T, H, V]."""
        s = self.shape
        q, k, v = qkv.split([s.key_dim, s.key_dim, s.value_dim], -1)
        q = l2_normalise(q.unflatten(-1, (s.num_heads, s.head_dim))) * s.head_dim**-0.5
        k = l2_normalise(k.unflatten(-1, (s.num_heads, s.head_dim)))
        return q, k, v.unflatten(-1, (s.num_heads, s.value_head_dim))

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g <= 0 and write strength beta in (0, 1), both [B, T, H]."""
        wide = self.A_log.dtype
        g = -self.A_log.exp() * F.softplus(a.to(wide) + self.dt_bias)
        return g, torch.sigmoid(b.to(wide))

    def finish(self, o: Tensor, gate: Tensor, compute: torch.dtype) -> Tensor:
        """Norm, then gate, then output projection. ``o`` [B, T, H, V], ``gate`` [B, T, HV]."""
        gate = F.silu(gate.unflatten(-1, o.shape[-2:]).to(o.dtype))
        o = (self.o_norm(o) * gate).flatten(-2)
        return F.linear(o.to(compute), self.o_proj.weight.to(compute))

    def forward(self, x: Tensor, packing: Packing, compute: torch.dtype) -> Tensor:
        """``x`` [B, T, D] -> [B, T, D]."""
        u, gate, a, b = self.project(x, compute)
        q, k, v = self.heads(convolve(u, self.conv_weight(), packing.taps))
        g, beta = self.gates(a, b)
        low = packing.products or k.dtype
        o = chunk_delta_rule(q, k.to(low), v.to(low), g, beta, packing.chunk)
        return self.finish(o.to(g.dtype), gate, compute)

    def step(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token: ``x`` [B, D], ``window`` [B, W-1, 2HK+HV], ``state`` [B, H, K, V]."""
        u, gate, a, b = (y[:, 0] for y in self.project(x[:, None], x.dtype))
        window = torch.cat([window, u[:, None]], 1)
        q, k, v = self.heads(F.silu((window * self.conv_weight().T).sum(1)))
        g, beta = self.gates(a, b)
        state = state * g.exp()[..., None, None]
        write = beta[..., None] * (v - (k[..., None] * state).sum(-2))
        state = state + k[..., None] * write[..., None, :]
        o = (q[..., None] * state).sum(-2)
        return self.finish(o, gate, x.dtype), window[:, 1:], state


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, compute: torch.dtype) -> Tensor:
        """[..., D] -> [..., D]."""
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(compute)
        gate, up = F.linear(x.to(compute), weight).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight.to(compute))


class Block(nn.Module):
    """Pre-norm mixer and MLP with residuals."""

    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attn = Mixer(shape)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, packing: Packing, compute: torch.dtype) -> Tensor:
        """``x`` [B, T, D] -> [B, T, D]."""
        x = x + self.attn(self.attn_norm(x), packing, compute)
        mixed: Tensor = self.mlp(self.mlp_norm(x), compute)
        return x + mixed

    def step(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One token; see `Mixer.step`."""
        o, window, state = self.attn.step(self.attn_norm(x), window, state)
        x = x + o
        return x + self.mlp(self.mlp_norm(x), x.dtype), window, state


class Backbone(nn.Module):
    """Embeddings, blocks, final norm: the ``model.`` part of the checkpoint."""

    def __init__(self, shape: GDNShape) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)


class GDNLanguageModel(nn.Module):
    """Gated DeltaNet; its state dict is fla's, ``lm_head.weight`` left out where it is tied."""

    def __init__(
        self,
        shape: GDNShape,
        compute: torch.dtype = torch.float32,
        products: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.compute, self.products = shape, compute, products
        self.model = Backbone(shape)
        if not shape.tie_word_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.reset_parameters()

    @property
    def head(self) -> Tensor:
        """[vocab, D]."""
        tied = self.shape.tie_word_embeddings
        weight: Tensor = self.model.embeddings.weight if tied else self.lm_head.weight
        return weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """fla's initialisation: normal(0, range) matrices, A in (0, 16), dt log-uniform in [1e-3,
        0.1]."""
        for name, p in self.named_parameters():
            if name.endswith("conv1d.weight"):
                nn.init.uniform_(p, -(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)
            elif name.endswith("A_log"):
                p.uniform_(1e-4, 16).log_()
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand_like(p) * math.log(100) + math.log(1e-3)).clamp(min=1e-4)
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif p.dim() == 2:
                nn.init.normal_(p, std=self.shape.initializer_range)

    def hidden(self, tokens: Tensor, segments: Tensor, chunk: int = 64) -> Tensor:
        """``tokens``, ``segments`` [B, T] -> normalised last hidden states [B, T, D]."""
        packing = pack_masks(segments, self.shape.conv_size, chunk)
        packing = packing._replace(products=self.products)
        x = self.model.embeddings(tokens)
        for layer in self.model.layers:
            x = layer(x, packing, self.compute)
        last: Tensor = self.model.norm(x)
        return last

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocab], in the compute dtype."""
        return F.linear(hidden.to(self.compute), self.head.to(self.compute))

    def forward(self, tokens: Tensor, segments: Tensor | None = None, chunk: int = 64) -> Tensor:
        """``tokens`` [B, T] -> logits [B, T, vocab]; one document a row unless told otherwise."""
        segments = torch.zeros_like(tokens) if segments is None else segments
        return self.logits(self.hidden(tokens, segments, chunk))

    def start(self, rows: int) -> Cache:
        """Empty (window, state) of every layer for `step`."""
        s, like = self.shape, self.model.embeddings.weight
        window = like.new_zeros(rows, s.conv_size - 1, 2 * s.key_dim + s.value_dim)
        state = like.new_zeros(rows, s.num_heads, s.head_dim, s.value_head_dim)
        return [(window, state)] * s.num_hidden_layers

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """One token a row: ``tokens`` [B] -> logits [B, vocab] and the cache to continue from."""
        x, new = self.model.embeddings(tokens), list[tuple[Tensor, Tensor]]()
        for layer, (window, state) in zip(self.model.layers, cache, strict=True):
            x, window, state = cast(Block, layer).step(x, window, state)
            new.append((window, state))
        return F.linear(self.model.norm(x), self.head), new
