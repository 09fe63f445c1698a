# SPDX-License-Identifier: Apache-2.0
"""EAGLE: a trained layer that guesses from the target's own layer outputs.

Each round first re-encodes what was accepted, with the target's true features: these factors, and
no others, enter the drafter's log. From there a tree grows level by level, every node's feature
being the layer's own output at its parent (`eagle_model`); what it computes on the way is dropped
with the tree. Rows are drafted together and do not see each other.

Source: EAGLE-3 (arXiv 2503.01840), EAGLE-2 (arXiv 2406.16858) for the tree; SpecLA (arXiv
2607.16673) for pruning by tau. A recurrent mixer in the drafter is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specla.drafters.agreement import check_tokenizer
from specla.drafters.base import Drafter, DrafterInfo, DraftRow, Observation
from specla.drafters.eagle_config import check_target
from specla.drafters.eagle_files import load_weights, read_config
from specla.drafters.eagle_model import EagleModel, EagleWeights
from specla.drafters.grow import Growing
from specla.drafters.options import (
    described,
    digest,
    require_flag,
    require_int,
    require_number,
)
from specla.errors import ConfigError, KernelUnavailable
from specla.models.base import TargetModel
from specla.topology.tree import DraftTree

MANY_CALLS = 4
"""Of encoding: where more would be needed than that and than there are slots, a prompt's form, one
call per slot, takes less."""
MOST_WAITING = 1024
"""Tokens of a slot that are not encoded yet: their features take memory."""


MIN_SURVIVAL = 0.6
"""By the drafter's own word, which is worth less: the demo's is right in 30 % where it says 0.6.
On a CPU 0.6 to 0.8 were alike, and 4 % better than 0.2 over all texts."""


class EagleDrafter:
    """A tree from a trained drafter; nothing for a prompt of one token, which has no features.

    Args:
        path: folder of the drafter's checkpoint.
        top_k: children per node and nodes expanded per level; 1 drafts a chain.
        max_depth: deepest draft.
        tau: keep a node iff its log-probability is within tau of the best of depth 1.
        spine: keep the likeliest chain before anything else, so that a tree never accepts less
            than the chain.
        min_survival: expand a node only if the probability of its path is at least this; None:
            0.6, as a level takes about as long as verifying two nodes does. Inside the round's
            graph every level is launched, as with 0, so that a drafter with another one drafts on
            the host.
        on_device: draft inside the round's graph (`eagle_device`), which needs a GPU; None: there,
            if its kernels can do it.
        longest: there, most tokens of a row that it drafts for with mixer attention.

    Raises:
        ConfigError: an option is out of range, or there is no drafter at `path`.
        InvalidCheckpoint: its config.json cannot be used.
    """

    def __init__(
        self,
        *,
        path: str,
        top_k: int = 4,
        max_depth: int = 6,
        tau: float = 6.0,
        spine: bool = True,
        min_survival: float | None = None,
        on_device: bool | None = None,
        longest: int = 4096,
    ) -> None:
        require_int("top_k", top_k, 1, 64)
        require_int("max_depth", max_depth, 1, 1023)
        require_number("tau", tau, 0, 1e9)
        require_flag("spine", spine)
        self._cuts = bool(min_survival)
        min_survival = MIN_SURVIVAL if min_survival is None else min_survival
        require_number("min_survival", min_survival, 0, 1)
        if on_device is not None:
            require_flag("on_device", on_device)
        require_int("longest", longest, 1, 1 << 20)
        self._on_device, self._longest = on_device, longest
        self._folder = Path(path)
        self.config = read_config(self._folder)
        self.feature_layers = self.config.target_layer_ids
        self._top_k, self._tau, self._spine = top_k, tau, spine
        self._min_survival = min_survival
        variant = described(
            checkpoint=digest(self.config), top_k=top_k, max_depth=max_depth, tau=tau, spine=spine,
            min_survival=min_survival,
        )  # fmt: skip
        self.info = DrafterInfo(
            name="eagle", max_depth=max_depth, may_return_nothing=True, variant=variant
        )
        self._model: EagleModel | None = None
        self._started: set[int] = set()
        # Accepted tokens and the features before them, in parts, not encoded yet, by slot.
        self._pending: dict[int, tuple[list[int], list[Tensor]]] = {}

    def check_tokenizer(self, digest: str) -> None:
        """Refuse another tokenizer than the drafter was trained with.

        Raises:
            ConfigError: the hashes differ.
        """
        check_tokenizer(self.config.tokenizer_hash, digest, self._folder)

    def for_gpu(self, *, num_slots: int, max_nodes: int) -> Drafter:
        """See `TwofoldDrafter`."""
        if self._on_device is False:
            return self
        # Triton is imported where there is a GPU only.
        from specla.drafters.eagle_device import DeviceEagle

        try:
            if self._cuts:
                raise ConfigError("min_survival is for drafting on the host; leave it out")
            other = DeviceEagle(
                path=str(self._folder), top_k=self._top_k, max_depth=self.info.max_depth,
                tau=self._tau, spine=self._spine, longest=self._longest,
            )  # fmt: skip
            other.check_room(num_slots=num_slots, max_nodes=max_nodes)
        except (ConfigError, KernelUnavailable) as error:
            if self._on_device:
                raise
            self.info = replace(self.info, fallback=f"drafted on the host: {error}")
            return self
        return other

    def bind(self, model: TargetModel, *, num_slots: int, max_nodes: int, exact: bool) -> None:
        """Load the weights beside a target's (see `FeatureDrafter`)."""
        if self._on_device:
            raise ConfigError("on_device=True needs a GPU; leave it out, or use --device cuda")
        check_target(self.config, model.info, str(self._folder))
        weights = load_weights(self._folder, self.config, model)
        self._model = self._made(weights, num_slots, max_nodes)
        if exact and model.device.type == "cpu":
            self._model.check_rows()

    @property
    def model(self) -> EagleModel:
        """The layer, once bound."""
        assert self._model is not None, "bind() first"
        return self._model

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        """One tree per row, with log-probabilities."""
        self._encode([row.slot for row in rows])
        wanted = [row for row in rows if row.max_drafts and self._drafts_for(row.slot)]
        trees = {row.slot: tree for row, tree in zip(wanted, self._grow(wanted), strict=True)}
        return [trees.get(row.slot) or DraftTree.root(row.tokens[-1]) for row in rows]

    def observe(self, seen: Sequence[Observation]) -> None:
        """Nothing to do: `feed` brings what counts."""

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        """A chunk of the prompt (see `FeatureDrafter`)."""
        assert slot not in self._pending, "a prompt comes before what follows it"
        self._read_prompt(slot, tokens, features)
        self._started.add(slot)

    @torch.inference_mode()
    def feed(self, seen: Sequence[Observation], features: Tensor) -> None:
        """Keep the accepted tokens and features until the next `draft`, or until they are many."""
        parts = features.split([len(row.emitted) for row in seen])
        for row, part in zip(seen, parts, strict=True):
            tokens, before = self._pending.setdefault(row.slot, ([], []))
            tokens += row.emitted
            before.append(part)
        slots = [row.slot for row in seen]
        if any(len(self._pending[slot][0]) > self._most_waiting for slot in slots):
            self._encode(slots)

    def fork(self, slot: int, to: int) -> None:
        """Copy a slot that has been prefilled."""
        self.model.copy(slot, to)
        self._started |= {to} if slot in self._started else set()

    def reset(self, slot: int) -> None:
        """Forget a slot."""
        self._pending.pop(slot, None)
        self._started.discard(slot)
        self.model.reset(slot)

    def _encode(self, slots: Sequence[int]) -> None:
        """Bring the state of these slots up to what has been accepted."""
        self._catch_up([slot for slot in slots if slot in self._pending])
        limit = self._max_tokens
        while waiting := [slot for slot in slots if slot in self._pending]:
            given = [self._waiting(slot) for slot in waiting]
            self._take_in(
                waiting,
                [tokens[:limit] for tokens, _ in given],
                torch.cat([features[:limit] for _, features in given]),
            )
            self._started.update(waiting)
            for slot, (tokens, features) in zip(waiting, given, strict=True):
                if len(tokens) > limit:
                    self._pending[slot] = tokens[limit:], [features[limit:]]

    def _catch_up(self, waiting: Sequence[int]) -> None:
        """In a prompt's form, if that is for the better: what many rounds have left while nobody
        asked, or a look would cost the more the longer ago the last one was."""
        longest = max((len(self._pending[slot][0]) for slot in waiting), default=0)
        if longest > self._max_tokens * max(MANY_CALLS, len(waiting)):
            for slot in waiting:
                self.prefill(slot, *self._waiting(slot))

    def _waiting(self, slot: int) -> tuple[list[int], Tensor]:
        """What a slot has missed, which is now no longer kept here."""
        tokens, parts = self._pending.pop(slot)
        return tokens, torch.cat(parts)

    @property
    def _most_waiting(self) -> int:
        """Tokens of a slot that may wait to be encoded."""
        return MOST_WAITING

    def _drafts_for(self, slot: int) -> bool:
        """Whether there is an output to grow from."""
        return slot in self._started

    def _made(self, weights: EagleWeights, num_slots: int, max_nodes: int) -> EagleModel:
        return EagleModel(self.config, weights, num_slots=num_slots, max_nodes=max_nodes)

    @property
    def _max_tokens(self) -> int:
        """Most tokens per row of one `_take_in`."""
        return self.model.mixer.max_tokens

    def _take_in(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], features: Tensor
    ) -> None:
        self.model.encode(slots, tokens, features)

    def _read_prompt(self, slot: int, tokens: Sequence[int], features: Tensor) -> None:
        self.model.prefill(slot, tokens, features)

    def _grow(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        if not rows:
            return []
        trees = [self._seed(row) for row in rows]
        tips = self.model.roots([row.slot for row in rows])
        level = [(b, 0) for b in range(len(trees))]
        while level:
            self._expand(trees, level, tips.y)
            place = {node: i for i, node in enumerate(level)}
            level = [(b, node) for b, tree in enumerate(trees) for node in tree.frontier()]
            if level:
                source = [place[b, trees[b].parents[node]] for b, node in level]
                tips = self.model.step(tips, source, [trees[b].tokens[n] for b, n in level])
        return [tree.tree() for tree in trees]

    def _seed(self, row: DraftRow) -> Growing:
        return Growing(
            row.tokens[-1],
            top_k=self._top_k,
            max_depth=self.info.max_depth,
            max_drafts=row.max_drafts,
            tau=self._tau,
            spine=self._spine,
            min_survival=self._min_survival,
        )

    def _expand(
        self, trees: Sequence[Growing], level: Sequence[tuple[int, int]], y: Tensor
    ) -> None:
        """Give every node of a level its likeliest children; y [n, D] are their outputs."""
        logprobs = torch.log_softmax(self.model.logits(y).float(), dim=-1).clamp(max=0)
        top = logprobs.topk(min(self._top_k, logprobs.shape[1]), dim=-1)
        ids = self.model.target_ids(top.indices).tolist()
        for (b, node), tokens, values in zip(level, ids, top.values.tolist(), strict=True):
            trees[b].add(node, tokens, values)
