"""Rotary tables against ``transformers``, bit for bit, in both spellings of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metrale_async.models import ModelConfig
from metrale_async.models.rope import inverse_frequencies, rope_tables

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False, "beta_fast": 8.0},
]


def raw_config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        **more,
    }


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_tables_equal_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw_config(rope_parameters={**scaling, "rope_theta": theta})))
    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(512)[None])
    new = ModelConfig.from_hf(raw_config(rope_parameters={**scaling, "rope_theta": theta}))
    old_scaling = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    old = ModelConfig.from_hf(raw_config(rope_theta=theta, rope_scaling=old_scaling))
    assert new.rope == old.rope
    cos, sin = rope_tables(new.rope, 512, torch.device("cpu"))
    assert cos.dtype is torch.float32
    assert torch.equal(cos, expected_cos[0, :, :32])
    assert torch.equal(sin, expected_sin[0, :, :32])


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "linear", "factor": 0.5}, 512),
        # Beyond its own length a dynamic model's answer would depend on the tokens that follow.
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (SCALINGS[3], 512),
    ],
    ids=str,
)
def test_the_longest_sequence_follows_from_the_scaling(scaling: dict[str, Any], limit: int) -> None:
    assert ModelConfig.from_hf(raw_config(rope_parameters=scaling)).max_position_embeddings == limit


def test_an_original_length_beside_the_rope_parameters_has_priority() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = ModelConfig.from_hf(raw_config(rope_parameters=scaling, original_max_position_embeddings=128))
    assert config.rope.original_max_position_embeddings == 128


def test_a_partial_rotation_covers_the_first_part_of_each_head() -> None:
    config = ModelConfig.from_hf(raw_config(partial_rotary_factor=0.25))
    assert config.rope.rotary_dim == 16
    assert inverse_frequencies(config.rope).shape == (8,)
    inside = ModelConfig.from_hf(raw_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25}))
    assert inside.rope == config.rope


def test_a_longer_table_starts_with_the_shorter_one() -> None:
    rope = ModelConfig.from_hf(raw_config(rope_parameters=SCALINGS[3])).rope
    for short, long in zip(
        rope_tables(rope, 37, torch.device("cpu")), rope_tables(rope, 512, torch.device("cpu")), strict=True
    ):
        assert torch.equal(short, long[:37])
