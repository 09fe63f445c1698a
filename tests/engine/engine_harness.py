# SPDX-License-Identifier: Apache-2.0
"""A target with habits and a driver that checks every rule after every step.

The target is a random two-layer checkpoint whose head leans towards one successor per token, so
that drafters which copy the past are often right and often wrong. Its 24 tokens stand for pieces
of text that cut characters and words in awkward places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specla import models
from specla.drafters.base import Drafter, DraftRow
from specla.drafters.none import NoDrafter
from specla.engine.engine import Engine
from specla.models.base import TargetModel
from specla.models.resolve import SINGLE_FILE
from specla.models.toy import END, write_toy_checkpoint
from specla.request import Completion, Request, SamplingParams, StreamDelta
from specla.state import State

# Ids 0..4 are special; 14..17 are the bytes of one emoji.
PIECES = (
    *(b"<0>", b"<1>", b"<2>", b"<3>", b"<4>"),
    *(b"a", b"b", b"c", b"d", b" ", b"ab", b"c d", b"\n", "\u00e9".encode()),
    *(bytes([byte]) for byte in "\U0001f600".encode()),
    *(b"x", b"yz", b" the", b".", "\u6f22".encode(), b"q"),
)
VOCAB = len(PIECES)
CYCLES = ((5, 6, 7, 8, 9), (10, 11, 12, 13), (14, 15, 16, 17), (18, 19, 20, 21, 22, 23))
PLAIN: WeakKeyDictionary[TargetModel, dict[str, Completion]] = WeakKeyDictionary()
SUCCESSOR = {a: b for c in CYCLES for a, b in zip(c, (*c[1:], c[0]), strict=True)}


class Letters:
    """A decoder for PIECES, as transformers' tokenizers decode."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD."""
        kept = [i for i in token_ids if not (skip_special_tokens and i <= END)]
        return b"".join(PIECES[i] for i in kept).decode("utf-8", "replace")


@contextmanager
def one_thread() -> Iterator[None]:
    """Restore the thread count afterwards: other tests' row-invariance plans depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_target(folder: Path, *, dtype: torch.dtype = torch.float32) -> TargetModel:
    """Write (once) and load the target, checked for exactness."""
    if not (folder / SINGLE_FILE).exists():
        write_toy_checkpoint(folder, vocab=VOCAB, hidden=32, intermediate=48, head_dim=8)
        _add_habits(folder / SINGLE_FILE)
    with one_thread():
        model = models.load(str(folder), device="cpu", dtype=dtype)
        model.check_rows(64)
    return model


def _add_habits(file: Path) -> None:
    tensors = load_file(file)
    embeddings = tensors["model.embeddings.weight"]
    for token, after in SUCCESSOR.items():
        tensors["lm_head.weight"][after] += 2.0 * embeddings[token]
    save_file(tensors, file, metadata={"format": "pt"})


def make_engine(
    model: TargetModel,
    drafter: Drafter | None = None,
    *,
    slots: int = 4,
    nodes: int = 8,
    log: int = 0,
    fold: int | None = None,
    chunk: int = 64,
    tokenizer: object = None,
    budget: str = "off",
) -> Engine:
    """An engine on the target; no drafter means plain decoding."""
    return Engine(
        model,
        State(
            model.info.recurrent,
            num_slots=slots,
            max_nodes=nodes,
            log_capacity=log,
            fold_threshold=fold,
            dtype=model.dtype,
        ),
        drafter or NoDrafter(),
        mode="exact",
        prefill_chunk=chunk,
        tokenizer=tokenizer or Letters(),  # type: ignore[arg-type]
        budget=budget,
    )


def request(
    name: str, prompt: Sequence[int] = (5, 6, 7), seed: int = 7, **params: object
) -> Request:
    """A request; 16 greedy tokens past any end token unless said otherwise."""
    asked = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **params}
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**asked),  # type: ignore[arg-type]
        seed=seed,
    )


def outcome(c: Completion) -> tuple[object, ...]:
    """What speculation must not change, bit for bit."""
    return (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.seed)


@dataclass
class Run:
    """What a drive produced. text and tokens are put together from the deltas."""

    completions: dict[str, Completion] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def take(self, deltas: Sequence[StreamDelta]) -> None:
        """Add one step's deltas."""
        for delta in deltas:
            name = delta.request_id
            assert name not in self.completions, "a delta after the last one"
            self.text[name] = self.text.get(name, "") + delta.text
            self.tokens[name] = self.tokens.get(name, ()) + delta.token_ids
            if delta.completion is not None:
                self.completions[name] = delta.completion
                assert self.text[name] == delta.completion.text
                assert self.tokens[name] == delta.completion.token_ids

    def outcomes(self) -> dict[str, tuple[object, ...]]:
        """By request id."""
        return {name: outcome(c) for name, c in self.completions.items()}


