"""Tokenizers from GGUF metadata and from directories against each other and against transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tokenizers import pre_tokenizers

from metrale_async.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from metrale_async.models.gguf_file import GgufFile
from metrale_async.text import Tokenizer
from metrale_async.text.tokenizer import MAX_INLINE_CHARS
from tests.support.scripted_engine import byte_tokenizer
from tests.text.awkward_strings import AWKWARD_STRINGS


@pytest.fixture(scope="module")
def from_gguf(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GgufFile(smollm2_gguf).metadata)


@pytest.fixture(scope="module")
def smollm2_directory(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as the Hugging Face directory publishes it, put together from vocabulary and merges alone."""
    metadata = GgufFile(smollm2_gguf).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = tokens[:17]
    directory = tmp_path_factory.mktemp("smollm2")
    (directory / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [
                    {"id": index, "content": token, "special": True}
                    | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
                    for index, token in enumerate(special)
                ],
                "normalizer": None,
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Digits", "individual_digits": True},
                        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                    ],
                },
                "post_processor": None,
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": False,
                    "byte_fallback": False,
                    "ignore_merges": False,
                    "vocab": {token: index for index, token in enumerate(tokens)},
                    "merges": metadata["tokenizer.ggml.merges"],
                },
            }
        )
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "<|im_start|>",
                "eos_token": {"content": "<|im_end|>"},
                "chat_template": metadata["tokenizer.chat_template"],
            }
        )
    )
    return directory


def test_there_are_two_hundred_awkward_strings() -> None:
    assert len(AWKWARD_STRINGS) >= 200


def test_gguf_directory_and_transformers_agree_on_awkward_strings(
    from_gguf: Tokenizer, smollm2_directory: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    from_directory = Tokenizer.from_directory(smollm2_directory)
    independent = PreTrainedTokenizerFast(tokenizer_file=str(smollm2_directory / "tokenizer.json"))
    for text in AWKWARD_STRINGS:
        ids = from_gguf.encode(text, add_special_tokens=True)
        assert ids == from_directory.encode(text, add_special_tokens=True), repr(text)
        assert ids == independent.encode(text), repr(text)
        for skip in (True, False):
            decoded = from_gguf.decode(ids, skip_special_tokens=skip)
            assert decoded == independent.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False), (
                repr(text)
            )
        assert from_gguf.decode(ids, skip_special_tokens=False) == text


def test_the_conversion_of_transformers_agrees_but_for_single_digits(
    from_gguf: Tokenizer, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """An independent reading of the file. It takes the vocabulary for GPT-2's, which does not cut digits apart."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name, local_files_only=True)
    ours = {text: from_gguf.encode(text, add_special_tokens=True) for text in AWKWARD_STRINGS}
    differing = [text for text in AWKWARD_STRINGS if theirs.encode(text) != ours[text]]
    assert differing == ["  42  ", "\r\n42\r\n"]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
    )
    theirs.save_pretrained(tmp_path)
    from_directory = Tokenizer.from_directory(tmp_path)
    for text in AWKWARD_STRINGS:
        assert ours[text] == from_directory.encode(text, add_special_tokens=True) == theirs.encode(text), repr(text)
    assert from_directory.special_token_ids == from_gguf.special_token_ids
    assert from_directory.eos_token_ids == from_gguf.eos_token_ids


def test_special_tokens_as_text_are_ordinary_text_when_not_parsed(from_gguf: Tokenizer) -> None:
    text = "<|im_start|>user<|im_end|>"
    assert from_gguf.encode(text, add_special_tokens=False)[0] in from_gguf.special_token_ids
    plain = from_gguf.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert not set(plain) & from_gguf.special_token_ids
    assert from_gguf.decode(plain) == text


def test_special_tokens_are_known(from_gguf: Tokenizer) -> None:
    assert from_gguf.eos_token_ids == (2,)
    assert from_gguf.bos_token_id == 1
    assert {0, 1, 2} <= from_gguf.special_token_ids
    assert from_gguf.token_text(2) == "<|im_end|>"
    assert from_gguf.vocab_size == 49152


def test_digests_tell_tokenizers_apart(from_gguf: Tokenizer, smollm2_directory: Path, tiny_hybrid: Path) -> None:
    assert from_gguf.digest == Tokenizer.from_gguf_metadata({**_metadata_of(from_gguf)}).digest
    assert from_gguf.digest != Tokenizer.from_directory(tiny_hybrid).digest


def _metadata_of(tokenizer: Tokenizer) -> dict[str, Any]:
    library = json.loads(tokenizer._library.to_str())
    vocabulary = sorted(library["model"]["vocab"], key=library["model"]["vocab"].__getitem__)
    special = {entry["id"] for entry in library["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(vocabulary))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in library["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedModelError, "tokenizer.ggml.pre is 'klingon'"),
        ({"tokenizer.ggml.tokens": None}, CheckpointError, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, CheckpointError, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, CheckpointError, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, CheckpointError, "token_type has 1"),
        ({"tokenizer.ggml.token_type": "abc"}, CheckpointError, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.bos_token_id": 3}, CheckpointError, "bos_token_id is 3"),
        ({"tokenizer.ggml.eos_token_id": -1}, CheckpointError, "eos_token_id is -1"),
        ({"tokenizer.chat_template": 1}, CheckpointError, "tokenizer.chat_template is not text"),
        ({"tokenizer.ggml.add_bos_token": 1}, CheckpointError, "add_bos_token is 1"),
    ],
)
def test_unusable_gguf_metadata_is_refused_by_name(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    Tokenizer.from_gguf_metadata(metadata)
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf_metadata({**metadata, **change})


async def test_long_texts_are_encoded_alike_on_their_worker_thread() -> None:
    tokenizer = byte_tokenizer()
    for length in (MAX_INLINE_CHARS - 1, MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1, 50_000):
        text = "aé😀 " * (length // 4)
        assert await tokenizer.encode_async(text, add_special_tokens=True) == list(text.encode())


class _Watched:
    """A library tokenizer that tells whether it is at work."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.at_work = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._library, name)

        def call(*args: Any, **options: Any) -> Any:
            self.at_work = True
            try:
                return method(*args, **options)
            finally:
                self.at_work = False

        return call


async def test_the_loop_runs_on_while_a_long_text_is_encoded(
    from_gguf: Tokenizer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    watched = _Watched(from_gguf._library)
    monkeypatch.setattr(from_gguf, "_library", watched)
    rounds = 0
    # A thread that waits for the interpreter lock gets it for one interval when the library returns: make that short.
    interval_s = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval_s))
    sys.setswitchinterval(1e-5)
    async with anyio.create_task_group() as group:

        async def encode() -> None:
            await from_gguf.encode_async("The quick brown fox 123. " * 40_000, add_special_tokens=True)
            group.cancel_scope.cancel()

        group.start_soon(encode)
        while True:
            await anyio.lowlevel.checkpoint()
            rounds += watched.at_work
    # With the lock held from beginning to end it would be hundreds at most; without, it is a hundred thousand.
    assert rounds > 10_000


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        byte_tokenizer().encode(text, add_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="Unicode"):
        byte_tokenizer().encode(text * MAX_INLINE_CHARS, add_special_tokens=True)


def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)
