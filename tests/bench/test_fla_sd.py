# SPDX-License-Identifier: Apache-2.0
"""FLA-SD's loop over a model with a cache that is changed in place, as fla's is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specla.bench.fla_sd import FlaSD, load
from specla.drafters import build
from specla.errors import KernelUnavailable
from specla.request import SamplingParams

VOCAB, END = 40, 39


class Model:
    """Says what follows from all tokens so far; a phrase of seven returns, broken by the sum."""

    def __init__(self) -> None:
        self.forwards: list[int] = []

    def __call__(self, *, input_ids, past_key_values, use_cache):
        assert use_cache
        cache = [] if past_key_values is None else past_key_values
        logits = torch.zeros(1, input_ids.shape[1], VOCAB)
        self.forwards.append(input_ids.shape[1])
        for i, token in enumerate(input_ids[0].tolist()):
            cache.append(token)
            logits[0, i, self.next(cache)] = 1
        return SimpleNamespace(logits=logits, past_key_values=cache)

    @staticmethod
    def next(tokens: list[int]) -> int:
        if len(tokens) == 60:
            return END
        return 30 if sum(tokens) % 11 == 3 else 5 + len(tokens) % 7


def greedy(prompt: list[int], most: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most and tokens[-1] != END:
        tokens.append(Model.next(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("most", [1, 2, 30, 90])
@pytest.mark.parametrize("prompt", [[7], [5, 6, 7, 8, 9, 10, 11, 5, 6]])
def test_it_says_what_the_model_says(prompt: list[int], most: int) -> None:
    model = Model()
    loop = FlaSD(model, build("ngram"), (END,), str, "cpu")
    for _ in range(2):  # nothing is left from the answer before
        done = loop(prompt, SamplingParams(temperature=0, max_tokens=most))
        assert list(done.token_ids) == greedy(prompt, most)
    report = done.speculation
    assert report.rounds + report.accepted == len(done.token_ids)
    assert done.finish_reason == ("stop" if done.token_ids[-1] == END else "length")
    if most >= 30:
        assert 0 < report.accepted < report.drafted
        # A round with drafts costs two forwards.
        assert len(model.forwards) > 2 * report.rounds


def test_plain_decoding_is_the_loop_without_drafts() -> None:
    model, prompt = Model(), [5, 6, 7, 8, 9, 10, 11, 5, 6]
    done = FlaSD(model, build("none"), (END,), str, "cpu")(
        prompt, SamplingParams(temperature=0, max_tokens=30)
    )
    assert list(done.token_ids) == greedy(prompt, 30)
    assert model.forwards == [len(prompt) - 1] + [1] * len(done.token_ids)


def test_what_goes_wrong_in_the_other_package_is_said_to_be_its_own() -> None:
    """And what goes wrong in ours is not taken for that."""

    def broken(**_: object) -> None:
        raise AttributeError("'FLACache' has no get_seq_length")

    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(KernelUnavailable, match=r"failed \(AttributeError: 'FLACache' has no"):
        FlaSD(broken, build("ngram"), (END,), str, "cpu")([5, 6, 7], params)
    with pytest.raises(TypeError):
        FlaSD(Model(), build("ngram"), (END,), None, "cpu")([5, 6, 7], params)  # type: ignore[arg-type]


class OutOfResources(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("kind", [OutOfResources, AssertionError, IndexError])
def test_whatever_the_other_package_raises_is_no_end_of_ours(kind: type[Exception]) -> None:
    def broken(**_: object) -> None:
        raise kind("no room")

    with pytest.raises(KernelUnavailable, match=f"failed \\({kind.__name__}: no room"):
        FlaSD(broken, build("ngram"), (END,), str, "cpu")(
            [5, 6, 7], SamplingParams(temperature=0, max_tokens=4)
        )


def test_it_needs_a_gpu(tmp_path) -> None:
    with pytest.raises(KernelUnavailable, match="need a GPU"):
        load(tmp_path, "cpu")
