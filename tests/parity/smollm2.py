"""SmolLM2's weights taken out of its GGUF file and written as the Hugging Face directory they once were."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from metrale_async.models.gguf_file import GgufFile
from tests.parity.gguf_files import gguf_name

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_as_safetensors(file: GgufFile, directory: Path) -> Path:
    """bfloat16 weights dequantised by the ``gguf`` library, in the row order of Hugging Face -> the directory."""
    tensors = {}
    for name in _names():
        tensor = file.tensors[gguf_name(name)]
        data = file.tensor_bytes(tensor).reshape(tensor.shape[0], -1)
        values = torch.from_numpy(gguf.dequantize(data, tensor.type).reshape(tensor.shape).copy())
        if ".q_proj." in name or ".k_proj." in name:
            heads = CONFIG["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.view(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[name] = values.to(torch.bfloat16).contiguous()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def _names() -> list[str]:
    modules = ["input_layernorm", "post_attention_layernorm"]
    modules += [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    names = [f"model.layers.{layer}.{module}.weight" for layer in range(30) for module in modules]
    return ["model.embed_tokens.weight", "model.norm.weight", *names]
