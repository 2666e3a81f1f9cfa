"""From files to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from metrale_kernels.interface import Operations

from metrale_async.errors import CheckpointError, ConfigurationError
from metrale_async.models.checkpoint_layout import LanguageModelWeights
from metrale_async.models.config import ModelConfig
from metrale_async.models.decoder import Decoder, decoder_shapes
from metrale_async.models.digest import model_digest
from metrale_async.models.generation_defaults import (
    GenerationDefaults,
    generation_defaults_from_gguf,
    generation_defaults_from_hf,
)
from metrale_async.models.gguf_config import config_from_gguf
from metrale_async.models.gguf_file import GgufFile
from metrale_async.models.gguf_weights import GgufWeights
from metrale_async.models.interface import CausalLanguageModel
from metrale_async.models.resolve import ModelSource
from metrale_async.models.safetensors_weights import SafetensorsWeights, read_json_object
from metrale_async.models.weights import Progress, WeightReader, WeightSource, check_tensors, natural_dtype

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its checkpoint says beside the weights."""

    model: CausalLanguageModel
    config: ModelConfig
    generation_defaults: GenerationDefaults
    dtype: torch.dtype
    """Type of weights, activations and KV cache."""
    digest: str
    """See :func:`metrale_async.models.digest.model_digest`."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    config: ModelConfig
    generation_defaults: GenerationDefaults
    weights: WeightSource
    files: Sequence[Path]


def load_config(source: ModelSource) -> ModelConfig:
    """The configuration alone, without opening the weights of a directory. Raises ModelError."""
    if source.kind == "gguf":
        return config_from_gguf(GgufFile(source.path))
    return ModelConfig.from_hf(read_json_object(source.path / "config.json"))


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: str,
    operations: Operations,
    progress: Progress | None = None,
    max_sequence_tokens: int | None = None,
) -> LoadedModel:
    """Load ``source`` onto ``device``; blocking, so call it from a worker thread.

    ``dtype`` is ``auto``, ``float32`` or ``bfloat16``; auto follows the checkpoint (see ``natural_dtype``). Weights are
    read tensor by tensor, so the memory needed beside the model is that of its largest layer. ``max_sequence_tokens``
    caps the model's own limit and with it the rotary tables. Raises UnsupportedModelError or CheckpointError, before
    any weight is read where a header can tell, and ConfigurationError for another ``dtype``.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype is {dtype!r}; allowed: one of auto, {', '.join(_DTYPES)}")
    checkpoint = _open_checkpoint(source)
    try:
        config = checkpoint.config
        compute_dtype = natural_dtype(checkpoint.weights) if dtype == "auto" else _DTYPES[dtype]
        expected = decoder_shapes(config)
        check_tensors(expected, checkpoint.weights, lambda name: _is_ignorable(name, config))
        if config.tie_word_embeddings and "lm_head.weight" in checkpoint.weights.tensors:
            _check_tied(checkpoint.weights, compute_dtype)
        reader = WeightReader(
            checkpoint.weights,
            expected,
            dtype=compute_dtype,
            device=device,
            operations=operations,
            progress=progress,
        )
        limit = config.max_position_embeddings
        if max_sequence_tokens is not None:
            limit = min(limit, max_sequence_tokens)
        model = Decoder(config, reader, operations, limit)
    finally:
        checkpoint.weights.close()
    return LoadedModel(
        model=model,
        config=config,
        generation_defaults=checkpoint.generation_defaults,
        dtype=compute_dtype,
        digest=model_digest(config, compute_dtype, checkpoint.files),
    )


def _open_checkpoint(source: ModelSource) -> _Checkpoint:
    if source.kind == "gguf":
        file = GgufFile(source.path)
        config = config_from_gguf(file)
        defaults = generation_defaults_from_gguf(file.metadata, config)
        return _Checkpoint(config, defaults, GgufWeights(file, config), [source.path])
    config = load_config(source)
    weights = LanguageModelWeights(SafetensorsWeights(source.path), config.text_prefix)
    return _Checkpoint(config, generation_defaults_from_hf(source.path, config), weights, weights.files)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Buffers that old checkpoints saved although they follow from the config, and the copy of a tied matrix."""
    return (
        name.endswith(".rotary_emb.inv_freq")
        or (config.tie_word_embeddings and name == "lm_head.weight")
        or name.startswith(config.ignored_prefixes)
    )


def _check_tied(weights: WeightSource, dtype: torch.dtype) -> None:
    """A tied checkpoint may store the shared matrix twice, but not two different ones."""
    head, embedding = weights.tensors["lm_head.weight"], weights.tensors["model.embed_tokens.weight"]
    if head.shape != embedding.shape or not torch.equal(
        weights.read("lm_head.weight", dtype), weights.read("model.embed_tokens.weight", dtype)
    ):
        raise CheckpointError(
            f"config: tie_word_embeddings is true, but lm_head.weight in {head.file} differs from the embedding"
        )
