# SPDX-License-Identifier: Apache-2.0
"""Random histories of a state, held against plain decoding bit for bit.

A history admits, cancels, forks and materialises sequences and plays rounds over them: random
trees, any path accepted (also one the target would never take: the committed tokens are then
what the path says). Rules by name, from the design:

    I1  durable_len + log_len == committed_len             after every step
    I2  verify leaves S as folding the accepted factors does, and touches no other slot
    I3  one code path: `PlainRun` calls the same verify with one node
    I4  logits of every node, and folded states, are bit-identical to plain decoding
    I6  a free slot is erased; slot 0 is never written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_run import PROMPTS, Committed, Context, PlainRun
from tiny_decoder import SHAPE, VOCAB, tiny_decoder
from torch import Tensor

from specla.models.gdn_decoder import Decoder
from specla.state import State
from specla.topology.tree import DraftTree

PREFILL_CHUNK = 64
# Every so many histories, the end is also compared with a run that reuses nothing.
FRESH_EVERY = 16

# A node: where it hangs (modulo the nodes so far) and which candidate it carries.
EDGES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2)), max_size=11)
# A row of a round: its tree, the node accepted (modulo its size), the candidate emitted after it.
ROWS = st.lists(st.tuples(EDGES, st.integers(0, 11), st.integers(0, 2)), min_size=1, max_size=3)
Row = tuple[list[tuple[int, int]], int, int]
PROMPT = st.integers(0, len(PROMPTS) - 1)
PICK = st.integers(0, 2)
COUNT = st.integers(1, 3)


@dataclass
class Sequence_:
    """Where one sequence stands. tokens: committed, from the prompt's last token on; pending:
    the last emitted token, node 0 of the next round."""

    prompt: int
    tokens: tuple[int, ...]
    pending: int


@cache
def target() -> tuple[Decoder, PlainRun]:
    """One decoder and its plain decoding for all histories of this process."""
    decoder = tiny_decoder()
    return decoder, PlainRun(decoder, SHAPE)


def same(a: Committed, b: Committed) -> bool:
    """Bitwise: NaN is never equal, which is what makes poison visible."""
    return all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def tensors(state: State) -> list[Tensor]:
    """All that a state holds; the first axis is the slot."""
    return [t for x in state.layers for t in (x.S, *x.factors, x.tail, x.inputs)]


def poison_unreachable(state: State, slot: int) -> None:
    """NaN into all of a slot that its log does not name: rejected candidates, the bank that the
    next verify writes, the ring beyond its end, the other tail."""
    log = state.logs[slot]
    live, path = set(log.entries()), set(log.path)
    dead = [e for e in range(state.num_entries) if e not in live]
    rejected = [n for n in range(state.max_nodes) if n not in path]
    for layer in state.layers:
        for store in layer.factors:
            store[slot, dead] = float("nan")
        layer.inputs[slot, log.bank, rejected] = float("nan")
        layer.inputs[slot, 1 - log.bank] = float("nan")
        layer.tail[slot, 1 - log.bank] = float("nan")


class Histories(RuleBasedStateMachine):
    """One example is one history."""

    finished = 0
    rounds = 0

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.plain = target()
        self.live: dict[int, Sequence_] = {}

    @initialize(
        num_slots=st.integers(1, 3),
        max_nodes=st.sampled_from((12, 5, 8, 3, 2, 1)),
        capacity=st.sampled_from((0, 1, 2, 3, 5, 8, 16)),
        threshold=st.integers(0, 16),
        prompt=PROMPT,
    )
    def start(
        self, num_slots: int, max_nodes: int, capacity: int, threshold: int, prompt: int
    ) -> None:
        self.state = State(
            SHAPE,
            num_slots=num_slots,
            max_nodes=max_nodes,
            log_capacity=capacity,
            fold_threshold=min(threshold, capacity),
        )
        self._admit(prompt, PREFILL_CHUNK)

    @precondition(lambda self: self.state.pool.num_free)
    @rule(prompt=PROMPT, chunk=st.sampled_from((PREFILL_CHUNK, 2 * PREFILL_CHUNK)))
    def admit(self, prompt: int, chunk: int) -> None:
        self._admit(prompt, chunk)

    @rule(rounds=st.lists(ROWS, min_size=1, max_size=2), first=PICK)
    def rounds_of_trees(self, rounds: list[list[Row]], first: int) -> None:
        for i, rows in enumerate(rounds):
            self._play(rows, first + i)

    @rule(depths=st.lists(st.integers(0, 11), min_size=2, max_size=4), first=PICK, count=COUNT)
    def rounds_of_right_chains(self, depths: list[int], first: int, count: int) -> None:
        """What a good drafter does: true chains, some accepted to the end, some cut."""
        for depth in depths:
            chain = [(i, 0) for i in range(depth)]
            self._play([(chain, depth // (b + 1), 0) for b in range(count)], first)

    @rule(emit=st.lists(PICK, min_size=1, max_size=4), first=PICK, count=COUNT)
    def rounds_without_drafts(self, emit: list[int], first: int, count: int) -> None:
        for choice in emit:
            self._play([([], 0, choice)] * count, first)

    @rule(first=PICK, prompt=PROMPT, reuse=st.booleans())
    def cancel(self, first: int, prompt: int, reuse: bool) -> None:
        """Release a slot; at once, or later, another sequence takes it."""
        slot = self._slots(first)[0]
        del self.live[slot]
        self.state.release(slot)
        self._check_erased(slot)
        if reuse or not self.live:
            self._admit(prompt, PREFILL_CHUNK)

    @precondition(lambda self: self.state.pool.num_free)
    @rule(first=PICK)
    def fork(self, first: int) -> None:
        slot = self._slots(first)[0]
        twin = self.state.fork(slot)
        assert twin not in self.live
        self.live[twin] = Sequence_(**vars(self.live[slot]))
        self._check_state(twin)

    @rule(first=PICK)
    def materialise(self, first: int) -> None:
        slot = self._slots(first)[0]
        self.state.materialise(slot)
        assert self.state.logs[slot].log_len == 0
        self._check_state(slot)

    @rule(first=PICK)
    def poison(self, first: int) -> None:
        poison_unreachable(self.state, self._slots(first)[0])

    @rule(first=PICK)
    def compare(self, first: int) -> None:
        self._check_state(self._slots(first)[0])

    @invariant()
    def lengths_add_up(self) -> None:
        """I1, against what the history itself has committed."""
        self.state.check_integrity()
        for slot, sequence in self.live.items():
            committed = len(PROMPTS[sequence.prompt]) - 1 + len(sequence.tokens)
            assert self.state.logs[slot].committed_len == committed, "I1"

    def teardown(self) -> None:
        for slot in range(self.state.pool.num_slots + 1):
            if slot in self.live:
                self._check_state(slot)
            else:
                self._check_erased(slot)
        if Histories.finished % FRESH_EVERY == 0:
            self._check_against_fresh_run()
        Histories.finished += 1

    def _slots(self, first: int) -> list[int]:
        slots = sorted(self.live)
        first %= len(slots)
        return slots[first:] + slots[:first]

    def _admit(self, prompt: int, chunk: int) -> None:
        slot = self.state.acquire()
        assert slot not in self.live
        self._check_erased(slot)
        *head, last = PROMPTS[prompt]
        for start in range(0, len(head), chunk):
            self.decoder.prefill(head[start : start + chunk], slot, self.state)
        self.live[slot] = Sequence_(prompt, (), last)

    def _play(self, rows: Sequence[Row], first: int) -> None:
        """One round: verify, check every node, commit the drawn paths."""
        slots = self._slots(first)[: len(rows)]
        drafts = [self._draft(slot, row[0]) for slot, row in zip(slots, rows, strict=False)]
        trees = [tree for tree, _ in drafts]
        before = [t.clone() for t in tensors(self.state)]
        plan = self.state.begin(slots, trees)
        logits = self.decoder.verify(plan, self.state)
        self._check_writes(slots, before)
        paths = []
        for b, slot in enumerate(slots):
            contexts = drafts[b][1]
            self._check_logits(logits[plan.offsets[b] : plan.offsets[b + 1]], contexts)
            node = rows[b][1] % trees[b].num_nodes
            paths.append(trees[b].path_to(node))
            emitted = _candidate(contexts[node], rows[b][2])
            self._advance(slot, [trees[b].tokens[i] for i in paths[b]], emitted)
        self.state.commit(slots, paths)
        Histories.rounds += 1

    def _draft(
        self, slot: int, edges: Sequence[tuple[int, int]]
    ) -> tuple[DraftTree, list[Context]]:
        """The drawn tree and each node's context in plain decoding."""
        at = self.live[slot]
        tokens, parents, known = [at.pending], [-1], set()
        paths = [(*at.tokens, at.pending)]
        contexts = [self.plain.at(at.prompt, paths[0])]
        for where, choice in edges[: self.state.max_nodes - 1]:
            parent = where % len(tokens)
            token = _candidate(contexts[parent], choice)
            if (parent, token) in known:
                continue
            known.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            paths.append((*paths[parent], token))
            contexts.append(self.plain.at(at.prompt, paths[-1]))
        return DraftTree(tuple(tokens), tuple(parents)), contexts

    def _check_writes(self, slots: list[int], before: list[Tensor]) -> None:
        """I2: S is the fold where one was due, else untouched; other slots are as they were."""
        now = tensors(self.state)
        for old, new in zip(before, now, strict=True):
            assert _written_slots(old, new) <= set(slots), "I2: another slot was written"
        per_layer = len(now) // len(self.state.layers)
        for slot in slots:
            at, due = self.live[slot], self.state.logs[slot].fold_due
            folded = self.plain.at(at.prompt, at.tokens).committed
            for i, layer in enumerate(self.state.layers):
                want = folded[i][0] if due else before[i * per_layer][slot]
                assert torch.equal(layer.S[slot], want), f"I2: S of slot {slot}"

    def _check_logits(self, logits: Tensor, contexts: list[Context]) -> None:
        for node, context in enumerate(contexts):
            assert context.logits is not None
            assert torch.equal(logits[node], context.logits), f"I4: logits of node {node}"

    def _advance(self, slot: int, path: list[int], emitted: int) -> None:
        at = self.live[slot]
        at.tokens, at.pending = (*at.tokens, *path), emitted

    def _check_state(self, slot: int) -> None:
        at = self.live[slot]
        want = self.plain.at(at.prompt, at.tokens).committed
        assert same(self.state.committed_state(slot), want), f"I4: state of slot {slot}"

    def _check_erased(self, slot: int) -> None:
        """I6; slot 0 counts as free."""
        for tensor in tensors(self.state):
            assert not tensor[slot].any(), f"I6: slot {slot} holds something"

    def _check_against_fresh_run(self) -> None:
        for slot, at in list(self.live.items())[:1]:
            want = self.plain.fresh(at.prompt, at.tokens).committed
            assert same(self.state.committed_state(slot), want), f"I4: state of slot {slot}"


def _candidate(context: Context, choice: int) -> int:
    """The true next token, or one of two others."""
    return (context.greedy + 5 * choice) % VOCAB


def _written_slots(old: Tensor, new: Tensor) -> set[int]:
    """Slots whose bits differ; as integers, so that poison equals itself."""
    changed = (old.view(torch.int32) != new.view(torch.int32)).flatten(1).any(1)
    return set(changed.nonzero().flatten().tolist())
