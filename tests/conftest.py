"""Fixtures that more than one package's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

TINY_HYBRID = Path(__file__).parent / "data" / "tiny-hybrid"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF (Q4_1), the default model; ``make test`` fetches it."""
    from metrale_async.errors import ModelNotFoundError
    from metrale_async.models import resolve_model

    try:
        return resolve_model("smollm2-135m", allow_download=False).path
    except ModelNotFoundError:
        pytest.skip("the default model is not fetched; run `python -m metrale_async models pull smollm2-135m`")


@pytest.fixture(scope="session")
def tiny_hybrid() -> Path:
    """A small trained qwen3_next-style checkpoint (delta nets, attention, experts) with tokenizer and chat template."""
    return TINY_HYBRID


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama in float32 with a byte-level tokenizer."""
    from tests.support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))
