# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what cannot be meant is refused when it is written, by name."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.errors import RequestRejected, SpeclaError
from specla.request import SamplingParams

NAN, INF, HUGE = math.nan, math.inf, 10**400
NOT_NUMBERS: tuple[Any, ...] = (NAN, INF, -INF, HUGE, -HUGE, True, False, "1", None, [1], 1j)
NOT_INTS: tuple[Any, ...] = (NAN, INF, True, 1.0, 1.5, "1", [1])

BAD: list[tuple[str, Any]] = [
    *(("temperature", bad) for bad in (*NOT_NUMBERS, -0.1, -1)),
    *(("top_p", bad) for bad in (*NOT_NUMBERS, 0, 0.0, -0.5, 1.0001, 2)),
    *(("min_p", bad) for bad in (*NOT_NUMBERS, -0.1, 1.1)),
    *(("top_k", bad) for bad in (*NOT_INTS, None, -2, -HUGE)),
    *(("presence_penalty", bad) for bad in (*NOT_NUMBERS, -2.1, 2.1)),
    *(("frequency_penalty", bad) for bad in (*NOT_NUMBERS, -2.1, 2.1)),
    *(("repetition_penalty", bad) for bad in (*NOT_NUMBERS, 0, -1.0)),
    *(("logit_bias", {5: bad}) for bad in (*NOT_NUMBERS, -100.1, 101)),
    *(("logit_bias", {bad: 1.0}) for bad in (-1, True, 1.5, "5", None)),
    *(("logit_bias", bad) for bad in ([1], "5", 5)),
    *(("seed", bad) for bad in (*NOT_INTS, -1, 2**64, HUGE)),
    *(("n", bad) for bad in (*NOT_INTS, None, 0, -1, 129, HUGE)),
    *(("max_tokens", bad) for bad in (*NOT_INTS, None, 0, -1, -HUGE)),
    *(("min_tokens", bad) for bad in (*NOT_INTS, None, -1, 17, HUGE)),
    *(("stop", bad) for bad in ("", [""], ["a", ""], [5], [None], 5, b"a", [b"a"])),
    *(("stop_token_ids", bad) for bad in ([-1], [True], [1.5], ["5"], [None], 5)),
    *((name, bad) for name in ("ignore_eos", "skip_special_tokens") for bad in (1, None, "no")),
    *(("logprobs", bad) for bad in (*NOT_INTS, -1, 21, HUGE)),
]


@pytest.mark.parametrize(("param", "bad"), BAD, ids=lambda x: str(x)[:20])
def test_bad_values_are_refused_by_name(param: str, bad: Any) -> None:
    with pytest.raises(RequestRejected) as refused:
        SamplingParams(**{param: bad})
    assert refused.value.param == param
    message = str(refused.value)
    assert message.startswith(param)
    assert "must be" in message
    assert "got" in message
    assert isinstance(refused.value, SpeclaError)
    assert isinstance(refused.value, ValueError)


GOOD: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 5e-324},
    {"temperature": 1e300},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": HUGE},
    {"top_p": 1},
    {"top_p": 5e-324},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2, "frequency_penalty": 2},
    {"repetition_penalty": 1e-6},
    {"logit_bias": {0: -100, 2**40: 100.0}},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"n": 128},
    {"max_tokens": HUGE},
    {"min_tokens": 16},
    {"min_tokens": 20, "max_tokens": 20},
    {"stop": "a"},
    {"stop": ["a", "b"]},
    {"stop": ("\U0001f600",)},
    {"stop_token_ids": [0, 2**40]},
    {"logprobs": 0},
    {"logprobs": 20},
]


@pytest.mark.parametrize("good", GOOD, ids=lambda x: str(x)[:30])
def test_good_values_are_kept(good: dict[str, Any]) -> None:
    params = SamplingParams(**good)
    for name, value in good.items():
        expected = value
        if name in ("stop", "stop_token_ids"):
            expected = (value,) if isinstance(value, str) else tuple(value)
        assert getattr(params, name) == expected


def test_defaults_are_vllms() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (p.max_tokens, p.min_tokens, p.seed, p.logprobs) == (16, 0, None, None)
    assert (p.stop, p.stop_token_ids, dict(p.logit_bias)) == ((), (), {})
    assert (p.ignore_eos, p.skip_special_tokens) == (False, True)


def test_params_cannot_change_after_they_were_checked() -> None:
    params = SamplingParams()
    with pytest.raises(FrozenInstanceError):
        params.temperature = -1.0  # type: ignore[misc]
    with pytest.raises(RequestRejected):
        replace(params, temperature=-1.0)
    assert replace(params, stop="a").stop == ("a",)


def test_unknown_parameters_are_errors() -> None:
    for name in ("best_of", "use_beam_search", "top_K", "max_new_tokens"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: 1})


def test_sequences_become_tuples() -> None:
    stop, ids = ["a"], [5]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(6)
    assert (params.stop, params.stop_token_ids) == (("a",), (5,))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
)
ANYTHING = (
    VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(st.integers(), VALUES, max_size=2)
)


@given(st.sampled_from([field.name for field in fields(SamplingParams)]), ANYTHING)
def test_anything_is_taken_or_refused(param: str, value: Any) -> None:
    """No other exception, whatever a client sends."""
    with suppress(RequestRejected):
        SamplingParams(**{param: value})


def test_none_means_none_of_them_as_in_vllm() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
