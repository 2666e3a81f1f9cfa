"""A tiny random llama with a byte-level tokenizer, as a Hugging Face directory: a real model in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.scripted_engine import END_TOKEN_ID, VOCAB_SIZE, write_byte_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": END_TOKEN_ID,
}


def write_tiny_model(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Weights are large enough that the next token depends on the whole prompt."""
    merged = {**CONFIG, "torch_dtype": str(dtype).removeprefix("torch."), **config}
    hidden, inner, head = merged["hidden_size"], merged["intermediate_size"], merged["head_dim"]
    query, key_value = merged["num_attention_heads"] * head, merged["num_key_value_heads"] * head
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    tensors = {
        "model.embed_tokens.weight": random(merged["vocab_size"], hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": random(merged["vocab_size"], hidden, scale=0.4),
    }
    for layer in range(merged["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden, dtype=dtype),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=dtype),
            prefix + "self_attn.q_proj.weight": random(query, hidden, scale=0.25),
            prefix + "self_attn.k_proj.weight": random(key_value, hidden, scale=0.25),
            prefix + "self_attn.v_proj.weight": random(key_value, hidden, scale=0.25),
            prefix + "self_attn.o_proj.weight": random(hidden, query, scale=0.25),
            prefix + "mlp.gate_proj.weight": random(inner, hidden, scale=0.2),
            prefix + "mlp.up_proj.weight": random(inner, hidden, scale=0.2),
            prefix + "mlp.down_proj.weight": random(hidden, inner, scale=0.2),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(merged))
    write_byte_tokenizer(directory)
    return directory
