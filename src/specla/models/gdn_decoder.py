# SPDX-License-Identifier: Apache-2.0
"""The decoder stack of a pure Gated DeltaNet model: one forward for prefill and verify.

    x <- x + o_proj(gated_norm(delta_rule(conv(in_proj(norm(x))))))
    x <- x + down(swiglu(gate_up(norm(x))))

Rows are nodes (verify) or prompt tokens (prefill); everything outside the convolution and the
recurrence acts on one row at a time. No positions anywhere: only the parent chain matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from specla.config import prefill_kernels
from specla.errors import ExactnessUnavailable, InvalidCheckpoint
from specla.models.features import Features
from specla.models.gdn_weights import BlockWeights, DecoderWeights
from specla.ops import conv, gdn
from specla.ops.contract import DevicePlan, LayerState, RecurrentShape, RoundPlan
from specla.ops.gdn import reference
from specla.ops.linear import Linear
from specla.ops.norm import cast, gated_rms_norm, rms_norm, swiglu
from specla.state import State
from specla.topology.tree import DraftTree

if TYPE_CHECKING:
    from specla.models.gdn_fused import FusedDecoder
    from specla.models.gdn_prefill import ChunkDecoder

Convolve = Callable[[Tensor, Tensor], Tensor]
Recur = Callable[[gdn.Inputs], Tensor]
MAX_DEVICE_NODES = 64  # of one tree in the GPU kernels


class Block:
    """One layer's forward."""

    def __init__(
        self, w: BlockWeights, shape: RecurrentShape, *, eps: float, gated: bool, beta_scale: float
    ) -> None:
        self._w, self._shape, self._eps = w, shape, eps
        self._gated, self._beta_scale = gated, beta_scale
        self.linears = {
            "in_proj": Linear(w.in_proj),
            "o_proj": Linear(w.o_proj),
            "gate_up": Linear(w.gate_up),
            "down": Linear(w.down),
        }

    def __call__(self, x: Tensor, convolve: Convolve, recur: Recur) -> Tensor:
        """x [M, D] -> [M, D]."""
        h = rms_norm(x, self._w.attn_norm, self._eps)
        return self.feed_forward(x + self.mix(h, convolve, recur))

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [M, D] plus its MLP's output."""
        hidden = self.linears["gate_up"](rms_norm(x, self._w.mlp_norm, self._eps))
        return x + self.linears["down"](swiglu(hidden))

    def mix(self, x: Tensor, convolve: Convolve, recur: Recur) -> Tensor:
        """The token mixer over normed inputs x [M, width of in_proj] -> [M, D]."""
        w, s = self._w, self._shape
        heads, values = s.num_value_heads, s.num_value_heads * s.value_dim
        sizes = [s.conv_channels, values if self._gated else 0, heads, heads]
        qkv, gate, a, b = self.linears["in_proj"](x).split_with_sizes(sizes, -1)
        x_in = gdn.inputs(
            convolve(qkv, w.conv),
            a,
            b,
            A=w.A,
            dt_bias=w.dt_bias,
            shape=s,
            beta_scale=self._beta_scale,
        )
        z = gate.unflatten(-1, (heads, s.value_dim)) if self._gated else None
        o = gated_rms_norm(recur(x_in), z, w.o_norm, self._eps)
        return self.linears["o_proj"](cast(o, x.dtype).flatten(1))


