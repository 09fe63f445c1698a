# SPDX-License-Identifier: Apache-2.0
"""Block drafters and state readers as modules that can be trained, named as in their checkpoints.

Their forward is that of use (`drafters.block_model`, `drafters.reader`); here many anchors of a
packed row attend at once. Matrix products run in ``compute`` dtype, the residual stream, norms
and readings of states in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from specla.drafters.block_config import BlockConfig, expected_tensors
from specla.drafters.block_files import save_drafter, save_reader
from specla.drafters.block_model import (
    Attend,
    BlockModel,
    Inject,
    KeysValues,
    visible,
    weights_from,
)
from specla.drafters.reader import Reader, ReaderConfig, reader_tensors
from specla.models.weights import Shape
from specla.ops.transfer import sent
from specla.train.block_batches import BlockBatch

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of attention. Not cuDNN's, which torch 2.11 takes first on Hopper: with a mask its gradients can
be NaN (keys 64 beyond a multiple of 128), and it plans anew for every number of keys."""


class Named(nn.Module):
    """Parameters with the names and shapes of a table of tensors."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    def tensors(self) -> dict[str, Tensor]:
        """By name, differentiable."""
        return dict(self.named_parameters())


class BlockNet(Named):
    """A block drafter, newly initialised.

    embeddings, head [vocab, D]: the target's, frozen. compute: of matrix products.
    """

    def __init__(
        self,
        config: BlockConfig,
        embeddings: Tensor,
        head: Tensor,
        compute: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(expected_tensors(config))
        self.config, self.compute = config, compute
        # Not of the module: neither saved nor trained.
        self._shared = embeddings.detach(), head.detach().to(compute)
        self.reset_parameters()
        self.to(embeddings.device)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Small matrices, smaller where they write into the residual stream; fc averages the
        features; heads that say nothing yet."""
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1)
            elif name.endswith("markov_w2.weight") or name.startswith("confidence_head"):
                p.zero_()
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.num_layers))
            else:
                nn.init.normal_(p, std=std)
        count = len(self.config.target_layer_ids)
        self.tensors()["fc.weight"] += torch.eye(self.config.hidden_size).repeat(1, count) / count

    @torch.no_grad()
    def start_from(self, norm: Tensor) -> None:
        """Take over the target's final norm [D], as the head is the target's."""
        self.tensors()["norm.weight"].copy_(norm)

    def model(self) -> BlockModel:
        """The forward with the parameters as they are now."""
        embeddings, head = self._shared
        return BlockModel(self.config, weights_from(self.tensors(), self.config, embeddings, head))

    def outputs(
        self, model: BlockModel, batch: BlockBatch, places: Tensor, inject: Inject | None = None
    ) -> Tensor:
        """What predicts the drafts of blocks with anchors at `places` [A], on the host and
        ascending: [A, num_drafts, D]."""
        length, n = batch.tokens.shape[1], self.config.block_size
        seats = Seats(places, len(batch.tokens), length, batch.tokens.device)
        where = batch.positions.flatten().clamp(min=0)
        # Features of other layers may lie behind the drafter's.
        width = self.config.hidden_size * len(self.config.target_layer_ids)
        features = batch.features[..., :width].flatten(0, 1).to(self.compute)
        context = model.context(features, where, end=length + n)
        x = model.inputs(batch.tokens.flatten()[seats.places]).float()
        offsets = torch.arange(n, device=x.device)
        positions = (where[seats.places][:, None] + offsets).flatten()
        attend = _attend(self.config, batch, seats, context)
        return model.drafting(model.outputs(x, positions, attend, inject, end=length + n))

    def casting(self) -> AbstractContextManager[object]:
        """Where matrix products run in `compute`."""
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self._shared[0].device.type, self.compute)

    def save(self, folder: Path, temperatures: tuple[float, ...] | None) -> None:
        """config.json with the confidence head's temperatures, and model.safetensors, bf16."""
        config = replace(self.config, confidence_temperatures=temperatures)
        save_drafter(folder, config, {k: v.bfloat16() for k, v in self.tensors().items()})


