"""Loading a Hugging Face directory: what is accepted, and what is refused before serving, by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metrale_kernels.interface import Operations

from metrale_async.errors import CheckpointError, ConfigurationError, ModelError, UnsupportedModelError
from metrale_async.models import PagedState, load_config, resolve_model
from metrale_async.models.gguf_file import GgufFile
from tests.models.tiny import CONFIG, load, tiny_tensors, write_directory, write_gguf, write_shards

Change = Callable[[Path], None]


def test_a_directory_loads_with_all_that_is_known_of_it(tmp_path: Path, operations: Operations) -> None:
    loaded = load(write_directory(tmp_path / "m"), operations)
    model = loaded.model
    assert (model.vocab_size, model.max_position_embeddings) == (50, 128)
    assert [list(layer) for layer in model.states] == [[PagedState(2, 8, torch.float32)]] * 2
    assert model.states[0][0].bytes_per_token == 2 * 2 * 8 * 4
    assert model.weight_bytes >= 4 * sum(tensor.numel() for tensor in tiny_tensors().values())
    assert loaded.generation_defaults.eos_token_ids == (2,)
    assert len(bytes.fromhex(loaded.digest)) == 32
    assert load_config(resolve_model(str(tmp_path / "m"))) == loaded.config


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float64, "auto", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
    ids=str,
)
def test_the_type_follows_the_checkpoint_or_the_flag(
    stored: torch.dtype, asked: str, expected: torch.dtype, tmp_path: Path, operations: Operations
) -> None:
    loaded = load(write_directory(tmp_path / "m", tiny_tensors(stored)), operations, asked)
    assert loaded.dtype is expected
    state = loaded.model.states[0][0]
    assert isinstance(state, PagedState)
    assert state.dtype is expected


def test_another_type_is_refused_with_the_allowed_ones(tmp_path: Path, operations: Operations) -> None:
    with pytest.raises(ConfigurationError, match="'float16'; allowed: one of auto, float32, bfloat16"):
        load(write_directory(tmp_path / "m"), operations, "float16")


def test_float32_norms_do_not_make_a_16_bit_checkpoint_wide(tmp_path: Path, operations: Operations) -> None:
    tensors = {
        name: tensor if tensor.dim() == 1 else tensor.to(torch.float16) for name, tensor in tiny_tensors().items()
    }
    assert load(write_directory(tmp_path / "m", tensors), operations).dtype is torch.bfloat16


def test_progress_rises_to_the_size_of_the_weights(tmp_path: Path, operations: Operations) -> None:
    seen: list[tuple[int, int]] = []
    load(write_directory(tmp_path / "m"), operations, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tiny_tensors().values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) == len(tiny_tensors())


@pytest.mark.parametrize(("asked", "limit"), [(1, 1), (127, 127), (128, 128), (129, 128), (None, 128)])
def test_a_shorter_limit_can_be_asked_for_but_no_longer_one(
    asked: int | None, limit: int, tmp_path: Path, operations: Operations
) -> None:
    loaded = load(write_directory(tmp_path / "m"), operations, max_sequence_tokens=asked)
    assert loaded.model.max_position_embeddings == limit


def test_shards_and_one_file_are_the_same_model(tmp_path: Path, operations: Operations) -> None:
    single = load(write_directory(tmp_path / "single"), operations)
    write_shards(write_directory(tmp_path / "shards"), tiny_tensors(), shards=3)
    sharded = load(tmp_path / "shards", operations)
    hidden = torch.randn(3, 32)
    assert torch.equal(single.model.logits(hidden), sharded.model.logits(hidden))


def test_weights_do_not_change_with_the_file_they_came_from(tmp_path: Path, operations: Operations) -> None:
    model = load(write_directory(tmp_path / "m"), operations).model
    hidden = torch.randn(3, 32)
    before = model.logits(hidden)
    weights = tmp_path / "m" / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(bytes(weights.stat().st_size // 2))
    assert torch.equal(model.logits(hidden), before)


def test_saved_rotary_buffers_and_the_copy_of_a_tied_matrix_are_harmless(
    tmp_path: Path, operations: Operations
) -> None:
    tensors = tiny_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    load(write_directory(tmp_path / "m", tensors, tie_word_embeddings=True), operations)


def test_a_tied_checkpoint_with_two_different_matrices_is_refused(tmp_path: Path, operations: Operations) -> None:
    with pytest.raises(
        CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight in model\.safetensors"
    ):
        load(write_directory(tmp_path / "m", tie_word_embeddings=True), operations)


def without(name: str) -> Change:
    def change(directory: Path) -> None:
        tensors = tiny_tensors()
        del tensors[name]
        write_directory(directory, tensors)

    return change


def with_tensor(name: str, tensor: torch.Tensor) -> Change:
    return lambda directory: void(write_directory(directory, {**tiny_tensors(), name: tensor}))


def void(_: object) -> None:
    """Drop a result."""


def with_content(file: str, content: bytes) -> Change:
    return lambda directory: void((directory / file).write_bytes(content))


def cut(file: str, keep: int) -> Change:
    return lambda directory: void((directory / file).write_bytes((directory / file).read_bytes()[:keep]))


def config(**changes: Any) -> Change:
    return lambda directory: void((directory / "config.json").write_text(json.dumps({**CONFIG, **changes})))


def only(file: str) -> Change:
    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        (directory / file).write_bytes(b"\x80\x02")

    return change


def sharded(change_index: Callable[[dict[str, Any], Path], None]) -> Change:
    def change(directory: Path) -> None:
        index = write_shards(directory, tiny_tensors())
        change_index(index["weight_map"], directory)
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


NORM = "model.norm.weight"
SHARD = "model-00002-of-00002.safetensors"
REFUSED: dict[str, tuple[Change, type[ModelError], tuple[str, ...]]] = {
    "a missing tensor": (without(NORM), CheckpointError, ("missing", NORM, "model.safetensors")),
    "a missing lm_head that is not tied": (without("lm_head.weight"), CheckpointError, ("missing", "lm_head.weight")),
    "an unused tensor": (
        with_tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(32)),
        CheckpointError,
        ("no use for", "model.layers.0.self_attn.q_proj.bias", "model.safetensors"),
    ),
    "a layer too many": (
        with_tensor("model.layers.2.input_layernorm.weight", torch.zeros(32)),
        CheckpointError,
        ("model.layers.2.input_layernorm.weight",),
    ),
    "a wrong shape": (with_tensor(NORM, torch.zeros(31)), CheckpointError, (NORM, "[31]", "[32]", "model.safetensors")),
    "a transposed matrix": (
        with_tensor("model.layers.1.mlp.up_proj.weight", torch.zeros(32, 64)),
        CheckpointError,
        ("model.layers.1.mlp.up_proj.weight", "[32, 64]", "[64, 32]"),
    ),
    "a config of another size": (config(intermediate_size=65), CheckpointError, ("gate_proj", "[64, 32]", "[65, 32]")),
    "an integer type": (
        with_tensor(NORM, torch.zeros(32, dtype=torch.int8)),
        CheckpointError,
        (NORM, "I8", "model.safetensors"),
    ),
    "an 8-bit float type": (
        with_tensor("model.layers.0.mlp.up_proj.weight", torch.zeros(64, 32).to(torch.float8_e4m3fn)),
        CheckpointError,
        ("model.layers.0.mlp.up_proj.weight", "F8_E4M3"),
    ),
    "a truncated file": (cut("model.safetensors", 20000), CheckpointError, ("model.safetensors", "20000 bytes")),
    "a file cut in its header": (cut("model.safetensors", 100), CheckpointError, ("model.safetensors", "100 bytes")),
    "a file cut in its length": (cut("model.safetensors", 4), CheckpointError, ("model.safetensors", "4 bytes")),
    "an empty file": (cut("model.safetensors", 0), CheckpointError, ("model.safetensors", "0 bytes")),
    "a header of nonsense": (
        with_content("model.safetensors", (40).to_bytes(8, "little") + b"x" * 200),
        CheckpointError,
        ("model.safetensors",),
    ),
    "a header longer than the file": (
        with_content("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
        CheckpointError,
        ("model.safetensors",),
    ),
    "no weights": (
        lambda directory: (directory / "model.safetensors").unlink(),
        CheckpointError,
        ("model.safetensors", "index.json"),
    ),
    "pickled weights": (only("pytorch_model.bin"), UnsupportedModelError, ("pytorch_model.bin", "safetensors")),
    "a config that is no JSON": (with_content("config.json", b"{"), CheckpointError, ("config.json", "JSON")),
    "a config that is a list": (with_content("config.json", b"[]"), CheckpointError, ("config.json", "object")),
    "a config nested without end": (with_content("config.json", b"[" * 10**6), CheckpointError, ("config.json",)),
    "an unknown model type": (config(model_type="gpt2"), UnsupportedModelError, ("'gpt2'", "llama")),
    "generation defaults that are no JSON": (
        with_content("generation_config.json", b"}"),
        CheckpointError,
        ("generation_config.json",),
    ),
    "an index that is no JSON": (
        lambda d: (write_shards(d, tiny_tensors()), with_content("model.safetensors.index.json", b"no")(d))[1],
        CheckpointError,
        ("model.safetensors.index.json",),
    ),
    "an index without a map": (
        lambda d: (write_shards(d, tiny_tensors()), with_content("model.safetensors.index.json", b"{}")(d))[1],
        CheckpointError,
        ("weight_map",),
    ),
    "a shard that is not there": (
        sharded(lambda _, directory: (directory / SHARD).unlink()),
        CheckpointError,
        (SHARD, "not in"),
    ),
    "a truncated shard": (sharded(lambda _, directory: cut(SHARD, 900)(directory)), CheckpointError, (SHARD, "900")),
    "an index that names the wrong shard": (
        sharded(lambda index, _: index.update({NORM: SHARD if index[NORM] != SHARD else SHARD.replace("2-", "1-")})),
        CheckpointError,
        (NORM, "not there"),
    ),
    "an index that forgets a tensor": (
        sharded(lambda index, _: void(index.pop(NORM))),
        CheckpointError,
        (NORM, "unknown to"),
    ),
    "an index that invents a tensor": (
        sharded(lambda index, _: index.update({"model.extra": SHARD})),
        CheckpointError,
        ("model.extra",),
    ),
    "an index that leaves its directory": (
        sharded(lambda index, _: index.update({NORM: "../outside.safetensors"})),
        CheckpointError,
        ("../outside.safetensors", "allowed: a file name"),
    ),
    "an index of numbers": (sharded(lambda index, _: index.update({NORM: 3})), CheckpointError, (NORM, "3")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_broken_directory_is_refused_with_the_name_of_what_is_wrong(
    what: str, tmp_path: Path, operations: Operations
) -> None:
    change, error, named = REFUSED[what]
    directory = write_directory(tmp_path / "m")
    change(directory)
    with pytest.raises(error) as raised:
        load(directory, operations)
    for part in named:
        assert part in str(raised.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_changed_bytes_in_a_header_load_or_are_refused_with_a_model_error(
    kind: str, tmp_path: Path, operations: Operations, data: st.DataObject
) -> None:
    if kind == "gguf":
        path = file = write_gguf(tmp_path / "m.gguf")
        header_bytes = GgufFile(path).header_bytes
    else:
        path = write_directory(tmp_path / "m")
        file = path / "model.safetensors"
        header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(ModelError):
        load(path, operations, max_sequence_tokens=128)


def test_two_shards_with_one_tensor_are_refused(tmp_path: Path, operations: Operations) -> None:
    from safetensors.torch import save_file

    directory = write_directory(tmp_path / "m")
    index = write_shards(directory, tiny_tensors())
    file = next(
        file for name, file in index["weight_map"].items() if name != NORM and file != index["weight_map"][NORM]
    )
    names = [name for name, place in index["weight_map"].items() if place == file]
    save_file({name: tiny_tensors()[name] for name in [*names, NORM]}, directory / file)
    with pytest.raises(CheckpointError, match=f"{NORM} lies in both"):
        load(directory, operations)


def test_the_digest_names_the_content_and_not_the_place(tmp_path: Path, operations: Operations) -> None:
    first = load(write_directory(tmp_path / "a"), operations).digest
    assert load(write_directory(tmp_path / "elsewhere"), operations).digest == first
    assert load(tmp_path / "a", operations, max_sequence_tokens=64).digest == first
    changed = tiny_tensors()
    changed["lm_head.weight"][17, 3] += 0.5
    others = [
        load(write_directory(tmp_path / "c", changed), operations).digest,
        load(write_directory(tmp_path / "d", rope_theta=10001.0), operations).digest,
        load(tmp_path / "a", operations, "bfloat16").digest,
        load(write_gguf(tmp_path / "e.gguf"), operations).digest,
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("position", [0.0, 0.3, 0.5, 0.999])
def test_the_digest_of_a_large_file_covers_every_region(position: float, tmp_path: Path) -> None:
    from metrale_async.models.config import ModelConfig
    from metrale_async.models.digest import model_digest

    size = 24 * 2**20
    path = tmp_path / "large"
    path.write_bytes(bytes(size))
    config = ModelConfig.from_hf(CONFIG)
    before = model_digest(config, torch.float32, [path])
    with path.open("r+b") as file:
        file.seek(int(size * position))
        file.write(b"\1" * min(200_000, size - int(size * position)))
    assert model_digest(config, torch.float32, [path]) != before
