"""One model, stored in other ways: stacked experts, a language model beside an image encoder, draft heads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from metrale_async.errors import CheckpointError
from metrale_async.models import CausalLanguageModel
from tests.parity.checkpoints import Variant, random_prompt, variant
from tests.parity.driver import prompt_logits

Checkpoint = Callable[[Variant], tuple[PreTrainedModel, Path]]
Load = Callable[[Path], CausalLanguageModel]
Tensors = dict[str, torch.Tensor]


def logits(model: CausalLanguageModel) -> torch.Tensor:
    return prompt_logits(model, random_prompt(30), 30)


def rewritten(path: Path, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy of the checkpoint with other tensors."""
    shutil.copytree(path, directory)
    tensors = change(load_file(path / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def stacked(tensors: Tensors) -> Tensors:
    """Experts as the publisher's own checkpoints of qwen3_5_moe store them."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        expert = [f"{prefix}.experts.{index}" for index in range(count)]
        result[f"{prefix}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([tensors[f"{e}.gate_proj.weight"], tensors[f"{e}.up_proj.weight"]]) for e in expert]
        )
        result[f"{prefix}.experts.down_proj"] = torch.stack([tensors[f"{e}.down_proj.weight"] for e in expert])
    return result


@pytest.mark.parametrize(("model_type", "name"), [("qwen3_5_moe", "beside-images"), ("qwen3_moe", "plain")])
def test_stacked_experts_are_the_same_model(
    model_type: str, name: str, checkpoint: Checkpoint, load: Load, tmp_path: Path
) -> None:
    _, path = checkpoint(variant(model_type, name))
    copy = rewritten(path, tmp_path / "stacked", stacked)
    assert not any(".experts.0." in stored for stored in load_file(copy / "model.safetensors"))
    assert torch.equal(logits(load(copy)), logits(load(path)))


def test_a_language_model_is_the_same_without_the_images_beside_it(
    checkpoint: Checkpoint, load: Load, tmp_path: Path
) -> None:
    _, path = checkpoint(variant("qwen3_5", "beside-images"))

    def language_model(tensors: Tensors) -> Tensors:
        assert any(name.startswith("model.visual.") for name in tensors)
        kept = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in kept.items() if not name.startswith("model.visual.")}

    copy = rewritten(path, tmp_path / "text", language_model)
    raw = json.loads((path / "config.json").read_text())
    text = {**raw["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    (copy / "config.json").write_text(json.dumps(text))
    assert torch.equal(logits(load(copy)), logits(load(path)))


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_next", "plain"), ("qwen3_5", "beside-images"), ("qwen3_5_moe_text", "plain")]
)
def test_a_draft_head_changes_nothing(
    model_type: str, name: str, checkpoint: Checkpoint, load: Load, tmp_path: Path
) -> None:
    _, path = checkpoint(variant(model_type, name))
    copy = rewritten(path, tmp_path / "draft", lambda tensors: {**tensors, "mtp.fc.weight": torch.zeros(64, 128)})
    assert torch.equal(logits(load(copy)), logits(load(path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {**t, "model.mtp.fc.weight": torch.zeros(2)}, "no use for: model.mtp.fc.weight"),
        (
            lambda t: {**t, "model.norm.weight": torch.zeros(64)},
            "model.norm.weight and model.language_model.norm.weight are both|"
            "model.language_model.norm.weight and model.norm.weight are both",
        ),
        (
            lambda t: {k: v[:, :, :5] if k.endswith("gate_up_proj") else v for k, v in stacked(t).items()},
            r"experts.gate_up_proj in model.safetensors is \[32, 5\], the config asks for \[32, 64\]",
        ),
        (
            lambda t: {k: v[:, :63] if k.endswith("gate_up_proj") else v for k, v in stacked(t).items()},
            r"experts.gate_up_proj in model.safetensors is \[5, 63, 64\]; allowed: a stack",
        ),
        (
            lambda t: {k: v[0] if k.endswith("down_proj") else v for k, v in stacked(t).items()},
            r"experts.down_proj in model.safetensors is \[64, 32\]; allowed: a stack",
        ),
        (
            lambda t: {k: v[:4] if k.endswith("experts.down_proj") else v for k, v in stacked(t).items()},
            r"missing from model.safetensors: model.layers.0.mlp.experts.4.down_proj.weight",
        ),
        (
            lambda t: {k: torch.cat([v, v]) if k.endswith("experts.down_proj") else v for k, v in stacked(t).items()},
            r"no use for: model.language_model.layers.0.mlp.experts.down_proj",
        ),
    ],
    ids=["unknown", "twice", "width", "odd", "flat", "too few", "too many"],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(
    change: Callable[[Tensors], Tensors], message: str, checkpoint: Checkpoint, load: Load, tmp_path: Path
) -> None:
    _, path = checkpoint(variant("qwen3_5_moe", "beside-images"))
    with pytest.raises(CheckpointError, match=message):
        load(rewritten(path, tmp_path / "changed", change))
