"""How KV blocks and recurrent states share the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from metrale_async.models import PagedState, RecurrentState, decoder_states, load_config, resolve_model
from metrale_async.startup.memory import (
    AUTO_MAX_BATCH_SIZE,
    allocate_caches,
    allocate_states,
    bytes_per_block,
    most_sequences,
    recurrent_bytes,
)

KV = PagedState(2, 8, torch.bfloat16)
CONV = RecurrentState((3, 40), torch.bfloat16)
MATRIX = RecurrentState((4, 8, 16), torch.float32)
STATES = [[CONV, MATRIX], [KV], [CONV, MATRIX]]


def test_only_layers_with_attention_take_kv_blocks() -> None:
    assert bytes_per_block(STATES, 16) == 16 * 2 * 2 * 8 * 2
    assert recurrent_bytes([[KV], [KV]]) == 0
    # Two layers, and two places for each.
    assert recurrent_bytes(STATES) == 2 * 2 * (3 * 40 * 2 + 4 * 8 * 16 * 4)


@pytest.mark.parametrize(
    ("budget", "sequence", "expected"),
    [(1000, 0, AUTO_MAX_BATCH_SIZE), (1000, 500, 1), (1000, 501, 1), (2000, 500, 2), (10**9, 1, AUTO_MAX_BATCH_SIZE)],
)
def test_recurrent_states_take_half_a_budget_at_most(budget: int, sequence: int, expected: int) -> None:
    assert most_sequences(budget, sequence) == expected


@pytest.mark.parametrize("places", [0, 1, 6])
def test_states_are_allocated_as_declared(places: int) -> None:
    memory = allocate_states(STATES, places, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in memory] == [(places, 3, 40), (places, 4, 8, 16)] * 2
    assert [tensor.dtype for tensor in memory] == [torch.bfloat16, torch.float32] * 2
    assert all(not tensor.any() for tensor in memory)
    (cache,) = allocate_caches(STATES, 5, 16, torch.device("cpu"))
    assert cache.keys.shape == cache.values.shape == (5, 2, 16, 8)


def test_the_states_of_a_model_are_known_without_its_weights(tiny_hybrid: Path) -> None:
    states = decoder_states(load_config(resolve_model(str(tiny_hybrid))), torch.bfloat16)
    assert [len(layer) for layer in states] == [2, 2, 2, 1, 2, 2, 2, 1]
    assert states[3] == (PagedState(2, 32, torch.bfloat16),)
    assert states[0][1] == RecurrentState((6, 32, 32), torch.float32)