class ReaderNet(Named):
    """A state reader, newly initialised: it adds nothing yet."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__(reader_tensors(config))
        self.config = config
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """What a state answers, u, and the MLP's hidden numbers have unit variance; norms, which
        are far from 0 and hardly change, are not looked at yet. The last matrix is zero, so that
        training starts at the drafter without a reader."""
        c = self.config
        states = len(c.state_layers) * c.num_heads
        deviations = {
            "query.weight": (c.key_dim / (c.rank * c.hidden_size)) ** 0.5,
            "keys": c.key_dim**-0.5,
            "values": c.value_dim**-0.5,
            "mlp.down.weight": (states * c.rank) ** -0.5,
            "mlp.up.weight": 0.0,
        }
        tensors = self.tensors()
        tensors["norm.weight"].fill_(1)
        for name, std in deviations.items():
            nn.init.normal_(tensors[name], std=std)
        tensors["mlp.down.weight"].unflatten(-1, (states, c.rank + 1))[..., c.rank].zero_()

    def reader(self) -> Reader:
        """The forward with the parameters as they are now."""
        return Reader(self.config, self.tensors())

    def save(self, folder: Path) -> None:
        """Into a drafter's folder; float32, as it is small and reads float32 states."""
        save_reader(folder, self.config, self.tensors())


class Seats:
    """Anchors at `places` [A] (on the host, ascending) as a row's: as many per row as the fullest
    one has, some of them taken twice.

    places [A], rows [B * m] and seats [A], on the device: each anchor's place, whose seat in a row
    is which anchor's, and each anchor's seat.
    """

    def __init__(self, places: Tensor, rows: int, length: int, device: torch.device) -> None:
        row = places // length
        counts = torch.bincount(row, minlength=rows)
        starts, self.per_row = counts.cumsum(0) - counts, int(counts.max())
        seats = row * self.per_row + torch.arange(len(places)) - starts[row]
        taken = torch.zeros(rows * self.per_row, dtype=torch.int64)
        taken[seats] = torch.arange(len(places))
        parts = sent(torch.cat([places, seats, taken]), device)
        self.places, self.seats, self.taken = parts.split([len(places), len(places), len(taken)])

    def seated(self, x: Tensor) -> Tensor:
        """x [A, n, ...] by anchor -> [B, m * n, ...] by row."""
        rows = x.index_select(0, self.taken).unflatten(0, (-1, self.per_row))
        found: Tensor = rows.flatten(1, 2)
        return found

    def by_anchor(self, x: Tensor, n: int) -> Tensor:
        """The way back of `seated`, from blocks of n."""
        blocks: Tensor = x.unflatten(1, (-1, n)).flatten(0, 1)
        return blocks.index_select(0, self.seats)


def _attend(
    config: BlockConfig, batch: BlockBatch, seats: Seats, context: list[KeysValues]
) -> Attend:
    """Attention of many blocks, all rows at once: places before a block's anchor in its document,
    and the block itself."""
    masks = dict[tuple[int | None, bool], Tensor]()
    shape, n = batch.tokens.shape, config.block_size

    def attend(layer: int, q: Tensor, own: KeysValues) -> Tensor:
        kind = config.windows[layer], config.causal(layer)
        if kind not in masks:
            masks[kind] = _seen(batch, seats, n, *kind)
        q, *own_rows = (seats.seated(x.unflatten(0, (-1, n))) for x in (q, *own))
        past = (x.unflatten(0, shape) for x in context[layer])
        # A row's blocks lie behind its places: what no block may see of another is masked.
        k, v = (torch.cat(x, dim=1) for x in zip(past, own_rows, strict=True))
        q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(KERNELS):
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=masks[kind], enable_gqa=grouped)
        return seats.by_anchor(o.transpose(1, 2), n).flatten(2).flatten(0, 1)

    return attend


def _seen(batch: BlockBatch, seats: Seats, n: int, window: int | None, causal: bool) -> Tensor:
    """[B, 1, m * n, T + m * n] bool: which places and blocks' positions a row's blocks see."""
    rows, m = batch.tokens.shape[0], seats.per_row
    device = batch.tokens.device
    anchors = seats.places[seats.taken]
    segment, start = (
        x.flatten()[anchors].unflatten(0, (rows, m, 1)) for x in (batch.segments, batch.positions)
    )
    segments, positions = batch.segments[:, None], batch.positions[:, None]
    past = (segments == segment) & (positions < start)  # [B, m, T]
    block = torch.arange(m, device=device).repeat_interleave(n)
    own = (block == torch.arange(m, device=device)[:, None]).expand(rows, -1, -1)
    inside = torch.cat([past, own], dim=-1).repeat_interleave(n, dim=1)
    query = (start + torch.arange(n, device=device)).flatten(1)
    key = torch.cat([batch.positions, query], dim=-1)
    mask = visible(query, key, window=window, causal=causal)
    return (inside if mask is None else inside & mask).unsqueeze(1)
