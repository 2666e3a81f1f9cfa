"""Models: what a checkpoint says (ModelConfig), where it lies, its weights, and the decoder that runs it.

Owns configuration, families, weight formats, the catalogue and downloads. Written in the operations of metrale_kernels;
of metrale_async it may import errors and arguments only.
"""

from metrale_async.models.catalogue import CATALOGUE, CatalogueEntry, models_folder
from metrale_async.models.config import ModelConfig
from metrale_async.models.decoder import decoder_states
from metrale_async.models.generation_defaults import GenerationDefaults
from metrale_async.models.gguf_file import GgufFile
from metrale_async.models.interface import (
    CausalLanguageModel,
    LayerState,
    OpaqueState,
    PagedCache,
    PagedState,
    RecurrentState,
)
from metrale_async.models.load import LoadedModel, load_config, load_model
from metrale_async.models.resolve import ListedModel, ModelSource, list_models, pull_model, resolve_model
from metrale_async.models.weights import Progress

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "CausalLanguageModel",
    "GenerationDefaults",
    "GgufFile",
    "LayerState",
    "ListedModel",
    "LoadedModel",
    "ModelConfig",
    "ModelSource",
    "OpaqueState",
    "PagedCache",
    "PagedState",
    "Progress",
    "RecurrentState",
    "decoder_states",
    "list_models",
    "load_config",
    "load_model",
    "models_folder",
    "pull_model",
    "resolve_model",
]
