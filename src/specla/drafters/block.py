# SPDX-License-Identifier: Apache-2.0
"""Block: a trained drafter that guesses a whole block in one pass over the target's outputs.

Each round the committed tokens' outputs become keys and values (`block_context`); then the anchor
and its masks run once through the layers (`block_model`) and every position has its base logits.
Without a Markov head they are laws of their own, and the tree is the best nodes over them
(`marginals`). With one, a node's law is that of its position corrected for its parent's token:
exact along every path, so the tree grows level by level (`grow`), a product per level. A state
reader lets the positions ask the target's committed states as well (`reader`).

Source: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147), DDTree, ReaDy (arXiv 2610.20503).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specla.drafters.agreement import check_tokenizer
from specla.drafters.base import Drafter, DrafterInfo, DraftRow, Observation
from specla.drafters.block_config import check_target
from specla.drafters.block_context import BlockContext
from specla.drafters.block_files import (
    has_reader,
    load_reader,
    load_weights,
    read_config,
    read_reader_config,
)
from specla.drafters.block_model import BlockModel, Inject
from specla.drafters.calibration import survival
from specla.drafters.grow import Growing
from specla.drafters.marginals import best_first
from specla.drafters.options import (
    described,
    digest,
    require,
    require_flag,
    require_int,
    require_number,
)
from specla.drafters.reader import Reader, check_states
from specla.errors import ConfigError
from specla.models.base import TargetModel
from specla.ops.transfer import ints, sent
from specla.state import State
from specla.topology.tree import DraftTree


class BlockDrafter:
    """A tree over one block.

    Args:
        path: folder of the drafter's checkpoint.
        top_k: children per node (with a Markov head also nodes expanded per level); 1 drafts a
            chain.
        max_depth: deepest draft; None: the block.
        tau: keep a node iff its log-probability is within tau of the best of depth 1.
        spine: keep the likeliest chain before anything else, so that a tree never accepts less
            than the chain.
        window: how many tokens back, itself included, a position sees; None leaves it to the
            checkpoint.
        min_survival: cut the block where the confidence head thinks that the likeliest chain has
            come to its end with a higher probability; 0 never cuts.
        reader: read the target's states; None: if the checkpoint has a reader.
        on_device: draft inside the round's graph (`block_device`), which needs a GPU; None: there,
            if its kernels can do it.
        longest: there, most tokens of a row that it drafts for.

    Raises:
        ConfigError: an option is out of range or asks for what the checkpoint does not have, or
            there is no drafter at `path`.
        InvalidCheckpoint: its config.json cannot be used.
    """

    def __init__(
        self,
        *,
        path: str,
        top_k: int = 4,
        max_depth: int | None = None,
        tau: float = 6.0,
        spine: bool = True,
        window: int | None = None,
        min_survival: float = 0.0,
        reader: bool | None = None,
        on_device: bool | None = None,
        longest: int = 4096,
    ) -> None:
        if on_device is not None:
            require_flag("on_device", on_device)
        require_int("longest", longest, 1, 1 << 20)
        self._on_device, self._longest = on_device, longest
        self._options = {
            **{"path": path, "top_k": top_k, "max_depth": max_depth, "tau": tau, "spine": spine},
            **{"window": window, "min_survival": min_survival, "reader": reader},
            "longest": longest,
        }
        self._folder = Path(path)
        self.config = config = read_config(self._folder)
        depth = config.num_drafts if max_depth is None else max_depth
        require_int("top_k", top_k, 1, 64)
        require_int("max_depth", depth, 1, config.num_drafts)
        require_number("tau", tau, 0, 1e9)
        require_flag("spine", spine)
        if window is not None:
            require_int("window", window, 1, 1 << 30)
        require_number("min_survival", min_survival, 0, 1)
        confident = config.confidence_head or not min_survival
        require(confident, "min_survival", "0 without a confidence head", min_survival)
        self.feature_layers = config.target_layer_ids
        self._top_k, self._tau, self._spine, self._window = top_k, tau, spine, window
        self._min_survival = min_survival
        if reader is not None:
            require_flag("reader", reader)
        reads = has_reader(self._folder) if reader is None else reader
        self._reader_config = read_reader_config(self._folder) if reads else None
        self.info = DrafterInfo(
            name="block+reader" if reads else "block",
            max_depth=depth,
            may_return_nothing=min_survival > 0,
            variant=described(
                checkpoint=digest(config, self._reader_config),
                top_k=top_k,
                max_depth=depth,
                tau=tau,
                spine=spine,
                window=window,
                min_survival=min_survival,
            ),
        )
        self._model: BlockModel | None = None
        self._reader: Reader | None = None
        self._state: State | None = None

    def check_tokenizer(self, digest: str) -> None:
        """Refuse another tokenizer than the drafter was trained with.

        Raises:
            ConfigError: the hashes differ.
        """
        check_tokenizer(self.config.tokenizer_hash, digest, self._folder)

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> Drafter:
        """See `TwofoldDrafter`."""
        from specla.drafters.block_graph import GraphBlock

        why = None
        try:
            if self._on_device is not False:
                # Triton is imported where there is a GPU only.
                from specla.drafters.block_device import DeviceBlock

                made = DeviceBlock(**self._options)
                made.check_room(num_slots=num_slots, max_nodes=max_nodes)
                return made
        except ConfigError as error:
            if self._on_device:
                raise
            why = f"trees are grown by the host: {error}"
        try:
            graphs = GraphBlock(**self._options)
        except ConfigError as error:
            self.info = replace(self.info, fallback=f"drafted by launches of the host: {error}")
            return self
        graphs.info = replace(graphs.info, fallback=why)
        return graphs

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Load the weights beside a target's (see `FeatureDrafter`)."""
        if self._on_device:
            raise ConfigError("on_device=True needs a GPU; leave it out, or use --device cuda")
        check_target(self.config, model.info, str(self._folder))
        self._model = BlockModel(self.config, load_weights(self._folder, self.config, model))
        if (config := self._reader_config) is not None:
            check_states(config, model.info, str(self._folder))
            self._reader = Reader(config, load_reader(self._folder, config, model))
        self._context = BlockContext(self.config, window=self._window)
        if exact and model.device.type == "cpu":
            self._model.check_rows()
            if self._reader is not None:
                self._reader.check_rows()

    def attach(self, state: State) -> None:
        """The target's states, for the reader (see `StateDrafter`)."""
        self._state = state

    @property
    def model(self) -> BlockModel:
        """The layers, once bound."""
        assert self._model is not None, "bind() first"
        return self._model

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, with log-probabilities."""
        wanted = [row for row in rows if row.max_drafts]
        trees = dict(zip([row.slot for row in wanted], self._propose(wanted), strict=True))
        return [trees.get(row.slot) or DraftTree.root(row.tokens[-1]) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to do: `feed` brings what counts."""

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk of the prompt (see `FeatureDrafter`)."""
        self._remember([slot], [len(features)], features)

    @torch.inference_mode()
    def feed(self, seen: Sequence[Observation], features: Tensor) -> None:
        """Remember the accepted tokens."""
        self._remember([one.slot for one in seen], [len(one.emitted) for one in seen], features)

    def fork(self, slot: int, to: int) -> None:
        """Copy a slot that has been prefilled."""
        self._context.copy(slot, to)

    def reset(self, slot: int) -> None:
        """Forget a slot."""
        self._context.reset(slot)

    def _remember(self, slots: Sequence[int], counts: Sequence[int], features: Tensor) -> None:
        positions = sent(self._context.positions(slots, counts), features.device)
        end = max(self._context.length(slot) + n for slot, n in zip(slots, counts, strict=True))
        self._context.append(slots, counts, self.model.context(features, positions, end=end))

    def _propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        if not rows:
            return []
        (anchors,) = self._ints([row.tokens[-1] for row in rows])
        h, base = self._bases([row.slot for row in rows], anchors)
        depths = self._depths(h, base, anchors)
        if not self.config.markov_rank:
            return self._over_marginals(rows, depths, base)
        trees = [self._seed(row, depth) for row, depth in zip(rows, depths, strict=True)]
        level = [(b, 0) for b, depth in enumerate(depths) if depth]
        for d in range(self.info.max_depth):
            if level:
                self._expand(trees, level, base, d)
                level = [(b, node) for b, _ in enumerate(trees) for node in trees[b].frontier()]
        return [tree.tree() for tree in trees]

    def _bases(self, slots: Sequence[int], anchors: Tensor) -> tuple[Tensor, Tensor]:
        """What predicts the drafts [n, num_drafts, D], and base logits [n, max_depth, vocab]."""
        h = self._outputs(slots, anchors)
        return h, self.model.logits(h[:, : self.info.max_depth])

    def _outputs(self, slots: Sequence[int], anchors: Tensor) -> Tensor:
        """What predicts the drafts [n, num_drafts, D]."""
        size, lengths = self.config.block_size, [self._context.length(slot) for slot in slots]
        (starts,), end = self._ints(lengths), max(lengths) + size
        positions = (starts[:, None] + torch.arange(size, device=starts.device)).flatten()
        x = self.model.inputs(anchors)
        attend = self._context.attend(slots)
        inject = self._inject(slots)
        return self.model.drafting(self.model.outputs(x, positions, attend, inject, end=end))

    def _inject(self, slots: Sequence[int]) -> Inject | None:
        if self._reader is None:
            return None
        assert self._state is not None, "attach() first"
        return partial(self._reader.delta, reading=self._reader.read(self._state.committed, slots))

    def _depths(self, h: Tensor, base: Tensor, anchors: Tensor) -> list[int]:
        """How deep each row may draft."""
        count = base.shape[1]
        if not self._min_survival:
            return [count] * len(base)
        previous = [anchors]
        for d in range(count):
            previous.append(self._laws(base[:, d], previous[-1]).argmax(-1))
        logits = self.model.confidence(h[:, :count], torch.stack(previous[:-1], dim=1))
        alive = survival(logits, self.config.confidence_temperatures) >= self._min_survival
        depths: list[int] = alive.sum(-1).tolist()
        return depths

    def _laws(self, base: Tensor, previous: Tensor) -> Tensor:
        """Log-probabilities [n, vocab] of positions with base logits [n, vocab] after tokens
        previous [n]."""
        if self.config.markov_rank:
            base = base + self.model.correction(previous)
        return torch.log_softmax(base, dim=-1).clamp(max=0)

    def _over_marginals(
        self, rows: Sequence[DraftRow], depths: Sequence[int], base: Tensor
    ) -> list[DraftTree]:
        laws = torch.log_softmax(base, dim=-1).clamp(max=0)
        ids, values = _read(self._likeliest(laws))
        return [
            best_first(
                row.tokens[-1],
                [list(zip(*law, strict=True)) for law in zip(ids[b], values[b], strict=True)][
                    :depth
                ],
                max_drafts=row.max_drafts,
                tau=self._tau,
                spine=self._spine,
            )
            for b, (row, depth) in enumerate(zip(rows, depths, strict=True))
        ]

    def _seed(self, row: DraftRow, depth: int) -> Growing:
        return Growing(
            row.tokens[-1],
            top_k=self._top_k,
            max_depth=depth,
            max_drafts=row.max_drafts,
            tau=self._tau,
            spine=self._spine,
        )

    def _expand(
        self, trees: Sequence[Growing], level: Sequence[tuple[int, int]], base: Tensor, d: int
    ) -> None:
        """Give every node of a level its likeliest children, at position d of base [rows,
        max_depth, vocab]."""
        places, previous = self._ints(
            [b * base.shape[1] + d for b, _ in level],
            [trees[b].tokens[node] for b, node in level],
        )
        found = _read(self._children(base.flatten(0, 1), places, previous))
        for (b, node), tokens, values in zip(level, *found, strict=True):
            trees[b].add(node, tokens, values)

    def _children(self, base: Tensor, places: Tensor, previous: Tensor) -> Tensor:
        """As `_likeliest`, of rows `places` of base [m, vocab] after tokens `previous`."""
        return self._likeliest(self._laws(base.index_select(0, places), previous))

    def _likeliest(self, laws: Tensor) -> Tensor:
        """Tokens of laws [..., vocab] and their log-probabilities [2, ..., top_k]: a float64
        holds either, and the host reads them in one copy."""
        top = laws.topk(min(self._top_k, laws.shape[-1]), dim=-1)
        return torch.stack((top.indices.double(), top.values.double()))

    def _ints(self, *columns: Sequence[int]) -> Tensor:
        """int64 [columns, n], sent in one copy."""
        flat = [value for column in columns for value in column]
        return ints(flat, self.model.weights.fc.device).view(len(columns), -1)


def _read(likeliest: Tensor) -> tuple[list[Any], list[Any]]:
    """Tokens and log-probabilities as lists; waits for the device."""
    ids, values = likeliest.tolist()
    return _whole(ids), values


def _whole(numbers: Any) -> Any:
    """Nested lists of whole floats as of integers."""
    return [_whole(x) for x in numbers] if isinstance(numbers, list) else int(numbers)
