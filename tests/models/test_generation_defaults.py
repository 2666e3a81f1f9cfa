"""Sampling parameters a checkpoint recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metrale_async.errors import CheckpointError
from metrale_async.models import GenerationDefaults, ModelConfig
from metrale_async.models.generation_defaults import generation_defaults_from_gguf, generation_defaults_from_hf
from tests.models.tiny import CONFIG

MODEL = ModelConfig.from_hf(CONFIG)


def read(tmp_path: Path, **values: Any) -> GenerationDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return generation_defaults_from_hf(tmp_path, MODEL)


def test_without_a_file_only_the_end_token_of_the_config_is_known(tmp_path: Path) -> None:
    assert generation_defaults_from_hf(tmp_path, MODEL) == GenerationDefaults(eos_token_ids=(2,))


def test_recommended_values_and_several_end_tokens_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        eos_token_id=[7, 2],
        transformers_version="5",
    )
    assert found == GenerationDefaults(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.0,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        eos_token_ids=(7, 2),
    )


def test_the_end_token_of_the_config_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    assert read(tmp_path, temperature=1.0, eos_token_id=None).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_k", 2.5), ("top_p", True), ("eos_token_id", ["2"])]
)
def test_a_value_of_the_wrong_type_is_refused_with_its_key(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(tmp_path, **{key: value})


def test_gguf_sampling_keys_are_read() -> None:
    found = generation_defaults_from_gguf(
        {"general.sampling.temp": 0.5, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.1}, MODEL
    )
    assert found == GenerationDefaults(temperature=0.5, top_k=40, repetition_penalty=1.1, eos_token_ids=(2,))
