# SPDX-License-Identifier: Apache-2.0
"""The state reader on a GPU: `reader` over fixed addresses.

`StateReads` projects what is committed, by kernels that find the rows' logs through the device's
own integers. `DeviceReader` is what follows in a chain of launches, between the norm of the last
layer's MLP and the MLP: norm, query, ask, down + SiLU, up, add.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specla.drafters import triton_reader as kernels
from specla.drafters.device_chain import Chain
from specla.drafters.reader import PROJECTIONS, Reader, Reading
from specla.ops import rows
from specla.ops.contract import DeviceRound
from specla.ops.gemm import GROUP, PackedLinear, pack_swiglu
from specla.state import State


class StateReads:
    """What `Reader.read` gives, of up to `num_rows` rows of a round on the device."""

    def __init__(self, reader: Reader, state: State, num_rows: int) -> None:
        self.config = c = reader.config
        self._reader, self._capacity = reader, state.log_capacity
        self._layers = [state.layers[layer] for layer in c.state_layers]
        self._keys, self._values = (reader.weights[name].contiguous() for name in PROJECTIONS)
        squares = len(self._layers) * num_rows * c.num_heads * kernels.num_tiles(c.value_dim)
        self._flat = [self._keys.new_zeros(squares * n) for n in (c.rank**2, 1)]

    @property
    def state_bytes(self) -> int:
        """Of one row's states, their logs aside."""
        return sum(layer.S[0].nbytes for layer in self._layers)

    def parts(self, num_rows: int) -> kernels.Parts:
        """Of the first rows, all layers."""
        c, tiles = self.config, kernels.num_tiles(self.config.value_dim)
        size = torch.Size((len(self._layers), num_rows, c.num_heads, tiles))
        R, square = self._flat
        matrices = R[: size.numel() * c.rank**2].view(*size, c.rank, c.rank)
        return kernels.Parts(matrices, square[: size.numel()].view(size))

    def __call__(self, rnd: DeviceRound, size: Tensor, *, pdl: bool = False) -> None:
        """See `triton_reader.read`; a launch per layer that is read."""
        parts = self.parts(len(size))
        for i, layer in enumerate(self._layers):
            mine = kernels.Parts(*(x[i] for x in parts))
            kernels.read(
                layer, rnd, size, self._keys[i], self._values[i], mine,
                log_capacity=self._capacity, pdl=pdl,
            )  # fmt: skip

    def reading(self, num_rows: int) -> Reading:
        """What the last call came to."""
        R, square = (x.sum(3).transpose(0, 1) for x in self.parts(num_rows))
        return self._reader.normed(R, square)


class DeviceReader(Chain):
    """A reader's launches after `read`, for up to `most` positions of all rows."""

    def __init__(self, reader: Reader, read: StateReads, most: int) -> None:
        w = reader.weights
        super().__init__(w["mlp.up.weight"], reader.config.norm_eps)
        self.read, self._norm = read, w["norm.weight"]
        self._query = PackedLinear(w["query.weight"].contiguous(), "plain", pdl=self._pdl)
        self._down, self._up = self._mlp_products(w["mlp.down.weight"], w["mlp.up.weight"])
        self._serve_few([self._query, self._down, self._up])

        def zeros(width: int) -> Tensor:
            return w["mlp.up.weight"].new_zeros(most, width)

        self._x, self._z = zeros(reader.config.hidden_size), zeros(len(w["query.weight"]))
        self._f, self._hidden = zeros(self._down.weight.shape[1]), zeros(self._up.weight.shape[1])
        # What the up half of `down` looks at.
        self._f[:, w["mlp.down.weight"].shape[1]] = 1
        self.partials = torch.zeros(self._up.workspace_elements(most), device=self._x.device)

    def _mlp_products(self, down: Tensor, up: Tensor) -> tuple[PackedLinear, PackedLinear]:
        """silu(down f) as a SwiGLU of (f, 1), padded to the products' sizes; and what follows."""
        outputs, inputs = down.shape
        more = -outputs % GROUP
        gate = pad(down, (0, GROUP - inputs % GROUP, 0, more))
        one = torch.zeros_like(gate)
        one[:, inputs] = 1
        return (
            PackedLinear(pack_swiglu(torch.cat([gate, one])), "swiglu", pdl=self._pdl),
            PackedLinear(pad(up, (0, more)).contiguous(), "partials", pdl=self._pdl),
        )

    @property
    def round_bytes(self) -> int:
        """Of what a round's launches read: weights, and one row's states."""
        linears = (self._query, self._down, self._up)
        read = sum(x.weight.numel() * x.weight.element_size() for x in linears)
        return read + self.read.state_bytes

    def __call__(self, h: Tensor, size: Tensor) -> None:
        """h [B * n, D] += what the reader says to it, of rows with size [B] int32 not 0: after
        `read`, for as many rows."""
        x, z, f, hidden = (t[: len(h)] for t in (self._x, self._z, self._f, self._hidden))
        self._added(h, x, 0)
        self._query(x, z)
        c = self.read.config
        kernels.ask(
            self.read.parts(len(size)), size, z, f,
            key_dim=c.key_dim, value_dim=c.value_dim, pdl=self._pdl,
        )  # fmt: skip
        self._down(f, hidden)
        self._up(hidden, self.partials)
        self._added(h, x, self._up.num_partials(len(h)))

    def _added(self, h: Tensor, x: Tensor, num_partials: int) -> None:
        """h += partials, x = h normed."""
        rows.add_partials_norm(
            h, self.partials, self._norm, x, self._eps,
            num_partials=num_partials, max_partials=self._up.max_partials if num_partials else 0,
            pdl=self._pdl, early=self._early(len(h)),
        )  # fmt: skip
