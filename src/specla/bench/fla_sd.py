# SPDX-License-Identifier: Apache-2.0
"""FLA-SD: speculation over flash-linear-attention's own model, which keeps no state per draft.

A chain is verified on a copy of the cache, and the copy is dropped; then the accepted tokens run
again on the cache that is kept (SpecLA's baseline of that name, as we read it). Two forwards a
round, launched one kernel after another, as a user of the package has them today. Drafts come
from the prompt and the output (n-gram lookup), greedy only.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specla.drafters.base import Drafter, DraftRow
from specla.errors import KernelUnavailable
from specla.request import Completion, SamplingParams, SpeculationReport, Timing

NAME, PLAIN = "FLA-SD", "FLA"
"""The loop, and the same without drafts."""
MAX_DRAFTS = 8


def load(folder: Path, device: str) -> Any:
    """fla's model of a checkpoint, in bfloat16.

    Raises:
        KernelUnavailable: no GPU, or no flash-linear-attention, or it cannot load it.
    """
    if device == "cpu":
        raise KernelUnavailable("fla's kernels need a GPU, and this runs on a CPU")
    try:
        from fla.models import GatedDeltaNetForCausalLM
    except ImportError as error:
        raise KernelUnavailable(
            f"flash-linear-attention must be installed with its models ({error}); pip install "
            "flash-linear-attention==0.6.0"
        ) from error
    with _theirs():
        model = GatedDeltaNetForCausalLM.from_pretrained(str(folder))
        return model.to(device, torch.bfloat16).eval()


def tune_beside(folder: Path, device: str) -> subprocess.Popen[bytes]:
    """Start a process that has fla's kernels compiled and tuned for a checkpoint. That takes more
    than a minute, which whoever loads the model later is spared: what was found is on disk."""
    command = [sys.executable, "-m", __name__, str(folder), device]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def _theirs() -> Iterator[None]:
    """Another package's code may fail in any of its own ways: that is a finding about it, not our
    end. Only its own calls stand in here.

    Raises:
        KernelUnavailable: it has.
    """
    try:
        yield
    except Exception as error:
        raise KernelUnavailable(
            f"flash-linear-attention failed ({type(error).__name__}: {error}); its releases that "
            "are known to work are those of 0.6"
        ) from error


class FlaSD:
    """The loop over a model that is called as transformers' are.

    Args:
        model: gives `logits` and `past_key_values` for `input_ids`, `past_key_values`, use_cache.
        drafter: chains, from the tokens alone.
        end_ids: tokens that end an answer.
        decode: token ids to text.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        drafter: Drafter,
        end_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        device: str,
    ) -> None:
        self._model, self._drafter, self._device = model, drafter, device
        self._ends, self._decode = frozenset(end_ids), decode

    @torch.no_grad()
    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """A greedy answer."""
        self._drafter.reset(0)
        began = time.perf_counter()
        cache = self._run(prompt[:-1], None)[1] if len(prompt) > 1 else None
        self._sync()
        middle, tokens = time.perf_counter(), list(prompt)
        rounds = drafted = accepted = 0
        while not self._ended(tokens[len(prompt) :], params.max_tokens):
            room = params.max_tokens - (len(tokens) - len(prompt)) - 1
            chain = self._chain(tokens, len(prompt), min(room, MAX_DRAFTS))
            emitted, cache = self._round(tokens[-1], chain, cache)
            emitted = self._cut(emitted)
            rounds, drafted = rounds + 1, drafted + len(chain)
            accepted += len(emitted) - 1
            tokens += emitted
        self._sync()
        times = (middle - began, time.perf_counter() - middle)
        return self._completion(prompt, tokens[len(prompt) :], (rounds, drafted, accepted), times)

    def _chain(self, tokens: Sequence[int], num_prompt: int, most: int) -> list[int]:
        row = DraftRow(
            slot=0, tokens=tokens, num_prompt_tokens=num_prompt, max_drafts=most, seed=0
        )
        (tree,) = self._drafter.draft([row])
        return list(tree.tokens[1:])

    def _round(self, last: int, chain: Sequence[int], cache: Any) -> tuple[list[int], Any]:
        """Tokens of one round, and the cache with all of them but the newest."""
        if not chain:
            said, cache = self._run([last], cache)
            return said, cache
        with _theirs():
            dropped = copy.deepcopy(cache)
        said, _ = self._run([last, *chain], dropped)
        count = 0
        while count < len(chain) and said[count] == chain[count]:
            count += 1
        _, cache = self._run([last, *chain[:count]], cache)
        return said[: count + 1], cache

    def _run(self, tokens: Sequence[int], cache: Any) -> tuple[list[int], Any]:
        ids = torch.tensor([list(tokens)], device=self._device)
        with _theirs():
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits[0].argmax(-1).tolist(), out.past_key_values

    def _ended(self, output: Sequence[int], most: int) -> bool:
        return len(output) >= most or (bool(output) and output[-1] in self._ends)

    def _cut(self, emitted: list[int]) -> list[int]:
        """Nothing after an end."""
        for i, token in enumerate(emitted):
            if token in self._ends:
                return emitted[: i + 1]
        return emitted

    def _sync(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _completion(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        counts: tuple[int, int, int],
        times: tuple[float, float],
    ) -> Completion:
        (rounds, drafted, accepted), (prefill, decode) = counts, times
        return Completion(
            request_id=NAME,
            prompt=None,
            prompt_token_ids=tuple(prompt),
            text=self._decode(output),
            token_ids=tuple(output),
            finish_reason="stop" if output[-1] in self._ends else "length",
            stop_reason=None,
            seed=0,
            logprobs=None,
            speculation=SpeculationReport(
                drafter=self._drafter.info.name,
                mode=NAME,
                rounds=rounds,
                drafted=drafted,
                accepted=accepted,
                tokens_per_round=len(output) / rounds,
                acceptance_by_depth=(),
                acceptance_histogram=(),
            ),
            timing=Timing(prefill_s=prefill, decode_s=decode, tokens_per_s=len(output) / decode),
        )


def _tune(folder: Path, device: str) -> None:
    """Everything once: a prompt of some chunks, rounds with and without a chain."""
    from specla.drafters import build

    loop = FlaSD(load(folder, device), build("ngram"), (), lambda tokens: "", device)
    for length in (100, 300):
        prompt = [1 + i % 7 for i in range(length)]
        loop(prompt, SamplingParams(temperature=0.0, max_tokens=12))


if __name__ == "__main__":
    _tune(Path(sys.argv[1]), sys.argv[2])
