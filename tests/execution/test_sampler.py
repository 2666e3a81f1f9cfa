"""The sampler against an independent statement of each filter (transformers' processors) and against chance."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from metrale_async.execution import SamplerSpec
from metrale_async.execution.sampler import TokenHistory, edit_logits, sample_row, token_logprobs, uniform

NEUTRAL = SamplerSpec(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias={},
    seed=0,
    choice=0,
    logprobs=None,
    prompt_logprobs=None,
    min_tokens=0,
    suppressed_token_ids=(),
)
VOCAB = 50


def spec(**changes: Any) -> SamplerSpec:
    return dataclasses.replace(NEUTRAL, **changes)


def random_logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_the_distribution_is_that_of_the_usual_filters_in_the_usual_order(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Inverse-CDF sampling: the share of the unit interval that maps to a token is its probability."""
    logits = random_logits(seed)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if 0 < top_k < VOCAB:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        warpers.append(MinPLogitsWarper(min_p))
    expected = torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].double())[0], dim=-1)
    chosen = spec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    cumulative = 0.0
    for token in range(VOCAB):
        width = float(expected[token])
        if width > 1e-3:
            middle = cumulative + width / 2
            assert int(sample_row(logits, chosen, middle)) == token
        cumulative += width
    assert float(expected[int(sample_row(logits, chosen, 0.0))]) > 0
    assert float(expected[int(sample_row(logits, chosen, 1 - 2**-53))]) > 0


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    logits = random_logits(3)
    for chosen in (spec(temperature=0.0), spec(temperature=1.7, top_k=1)):
        assert int(sample_row(logits, chosen, 0.999)) == int(logits.argmax())


@given(token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_repetition_penalty_is_that_of_transformers(token_ids: list[int], data: st.DataObject) -> None:
    prompt_length = data.draw(st.integers(1, len(token_ids)))
    penalty = data.draw(st.floats(0.1, 2.0))
    logits = random_logits(len(token_ids))
    history = TokenHistory(torch.tensor(token_ids), prompt_length, VOCAB)
    edited = edit_logits(logits, spec(repetition_penalty=penalty), history, 0)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), logits[None].clone())[0]
    torch.testing.assert_close(edited, expected)


def test_frequency_and_presence_penalties_count_generated_tokens_only() -> None:
    history = TokenHistory(torch.tensor([5, 5, 6, 7, 7]), 3, VOCAB)
    history.add(torch.tensor(7))
    logits = torch.zeros(VOCAB)
    edited = edit_logits(logits, spec(frequency_penalty=0.5, presence_penalty=0.25), history, 3)
    assert float(edited[7]) == pytest.approx(-(3 * 0.5 + 0.25))
    assert float(edited[5]) == float(edited[6]) == 0.0
    assert float(logits[7]) == 0.0


def test_bias_is_added_and_ending_is_banned_until_min_tokens() -> None:
    chosen = spec(logit_bias={3: 2.5, 4: -100.0}, min_tokens=2, suppressed_token_ids=(9,))
    logits = torch.zeros(VOCAB)
    early, late = edit_logits(logits, chosen, None, 1), edit_logits(logits, chosen, None, 2)
    assert (float(early[3]), float(early[4])) == (2.5, -100.0)
    assert math.isinf(float(early[9]))
    assert float(late[9]) == 0.0


def test_a_large_nucleus_is_found_beyond_the_first_candidates() -> None:
    logits = torch.zeros(4000)
    logits[0] = 1e-3
    seen = {int(sample_row(logits, spec(top_p=0.9), step / 1000)) for step in range(1000)}
    assert max(seen) > 3500


def test_random_numbers_are_uniform_and_depend_on_seed_choice_and_position() -> None:
    draws = [uniform(spec(seed=11), position) for position in range(20_000)]
    counts = Counter(int(draw * 20) for draw in draws)
    chi_square = sum((counts[bin] - 1000) ** 2 / 1000 for bin in range(20))
    assert chi_square < 43.8  # 99.9 % quantile for 19 degrees of freedom
    assert all(0.0 <= draw < 1.0 for draw in draws)
    assert len({uniform(spec(seed=a, choice=b), c) for a in (1, 2) for b in (0, 1) for c in (5, 6)}) == 8


def test_samples_follow_the_model_over_many_positions() -> None:
    logits = random_logits(9, vocab=12)
    chosen = spec(seed=5)
    counts = Counter(int(sample_row(logits, chosen, uniform(chosen, position))) for position in range(20_000))
    expected = torch.softmax(logits, dim=-1) * 20_000
    chi_square = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(12))
    assert chi_square < 31.3  # 99.9 % quantile for 11 degrees of freedom


def test_logprobs_are_of_the_whole_distribution_and_alternatives_come_best_first() -> None:
    logits = random_logits(4)
    expected = torch.log_softmax(logits.double(), dim=-1)
    entry = token_logprobs(logits, 17, 5)
    assert entry.logprob == pytest.approx(float(expected[17]), abs=1e-5)
    assert [token for token, _ in entry.top] == expected.topk(5).indices.tolist()
    assert token_logprobs(logits, 17, 0).top == ()