class Decoder:
    """Embedding, blocks, final norm, head.

    Implements `prefill`, `verify` and `check_rows` of the model contract.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        shape: RecurrentShape,
        *,
        eps: float,
        gated: bool = True,
        beta_scale: float = 1.0,
    ) -> None:
        self._weights, self._shape, self._eps = weights, shape, eps
        self._beta_scale = beta_scale
        self.blocks: list[Block] = []
        self._fused: FusedDecoder | None = None
        self._chunks: ChunkDecoder | None = None
        if weights.embeddings.is_cuda:
            self._use_gpu(gated, beta_scale)
        else:
            self.blocks = [
                Block(w, shape, eps=eps, gated=gated, beta_scale=beta_scale)
                for w in weights.blocks
            ]
            self.head = Linear(weights.head)

    def _use_gpu(self, gated: bool, beta_scale: float) -> None:
        """Kernels in the blocks' place. Triton is imported where there is a GPU only."""
        from specla.models.gdn_fused import FusedDecoder
        from specla.models.gdn_prefill import ChunkDecoder

        given, eps = self._weights.embeddings, self._eps
        pdl = torch.cuda.get_device_capability(given.device) >= (9, 0)
        kernels, _ = prefill_kernels(str(given.dtype).removeprefix("torch."))
        self._fused = FusedDecoder(
            self._weights, self._shape, eps=eps, gated=gated, beta_scale=beta_scale, pdl=pdl
        )
        # Packed for the kernels: what it was made from is not kept.
        self._weights = self._fused.weights
        self._chunks = ChunkDecoder(
            self._weights, self._shape, eps=eps, gated=gated, beta_scale=beta_scale,
            kernels=kernels,
        )  # fmt: skip

    def kernels(self, mode: str) -> tuple[str, ...]:
        """What may verify a round (see the model contract)."""
        if self._fused is None:
            return ("reference",)
        return ("walk", "closed") if mode == "fast" else ("walk",)

    def default_kernel(self, rows: int, nodes: int, mode: str) -> str:
        """What does, where nobody has measured (see the model contract)."""
        if self._fused is None or mode != "fast":
            return self.kernels(mode)[0]
        return self._fused.default_kernel(rows, nodes)

    def reserve(self, max_rows: int) -> None:
        """Room for rounds of `max_rows` flat nodes (see the model contract)."""
        if self._fused is not None:
            self._fused.reserve(max_rows)

    @property
    def embeddings(self) -> Tensor:
        """[vocab, D], for drafters that share it."""
        return self._weights.embeddings

    @property
    def head_weight(self) -> Tensor:
        """[vocab, D], for drafters that share it."""
        return self._weights.head

    @property
    def final_norm(self) -> Tensor:
        """[D], the norm before the head."""
        return self._weights.norm

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Logits [M, vocab] of last-layer outputs x [M, D] (see the model contract)."""
        return linear(rms_norm(x, self._weights.norm, self._eps), self._weights.head).float()

    @torch.inference_mode()
    def recurrence_inputs(self, layer: int, x: Tensor, same: Tensor) -> gdn.Inputs:
        """What a layer's recurrence reads of texts, end to end (see the model contract)."""
        w, s = self._weights.blocks[layer], self._shape
        y = linear(rms_norm(x, w.attn_norm, self._eps), w.in_proj)
        a, b = y[:, -2 * s.num_value_heads :].chunk(2, dim=-1)
        qkv = conv.packed(y[:, : s.conv_channels], w.conv, same)
        return gdn.inputs(
            qkv, a, b, A=w.A, dt_bias=w.dt_bias, shape=s, beta_scale=self._beta_scale
        )

    def side_by_side(self) -> AbstractContextManager[None]:
        """Prompts that need not wait for each other (see the model contract)."""
        return nullcontext() if self._chunks is None else self._chunks.side_by_side()

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[int], slot: int, state: State, features: Features | None = None
    ) -> None:
        """Advance `slot` over one chunk of its prompt (see the model contract)."""
        if self._chunks is not None:
            self._chunks(tokens, slot, state, features)
            return
        device = self._weights.embeddings.device
        x = self._weights.embeddings[torch.tensor(tokens, dtype=torch.int64, device=device)]
        for i, block in enumerate(self.blocks):
            layer, tail = state.layers[i], state.tail(i, slot)
            x = block(x, partial(_prefill_conv, tail), partial(_prefill_recur, layer, slot))
            if features is not None:
                features.take(i, x)
        state.advance(slot, len(tokens))

    @torch.inference_mode()
    def verify(
        self,
        plan: RoundPlan | DevicePlan,
        state: State,
        features: Features | None = None,
    ) -> Tensor:
        """Logits [M, vocab] in compute dtype of every node of every tree."""
        if isinstance(plan, DevicePlan):
            assert self._fused is not None
            kernel = plan.kernel or self.kernels("exact")[0]
            return self._fused(plan.round, state, features, kernel=kernel)
        x = self._weights.embeddings[plan.tokens]
        for i, (block, layer) in enumerate(zip(self.blocks, state.layers, strict=True)):
            x = block(
                x,
                partial(conv.verify, layer, plan),
                partial(reference.verify, layer, plan),
            )
            if features is not None:
                features.take(i, x)
        logits = self.head(rms_norm(x, self._weights.norm, self._eps))
        return logits if logits.dtype == torch.float64 else logits.float()

    def check_rows(self, max_rows: int) -> None:
        """Make every product row-invariant, then try the whole forward (see the contract)."""
        if self._fused is None:
            for i, block in enumerate(self.blocks):
                for name, linear in block.linears.items():
                    linear.check(f"layers.{i}.{name}")
            self.head.check("head")
        self._check_forward(max_rows)

    def _check_forward(self, max_rows: int) -> None:
        """One node alone and as a leaf of a star must have the same logits, bit for bit."""
        leaves = min(max_rows, self._weights.head.shape[0] - 1)
        if self._fused is not None:
            leaves = min(leaves, MAX_DEVICE_NODES - 1)
            self.reserve(2 * MAX_DEVICE_NODES)
        state = State(
            self._shape,
            num_slots=2,
            max_nodes=leaves + 1,
            dtype=self._weights.embeddings.dtype,
            device=self._weights.embeddings.device,
        )
        star = DraftTree(tuple(range(leaves + 1)), (-1,) + (0,) * leaves)
        slots = [state.acquire(), state.acquire()]
        if self._chunks is not None:
            self._check_prefill(state, slots)
        plan = state.begin(slots, [star, star])
        many = self.verify(plan, state).clone()
        for leaf in {1, leaves // 2 + 1, leaves}:
            slot = slots[0]
            state.reset(slot)
            chain = DraftTree((0, leaf), (-1, 0))
            alone = self.verify(state.begin([slot], [chain]), state)
            _require_finite(alone[1], "logits")
            for at in (leaf, plan.offsets[1] + leaf):
                if not torch.equal(alone[1], many[at]):
                    raise ExactnessUnavailable(
                        "exact mode needs a forward whose bits do not depend on row count; the "
                        f"logits of one node differ between 2 and {len(many)} rows although "
                        "every product agrees; use mode plain without a drafter"
                    )

    def _check_prefill(self, state: State, slots: Sequence[int]) -> None:
        """The same chunk twice must leave the same bits. Also compiles the kernels."""
        for slot in slots:
            self.prefill([0, 1, 0], slot, state)
            for layer in state.layers:
                _require_finite(layer.S[slot], "states")
        one, two = slots
        if not all(
            torch.equal(stored[one], stored[two])
            for layer in state.layers
            for stored in (layer.S, layer.tail)
        ):
            raise ExactnessUnavailable(
                "exact mode needs prompts whose state has the same bits every time; prefilling "
                "3 tokens twice gave two states; use mode plain without a drafter"
            )
        for slot in slots:
            state.reset(slot)


def _require_finite(x: Tensor, what: str) -> None:
    if not x.isfinite().all():
        raise InvalidCheckpoint(
            f"the weights must give finite {what}, got NaN or infinities over two tokens; look "
            "for them in the checkpoint, or load it in a wider dtype"
        )


def _prefill_conv(tail: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    y, tail[:] = conv.prefill(x, weight, tail)
    return y


def _prefill_recur(layer: LayerState, slot: int, x: gdn.Inputs) -> Tensor:
    o, layer.S[slot] = reference.prefill(layer.S[slot], x)
    return o
