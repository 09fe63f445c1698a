# SPDX-License-Identifier: Apache-2.0
"""What drafters that launch in a round's graph have in common: buffers at fixed addresses, and the
products and residuals of a chain of dependent launches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specla.drafters import triton_grow as growing
from specla.models.gdn_fused import is_hopper, stream_linear
from specla.ops import gemm, rows
from specla.ops.gemm import PackedLinear
from specla.state.rounds import bucket


class Pool:
    """Everything that launches write, allocated once. A buffer is a flat run of elements; each
    use takes its first ones in the shape it needs.

    Args:
        num_rows, num_nodes: most rows, and nodes of a tree.
        width: most nodes of a frontier.
        num_logits: most rows of logits that are looked at at once.
        vocab, top_k: tokens that can be drafted, and children of a node.
    """

    def __init__(
        self, *, num_rows: int, num_nodes: int, width: int, num_logits: int, vocab: int,
        top_k: int, device: torch.device,
    ) -> None:  # fmt: skip
        B, N, self._rows, self._device = num_rows, bucket(num_nodes), num_rows, device
        self._flat: dict[str, Tensor] = {}
        self.add(
            torch.int32, count=3 * B, **{f"tree{i}": B * (3 * N + width + 1) for i in range(3)}
        )
        self.add(torch.float64, best_score=B, **{f"score{i}": B * N for i in range(3)})
        self._best = growing.Best.allocate(num_logits, vocab, min(top_k, vocab), device)

    def add(self, dtype: torch.dtype, **sizes: int) -> None:
        """Zeros by name, elements of each."""
        for name, size in sizes.items():
            self._flat[name] = torch.zeros(size, dtype=dtype, device=self._device)

    def take(self, name: str, *size: int) -> Tensor:
        """A buffer's first elements."""
        return self._flat[name][: torch.Size(size).numel()].view(size)

    def best(self, num_flat: int) -> growing.Best:
        """For so many rows of logits."""
        return growing.Best(*(x[:num_flat] for x in self._best))

    def grown(self, i: int, num_rows: int, num_nodes: int, width: int) -> growing.Grown:
        """One of three results of a level; the first is the root's alone."""
        size = num_rows * num_nodes
        words = self.take(f"tree{i}", 3 * size + num_rows * (width + 1))
        tokens, parents, spine = words[: 3 * size].view(3, num_rows, num_nodes)
        return growing.Grown(
            tokens=tokens,
            parents=parents,
            num_nodes=words[3 * size : 3 * size + num_rows],
            score=self.take(f"score{i}", num_rows, num_nodes),
            spine=spine,
            place=words[3 * size + num_rows :].view(num_rows, width),
            count=self.take("count", 3, self._rows)[i, :num_rows],
        )


class Chain:
    """Products of a drafter and what is added between them.

    like: one of its weights. eps: of its norms. partials: float32, as large as the largest sum of
    partial products; set once the products are there.
    """

    partials: Tensor

    def __init__(self, like: Tensor, eps: float) -> None:
        self._pdl, self._eps = is_hopper(like), eps
        self._stream_rows = 0
        """Most rows that `ops.gemm_stream` and `ops.gemm_wide` serve."""

    def _add(self, x: Tensor | None, linear: PackedLinear, norm: Tensor, h: Tensor) -> None:
        """What `linear` left in `partials`; see `rows.add_partials_norm`."""
        rows.add_partials_norm(
            x, self.partials, norm, h, self._eps,
            num_partials=linear.num_partials(h.shape[0]), max_partials=linear.max_partials,
            pdl=self._pdl, early=self._early(h.shape[0]),
        )  # fmt: skip

    def _mlp(
        self, x: Tensor, h: Tensor, hidden: Tensor, gate_up: PackedLinear, down: PackedLinear,
        norm: Tensor,
    ) -> None:  # fmt: skip
        """Of h, added to x; h is then x normed."""
        gate_up(h, hidden)
        down(hidden, self.partials)
        self._add(x, down, norm, h)

    def _serve_few(self, linears: Iterable[PackedLinear]) -> None:
        """On Hopper, serve few rows by `ops.gemm_stream`, as the target does."""
        if not self._pdl:
            return
        from specla.ops import gemm_stream as stream

        for linear in linears:
            stream_linear(linear)
        self._stream_rows = max(stream.MAX_ROWS, gemm.WIDE_ROWS)

    def _early(self, num_flat: int) -> bool:
        return num_flat <= self._stream_rows
