"""Tokenizers from GGUF metadata and from directories against each other and against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from metrale_async.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from metrale_async.models.gguf_file import GgufFile
from metrale_async.text import IncrementalDetokenizer, Tokenizer
from metrale_async.text.gguf_tokenizer import library_tokenizer
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
    library_tokenizer(metadata)
    with pytest.raises(error, match=message):
        library_tokenizer({**metadata, **change})


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "tekken", "smollm"])
def test_every_pre_tokenizer_keeps_all_of_the_text(pre: str) -> None:
    tokenizer = byte_tokenizer()
    vocabulary = [tokenizer._library.id_to_token(index) for index in range(256)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.merges": [],
    }
    made = Tokenizer.from_gguf_metadata(metadata)
    for text in AWKWARD_STRINGS:
        normal = made._library.normalizer.normalize_str(text) if made._library.normalizer else text
        assert made.decode(made.encode(text, add_special_tokens=False)) == normal


@pytest.fixture(scope="module")
def sentence_piece() -> tuple[LibraryTokenizer, Tokenizer]:
    """A small trained SentencePiece-style BPE, as the library trained it and through GGUF metadata."""
    mark = "\u2581"
    library = LibraryTokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    library.decoder = decoders.Sequence(
        [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    library.pre_tokenizer = pre_tokenizers.Split(mark, behavior="merged_with_next")
    corpus = [text for text in AWKWARD_STRINGS if "<" not in text] + ["the cat sat on the mat and the dog ran"] * 5
    library.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=700, special_tokens=first, show_progress=False, max_token_length=8)
    )
    library.pre_tokenizer = None
    tokens = [library.id_to_token(index) for index in range(library.get_vocab_size())]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return library, Tokenizer.from_gguf_metadata(metadata)


def test_sentence_piece_from_gguf_agrees_with_the_tokenizer_it_came_from(
    sentence_piece: tuple[LibraryTokenizer, Tokenizer],
) -> None:
    library, tokenizer = sentence_piece
    for text in AWKWARD_STRINGS:
        # The trainer's special tokens include the byte pieces, which GGUF does not make special.
        # SentencePiece writes spaces as a mark, so a mark in the text comes back as a space.
        if not text or "<" in text or "\u2581" in text:
            continue
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids, repr(text)
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
        assert tokenizer.decode(ids) == text, repr(text)


@pytest.mark.parametrize("kind", ["byte-level", "sentence-piece", "tiny-hybrid"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_whole_and_never_break_a_character(
    kind: str, data: st.DataObject, sentence_piece: tuple[LibraryTokenizer, Tokenizer], tiny_hybrid: Path
) -> None:
    tokenizer = {
        "byte-level": byte_tokenizer,
        "sentence-piece": lambda: sentence_piece[1],
        "tiny-hybrid": lambda: Tokenizer.from_directory(tiny_hybrid),
    }[kind]()
    skip = data.draw(st.booleans())
    if data.draw(st.booleans()):
        ids = tokenizer.encode(data.draw(st.text(max_size=20)), add_special_tokens=False)
    else:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.push(token) for token in ids]
    whole = b"".join(
        tokenizer.token_bytes(token) for token in ids if not (skip and token in tokenizer.special_token_ids)
    )
    assert "".join(pieces) + detokenizer.flush() == whole.decode(errors="replace")
    if kind != "sentence-piece":
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._library.decode(
            ids, skip_special_tokens=skip
        )


async def test_long_texts_are_encoded_alike_on_their_worker_thread() -> None:
    tokenizer = byte_tokenizer()
    for length in (MAX_INLINE_CHARS - 1, MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1, 50_000):
        text = "aé😀 " * (length // 4)
        assert await tokenizer.encode_async(text, add_special_tokens=True) == list(text.encode())


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        byte_tokenizer().encode(text, add_special_tokens=True)


def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_ids_without_text_decode_to_nothing() -> None:
    assert byte_tokenizer().decode([97, 5000, 98]) == "ab"
