"""A tiny llama checkpoint written by hand, in both formats, for tests that break one thing in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType
from metrale_kernels.interface import Operations
from safetensors.torch import save_file

from metrale_async.models import LoadedModel, load_model, resolve_model

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50,
    "eos_token_id": 2,
}


def tiny_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights under their Hugging Face names."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (50, 32),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (32,),
            f"{prefix}.post_attention_layernorm.weight": (32,),
            f"{prefix}.self_attn.q_proj.weight": (32, 32),
            f"{prefix}.self_attn.k_proj.weight": (16, 32),
            f"{prefix}.self_attn.v_proj.weight": (16, 32),
            f"{prefix}.self_attn.o_proj.weight": (32, 32),
            f"{prefix}.mlp.gate_proj.weight": (64, 32),
            f"{prefix}.mlp.up_proj.weight": (64, 32),
            f"{prefix}.mlp.down_proj.weight": (32, 64),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_directory(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A Hugging Face directory with one safetensors file; ``config`` overrides CONFIG."""
    directory.mkdir(exist_ok=True)
    save_file(tiny_tensors() if tensors is None else tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return directory


def write_shards(directory: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> dict[str, Any]:
    """Replace the single file by ``shards`` files and an index -> the index."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


GGUF_METADATA: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight"
        for layer in range(2)
        for ours, theirs in {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }.items()
    },
}


def write_gguf(
    path: Path,
    tensors: dict[str, torch.Tensor] | None = None,
    kinds: dict[str, GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    **metadata: Any,
) -> Path:
    """A GGUF file; ``tensors`` by GGUF name, ``kinds`` lies about a tensor's type, ``metadata`` None removes a key."""
    if tensors is None:
        tensors = {GGUF_NAMES[name]: tensor for name, tensor in tiny_tensors().items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**GGUF_METADATA, **metadata}.items():
        key = key.replace("llama.", f"{architecture}.", 1) if key.startswith("llama.") else key
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        data = tensor.numpy() if kind is None else gguf.quantize(tensor.numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, operations: Operations, dtype: str = "auto", **options: Any) -> LoadedModel:
    """Load a directory or file on the CPU."""
    return load_model(
        resolve_model(str(path)), device=torch.device("cpu"), dtype=dtype, operations=operations, **options
    )
