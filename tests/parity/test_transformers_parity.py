"""Every family and config variant against ``transformers``, in float32, position by position."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from metrale_async.models import CausalLanguageModel
from tests.parity.checkpoints import VARIANTS, Variant, random_prompt, variant
from tests.parity.driver import greedy_tokens, prompt_logits

PROMPT_TOKENS = 200
GREEDY_TOKENS = 64
TOLERANCE = 1e-4

Checkpoint = Callable[[Variant], tuple[PreTrainedModel, Path]]
Load = Callable[[Path], CausalLanguageModel]


def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("of", VARIANTS, ids=str)
def test_logits_and_greedy_tokens_equal_those_of_transformers(of: Variant, checkpoint: Checkpoint, load: Load) -> None:
    reference, path = checkpoint(of)
    model = load(path)
    prompt = random_prompt(PROMPT_TOKENS)
    theirs = transformers_logits(reference, prompt)
    # Nothing below could fail on a model that finds every token equally likely.
    assert theirs.std() > 1
    whole = prompt_logits(model, prompt, PROMPT_TOKENS)
    assert largest_difference(whole, theirs) < TOLERANCE
    for chunk_tokens in (1, 7, 16, 64):
        ours = prompt_logits(model, prompt, chunk_tokens)
        assert torch.equal(ours, whole), f"in chunks of {chunk_tokens}: not the bits of the whole prompt"

    tokens = greedy_tokens(model, prompt, GREEDY_TOKENS)
    # One pass of transformers over prompt and answer gives the token it would choose after each prefix; by induction
    # its own greedy answer is the same if every choice is.
    choices = transformers_logits(reference, prompt + tokens)[PROMPT_TOKENS - 1 : -1].argmax(dim=-1)
    assert tokens == choices.tolist()


def with_config(path: Path, directory: Path, **changes: Any) -> Path:
    """A copy of the checkpoint whose config.json says something else."""
    shutil.copytree(path, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (variant("llama", "plain"), {"rope_parameters": {"rope_type": "default", "rope_theta": 10500.0}}),
        (variant("llama", "linear"), {"rope_parameters": None}),
        (variant("llama", "llama3"), {"rope_parameters": None}),
        (variant("llama", "yarn"), {"rope_parameters": None}),
        (
            variant("llama", "yarn-attention-factor"),
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        ),
        (
            variant("llama", "yarn-untruncated"),
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        ),
        (variant("llama", "plain"), {"rms_norm_eps": 1e-2}),
        (variant("mistral", "window"), {"sliding_window": 25}),
        (variant("mistral", "window"), {"sliding_window": None}),
        (variant("qwen2", "window-in-upper-layers"), {"max_window_layers": 2, "layer_types": None}),
        (
            variant("qwen3", "window-by-layer"),
            {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
        ),
        (variant("qwen3_moe", "normalised"), {"norm_topk_prob": False}),
        (variant("qwen3_moe", "plain"), {"num_experts_per_tok": 3}),
        (variant("qwen3_next", "plain"), {"norm_topk_prob": False}),
        (variant("qwen3_next", "half-rotary"), {"rope_parameters": None}),
        (variant("qwen3_5_text", "plain"), {"rms_norm_eps": 1e-2}),
    ],
    ids=str,
)
def test_a_config_that_says_something_else_is_told_apart(
    of: Variant, changes: dict[str, Any], checkpoint: Checkpoint, load: Load, tmp_path: Path
) -> None:
    reference, path = checkpoint(of)
    model = load(with_config(path, tmp_path / "changed", **changes))
    prompt = random_prompt(PROMPT_TOKENS)
    ours = prompt_logits(model, prompt, PROMPT_TOKENS)
    assert largest_difference(ours, transformers_logits(reference, prompt)) > 100 * TOLERANCE


def test_two_swapped_tokens_are_told_apart_from_their_position_on(checkpoint: Checkpoint, load: Load) -> None:
    reference, path = checkpoint(variant("llama", "plain"))
    model = load(path)
    prompt = random_prompt(PROMPT_TOKENS)
    theirs = transformers_logits(reference, prompt)
    swapped = [*prompt[:100], prompt[101], prompt[100], *prompt[102:]]
    ours = prompt_logits(model, swapped, PROMPT_TOKENS)
    assert largest_difference(ours[:100], theirs[:100]) < TOLERANCE
    assert largest_difference(ours[100:], theirs[100:]) > 1
