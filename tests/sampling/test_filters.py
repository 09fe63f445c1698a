# SPDX-License-Identifier: Apache-2.0
"""Filters against a plain reading of vLLM's definitions. Tier: exact for kept sets, algebra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specla.errors import RequestRejected
from specla.request import SamplingParams
from specla.sampling.filters import History, adjust, law, needs_sort, validate

PROPERTY = settings(max_examples=150)


def kept(logits, params: SamplingParams) -> dict[int, float]:
    """Tokens left and their scores, of one row."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    token_ids, scores = law(logits[None], [params], sort=needs_sort(params))
    pairs = zip(token_ids[0].tolist(), scores[0].tolist(), strict=True)
    return {token: score for token, score in pairs if score > -np.inf}


def by_hand(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """Token by token in float64: temperature, min-p, top-k, top-p."""
    scaled = logits.astype(np.float64) / params.temperature
    ranked = sorted(range(len(logits)), key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    weight = {t: np.exp(scaled[t] - scaled[ranked[0]]) for t in ranked}
    ranked = [t for t in ranked if weight[t] >= params.min_p]
    if params.top_p < 1:
        total, before, nucleus = sum(weight[t] for t in ranked), 0.0, []
        for token in ranked:
            if before >= params.top_p * total:
                break
            nucleus.append(token)
            before += weight[token]
        ranked = nucleus
    return {t: np.log(weight[t]) for t in ranked}


@PROPERTY
@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.integers(-1, 45),
    # Away from sums of a few equal weights, where rounding decides.
    st.sampled_from([1.0, 0.9501, 0.7001, 0.3011, 0.0501]),
    st.sampled_from([0.0, 0.0501, 0.3011, 1.0]),
)
def test_filters_equal_the_plain_reading(values, temperature, top_k, top_p, min_p):
    logits = np.array(values, dtype=np.float32) / 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got, expected = kept(logits, params), by_hand(logits, params)
    assert set(got) == set(expected)
    assert all(np.isclose(got[t], expected[t], rtol=1e-12, atol=1e-12) for t in got)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 1}, {1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 1.0}, {1, 2, 3}),
        # min-p goes first, so the nucleus is one of what it leaves.
        ({"min_p": 0.5, "top_p": 0.64}, {1, 2}),
        ({"min_p": 0.5}, {1, 2, 3}),
        ({"top_k": 4, "min_p": 0.1}, {0, 1, 2, 3}),
        ({"top_k": 4, "top_p": 0.5}, {1, 2}),
    ],
)
def test_ties_go_to_the_lower_id(params, tokens):
    assert set(kept([1.0, 3.0, 3.0, 3.0, 1.0], SamplingParams(**params))) == tokens


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_is_the_smallest_set_reaching_p(top_p):
    """Four equal tokens: the boundary is exact, so exactly p * 4 stay."""
    assert set(kept([0.0] * 4, SamplingParams(top_p=top_p))) == set(range(int(top_p * 4)))
    assert len(kept([0.0] * 4, SamplingParams(top_p=top_p + 1e-9))) == int(top_p * 4) + 1


def test_top_p_counts_what_top_k_left():
    """Among the two survivors each has half; of all four each has a quarter."""
    assert set(kept([0.0] * 4, SamplingParams(top_k=2, top_p=0.5))) == {0}


def test_top_p_one_keeps_the_least_likely():
    assert set(kept([0.0, -200.0, -300.0], SamplingParams(top_k=3))) == {0, 1, 2}
    assert set(kept([0.0, -200.0, -300.0], SamplingParams())) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e300])
def test_no_temperature_overflows(temperature):
    left = kept([50.0, 50.0, -50.0, -np.inf], SamplingParams(temperature=temperature))
    assert left[0] == left[1] == 0
    assert 3 not in left
    assert (2 in left) == (temperature > 1e-300)


def test_large_vocabulary_top_p():
    """150,000 equal tokens: the fixed-point sum neither overflows nor drifts."""
    assert len(kept(np.zeros(150_000), SamplingParams(top_p=0.5))) == 75_000


def _adjusted(logits, params: SamplingParams, prompt=(), output=(), forbidden=()) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float32)
    adjust(row, params, History([*prompt, *output], len(prompt)), forbidden)
    return row.tolist()


def test_logit_bias():
    params = SamplingParams(logit_bias={0: 2.0, 2: -100.0})
    assert _adjusted([1.0, 1.0, 1.0], params) == [3.0, 1.0, -99.0]
    assert _adjusted([1.0, 1.0], SamplingParams()) == [1.0, 1.0]


def test_repetition_penalty_covers_prompt_and_output():
    params = SamplingParams(repetition_penalty=2.0)
    got = _adjusted([4.0, -4.0, 4.0, -4.0, 4.0], params, prompt=[0, 1], output=[2, 3, 3])
    assert got == [2.0, -8.0, 2.0, -8.0, 4.0]


def test_presence_and_frequency_cover_output_only():
    prompt, output = [0, 0, 1], [1, 2, 2, 2]
    got = _adjusted([0.0] * 4, SamplingParams(presence_penalty=1.5), prompt, output)
    assert got == [0.0, -1.5, -1.5, 0.0]
    got = _adjusted([0.0] * 4, SamplingParams(frequency_penalty=0.5), prompt, output)
    assert got == [0.0, -0.5, -1.5, 0.0]


def test_order_is_bias_then_repetition_then_the_rest():
    params = SamplingParams(
        logit_bias={0: 3.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert _adjusted([-1.0], params, output=[0, 0]) == [(-1 + 3) / 2 - 2 * 0.25 - 0.5]


def test_forbidden_tokens_go_last():
    params = SamplingParams(logit_bias={1: 100.0})
    assert _adjusted([0.0, 0.0], params, forbidden=[1]) == [0.0, -np.inf]


def test_empty_history_is_fine():
    assert _adjusted([1.0], SamplingParams(presence_penalty=2.0)) == [1.0]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logit_bias": {16: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**63: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [3, 16]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(given, param):
    with pytest.raises(RequestRejected, match=r"\[0, 16\)") as error:
        validate(SamplingParams(**given), 16)
    assert error.value.param == param
    validate(SamplingParams(logit_bias={15: 1.0}, stop_token_ids=[0, 15]), 16)