def drive(
    engine: Engine,
    requests: Sequence[Request],
    on_step: Callable[[Engine], None] | None = None,
    limit: int = 2000,
) -> Run:
    """Run until nothing is left, checking the rules after every step."""
    run = Run()
    for one in requests:
        engine.add(one)
    for _ in range(limit):
        if not engine.has_work:
            break
        run.take(engine.step())
        check_rules(engine)
        if on_step is not None:
            on_step(engine)
    assert not engine.has_work, "the engine does not come to an end"
    check_whole(engine)
    return run


def check_rules(engine: Engine) -> None:
    """I1, one slot per running sequence, and the count of committed tokens."""
    engine.state.check_integrity()
    running = engine.scheduler.running.values()
    slots = [row.slot for row in running]
    assert len(set(slots)) == len(slots)
    assert engine.state.pool.num_free + len(slots) == engine.state.pool.num_slots
    for row in running:
        committed = engine.state.logs[row.slot].committed_len
        assert committed == (len(row.tokens) - 1 if row.ready else row.num_prefilled)


def check_whole(engine: Engine) -> None:
    """No slot leaked, and every slot is zero again (I6)."""
    state = engine.state
    assert state.pool.num_free == state.pool.num_slots
    for layer in state.layers:
        for tensor in (layer.S, *layer.factors, layer.tail, layer.inputs):
            assert not tensor.any()


def check_counts(c: Completion, cut_text: int = 0) -> None:
    """The identities of one report. cut_text: tokens removed by a stop string."""
    s = c.speculation
    assert sum(s.acceptance_histogram) == s.rounds
    assert sum(i * h for i, h in enumerate(s.acceptance_histogram)) == s.accepted
    assert s.accepted <= s.drafted
    assert all(0 <= rate <= 1 for rate in s.acceptance_by_depth)
    no_bonus = s.rounds + s.accepted - cut_text - len(c.token_ids)
    assert no_bonus in (0, 1), "only the last round may be cut"
    assert c.finish_reason != "abort" or no_bonus == 0


def plain(model: TargetModel, requests: Sequence[Request]) -> dict[str, Completion]:
    """Every request alone in a fresh engine, one node per round. Once per model and request: what
    many tests hold their runs against is the same."""
    done = PLAIN.setdefault(model, {})
    for one in requests:
        # repr: a list of stop strings has no hash.
        if repr(one) not in done:
            run = drive(make_engine(model, slots=1, nodes=1), [one])
            done[repr(one)] = run.completions[one.request_id]
    return {one.request_id: done[repr(one)] for one in requests}


def truth_of(
    requests: Sequence[Request], completions: Mapping[str, Completion]
) -> Callable[[DraftRow], Sequence[int]]:
    """For doubles: the plain output of the request that a row belongs to."""
    table = {(r.prompt_token_ids, r.seed): completions[r.request_id].token_ids for r in requests}
    assert len(table) == len(requests), "requests of one prompt need distinct seeds"
    return lambda row: table[tuple(row.tokens[: row.num_prompt_tokens]), row.seed]


States = list[tuple[Tensor, Tensor]]


def same_state(a: States, b: States) -> bool:
    """Bit for bit: -0 differs from 0, and NaN equals itself."""
    pairs = [(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True)]
    return all(torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
