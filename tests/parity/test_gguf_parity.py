"""Whole GGUF files against ``transformers`` running the same, equally rounded, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from metrale_kernels.interface import Operations

from metrale_async.models import CausalLanguageModel, load_model, resolve_model
from metrale_async.models.gguf_file import GgufFile
from tests.parity.checkpoints import Variant, build, random_prompt, save, variant
from tests.parity.driver import greedy_tokens, prompt_logits
from tests.parity.gguf_files import write_gguf
from tests.parity.smollm2 import write_as_safetensors

# Rows of quantised matrices are multiples of 32.
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
CASES = [
    (Variant("plain", "llama", _SIZES), Type.F32),
    (Variant("biases", "llama", {**_SIZES, "attention_bias": True, "mlp_bias": True}), Type.F32),
    (Variant("tied-4-bit", "llama", {**_SIZES, "tie_word_embeddings": True}), Type.Q4_1),
    (Variant("llama3", "llama", {**_SIZES, **variant("llama", "llama3").config}), Type.F32),
    (Variant("linear", "llama", {**_SIZES, **variant("llama", "linear").config}), Type.F16),
    (Variant("yarn", "llama", {**_SIZES, **variant("llama", "yarn").config}), Type.BF16),
    (Variant("8-bit", "llama", _SIZES), Type.Q8_0),
    (Variant("plain", "qwen2", {"hidden_size": 64, "intermediate_size": 96}), Type.F32),
    (Variant("5-bit", "qwen2", {"hidden_size": 64, "intermediate_size": 96}), Type.Q5_0),
    (Variant("plain", "qwen3", _SIZES), Type.F32),
    (Variant("tied-5-bit", "qwen3", {**_SIZES, "tie_word_embeddings": True}), Type.Q5_1),
    (Variant("4-bit", "qwen3", _SIZES), Type.Q4_0),
]


@pytest.mark.parametrize(("of", "weight_type"), CASES, ids=str)
def test_a_gguf_file_gives_the_logits_of_transformers(
    of: Variant, weight_type: Type, load: Callable[[Path], CausalLanguageModel], tmp_path: Path
) -> None:
    reference = build(of)
    model = load(write_gguf(reference, tmp_path / "model.gguf", weight_type))
    prompt = random_prompt(200)
    theirs = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    assert theirs.std() > 1
    for chunk_tokens in (200, 16):
        assert float((prompt_logits(model, prompt, chunk_tokens) - theirs).abs().max()) < 1e-4


@pytest.mark.parametrize("of", [CASES[0][0], CASES[7][0], CASES[9][0]], ids=str)
def test_a_gguf_file_and_the_directory_it_was_made_from_agree_in_every_bit(
    of: Variant, load: Callable[[Path], CausalLanguageModel], tmp_path: Path
) -> None:
    reference = build(of)
    prompt = random_prompt(64)
    from_gguf = prompt_logits(load(write_gguf(reference, tmp_path / "model.gguf")), prompt, 64)
    from_directory = prompt_logits(load(save(reference, tmp_path / "hf")), prompt, 64)
    assert torch.equal(from_gguf, from_directory)


def test_smollm2_answers_alike_from_gguf_and_from_the_same_weights_as_safetensors(
    smollm2_gguf: Path, operations: Operations, tmp_path: Path
) -> None:
    directory = write_as_safetensors(GgufFile(smollm2_gguf), tmp_path / "smollm2")
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    answers = []
    for path in (smollm2_gguf, directory):
        loaded = load_model(resolve_model(str(path)), device=torch.device("cpu"), dtype="auto", operations=operations)
        assert loaded.dtype is torch.bfloat16
        answers.append((greedy_tokens(loaded.model, prompt, 24), prompt_logits(loaded.model, prompt, 5)))
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])
