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
from torch import Tensor, nn

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
from specla.train.block_batches import BlockBatch


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
        """What predicts the drafts of blocks with anchors at `places` (ascending): [A,
        num_drafts, D]."""
        where = batch.positions.flatten().clamp(min=0)
        context = model.context(batch.features.flatten(0, 1), where)
        x = model.inputs(batch.tokens.flatten()[places]).float()
        offsets = torch.arange(self.config.block_size, device=places.device)
        positions = (where[places][:, None] + offsets).flatten()
        attend = _attend(self.config, batch, places, context)
        return model.drafting(model.outputs(x, positions, attend, inject))

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
        """Projections of unit gain; the last matrix is zero, so that training starts at the
        drafter without a reader."""
        for name, p in self.named_parameters():
            if name == "norm.weight":
                p.fill_(1)
            elif name == "mlp.up.weight":
                p.zero_()
            else:
                nn.init.normal_(p, std=p.shape[-2 if name == "values" else -1] ** -0.5)

    def reader(self) -> Reader:
        """The forward with the parameters as they are now."""
        return Reader(self.config, self.tensors())

    def save(self, folder: Path) -> None:
        """Into a drafter's folder; float32, as it is small and reads float32 states."""
        save_reader(folder, self.config, self.tensors())


def _attend(
    config: BlockConfig, batch: BlockBatch, places: Tensor, context: list[KeysValues]
) -> Attend:
    """Attention of many blocks, row by row: places before a block's anchor in its document, and
    the block itself."""
    rows, length, n = *batch.tokens.shape, config.block_size
    counts = torch.bincount(places // length, minlength=rows).tolist()
    spans = list(zip(range(rows), places.split(counts), strict=True))
    offsets = torch.arange(n, device=places.device)

    def seen(layer: int, row: int, at: Tensor) -> Tensor:
        """[A, n, T + n] bool."""
        segments, positions = batch.segments[row], batch.positions[row]
        t = at - row * length
        start = positions[t][:, None]
        before = (segments == segments[t][:, None]) & (positions < start)
        key = torch.cat([positions.expand(len(t), -1), start + offsets], dim=1)
        inside = torch.cat([before, torch.ones_like(before[:, :n])], dim=1).unsqueeze(1)
        mask = visible(
            start + offsets, key, window=config.windows[layer], causal=config.causal(layer)
        )
        return inside.expand(-1, n, -1) if mask is None else inside & mask

    def attend(layer: int, q: Tensor, own: KeysValues) -> Tensor:
        parts = (x.unflatten(0, (-1, n)).split(counts) for x in (q, *own))
        outputs = []
        for (row, at), queries, k, v in zip(spans, *parts, strict=True):
            span = slice(row * length, (row + 1) * length)
            past = KeysValues(*(x[span] for x in context[layer]))
            outputs.append(_blocks(queries, past, KeysValues(k, v), seen(layer, row, at)))
        return torch.cat(outputs).flatten(0, 1)

    return attend


def _blocks(q: Tensor, past: KeysValues, own: KeysValues, seen: Tensor) -> Tensor:
    """q [A, n, Q, d] over past [T, H, d] and own [A, n, H, d], seen [A, n, T + n] -> [A, n, Q d].
    The past is not copied per block."""
    groups = q.shape[2] // past.k.shape[1]
    q = q.unflatten(2, (-1, groups))
    scores = torch.cat(
        [
            torch.einsum("anhgd,thd->ahgnt", q, past.k),
            torch.einsum("anhgd,amhd->ahgnm", q, own.k),
        ],
        dim=-1,
    ).float() / math.sqrt(q.shape[-1])
    law = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).to(q.dtype)
    before, inside = law.split([len(past.k), own.k.shape[1]], dim=-1)
    o = torch.einsum("ahgnt,thd->anhgd", before, past.v.to(q.dtype))
    o = o + torch.einsum("ahgnm,amhd->anhgd", inside, own.v.to(q.dtype))
    return o.flatten(2)
